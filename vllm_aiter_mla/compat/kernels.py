"""vLLM's own kernels, as its MLA layer calls them. Imported at the call: vLLM loads its library with them."""

from __future__ import annotations

import functools
from typing import Any

import torch


def rotary_embedding(
    positions: torch.Tensor, q_pe: torch.Tensor, k_pe: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox: bool
) -> None:
    """Rotate q_pe [T, N, R] and k_pe [T, R] in place, any strides; rounds to their dtype."""
    # Flat: the CPU kernel of this op takes the last dimension for all heads, whatever the number of dimensions.
    query, key = q_pe.flatten(1), k_pe.contiguous()
    _ops().rotary_embedding(positions, query, key, k_pe.shape[-1], cos_sin_cache, is_neox)
    q_pe.copy_(query.view(q_pe.shape))
    k_pe.copy_(key)


def has_rope_and_write() -> bool:
    """Whether this build of vLLM has the kernel that ``rope_and_write`` calls."""
    return hasattr(getattr(torch.ops, "_C_cache_ops", None), "concat_and_cache_mla_rope_fused")


def rope_and_write(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    slots: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
) -> None:
    """Rotate q_pe [T, N, R] and k_pe [T, R] in place and write the KV rows, in one launch.

    Args:
        positions: [T] int64.
        q_pe: rotated in place, also in rows without a slot.
        k_pe: rotated in place in rows with a slot.
        kv_c: [T, L].
        cos_sin_cache: [max_position, R].
        is_neox: pairing of the rotation.
        slots: [T] int64, -1 for a row without a KV row.
        kv_cache: [blocks, block_size, L+R], the activation dtype, or an fp8 cache as uint8.
        kv_cache_dtype: as the layer has it, in vLLM's spelling.
        k_scale: one float32, dequantisation scale of the cache.
    """
    _ops().concat_and_cache_mla_rope_fused(
        positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, slots, kv_cache, kv_cache_dtype, k_scale
    )


def concat_quantise_fp8(absorbed: torch.Tensor, q_pe: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """absorbed [T, N, L] and q_pe [T, N, R] side by side in the platform's fp8 type, divided by ``scale``, one float32.

    What vLLM's layers of the current ``VllmConfig`` do: by default one kernel, which Inductor makes of plain PyTorch.

    Raises:
        AssertionError: vLLM has no current config (``set_current_vllm_config``).
    """
    from vllm.config import get_current_vllm_config

    compilation = get_current_vllm_config().compilation_config
    quantised: torch.Tensor = _concat_quantiser(compilation.mode, compilation.backend, *compilation.custom_ops)(
        absorbed, q_pe, scale
    )
    return quantised


@functools.lru_cache(maxsize=8)
def _concat_quantiser(*_: Any) -> Any:
    """As ``MLAAttention.__init__`` makes its own. No layer's own is used: what is compiled for it then is its affair.

    Called with what decides in vLLM which function it is: mode, back end and custom ops of the compilation config.
    """
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    return mla_attention._DecodeConcatQuantFP8(static=True, group_shape=GroupShape.PER_TENSOR, compile_native=True)


def fp8_dtype() -> torch.dtype:
    """The platform's fp8 type, as vLLM names it."""
    from vllm.platforms import current_platform

    return current_platform.fp8_dtype()


@functools.cache
def _ops() -> Any:
    """vLLM's calls of its kernels. An import statement in every step would cost as much as what it is for."""
    from vllm import _custom_ops

    return _custom_ops

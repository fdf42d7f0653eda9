"""vLLM's forward context and layer as the op bodies take them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.ops.bodies import Batch, LayerContext
from vllm_aiter_mla.runtime import absorb, kernel


class VLLMLayer:
    """``bodies.MLALayer`` over vLLM's ``MLAAttention`` module, which it holds as ``module``."""

    __slots__ = ("module", "name")

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module

    @property
    def q_scale(self) -> torch.Tensor:
        """See ``MLALayer.q_scale``; likewise the methods below."""
        scale: torch.Tensor = self.module._q_scale
        return scale

    def weight(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As vLLM keeps it."""
        return absorb.weight_of(self.module)

    def prepare(self, inputs: DecodeInputs) -> torch.Tensor:
        """By the back end that was chosen for the layer. Raises NoKernelError."""
        return kernel.prepare(self.name, self.module, inputs)

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        """By vLLM's own product."""
        return absorb.absorb(q_nope, *self.weight())

    def quantise(self, absorbed: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        """By vLLM's own kernel."""
        quantised: torch.Tensor = self.module._decode_concat_quant_fp8_op(absorbed, q_pe, self.q_scale)
        return quantised

    def rotate(
        self, q_pe: torch.Tensor, k_pe: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, is_neox: bool
    ) -> None:
        """By vLLM's own rotary kernel."""
        from vllm import _custom_ops as ops

        # Flat: the CPU kernel of this op takes the last dimension for all heads, whatever the number of dimensions.
        ops.rotary_embedding(positions, q_pe.flatten(1), k_pe, k_pe.shape[-1], table, is_neox)

    def forward_mqa(self, q_prepared: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> torch.Tensor:
        """By the attention implementation of the layer."""
        attended: torch.Tensor = self.module.impl.forward_mqa(q_prepared, kv_cache, metadata, self.module)[0]
        return attended

    def v_up(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """By vLLM's own projection."""
        self.module._v_up_proj(attended, out=out)

    def stock_forward(
        self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> None:
        """``forward_impl``, which takes the cache as vLLM stores it."""
        self.module.forward_impl(q, kv_c, k_pe, self.module.kv_cache, metadata, output=output)


NO_BATCH = Batch(metadata=None, num_actual_tokens=0, decode_only=False)


def layer_context(layer_name: Any) -> LayerContext:
    """The context of the layer that an op was given by name."""
    return _read(layer_name)[0]


def layer_and_batch(layer_name: Any) -> tuple[LayerContext, Batch]:
    """As ``layer_context``, with what is known of the batch: for the attention op alone."""
    context, metadata = _read(layer_name)
    if metadata is None:
        return context, NO_BATCH
    return context, Batch(metadata, metadata.num_actual_tokens, is_decode_only(metadata, context.slots))


def is_decode_only(metadata: Any, slots: torch.Tensor | None) -> bool:
    """Whether every real row of the batch is a decode row whose KV row has been written."""
    return (
        slots is not None
        and metadata.decode is not None
        and metadata.num_prefills == 0
        and metadata.num_decode_tokens == metadata.num_actual_tokens
    )


def is_piecewise() -> bool:
    """Whether this forward pass runs, or records, piecewise graphs."""
    vllm = _vllm()
    return bool(vllm.forward_context().cudagraph_runtime_mode == vllm.piecewise)


def fp8_view(kv_cache: torch.Tensor) -> torch.Tensor:
    """vLLM's uint8 KV cache as the platform's fp8 type, without a copy; other caches as they are."""
    if kv_cache.dtype != torch.uint8:
        return kv_cache
    return kv_cache.view(_vllm().platforms.current_platform.fp8_dtype())


def _read(layer_name: Any) -> tuple[LayerContext, Any]:
    """The layer's context, and vLLM's metadata of the batch."""
    vllm = _vllm()
    name = vllm.resolve_name(layer_name)
    metadata, module, kv_cache, slots = vllm.attention_context(name)
    return LayerContext(name, VLLMLayer(name, module), fp8_view(kv_cache), slots, is_piecewise()), metadata


class _VLLM(NamedTuple):
    """What is called in every step. Looked up once: an import statement costs as much as the call behind it."""

    attention_context: Callable[[str], tuple[Any, Any, torch.Tensor, torch.Tensor | None]]
    resolve_name: Callable[[Any], str]
    forward_context: Callable[[], Any]
    piecewise: Any
    platforms: Any


@functools.cache
def _vllm() -> _VLLM:
    from vllm import platforms
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.attention.attention import get_attention_context
    from vllm.utils.torch_utils import _resolve_layer_name

    return _VLLM(get_attention_context, _resolve_layer_name, get_forward_context, CUDAGraphMode.PIECEWISE, platforms)

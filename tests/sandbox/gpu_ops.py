"""Ops of vLLM on a CPU: those that only its GPU builds register, RoPE without the CPU build's roundings, and experts
that know their rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from vllm_aiter_mla.kernels import formats
from vllm_aiter_mla.kernels.reference import VLLM_KERNEL, gather_cos_sin, rotate, scatter_rows, store_nope

_LIBRARIES: list[torch.library.Library] = []

# FixFunctionalizationPass and the fusion modules name these ops when they are imported or run, and never call them
# here; a call fails loudly.
_MISSING = (
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "silu_and_mul_quant",
    "fused_qk_norm_rope",
    "static_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_per_token_scaled_fp8_quant",
)


def register() -> None:
    """Define the missing names and the vLLM RoPE + KV kernel, and replace the CPU kernel of RoPE. Idempotent."""
    if _LIBRARIES:
        return
    # vLLM's own library first: loaded later, it would define these names a second time and abort the process.
    import vllm._custom_ops  # noqa: F401

    library = torch.library.Library("_C", "FRAGMENT")
    for name in _MISSING:
        if not hasattr(torch.ops._C, name):
            library.define(f"{name}() -> ()")
    # vLLM's AVX2 library rounds each product of NeoX pairs to bf16, its AVX-512 library and its GPU kernel do not.
    library.impl("rotary_embedding", rotary_embedding, "CPU")
    _LIBRARIES.append(library)
    over_cache = torch.library.Library("_C_cache_ops", "FRAGMENT")
    for kernel, schema in _cache_kernels().items():
        if not hasattr(torch.ops._C_cache_ops, kernel.__name__):
            over_cache.define(f"{kernel.__name__}({schema}) -> ()")
            over_cache.impl(kernel.__name__, kernel, "CPU")
    _LIBRARIES.append(over_cache)
    _import_vllm_fusion()


def _cache_kernels() -> dict[Callable[..., None], str]:
    """vLLM's kernels over the KV cache that only GPU builds have, with their arguments."""
    return {
        concat_and_cache_mla_rope_fused: "Tensor positions, Tensor! q_pe, Tensor! k_pe, Tensor kv_c, Tensor"
        " cos_sin_cache, bool is_neox, Tensor slot_mapping, Tensor! kv_cache, str kv_cache_dtype, Tensor"
        " kv_cache_scale",
        concat_and_cache_mla: "Tensor kv_c, Tensor k_pe, Tensor! kv_cache, Tensor slot_mapping, str kv_cache_dtype,"
        " Tensor scale, bool skip_scale=False",
        gather_and_maybe_dequant_cache: "Tensor src_cache, Tensor! dst, Tensor block_table, Tensor cu_seq_lens, Tensor"
        " token_to_seq, int num_tokens, str kv_cache_dtype, Tensor scale, Tensor? seq_starts",
    }


def _import_vllm_fusion() -> None:
    """Import vLLM's own MLA RoPE pass, which defines its fused op, and show it to the pass manager.

    vLLM's pass manager imports it on GPU platforms only, and names it as a global of its own.
    """
    from vllm.compilation.passes import pass_manager
    from vllm.compilation.passes.fusion.mla_rope_kvcache_cat_fusion import MLARoPEKVCacheCatFusionPass

    vars(pass_manager).setdefault("MLARoPEKVCacheCatFusionPass", MLARoPEKVCacheCatFusionPass)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate query and key in place, [T, heads * R] or [T, heads, R], with one rounding, as vLLM's GPU kernel does.

    Raises:
        NotImplementedError: a rotation of a part of the head, or an inverse one.
    """
    if rope_dim_offset or inverse or cos_sin_cache.shape[-1] != head_size:
        raise NotImplementedError("the sandbox rotates whole heads forward only")
    cos, sin = (half.unsqueeze(1) for half in gather_cos_sin(cos_sin_cache, positions.flatten()))
    for x in (query, key):
        if x is not None:
            heads = x.shape[1:].numel() // head_size
            x.copy_(rotate(x.reshape(x.shape[0], heads, head_size), cos, sin, is_neox).view(x.shape))


def concat_and_cache_mla_rope_fused(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_dtype: str,
    kv_cache_scale: torch.Tensor,
) -> None:
    """Rotate q_pe [T, N, R] and k_pe [T, R] in place and write the KV rows, as vLLM's GPU kernel of this name does.

    The kernel computes in the activation dtype: both products and their sum are rounded. A row without a slot is not
    rotated: since vllm-project/vllm#40392 the kernel returns before. Earlier it had rotated the row's query by then.

    Raises:
        ValueError: an operand is not what the kernel checks for: one slot per row, and one dtype.
    """
    if slot_mapping.shape[0] != q_pe.shape[0]:
        raise ValueError(f"slot_mapping: {q_pe.shape[0]} slots expected, got {slot_mapping.shape[0]}")
    if len(found := {x.dtype for x in (q_pe, k_pe, kv_c, cos_sin_cache)}) > 1:
        raise ValueError(f"one dtype expected, got {found}")
    cos, sin = gather_cos_sin(cos_sin_cache, positions[: q_pe.shape[0]])
    has_slot = (slot_mapping >= 0).unsqueeze(-1)
    rotated_q = rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1), is_neox, q_pe.dtype)
    q_pe.copy_(torch.where(has_slot.unsqueeze(-1), rotated_q, q_pe))
    k_pe.copy_(torch.where(has_slot, rotate(k_pe, cos, sin, is_neox, k_pe.dtype), k_pe))
    write_kv_rows(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_scale)


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    skip_scale: bool = False,
) -> None:
    """Write the KV rows, as vLLM's GPU kernel of this name does.

    vLLM 0.33 sets ``skip_scale`` where the scale is one.
    """
    write_kv_rows(kv_c, k_pe, kv_cache, slot_mapping, scale)


def gather_and_maybe_dequant_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    seq_starts: torch.Tensor | None,
) -> None:
    """Gather the context of requests into ``dst`` [tokens, L+R], fp8 rows scaled, as vLLM's GPU kernel does."""
    owner = token_to_seq[:num_tokens].long()
    key = torch.arange(num_tokens) - cu_seq_lens[owner] + (0 if seq_starts is None else seq_starts[owner])
    size = src_cache.shape[1]
    blocks = block_table[owner, (key // size).long()].long()
    if src_cache.itemsize == 1:
        rows = src_cache.view(torch.uint8)[blocks, key % size].view(src_cache.dtype).float() * scale
    else:
        rows = src_cache[blocks, key % size]
    dst[:num_tokens] = rows.to(dst.dtype)


def write_kv_rows(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, k_scale: torch.Tensor
) -> None:
    """Write [kv_c | rotated k_pe] rows to a bf16 cache or to a uint8 cache that holds the platform's fp8 type.

    As vLLM's kernels on ROCm (``scaled_convert`` of csrc/quantization/w8a8/fp8/amd/quant_utils.cuh): values are divided
    by the scale in float32, saturate, and stay NaN. AITER's op and ours multiply by the reciprocal, so a decode row
    may hold another fp8 code unless the scale is a power of two.
    """
    from vllm.platforms import current_platform

    if kv_cache.numel() == 0 or slots.numel() == 0:
        return
    cache = kv_cache.view(current_platform.fp8_dtype()) if kv_cache.dtype == torch.uint8 else kv_cache
    s = slots.numel()
    rows = torch.cat([kv_c[:s], k_pe[:s].reshape(s, -1)], dim=-1)
    if formats.is_fp8(cache.dtype):
        rows = store_nope(rows.float() / k_scale.reshape(-1)[0], torch.ones(()), cache.dtype, VLLM_KERNEL)
    scatter_rows(cache, slots.flatten(), rows)


@cache
def mend_experts() -> None:
    """Make vLLM's experts for CPUs fit for expert parallelism, if this release has them where we look.

    Their kernel treats global expert ids as local ones and reads out of bounds, which crashes the process.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return
    inner = CPUUnquantizedExperts.apply
    signature = inspect.signature(inner)

    def apply(*args: Any, **named: Any) -> None:
        given = signature.bind(*args, **named)
        values = given.arguments
        if values["expert_map"] is not None:
            found = local_experts(values["topk_weights"], values["topk_ids"], values["expert_map"])
            values["topk_weights"], values["topk_ids"] = found
        inner(*given.args, **given.kwargs)

    CPUUnquantizedExperts.apply = apply


def local_experts(
    weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [T, K] and ids [T, K] of this rank: ``expert_map`` has -1 for an expert of another rank."""
    mapped = expert_map[ids.long()]
    return torch.where(mapped < 0, 0, weights), mapped.clamp(min=0).to(ids.dtype)

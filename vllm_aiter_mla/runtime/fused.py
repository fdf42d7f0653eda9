"""``fused_qk_rope_kv_cache_q_prep``: rotate, write the KV row and assemble the query, in one functional op."""

from typing import Any

import torch

from vllm_aiter_mla.census import state as census
from vllm_aiter_mla.ops import bodies
from vllm_aiter_mla.runtime import context, kernel


def fused_qk_rope_kv_cache_q_prep(
    q: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_scale: torch.Tensor,
    is_neox: bool,
    out_dtype: torch.dtype,
    layer_name: Any,
) -> torch.Tensor:
    """Un-rotated q [T, N, P+R], k_pe [T, R] and kv_c [T, L] -> q_prepared [T, N, L+R] of ``out_dtype``.

    Raises:
        RuntimeError: asked to run without slots or a cache while a graph is being captured: the write would be
            missing from every replay.
    """
    ctx = context.layer_context(layer_name)
    prepared = bodies.fused_prepare(ctx, q, k_pe, kv_c, positions, cos_sin_cache, k_scale, is_neox, out_dtype)
    if not ctx.has_cache:
        _engage(ctx, q.dtype, is_neox, out_dtype)
    return prepared


def fused_qk_rope_kv_cache_q_prep_fake(
    q: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_scale: torch.Tensor,
    is_neox: bool,
    out_dtype: torch.dtype,
    layer_name: Any,
) -> torch.Tensor:
    """Shape and dtype from the tensor and scalar arguments alone."""
    return bodies.declared(q, k_pe, kv_c, out_dtype)


def _engage(ctx: bodies.LayerContext, act: torch.dtype, is_neox: bool, out_dtype: torch.dtype) -> None:
    """Note, while vLLM profiles memory, which kernel the layer's calls will run on."""
    layer = ctx.layer.module  # type: ignore[attr-defined]
    shape = kernel.shape_of(layer, is_neox=is_neox, act=act, out_dtype=out_dtype)
    planned = kernel.plan(layer, shape).kernel
    if planned is not None:  # else the first call with a cache raises, with every back end's reason
        census.engage(ctx.name, planned)

"""``fused_qk_rope_kv_cache_q_prep``: rotate, write the KV row and assemble the query, in one functional op.

It may be captured in a piecewise graph and replayed for any batch, so it branches on nothing that belongs to a batch:
every row is prepared, and rows whose slot is >= 0 are written.
"""

from typing import Any

import torch

from vllm_aiter_mla.kernels import capture
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.report import census
from vllm_aiter_mla.runtime import context, kernel
from vllm_aiter_mla.runtime.absorb import weight_of


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
    if ctx.slots is None or ctx.kv_cache.numel() == 0:
        if capture.is_capturing():
            missing = "slot mapping" if ctx.slots is None else "KV cache"
            raise RuntimeError(
                f"aiter-mla: {ctx.name} is being captured without a {missing}; its KV write would be missing from "
                "every replay. Capture after the KV cache is bound and with slot mappings, or switch "
                "pass_config.fuse_aiter_qk_rope_kvcache_mla off."
            )
        # Profiling: attention zero-fills its output and reads none of this.
        shape = kernel.shape_of(ctx.layer, is_neox=is_neox, act=q.dtype, out_dtype=out_dtype)
        planned = kernel.plan(ctx.layer, shape).kernel
        if planned is not None:  # else the first call with a cache raises, with every back end's reason
            census.engage(ctx.name, planned)
        return _empty(q, k_pe, kv_c, out_dtype)
    inputs = DecodeInputs(
        q=q,
        k_pe=k_pe,
        kv_c=kv_c,
        weight=weight_of(ctx.layer),
        kv_cache=context.fp8_view(ctx.kv_cache),
        slot_mapping=ctx.slots[: q.shape[0]],
        positions=positions,
        cos_sin_cache=cos_sin_cache,
        k_scale=k_scale,
        q_scale=ctx.layer._q_scale,
        is_neox=is_neox,
        out_dtype=out_dtype,
    )
    return kernel.prepare(ctx.name, ctx.layer, inputs)


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
    return _empty(q, k_pe, kv_c, out_dtype)


def _empty(q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[1], kv_c.shape[-1] + k_pe.shape[-1]), dtype=out_dtype)

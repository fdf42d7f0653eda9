"""``mla_attention_with_prepared_q``: attention that takes the prepared query, and decides prefill or decode.

It is a splitting op: it runs outside piecewise graphs, where the metadata is the batch's own. A full graph holds it,
and vLLM replays full graphs of this kind for all-decode batches only.
"""

from typing import Any

import torch

from vllm_aiter_mla.kernels import capture
from vllm_aiter_mla.runtime import context
from vllm_aiter_mla.runtime.context import LayerContext, fp8_view


def mla_attention_with_prepared_q(
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    q_prepared: torch.Tensor,
    output: torch.Tensor,
    layer_name: Any,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    is_rotated: bool,
    kv_cache_dummy_dep: torch.Tensor | None = None,
) -> None:
    """Fill ``output`` [T, N*V] with the attention of one layer.

    Args:
        q: [T, N, P+R]; rotated where ``is_rotated``.
        kv_c_normed: [T, L].
        k_pe: [T, R] or [T, 1, R]; rotated where ``is_rotated``.
        q_prepared: [T, N, L+R] for the decode kernel.
        output: [T, N*V], written in place.
        layer_name: the layer.
        positions: [T] int64.
        cos_sin_cache: [max_position, R].
        is_neox: pairing of the rotation.
        is_rotated: False where q and k_pe have not been rotated yet (after pass 3).
        kv_cache_dummy_dep: orders a separate KV write before attention; its value is not read.

    Raises:
        RuntimeError: captured inside a piecewise graph: whatever this batch is, it would be frozen for all.
    """
    ctx = context.layer_context(layer_name)
    if context.is_piecewise() and capture.is_capturing():
        raise RuntimeError(
            f"aiter-mla: the attention of {ctx.name} is inside a piecewise graph. Add "
            "'vllm_aiter_mla::mla_attention_with_prepared_q' to compilation_config.splitting_ops, or leave "
            "splitting_ops unset."
        )
    if is_decode_only(ctx):
        decode(ctx, q_prepared, output)
        return
    if ctx.metadata is not None and not is_rotated:
        q, k_pe = rotated_copies(q, k_pe, positions, cos_sin_cache, is_neox)
    ctx.layer.forward_impl(q, kv_c_normed, k_pe.view(-1, 1, k_pe.shape[-1]), ctx.kv_cache, ctx.metadata, output=output)


def mla_attention_with_prepared_q_fake(
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    q_prepared: torch.Tensor,
    output: torch.Tensor,
    layer_name: Any,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    is_rotated: bool,
    kv_cache_dummy_dep: torch.Tensor | None = None,
) -> None:
    """Nothing is returned; ``output`` is written."""


def is_decode_only(ctx: LayerContext) -> bool:
    """Whether every real row of the batch is a decode row whose KV row has been written."""
    metadata = ctx.metadata
    return (
        metadata is not None
        and ctx.slots is not None
        and metadata.decode is not None
        and metadata.num_prefills == 0
        and metadata.num_decode_tokens == metadata.num_actual_tokens
    )


def decode(ctx: LayerContext, q_prepared: torch.Tensor, output: torch.Tensor) -> None:
    """Decode attention and v-up projection of the real rows; padded rows of ``output`` stay as they are."""
    n = ctx.metadata.num_actual_tokens
    attended, _ = ctx.layer.impl.forward_mqa(q_prepared[:n], fp8_view(ctx.kv_cache), ctx.metadata, ctx.layer)
    ctx.layer._v_up_proj(attended, out=output[:n])


def rotated_copies(
    q: torch.Tensor, k_pe: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Private rotated copies of q [T, N, P+R] and k_pe [T, R], by vLLM's own rotary kernel: (q, k_pe)."""
    from vllm import _custom_ops as ops

    rope_dim = k_pe.shape[-1]
    q_pe = q[..., -rope_dim:].contiguous()
    k_rot = k_pe.reshape(-1, rope_dim).clone()
    # Flat: the CPU kernel of this op takes the last dimension for all heads, whatever the number of dimensions.
    ops.rotary_embedding(positions[: q.shape[0]], q_pe.flatten(1), k_rot, rope_dim, cos_sin_cache, is_neox)
    return torch.cat([q[..., :-rope_dim], q_pe], dim=-1), k_rot

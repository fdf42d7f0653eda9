"""The three ops that a rewritten graph calls, and their registration.

Registered when the plugin loads: a warm start calls them without ever running a pass. They are thin: each reads
vLLM's context and calls its body in ``bodies``. A fake looks at tensors and plain arguments alone (I7).
"""

# No "from __future__ import annotations": the schema is inferred from the annotations themselves.

from collections.abc import Callable
from typing import Any

import torch

from vllm_aiter_mla.compat import custom_ops
from vllm_aiter_mla.ops import adapter, bodies

NAMESPACE = "vllm_aiter_mla"
ATTENTION_OP = f"{NAMESPACE}::mla_attention_with_prepared_q"

FAKES: dict[str, Callable[..., Any]] = {}
"""The fakes by qualified name of their op, once the ops are registered."""

_LIBRARY: list[torch.library.Library] = []


def register() -> None:
    """Define the ops under ``torch.ops.vllm_aiter_mla``. Idempotent."""
    if _LIBRARY:
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for function, fake in (
        (mla_decode_q_prep, mla_decode_q_prep_fake),
        (fused_qk_rope_kv_cache_q_prep, fused_qk_rope_kv_cache_q_prep_fake),
    ):
        custom_ops.define(library, function, fake)
        FAKES[f"{NAMESPACE}::{function.__name__}"] = fake
    # A splitting op: it runs outside piecewise graphs, where the metadata is the batch's own. A full graph holds it,
    # and vLLM replays full graphs of this kind for all-decode batches only.
    custom_ops.define(
        library,
        custom_ops.with_attention_hooks(mla_attention_with_prepared_q),
        mla_attention_with_prepared_q_fake,
        mutates=["output"],
        tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),
    )
    _LIBRARY.append(library)


def mla_decode_q_prep(
    q: torch.Tensor, latent_dim: int, rope_dim: int, out_dtype: torch.dtype, layer_name: Any
) -> torch.Tensor:
    """Absorb BMM, concat and optional fp8 quantisation of a rotated query, as stock's attention op prepares it.

    q [T, N, P+R] -> q_prepared [T, N, L+R] of ``out_dtype``. The weights and the scale are read from the layer per
    call: reloading replaces them.
    """
    return bodies.decode_q_prep(adapter.layer_context(layer_name).layer, q, rope_dim, out_dtype)


def mla_decode_q_prep_fake(
    q: torch.Tensor, latent_dim: int, rope_dim: int, out_dtype: torch.dtype, layer_name: Any
) -> torch.Tensor:
    """Shape and dtype from the tensor and scalar arguments alone."""
    return q.new_empty((q.shape[0], q.shape[1], latent_dim + rope_dim), dtype=out_dtype)


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
    """Rotate, write the KV row and assemble the query, in one functional op.

    Un-rotated q [T, N, P+R], k_pe [T, R] and kv_c [T, L] -> q_prepared [T, N, L+R] of ``out_dtype``.

    Raises:
        RuntimeError: asked to run without slots or a cache while a graph is being captured: the write would be
            missing from every replay.
    """
    ctx = adapter.layer_context(layer_name)
    prepared = bodies.fused_prepare(ctx, q, k_pe, kv_c, positions, cos_sin_cache, k_scale, is_neox, out_dtype)
    if not ctx.has_cache:
        adapter.note_while_profiling(ctx, is_neox=is_neox, act=q.dtype)
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
    ctx, batch = adapter.layer_and_batch(layer_name)
    bodies.attention(
        ctx, batch, q, kv_c_normed, k_pe, q_prepared, output, positions, cos_sin_cache, is_neox, is_rotated
    )


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

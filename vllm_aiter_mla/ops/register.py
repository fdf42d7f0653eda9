"""The three ops that rewritten graphs call, and their registration.

Registered when the plugin loads: a warm start calls them without ever running a pass. They are thin: each reads
vLLM's context and calls its body in ``bodies``. A fake looks at tensors and plain arguments alone (I7).
"""

# No "from __future__ import annotations": the schema is inferred from the annotations themselves.

from collections.abc import Callable
from typing import Any

import torch

from vllm_aiter_mla.compat import layer as custom_ops
from vllm_aiter_mla.ops import adapter, bodies

NAMESPACE = "vllm_aiter_mla"

FAKES: dict[str, Callable[..., Any]] = {}
"""The fakes of the ops without side effects by qualified name, once the ops are registered."""

_LIBRARY: list[torch.library.Library] = []


def register() -> None:
    """Define the ops under ``torch.ops.vllm_aiter_mla``. Idempotent."""
    if _LIBRARY:
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    custom_ops.define(library, mla_decode_q_prep, mla_decode_q_prep_fake)
    FAKES[f"{NAMESPACE}::{mla_decode_q_prep.__name__}"] = mla_decode_q_prep_fake
    # Splitting ops: they run outside piecewise graphs, where the metadata is the batch's own. A full graph holds them,
    # and vLLM replays full graphs of this kind for all-decode batches only.
    for function, fake, mutates in (
        (mla_attention_with_prepared_q, mla_attention_with_prepared_q_fake, ("output",)),
        (mla_attention_with_rope, mla_attention_with_rope_fake, ("q", "k_pe", "output")),
    ):
        tags = (torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe)
        custom_ops.define(library, custom_ops.with_attention_hooks(function), fake, mutates=mutates, tags=tags)
    _LIBRARY.append(library)


def mla_decode_q_prep(
    q: torch.Tensor, latent_dim: int, rope_dim: int, out_dtype: torch.dtype, layer_name: Any
) -> torch.Tensor:
    """Absorb BMM, concat and optional fp8 quantisation of a rotated query, as vLLM's own attention op prepares it.

    q [T, N, P+R] -> q_prepared [T, N, L+R] of ``out_dtype``. The weights and the scale are read from the layer per
    call: reloading replaces them.
    """
    return bodies.decode_q_prep(adapter.layer_of(layer_name), q, rope_dim, out_dtype)


def mla_decode_q_prep_fake(
    q: torch.Tensor, latent_dim: int, rope_dim: int, out_dtype: torch.dtype, layer_name: Any
) -> torch.Tensor:
    """Shape and dtype from the tensor and scalar arguments alone."""
    return q.new_empty((q.shape[0], q.shape[1], latent_dim + rope_dim), dtype=out_dtype)


def mla_attention_with_prepared_q(
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    q_prepared: torch.Tensor,
    output: torch.Tensor,
    layer_name: Any,
    kv_cache_dummy_dep: torch.Tensor | None = None,
) -> None:
    """Fill ``output`` [T, N*V] with the attention of one layer, after pass 2.

    Args:
        q: [T, N, P+R], rotated.
        kv_c_normed: [T, L].
        k_pe: [T, 1, R], rotated.
        q_prepared: [T, N, L+R] for the decode kernel.
        output: [T, N*V], written in place.
        layer_name: the layer.
        kv_cache_dummy_dep: orders a separate KV write before attention; its value is not read.

    Raises:
        RuntimeError: captured inside a piecewise graph: whatever this batch is, it would be frozen for all.
    """
    bodies.attention(adapter.layer_step(layer_name), q, kv_c_normed, k_pe, q_prepared, output)


def mla_attention_with_prepared_q_fake(
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    q_prepared: torch.Tensor,
    output: torch.Tensor,
    layer_name: Any,
    kv_cache_dummy_dep: torch.Tensor | None = None,
) -> None:
    """Nothing is returned; ``output`` is written."""


def mla_attention_with_rope(
    q: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_scale: torch.Tensor,
    output: torch.Tensor,
    is_neox: bool,
    layer_name: Any,
) -> None:
    """Do one layer from the un-rotated query to the attention's output, after pass 3: see ``bodies``.

    Args:
        q: [T, N, P+R], not rotated; its rope part is rotated in place in a batch with prefill rows.
        k_pe: [T, R], not rotated; likewise.
        kv_c: [T, L].
        positions: [T] int64.
        cos_sin_cache: [max_position, R].
        k_scale: one float32, dequantisation scale of the cache.
        output: [T, N*V], written in place.
        is_neox: pairing of the rotation.
        layer_name: the layer.

    Raises:
        RuntimeError: captured inside a piecewise graph, or without a batch.
    """
    step = adapter.layer_step(layer_name)
    bodies.attention_with_rope(step, q, k_pe, kv_c, bodies.Rope(positions, cos_sin_cache, k_scale, is_neox), output)
    if step.metadata is None:
        adapter.note_while_profiling(step, is_neox=is_neox, act=q.dtype)


def mla_attention_with_rope_fake(
    q: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_scale: torch.Tensor,
    output: torch.Tensor,
    is_neox: bool,
    layer_name: Any,
) -> None:
    """Nothing is returned; ``output`` is written."""

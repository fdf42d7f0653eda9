# SPDX-License-Identifier: Apache-2.0
"""The three ops that rewritten graphs call: their registration, their fakes, and what they do.

Registered by the gate and by each worker's engine: a warm start calls them without ever running a pass. An op reads
vLLM's context and calls its body, which ``verify`` runs over plain tensors. A fake looks at its arguments only (I7).

Sizes: T rows of a step (graph padding included), S slots, N heads, P and R the un-rotated and rotated widths of a query
head, L the latent width, V the width of a value head.
"""

# No "from __future__ import annotations": the schema is inferred from the annotations themselves.

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_aiter_mla.admission import ATTENTION_OPS
from vllm_aiter_mla.compat import custom_op
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.serving.layer import Layer

NAMESPACE = "vllm_aiter_mla"

# Of the process, as torch's registry of ops is; a library that is dropped takes its ops with it.
_LIBRARY: list[torch.library.Library] = []


class LayerStep(NamedTuple):
    """One MLA layer in one step."""

    name: str  # the layer's dotted name
    layer: Any  # a ``layer.Layer``, or in ``verify`` an object with the methods of its last section
    # [blocks, block_size, L+R] in the activation dtype or the platform's fp8 type; empty before the cache exists
    kv_cache: torch.Tensor
    slots: torch.Tensor | None  # [S] int64, S may exceed T; None while profiling
    metadata: Any  # of vLLM's attention, handed on as it is; None while profiling and in dummy runs
    num_actual_tokens: int  # real rows; the others pad a graph, or all of a microbatch
    decode_only: bool  # whether there are real rows, and each is a decode row with a slot for its KV row
    # Tells whether the forward pass runs, or records, piecewise graphs; only captures ask
    is_piecewise: Callable[[], bool]


class Rope(NamedTuple):
    """How a layer rotates, and the scale of its KV rows."""

    positions: torch.Tensor  # [T] int64
    table: torch.Tensor  # cos and sin, [max_position, R]
    k_scale: torch.Tensor  # one float32, dequantisation scale of the cache
    is_neox: bool  # pairing of the rotation
    # What rotates in a batch that no kernel of ours takes, as flag off does it there: ``FUSED_ROPE``, another in-place
    # rotary op by its name, or ``ROTARY_EMB``, the layer's own module
    rotation: str


def register() -> None:
    """Define the ops under ``torch.ops.vllm_aiter_mla``. Idempotent."""
    if _LIBRARY:
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    custom_op.define(library, mla_decode_q_prep, mla_decode_q_prep_fake)
    # Splitting ops: they run outside piecewise graphs, where the metadata is the batch's own. A full graph holds them,
    # and vLLM replays full graphs of this kind for all-decode batches only.
    tags = (torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe)
    for function, mutates in (
        (mla_attention_with_prepared_q, ("output",)),
        (mla_attention_with_rope, ("q", "k_pe", "output")),
    ):
        custom_op.define(library, custom_op.with_attention_hooks(function), _no_result, mutates=mutates, tags=tags)
    _LIBRARY.append(library)


def _no_result(*args: Any, **kwargs: Any) -> None:
    """Fake of an op that returns nothing and writes ``output``."""


def mla_decode_q_prep(
    q: torch.Tensor, latent_dim: int, rope_dim: int, out_dtype: torch.dtype, layer_name: Any
) -> torch.Tensor:
    """Absorb BMM, concat and optional fp8 quantisation of a rotated query, as vLLM's attention op prepares it.

    q [T, N, P+R] -> q_prepared [T, N, L+R] of ``out_dtype``. The weights and the scale are read from the layer per
    call: reloading replaces them. May lie inside a piecewise graph, so it does not look at the batch (I2).
    """
    _, module = compat_layer.layer_module(layer_name)
    return decode_q_prep(Layer.of(module), q, rope_dim, out_dtype)


def mla_decode_q_prep_fake(
    q: torch.Tensor, latent_dim: int, rope_dim: int, out_dtype: torch.dtype, layer_name: Any
) -> torch.Tensor:
    """Shape and dtype from the tensor and the plain arguments only."""
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
    attention(layer_step(layer_name), q, kv_c_normed, k_pe, q_prepared, output)


def mla_attention_with_rope(
    q: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_scale: torch.Tensor,
    output: torch.Tensor,
    is_neox: bool,
    rotation: str,
    layer_name: Any,
) -> None:
    """Do one layer from the un-rotated query to the attention's output, after pass 3: see ``attention_with_rope``.

    Args:
        q: [T, N, P+R], not rotated; its rope part is rotated in place in a batch that no kernel of ours takes.
        k_pe: [T, R], not rotated; there it may be rotated in place, too.
        kv_c: [T, L].
        positions, cos_sin_cache, k_scale, is_neox, rotation: see ``Rope``.
        output: [T, N*V], written in place.
        layer_name: the layer.

    Raises:
        RuntimeError: captured inside a piecewise graph, or without a batch: wrong for every replay.
    """
    name, metadata, module, kv_cache, slots = compat_layer.layer_call(layer_name)
    layer = Layer.of(module)
    if metadata is None and layer.possible_kernels is not None and not card().is_capturing():
        # An idle data-parallel rank runs such batches while the others wait for it: nothing is decided any more. vLLM
        # writes zeros and reads no row, so that k_pe needs no third axis.
        layer.vllm_forward(q, kv_c, k_pe, None, output)
        return
    step = _step_of(name, layer, metadata, kv_cache, slots)
    attention_with_rope(step, q, k_pe, kv_c, Rope(positions, cos_sin_cache, k_scale, is_neox, rotation), output)
    if metadata is None:
        layer.reached(q.dtype)


def layer_step(layer_name: Any) -> LayerStep:
    """Return one layer in the current step, for an op that was given it by name."""
    name, metadata, module, kv_cache, slots = compat_layer.layer_call(layer_name)
    return _step_of(name, Layer.of(module), metadata, kv_cache, slots)


def _step_of(name: str, layer: Layer, metadata: Any, kv_cache: torch.Tensor, slots: torch.Tensor | None) -> LayerStep:
    if metadata is None:
        return LayerStep(name, layer, kv_cache, slots, None, 0, False, compat_layer.is_piecewise)
    rows = metadata.num_actual_tokens
    decode_only = 0 < rows <= layer.limit and compat_layer.is_decode_only(metadata, slots) and kv_cache.numel() > 0
    if decode_only:
        kv_cache = layer.cache_view(kv_cache)
    return LayerStep(name, layer, kv_cache, slots, metadata, rows, decode_only, compat_layer.is_piecewise)


# The bodies. ``verify`` runs them too, over its own layers.


def attention_with_rope(
    step: LayerStep, q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, rope: Rope, output: torch.Tensor
) -> None:
    """Do one layer from the un-rotated query to ``output``, whose padded rows stay as they are.

    The layer's kernel prepares the real rows of a batch of decode rows. Any other batch is rotated, and its KV rows are
    written, by what does both with the flag off; then it goes to vLLM's own attention. So its bytes are those of flag
    off (I5). Operands and errors are those of ``mla_attention_with_rope``.
    """
    if card().is_capturing():
        _check_capture(step)
    query = None
    if step.decode_only:
        try:
            query = prepared_query(step, q, k_pe, kv_c, rope)
        except Exception as error:
            if card().is_capturing():
                raise  # half of a launch would be in the graph
            step.layer.fail(error)  # no kernel changes q or k_pe: vLLM's attention can take them
    if query is not None:
        decode(step, query, output)
        return
    rotates = step.metadata is not None and step.num_actual_tokens
    k_3d = rotate_and_write(step, q, k_pe, kv_c, rope) if rotates else k_pe.unsqueeze(1)
    step.layer.vllm_forward(q, kv_c, k_3d, step.metadata, output)


def prepared_query(
    step: LayerStep, q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, rope: Rope
) -> torch.Tensor | None:
    """Return q_prepared [n, N or M, L+R] of the n real rows, KV rows written; None if no kernel takes them."""
    n, layer, slots = step.num_actual_tokens, step.layer, step.slots
    assert slots is not None
    positions = rope.positions
    if n != q.shape[0]:
        q, k_pe, kv_c, positions = q[:n], k_pe[:n], kv_c[:n], positions[:n]
    # By position: names take twice as long.
    inputs = DecodeInputs(
        q, k_pe, kv_c, layer.weight(), step.kv_cache, slots if slots.shape[0] == n else slots[:n], positions,
        rope.table, rope.k_scale, layer.q_scale, rope.is_neox, layer.query_dtype(q.dtype), layer.out_heads,
    )  # fmt: skip
    run = layer.kernel(inputs)
    return None if run is None else run(inputs)


def rotate_and_write(
    step: LayerStep, q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, rope: Rope
) -> torch.Tensor:
    """Rotate the n real rows of q in place, write their KV rows, and return the rotated k_pe [n, 1, R].

    A batch without slots or without a cache is rotated and writes nothing.
    """
    n, width, slots = step.num_actual_tokens, k_pe.shape[-1], step.slots
    if n != q.shape[0]:
        q, k_pe, kv_c, rope = q[:n], k_pe[:n], kv_c[:n], rope._replace(positions=rope.positions[:n])
    q_pe, k_3d = q[..., -width:], k_pe.unsqueeze(1)
    if slots is None or not step.kv_cache.numel():
        return step.layer.rotate(q_pe, k_3d, rope)
    slots = slots if n == slots.shape[0] else slots[:n]
    if rope.rotation == compat_layer.FUSED_ROPE:
        step.layer.rope_and_write(q_pe, k_pe, kv_c, slots, rope)
        return k_3d
    k_rotated = step.layer.rotate(q_pe, k_3d, rope)
    step.layer.write(kv_c, k_rotated, slots, step.metadata, rope)
    return k_rotated


def attention(
    step: LayerStep,
    q: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    q_prepared: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Fill ``output``: decode rows with ``q_prepared``, any other batch with vLLM's own attention.

    Operands and errors are those of ``mla_attention_with_prepared_q``.
    """
    if card().is_capturing():
        _check_capture(step)
    if step.decode_only:
        decode(step, q_prepared, output)
    else:
        step.layer.vllm_forward(q, kv_c, k_pe.view(-1, 1, k_pe.shape[-1]), step.metadata, output)


def decode_q_prep(layer: Any, q: torch.Tensor, rope_dim: int, out_dtype: torch.dtype) -> torch.Tensor:
    """Return q_prepared [T, N, L+R] of ``out_dtype`` from rotated q [T, N, P+R], as vLLM's attention prepares it."""
    q_nope, q_pe = q.split([q.shape[-1] - rope_dim, rope_dim], dim=-1)
    absorbed = layer.weight().product(q_nope)
    if out_dtype == q.dtype:
        return torch.cat([absorbed, q_pe], dim=-1)
    return layer.quantise(absorbed, q_pe)


def decode(step: LayerStep, q_prepared: torch.Tensor, output: torch.Tensor) -> None:
    """Run decode attention and v-up projection of the real rows; padded rows of ``output`` stay as they are."""
    n = step.num_actual_tokens
    if n != output.shape[0]:
        q_prepared, output = q_prepared[:n], output[:n]
    step.layer.v_up(step.layer.forward_mqa(q_prepared, step.kv_cache, step.metadata), output)


def _check_capture(step: LayerStep) -> None:
    """Raise if what is being captured would be wrong for every replay."""
    if step.is_piecewise():
        raise RuntimeError(
            f"aiter-mla: the attention of {step.name} is inside a piecewise graph. Add the plugin's ops "
            f"({', '.join(ATTENTION_OPS)}) to compilation_config.splitting_ops, or leave splitting_ops unset."
        )
    found = {"attention metadata": step.metadata, "slot mapping": step.slots, "KV cache": step.kv_cache.numel() or None}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise RuntimeError(
            f"aiter-mla: {step.name} is being captured without {' and '.join(missing)}; its KV write would be missing "
            "from every replay. Capture after the KV cache is bound and with slot mappings, or switch "
            "pass_config.fuse_aiter_qk_rope_kvcache_mla off."
        )
    if not step.decode_only and compat_layer.has_prefill_rows(step.metadata):
        raise RuntimeError(
            f"aiter-mla: {step.name} is being captured with prefill rows in a full graph: every replay would take "
            "their branch. Set compilation_config.cudagraph_mode to FULL_DECODE_ONLY or PIECEWISE."
        )

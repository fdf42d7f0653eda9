"""What the ops do, over plain records and without vLLM: the registered ops and ``verify`` both run these functions.

Sizes: T rows of a step (graph padding included), S slots, N heads, P and R the un-rotated and rotated widths of a query
head, L the latent width, V the width of a value head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from vllm_aiter_mla.admission import ATTENTION_OPS
from vllm_aiter_mla.kernels import backend as capture
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.backend import Run
from vllm_aiter_mla.kernels.inputs import DecodeInputs


class MLALayer(Protocol):
    """What belongs to the layer itself: in serving vLLM's module, in ``verify`` a layer made of plain tensors."""

    @property
    def q_scale(self) -> torch.Tensor:
        """One float32, dequantisation scale of the query."""
        ...

    def weight(self) -> AbsorbWeight:
        """The absorbed weight W_UK, in the form in which the layer holds it."""
        ...

    def query_dtype(self, act: torch.dtype) -> torch.dtype:
        """What the layer's decode kernel reads where the activations are ``act``: fp8, or ``act``."""
        ...

    def kernel(self, inputs: DecodeInputs) -> Run | None:
        """What prepares a batch of decode rows; None where the layer's own attention does it."""
        ...

    def give_up(self, error: Exception) -> None:
        """The layer's kernel has raised: from now on its own attention serves it, and one line says so."""
        ...

    def quantise(self, absorbed: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        """[T, N, L] and [T, N, R] -> fp8 [T, N, L+R], as the layer's own attention quantises its query."""
        ...

    def rope_and_write(
        self,
        q_pe: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        k_scale: torch.Tensor,
        is_neox: bool,
    ) -> None:
        """Rotate q_pe [T, N, R] and k_pe [T, R] in place and write the KV rows, by vLLM's one kernel for it.

        k_pe stays as it is in rows without a slot.
        """
        ...

    def rotate(
        self, q_pe: torch.Tensor, k_pe: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, is_neox: bool
    ) -> None:
        """Rotate q_pe [T, N, R] and k_pe [T, R] in place."""
        ...

    def forward_mqa(self, q_prepared: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Decode attention over the cache: q_prepared [n, N, L+R] -> [n, N, L]."""
        ...

    def v_up(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """Write the projection of [n, N, L] to ``out`` [n, N*V]."""
        ...

    def vllm_forward(
        self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> None:
        """The layer's own attention of rotated q [T, N, P+R] and k_pe [T, 1, R]; zeros where metadata is None."""
        ...


class LayerStep(NamedTuple):
    """One MLA layer in one step.

    Attributes:
        name: the layer's dotted name.
        layer: what belongs to the layer.
        kv_cache: [blocks, block_size, L+R] in the activation dtype or the platform's fp8 type; empty before the cache
            exists.
        slots: [S] int64, S may exceed T; None while profiling.
        metadata: of the layer's own attention, handed on as it is; None while profiling and in dummy runs.
        num_actual_tokens: real rows; the others pad a graph.
        decode_only: whether every real row is a decode row, with a slot for its KV row.
        is_piecewise: tells whether the forward pass runs, or records, piecewise graphs; asked in captures alone.
    """

    name: str
    layer: MLALayer
    kv_cache: torch.Tensor
    slots: torch.Tensor | None
    metadata: Any
    num_actual_tokens: int
    decode_only: bool
    is_piecewise: Callable[[], bool]


class Rope(NamedTuple):
    """How a layer rotates, and the scale of its KV rows: what an op is given beside a step's rows.

    Attributes:
        positions: [T] int64.
        table: cos and sin, [max_position, R].
        k_scale: one float32, dequantisation scale of the cache.
        is_neox: pairing of the rotation.
    """

    positions: torch.Tensor
    table: torch.Tensor
    k_scale: torch.Tensor
    is_neox: bool


def attention_with_rope(
    step: LayerStep, q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, rope: Rope, output: torch.Tensor
) -> None:
    """Do one layer from the un-rotated query to ``output``: the op in which pass 3 ends.

    A batch of decode rows is prepared by the layer's kernel, its real rows alone. Any other batch is rotated where it
    lies, with the KV rows written in the same launch, and goes to the layer's own attention: what vLLM does by itself.

    Args:
        step: the layer, and what is known of the batch.
        q: [T, N, P+R], not rotated. q_pe of the real rows is rotated in place where the layer's own attention runs.
        k_pe: [T, R], not rotated; likewise.
        kv_c: [T, L].
        rope: the rotation.
        output: [T, N*V], written in place; padded rows stay as they are.

    Raises:
        RuntimeError: captured inside a piecewise graph, or without a batch: the graph would be wrong for every replay.
    """
    if capture.is_capturing():
        _check_capture(step)
    query = _prepared_or_none(step, q, k_pe, kv_c, rope) if step.decode_only else None
    if query is not None:
        decode(step, query, output)
        return
    if step.metadata is not None:
        rotate_and_write(step, q, k_pe, kv_c, rope)
    step.layer.vllm_forward(q, kv_c, k_pe.unsqueeze(1), step.metadata, output)


def _prepared_or_none(
    step: LayerStep, q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, rope: Rope
) -> torch.Tensor | None:
    """As ``prepared_query``; what it raises sends the layer to its own attention. No kernel changes q or k_pe.

    Inside a capture it passes: half of a launch would be in the graph.
    """
    try:
        return prepared_query(step, q, k_pe, kv_c, rope)
    except Exception as error:
        if capture.is_capturing():
            raise
        step.layer.give_up(error)
        return None


def prepared_query(
    step: LayerStep, q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, rope: Rope
) -> torch.Tensor | None:
    """q_prepared [n, N, L+R] of the n real rows by the layer's kernel, KV rows written; None where it has none."""
    n, layer, positions, slots = step.num_actual_tokens, step.layer, rope.positions, step.slots
    assert slots is not None
    if n != q.shape[0]:
        q, k_pe, kv_c, positions = q[:n], k_pe[:n], kv_c[:n], positions[:n]
    # By position: names take twice as long.
    inputs = DecodeInputs(
        q, k_pe, kv_c, layer.weight(), step.kv_cache, slots if slots.shape[0] == n else slots[:n], positions,
        rope.table, rope.k_scale, layer.q_scale, rope.is_neox, layer.query_dtype(q.dtype),
    )  # fmt: skip
    run = layer.kernel(inputs)
    return None if run is None else run(inputs)


def rotate_and_write(step: LayerStep, q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, rope: Rope) -> None:
    """Rotate the real rows of q and k_pe where they lie, and write their KV rows.

    A batch without slots or without a cache is rotated and writes nothing, as in vLLM.
    """
    n, width, positions, slots = step.num_actual_tokens, k_pe.shape[-1], rope.positions, step.slots
    if n != q.shape[0]:
        q, k_pe, kv_c, positions = q[:n], k_pe[:n], kv_c[:n], positions[:n]
    q_pe = q.narrow(2, q.shape[2] - width, width)
    if slots is None or not step.kv_cache.numel():
        step.layer.rotate(q_pe, k_pe, positions, rope.table, rope.is_neox)
        return
    if n != slots.shape[0]:
        slots = slots[:n]
    step.layer.rope_and_write(q_pe, k_pe, kv_c, positions, rope.table, slots, rope.k_scale, rope.is_neox)


def attention(
    step: LayerStep,
    q: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    q_prepared: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Fill ``output`` [T, N*V]: decode rows with ``q_prepared``, any other batch with the layer's own attention.

    Args:
        step: the layer, and what is known of the batch.
        q: [T, N, P+R], rotated.
        kv_c: [T, L].
        k_pe: [T, 1, R], rotated.
        q_prepared: [T, N, L+R].
        output: [T, N*V], written in place.

    Raises:
        RuntimeError: as ``attention_with_rope``.
    """
    if capture.is_capturing():
        _check_capture(step)
    if step.decode_only:
        decode(step, q_prepared, output)
    else:
        step.layer.vllm_forward(q, kv_c, k_pe.view(-1, 1, k_pe.shape[-1]), step.metadata, output)


def decode_q_prep(layer: MLALayer, q: torch.Tensor, rope_dim: int, out_dtype: torch.dtype) -> torch.Tensor:
    """Rotated q [T, N, P+R] -> q_prepared [T, N, L+R] of ``out_dtype``, as the layer's own attention prepares it."""
    q_nope, q_pe = q.split([q.shape[-1] - rope_dim, rope_dim], dim=-1)
    absorbed = layer.weight().product(q_nope)
    if out_dtype == q.dtype:
        return torch.cat([absorbed, q_pe], dim=-1)
    return layer.quantise(absorbed, q_pe)


def decode(step: LayerStep, q_prepared: torch.Tensor, output: torch.Tensor) -> None:
    """Decode attention and v-up projection of the real rows; padded rows of ``output`` stay as they are."""
    n = step.num_actual_tokens
    if n != output.shape[0]:
        q_prepared, output = q_prepared[:n], output[:n]
    step.layer.v_up(step.layer.forward_mqa(q_prepared, step.kv_cache, step.metadata), output)


def _check_capture(step: LayerStep) -> None:
    """Raise where what is being captured would be wrong for every replay."""
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

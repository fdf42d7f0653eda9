"""One step of a model: a back end inside the plugin's own op bodies, with what runs before and after the op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from vllm_aiter_mla import ops as bodies
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.verify.layer import Buffers, Layer, Rows

Outputs = dict[str, torch.Tensor]
Op = Callable[[Rows, torch.Tensor, torch.Tensor], None]


class Segment(NamedTuple):
    """A part of a step: captured into a graph, or run again at every replay as vLLM runs a splitting op."""

    captured: bool
    run: Callable[[], None]


class Step(NamedTuple):
    """The segments of a step in order, and its outputs, which every run brings up to date."""

    segments: list[Segment]
    outputs: Outputs

    def run(self) -> None:
        """Run it without any graph."""
        for segment in self.segments:
            segment.run()


def query_name(index: int) -> str:
    """Return the key of a layer's prepared query among a step's outputs."""
    return f"q_prepared.{index}"


def rope_of(layer: Layer, positions: torch.Tensor) -> bodies.Rope:
    """Return the layer's rotation at these positions."""
    return bodies.Rope(positions, layer.buffers.table, layer.k_scale, layer.buffers.variant.is_neox)


def produce(source: Rows, work: Rows) -> None:
    """Write a step's rows again, as the matrix products before the op do."""
    for given, written in zip(source, work, strict=True):
        written.copy_(given)


def make_op(
    kind: str, buffers: Buffers, backend: KernelBackend, index: int, outputs: Outputs, slots: int | None = None
) -> Op:
    """Return the op of layer ``index``: a function of rows, positions and the attention's output buffer.

    The op looks up the current batch at every call and puts the prepared query into ``outputs``. ``kind`` is as in
    ``Case``; ``slots`` is S, if the slot mapping is shorter than T.
    """
    name = query_name(index)

    def prepare(inputs: DecodeInputs) -> torch.Tensor:
        outputs[name] = query = backend.prepare(inputs)
        return query

    layer = replace(buffers.layers[index], tested=prepare)

    def op(rows: Rows, positions: torch.Tensor, out: torch.Tensor) -> None:
        batch = buffers.batch
        step = bodies.LayerStep(
            name, layer, layer.kv_cache, buffers.slots[:slots], None if batch.dummy else batch, batch.rows,
            not batch.dummy and not batch.prefill_rows, lambda: kind == "piecewise",
        )  # fmt: skip
        rope = rope_of(layer, positions)
        outputs.pop(name, None)
        if kind != "kernel":
            bodies.attention_with_rope(step, *rows, rope, out)
        elif (query := bodies.prepared_query(step, *rows, rope)) is not None:
            outputs[name] = query

    return op


def build(kind: str, buffers: Buffers, backend: KernelBackend, size: int, slots: int | None = None) -> Step:
    """Build one step of ``size`` padded rows. ``kind`` and ``slots`` are as in ``make_op``."""
    outputs: Outputs = {}
    segments = []
    for i, layer in enumerate(buffers.layers):
        op = make_op(kind, buffers, backend, i, outputs, slots)
        source, work = layer.source.first(size), layer.work.first(size)
        if kind != "kernel":
            segments.append(Segment(True, partial(produce, source, work)))
        rows = source if kind == "kernel" else work
        segments.append(Segment(False, partial(op, rows, buffers.positions[:size], layer.out[:size])))

    def tail() -> None:
        # Something after the attention that a graph computes from its output buffer.
        outputs.update({f"final.{i}": layer.out[:size] * 2 for i, layer in enumerate(buffers.layers)})

    if kind != "kernel":
        segments.append(Segment(True, tail))
    step = Step(segments, outputs)
    return step if kind == "piecewise" else Step([Segment(True, step.run)], outputs)

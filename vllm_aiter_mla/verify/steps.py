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
from vllm_aiter_mla.verify.layer import Buffers, Rows

Outputs = dict[tuple[str, int], torch.Tensor]
"""("query", i) is the prepared query of layer i, ("final", i) what a reader of its attention output computed."""


class Segment(NamedTuple):
    """A part of a step: captured into a graph, or run again at every replay as vLLM runs a splitting op."""

    captured: bool
    run: Callable[[], object]  # once captured: replays the graph
    launches: tuple[str, ...] | str = ()  # names of what the graph launches, or why they are unknown


class Step(NamedTuple):
    """The segments of a step in order, and its outputs, which every run brings up to date."""

    segments: list[Segment]
    outputs: Outputs

    def run(self) -> None:
        """Run every segment: without any graph, or what was captured as a replay."""
        for segment in self.segments:
            segment.run()

    @property
    def graphs(self) -> list[Segment]:
        """The segments that are captured."""
        return [segment for segment in self.segments if segment.captured]


def produce(source: Rows, work: Rows) -> None:
    """Write a step's rows again, as the matrix products before the op do."""
    for given, written in zip(source, work, strict=True):
        written.copy_(given)


def make_op(buffers: Buffers, backend: KernelBackend, index: int, rows: Rows, outputs: Outputs) -> Callable[[], None]:
    """Return the op of layer ``index`` over ``rows``.

    The op looks up the current batch at every call and puts the prepared query into ``outputs``.
    """
    kind, size = buffers.case.kind, len(rows.q)

    def prepare(inputs: DecodeInputs) -> torch.Tensor:
        outputs["query", index] = query = backend.prepare(inputs)
        return query

    layer = replace(buffers.layers[index], tested=prepare)
    positions, out = buffers.positions[:size], layer.out[:size]

    def op() -> None:
        batch = buffers.batch
        step = bodies.LayerStep(
            f"layer {index}", layer, layer.kv_cache, buffers.slot_mapping(size),
            None if batch.dummy else batch, batch.rows, not batch.dummy and not batch.num_prefills,
            lambda: kind == "piecewise",
        )  # fmt: skip
        rope = layer.rope(positions)
        outputs.pop(("query", index), None)
        if kind != "kernel":
            bodies.attention_with_rope(step, *rows, rope, out)
        elif (query := bodies.prepared_query(step, *rows, rope)) is not None:
            outputs["query", index] = query

    return op


def build(buffers: Buffers, backend: KernelBackend, size: int) -> Step:
    """Build one step of ``size`` padded rows, captured as the kind of the case says."""
    kind, outputs, segments = buffers.case.kind, Outputs(), list[Segment]()
    for i, layer in enumerate(buffers.layers):
        rows = source = layer.source.first(size)
        if kind != "kernel":
            rows = layer.work.first(size)
            segments.append(Segment(True, partial(produce, source, rows)))
        segments.append(Segment(False, make_op(buffers, backend, i, rows, outputs)))

    def tail() -> None:
        # Something after the attention that a graph computes from its output buffer.
        outputs.update({("final", i): layer.out[:size] * 2 for i, layer in enumerate(buffers.layers)})

    if kind != "kernel":
        segments.append(Segment(True, tail))
    step = Step(segments, outputs)
    return step if kind == "piecewise" else Step([Segment(True, step.run)], outputs)

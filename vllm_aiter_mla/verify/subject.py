"""What is under test: a back end inside the plugin's own op bodies, and the steps made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from vllm_aiter_mla import ops as bodies
from vllm_aiter_mla.kernels.backend import KernelBackend, Run
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.verify.buffers import Buffers
from vllm_aiter_mla.verify.layer import Rows

Outputs = dict[str, torch.Tensor]


def produce(source: Rows, work: Rows) -> None:
    """Write a step's rows anew, as the matrix products in front of the op do."""
    for given, written in zip(source, work, strict=True):
        written.copy_(given)


@dataclass(frozen=True)
class Subject:
    """A back end as the plugin would run it; a planted fault replaces what it changes.

    Attributes:
        backend: what it says about itself counts.
        prepare: its kernel.
        defined_rows: how many leading rows of q_prepared it defines.
        attend: the op.
        produce: what stands in front of the op.
        splitting: whether graphs end before the op; else a piecewise step is one graph, captured with a decode batch.
    """

    backend: KernelBackend
    prepare: Run
    defined_rows: Callable[[DecodeInputs], int]
    attend: Callable[..., None] = lambda *given: bodies.attention_with_rope(*given)  # looked up at every call
    produce: Callable[[Rows, Rows], None] = produce
    splitting: bool = True


def subject_of(backend: KernelBackend) -> Subject:
    """A back end without a fault."""
    return Subject(backend, backend.prepare, backend.defined_rows)


class Op:
    """One layer's op over the buffers; what the kernel prepares is noted among the step's outputs.

    Args:
        buffers: what the step reads and writes.
        subject: what is tested.
        index: of the layer.
        outputs: of the step.
        kind: as ``build`` has it.
        slots: likewise.
    """

    def __init__(
        self, buffers: Buffers, subject: Subject, index: int, outputs: Outputs, kind: str, slots: int | None = None
    ) -> None:
        self._buffers, self._subject, self._outputs, self._kind = buffers, subject, outputs, kind
        self._slots, self._name = slots, query_name(index)
        self._layer = replace(buffers.layers[index], tested=self._noted)

    def _noted(self, inputs: DecodeInputs) -> torch.Tensor:
        self._outputs[self._name] = query = self._subject.prepare(inputs)
        return query

    def __call__(self, rows: Rows, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Run it on what Python knows of the step now."""
        layer, batch, table = self._layer, self._buffers.batch, self._buffers.table
        step = bodies.LayerStep(
            self._name, layer, layer.kv_cache, self._buffers.slots[: self._slots], None if batch.dummy else batch,
            batch.rows, not batch.dummy and not batch.prefill_rows, lambda: self._kind == "piecewise",
        )  # fmt: skip
        rope = bodies.Rope(positions, table, layer.k_scale, self._buffers.variant.is_neox)
        self._outputs.pop(self._name, None)
        if self._kind != "kernel":
            self._subject.attend(step, *rows, rope, out)
        elif (query := bodies.prepared_query(step, *rows, rope)) is not None:
            self._outputs[self._name] = query


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a step: recorded into a graph, or run anew at every replay as vLLM runs a splitting op."""

    captured: bool
    run: Callable[[], Outputs]


def query_name(index: int) -> str:
    """Key of a layer's prepared query among a step's outputs."""
    return f"q_prepared.{index}"


def build(kind: str, buffers: Buffers, subject: Subject, size: int, slots: int | None = None) -> list[Segment]:
    """The segments of one step at a padded size; all return the same dict, which each run brings up to date.

    Args:
        kind: "kernel" is the preparation of decode rows alone; "full" has what stands in front of the op, the op and
            what follows in one graph; "piecewise" leaves the op out.
        buffers: what the step reads and writes.
        subject: what is tested.
        size: T.
        slots: S, where it is below T; by default the slot mapping is longer than T.
    """
    results: Outputs = {}
    positions = buffers.positions[:size]

    def tail() -> None:
        # Something behind the attention that a graph computes from its output buffer.
        results.update({f"final.{i}": layer.out[:size] * 2 for i, layer in enumerate(buffers.layers)})

    def segment(captured: bool, *calls: Callable[[], None]) -> Segment:
        def run() -> Outputs:
            for call in calls:
                call()
            return results

        return Segment(captured, run)

    calls: list[tuple[bool, Callable[[], None]]] = []
    for i, layer in enumerate(buffers.layers):
        op = Op(buffers, subject, i, results, kind, slots)
        source, work = layer.source.first(size), layer.work.first(size)
        if kind != "kernel":
            calls.append((True, partial(subject.produce, source, work)))
        calls.append((False, partial(op, source if kind == "kernel" else work, positions, layer.out[:size])))
    if kind != "kernel":
        calls.append((True, tail))
    if kind == "piecewise":
        return [segment(captured, call) for captured, call in calls]
    return [segment(True, *(call for _, call in calls))]

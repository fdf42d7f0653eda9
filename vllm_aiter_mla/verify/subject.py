"""What is under test: a back end inside the plugin's own op bodies, and the steps made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from vllm_aiter_mla.kernels.backend import KernelBackend, Run
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.ops import bodies
from vllm_aiter_mla.verify.buffers import Buffers
from vllm_aiter_mla.verify.layer import Rows

Outputs = dict[str, torch.Tensor]


def attend(
    step: bodies.LayerStep,
    q: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    rope: bodies.Rope,
    out: torch.Tensor,
) -> None:
    """The op of the plugin; looked up at every call."""
    bodies.attention_with_rope(step, q, k_pe, kv_c, rope, out)


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
    attend: Callable[..., None] = attend
    produce: Callable[[Rows, Rows], None] = produce
    splitting: bool = True


def subject_of(backend: KernelBackend) -> Subject:
    """A back end without a fault."""
    return Subject(backend, backend.prepare, backend.defined_rows)


class Op:
    """One layer's op over the buffers; its prepared query is noted among the step's outputs, if there is one.

    Args:
        buffers: what the step reads and writes.
        subject: what is tested.
        index: of the layer.
        outputs: of the step.
        slots: S; by default the whole buffer, however many rows a step has.
        piecewise: whether the op is told that graphs are piecewise.
    """

    def __init__(
        self, buffers: Buffers, subject: Subject, index: int, outputs: Outputs, slots: int | None = None,
        piecewise: bool = False,
    ) -> None:  # fmt: skip
        self._buffers, self._subject, self._outputs = buffers, subject, outputs
        self._slots, self._piecewise, self._name = slots, piecewise, query_name(index)
        self.layer = replace(buffers.layers[index], tested=self._noted)

    def attend(self, rows: Rows, positions: torch.Tensor, out: torch.Tensor) -> None:
        """What serving runs."""
        self._outputs.pop(self._name, None)
        self._subject.attend(self._step(), *rows, self._rope(positions), out)

    def prepare(self, rows: Rows, positions: torch.Tensor) -> None:
        """What a full graph holds of it before the decode kernel."""
        query = bodies.prepared_query(self._step(), *rows, self._rope(positions))
        assert query is not None, "the layer always has a kernel"
        self._outputs[self._name] = query

    def _noted(self, inputs: DecodeInputs) -> torch.Tensor:
        self._outputs[self._name] = query = self._subject.prepare(inputs)
        return query

    def _rope(self, positions: torch.Tensor) -> bodies.Rope:
        return bodies.Rope(positions, self._buffers.table, self.layer.k_scale, self._buffers.variant.is_neox)

    def _step(self) -> bodies.LayerStep:
        """What Python knows of the step now."""
        batch, cache, slots = self._buffers.batch, self.layer.kv_cache, self._buffers.slots[: self._slots]
        metadata = None if batch.dummy else batch
        decode_only = not batch.dummy and not batch.prefill_rows
        return bodies.LayerStep(
            self._name, self.layer, cache, slots, metadata, batch.rows, decode_only, self._piecewise
        )  # fmt: skip


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
    ops = [Op(buffers, subject, i, results, slots, kind == "piecewise") for i in range(len(buffers.layers))]

    def tail() -> None:
        # Something behind the attention that a graph computes from its output buffer.
        results.update({f"final.{i}": layer.out[:size] * 2 for i, layer in enumerate(buffers.layers)})

    def segment(captured: bool, *calls: Callable[[], None]) -> Segment:
        def run() -> Outputs:
            for call in calls:
                call()
            return results

        return Segment(captured, run)

    if kind == "kernel":
        return [segment(True, *(partial(op.prepare, op.layer.source.first(size), positions) for op in ops))]
    calls: list[tuple[bool, Callable[[], None]]] = []
    for layer, op in zip(buffers.layers, ops, strict=True):
        work = layer.work.first(size)
        calls.append((True, partial(subject.produce, layer.source.first(size), work)))
        calls.append((False, partial(op.attend, work, positions, layer.out[:size])))
    calls.append((True, tail))
    if kind == "piecewise":
        return [segment(captured, call) for captured, call in calls]
    return [segment(True, *(call for _, call in calls))]

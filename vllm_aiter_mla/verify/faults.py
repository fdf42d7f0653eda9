"""Planted faults: what goes wrong with graphs in practice, each a small change of something right.

Each names the case and the oracle that must catch it. A fault works on any device; none synchronises while a graph is
captured unless that is the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vllm_aiter_mla import ops as bodies
from vllm_aiter_mla.kernels import fp8
from vllm_aiter_mla.kernels.absorb import PlainWeight, plain
from vllm_aiter_mla.kernels.backend import Run
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.verify.layer import Layer, Rows
from vllm_aiter_mla.verify.subject import Subject

Plant = Callable[[Subject], Subject]
Op = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault.

    Attributes:
        name: as printed.
        what: the mistake, in one sentence.
        case: the case that must catch it.
        oracle: the oracle that must name it.
        plant: makes the faulty subject of a right one.
        base: makes the right subject that the fault is planted in, where the back end alone does not show it.
    """

    name: str
    what: str
    case: str
    oracle: str
    plant: Plant
    base: Plant = lambda subject: subject


def _kernel(change: Callable[[Run, DecodeInputs], torch.Tensor]) -> Plant:
    """``change`` in the place of the kernel; it is given the right one."""
    return lambda right: replace(right, prepare=partial(change, right.prepare))


def _op(change: Callable[..., None]) -> Plant:
    """``change`` in the place of the op; it is given the right one, the step and what the op is given beside it."""
    return lambda right: replace(right, attend=partial(change, right.attend))


class _Changed:
    """A layer with one method changed; ``change`` is given the right one."""

    def __init__(self, layer: bodies.MLALayer, method: str, change: Callable[..., Any]) -> None:
        self._layer = layer
        setattr(self, method, partial(change, getattr(layer, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _method(name: str, change: Callable[..., Any]) -> Plant:
    """``change`` in the place of a method of the layer."""

    def changed(attend: Op, step: bodies.LayerStep, *given: Any) -> None:
        attend(step._replace(layer=_Changed(step.layer, name, change)), *given)

    return _op(changed)


def _copied_once(field: str) -> Plant:
    """A kernel that goes on with the copy of an operand that it made when it saw it for the first time."""

    def plant(right: Subject) -> Subject:
        copies: dict[tuple[int, torch.Size], torch.Tensor] = {}

        def copied(run: Run, inputs: DecodeInputs) -> torch.Tensor:
            tensor = plain(inputs.weight) if field == "weight" else getattr(inputs, field)
            key = (tensor.data_ptr(), tensor.shape)
            if key not in copies:
                copies[key] = tensor.clone()
            change: dict[str, Any] = {field: PlainWeight(copies[key]) if field == "weight" else copies[key]}
            return run(replace(inputs, **change))

        return _kernel(copied)(right)

    return plant


def leaves_padded_rows(right: Subject) -> Subject:
    """Not a fault: a back end that leaves rows without a slot unwritten, as AITER does without its 15th argument."""

    def partly(run: Run, inputs: DecodeInputs) -> torch.Tensor:
        whole = run(inputs)
        out = torch.empty_like(whole)
        mine, theirs = _bytes(out), _bytes(whole)
        mine.copy_(torch.where((inputs.slot_mapping >= 0).view(-1, 1, 1), theirs, mine))
        return out

    return replace(_kernel(partly)(right), defined_rows=lambda inputs: int((inputs.slot_mapping >= 0).sum()))


@_op
def _prepares_mixed_batches(attend: Op, step: bodies.LayerStep, *given: Any) -> None:
    if step.metadata is not None and not step.decode_only:
        bodies.prepared_query(step, *given[:-1])
    attend(step, *given)


@_op
def _takes_padding_for_rows(attend: Op, step: bodies.LayerStep, q: torch.Tensor, *given: Any) -> None:
    attend(step if step.metadata is None else step._replace(num_actual_tokens=q.shape[0]), q, *given)


def _rotates_again(right: Op, q_pe: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, *given: Any) -> None:
    right(q_pe, k_pe, kv_c, *given)
    positions, table, _, _, is_neox = given
    Layer.rotate(q_pe, k_pe, positions, table, is_neox)


def _produces_once(right: Subject) -> Subject:
    done: set[tuple[int, torch.Size]] = set()

    def produce(source: Rows, work: Rows) -> None:
        key = (work.q.data_ptr(), work.q.shape)
        if key not in done:
            right.produce(source, work)
        done.add(key)

    return replace(right, produce=produce)


@_kernel
def _copies_table(run: Run, inputs: DecodeInputs) -> torch.Tensor:
    halves = [half.contiguous() for half in inputs.cos_sin_cache.chunk(2, dim=-1)]
    return run(replace(inputs, cos_sin_cache=torch.cat(halves, dim=-1)))


@_kernel
def _reads_scale(run: Run, inputs: DecodeInputs) -> torch.Tensor:
    return run(replace(inputs, q_scale=torch.full_like(inputs.q_scale, float(inputs.q_scale.item()))))


@_kernel
def _writes_behind(run: Run, inputs: DecodeInputs) -> torch.Tensor:
    query = run(inputs)
    rows = inputs.kv_cache.view(torch.uint8).flatten(0, 1)
    last = inputs.slot_mapping.max().view(1)
    behind = (last.clamp(min=0) + 1) % rows.shape[0]
    there = rows.index_select(0, behind)
    rows.index_copy_(0, behind, torch.where(last.view(1, 1) >= 0, there ^ 0x11, there))
    return query


@_kernel
def _wraps_slots(run: Run, inputs: DecodeInputs) -> torch.Tensor:
    rows, given = inputs.kv_cache.shape[0] * inputs.kv_cache.shape[1], inputs.slot_mapping
    return run(replace(inputs, slot_mapping=torch.where(given < 0, given + rows, given)))


def _mixes_rows(right: Callable[..., torch.Tensor], query: torch.Tensor, *given: Any) -> torch.Tensor:
    largest = query.float().abs().amax()
    return right((query.float() / largest * largest).to(query.dtype), *given)


def _hoards(right: Subject) -> Subject:
    workspaces: list[torch.Tensor] = []

    def hoarding(attend: Op, step: bodies.LayerStep, q: torch.Tensor, *given: Any) -> None:
        workspaces.append(torch.empty_like(q))
        attend(step, q, *given)

    return _op(hoarding)(right)


@_kernel
def _flips_query(run: Run, inputs: DecodeInputs) -> torch.Tensor:
    query, q_pe = run(inputs), inputs.q[..., inputs.nope_dim :]
    q_pe.copy_(q_pe.flip(-1))
    return query


def _one_buffer(right: Subject) -> Subject:
    buffers: dict[int, torch.Tensor] = {}

    def sharing(run: Run, inputs: DecodeInputs) -> torch.Tensor:
        query = run(inputs)
        buffer = buffers.setdefault(inputs.num_tokens, torch.empty_like(query))
        _bytes(buffer).copy_(_bytes(query))
        return buffer

    return _kernel(sharing)(right)


@_kernel
def _one_position(run: Run, inputs: DecodeInputs) -> torch.Tensor:
    query = run(inputs)
    run(replace(inputs, positions=inputs.positions[:1].repeat(inputs.num_tokens)))
    return query


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: few operations know fp8."""
    return tensor.view(torch.uint8) if fp8.is_fp8(tensor.dtype) else tensor


_ONCE = "at the first call, before the capture, and never again"
FAULTS = [
    Fault("captured-in-a-piece", "the op is captured with a decode batch in a graph that mixed batches replay too",
          "mixed-batch-piecewise", "attention-output", lambda right: replace(right, splitting=False)),
    Fault("rotates-twice", "rows that vLLM's kernel has rotated are rotated again",
          "mixed-batch-piecewise", "attention-output", _method("rope_and_write", _rotates_again)),
    Fault("rotates-copies", "copies are rotated, and the layer's own attention gets q and k_pe as they were",
          "mixed-batch-piecewise", "attention-output",
          _method("rope_and_write", lambda right, q_pe, k_pe, *given: right(q_pe.clone(), k_pe.clone(), *given))),
    Fault("rotates-padded-rows", "the padding of a mixed batch is rotated like its real rows",
          "mixed-batch-piecewise", "inputs-unchanged", _takes_padding_for_rows),
    Fault("prepares-padded-rows", "the padding of a decode batch is prepared, and the decode kernel reads it",
          "piecewise-decode", "shape-and-dtype", _takes_padding_for_rows),
    Fault("prepares-mixed-batches", "a batch with prefill rows is prepared too, for nobody",
          "mixed-batch-piecewise", "shape-and-dtype", _prepares_mixed_batches),
    Fault("rows-not-written-anew", "a full graph holds the op and not what writes its q, k_pe and kv_c",
          "full-graph-decode", "query-nope", _produces_once),
    Fault("stale-table", f"cos and sin are copied {_ONCE}",
          "table-rewritten", "query-rope", _copied_once("cos_sin_cache")),
    Fault("table-copied-per-call", "cos and sin are copied at every call",
          "fresh-data", "no-table-copy", _copies_table),
    Fault("host-sync", "the op reads a scale on the host", "fresh-data", "no-sync", _reads_scale),
    Fault("scale-baked-in", f"a scale is read {_ONCE}", "scales-changed", "query-nope", _copied_once("q_scale")),
    Fault("write-outside-slot", "the row after the last written one is written too",
          "other-slots", "cache-elsewhere", _writes_behind),
    Fault("writes-slot-minus-one", "a row with slot -1 writes its KV row to the end of the cache",
          "rows-grow-and-shrink", "cache-elsewhere", _wraps_slots),
    Fault("mixes-padded-rows",
          "attention scales the query by the largest value of all rows, undefined padded ones included",
          "padded-rows-are-poison", "finite", _method("forward_mqa", _mixes_rows), base=leaves_padded_rows),
    Fault("allocates-on-replay", "the op between two graphs keeps a new workspace at every step",
          "long-run-piecewise", "memory", _hoards),
    Fault("weights-copied", f"the absorbed weights are copied {_ONCE}",
          "weights-replaced", "query-nope", _copied_once("weight")),
    Fault("slots-copied", f"the slots are copied {_ONCE}", "other-slots", "cache-rows", _copied_once("slot_mapping")),
    Fault("rotates-its-inputs", "q of a decode batch is changed in place, as vLLM's own rotary kernel does",
          "fresh-data", "inputs-unchanged", _flips_query),
    Fault("one-buffer-for-all-layers", "all layers of a step share one query buffer",
          "two-layers-one-graph", "query-nope", _one_buffer),
    Fault("launches-more", "a step in several launches: the op makes two copies of its result more",
          "kernel-status", "launches", _kernel(lambda run, inputs: run(inputs).clone().clone())),
    Fault("one-position-for-all-keys", "all KV rows of a step are rotated by the first row's position",
          "fresh-data", "cache-rows", _one_position),
]  # fmt: skip

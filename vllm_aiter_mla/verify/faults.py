"""Planted faults: what goes wrong with graphs in practice, each a small change of something right.

Each names the case and the oracle that must catch it. A fault works on any device; none synchronises while a graph is
captured unless that is the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_aiter_mla.kernels import fp8, reference
from vllm_aiter_mla.kernels.absorb.plain import PlainWeight, plain
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.verify.subject import Attend, Subject
from vllm_aiter_mla.verify.world import Batch

Plant = Callable[[Subject], Subject]


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


FAULTS: list[Fault] = []


def _fault(what: str, case: str, oracle: str, base: Plant | None = None) -> Callable[[Plant], Plant]:
    def note(plant: Plant) -> Plant:
        name = plant.__name__.strip("_").replace("_", "-")
        FAULTS.append(Fault(name, what, case, oracle, plant, base or (lambda subject: subject)))
        return plant

    return note


def _given(subject: Subject, change: Callable[[DecodeInputs], dict[str, Any]]) -> Subject:
    """``subject`` whose kernel gets other operands."""
    return replace(subject, prepare=lambda inputs, batch: subject.prepare(replace(inputs, **change(inputs)), batch))


def _then(subject: Subject, spoil: Callable[[torch.Tensor, DecodeInputs, Batch], torch.Tensor]) -> Subject:
    """``subject`` whose kernel does something more with its result."""
    return replace(subject, prepare=lambda inputs, batch: spoil(subject.prepare(inputs, batch), inputs, batch))


def _first_copies() -> Callable[[torch.Tensor], torch.Tensor]:
    """Gives the copy that it made when it saw a tensor for the first time."""
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.data_ptr(), tensor.shape)
        if key not in copies:
            copies[key] = tensor.clone()
        return copies[key]

    return copy


def _copied_once(field: str) -> Plant:
    """A kernel that goes on with the copy of an operand that it made at its first call."""

    def plant(subject: Subject) -> Subject:
        copy = _first_copies()
        if field == "weight":
            return _given(subject, lambda inputs: {field: PlainWeight(copy(plain(inputs.weight)))})
        return _given(subject, lambda inputs: {field: copy(getattr(inputs, field))})

    return plant


def leaves_padded_rows(subject: Subject) -> Subject:
    """Not a fault: a back end that leaves rows without a slot unwritten, as AITER does without its 15th argument."""

    def partly(whole: torch.Tensor, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
        out = torch.empty_like(whole)
        mine, theirs = _bytes(out), _bytes(whole)
        mine.copy_(torch.where(defined(inputs).view(-1, 1, 1), theirs, mine))
        return out

    def defined(inputs: DecodeInputs) -> torch.Tensor:
        return inputs.slot_mapping >= 0

    return replace(_then(subject, partly), defined=defined)


@_fault("the op returns the decode rows of the batch, its fake declares T", "rows-grow-and-shrink", "shape-and-dtype")
def _fake_lies_about_rows(subject: Subject) -> Subject:
    return _then(subject, lambda query, inputs, batch: query[: batch.decode_rows])


@_fault("the op prepares the decode rows that Python knows of, no others", "eager-between-replays", "cache-rows")
def _slices_decode_rows(subject: Subject) -> Subject:
    def prepare(inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
        names = ("q", "k_pe", "kv_c", "positions", "slot_mapping")
        cut = {name: getattr(inputs, name)[: batch.decode_rows] for name in names}
        part = subject.prepare(replace(inputs, **cut), batch)
        whole = part.new_empty((inputs.num_tokens, *part.shape[1:]))
        whole[: part.shape[0]] = part
        return whole

    return replace(subject, prepare=prepare)


@_fault(
    "the captured op rotates q and k_pe for prefill rows only if the batch had some when it was captured",
    "mixed-batch-piecewise",
    "attention-output",
)
def _frozen_metadata_branch(subject: Subject) -> Subject:
    def rotating(query: torch.Tensor, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
        if batch.prefill_rows:
            cos, sin = reference.gather_cos_sin(inputs.cos_sin_cache, inputs.positions)
            q_pe, k_pe = inputs.q[..., inputs.nope_dim :], inputs.k_pe
            q_pe.copy_(reference.rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1), inputs.is_neox))
            k_pe.copy_(reference.rotate(k_pe, cos, sin, inputs.is_neox))
        return query

    def trusting(call: Attend) -> None:
        subject.attend(replace(call, is_rotated=True))

    return replace(_then(subject, rotating), attend=trusting)


_COPIED = (
    ("stale-table", "cos and sin are copied", "cos_sin_cache", "table-rewritten", "query-rope"),
    ("scale-baked-in", "a scale is read", "q_scale", "scales-changed", "query-nope"),
    ("weights-copied", "the absorbed weights are copied", "weight", "weights-replaced", "query-nope"),
    ("slots-copied", "the slots are copied", "slot_mapping", "other-slots", "cache-rows"),
)
for _name, _what, _field, _case, _oracle in _COPIED:
    _what += " at the first call, before the capture, and never again"
    FAULTS.append(Fault(_name, _what, _case, _oracle, _copied_once(_field)))


@_fault("cos and sin are copied at every call", "fresh-data", "no-table-copy")
def _table_copied_per_call(subject: Subject) -> Subject:
    def table(inputs: DecodeInputs) -> dict[str, torch.Tensor]:
        cos, sin = inputs.cos_sin_cache.chunk(2, dim=-1)
        return {"cos_sin_cache": torch.cat([cos.contiguous(), sin.contiguous()], dim=-1)}

    return _given(subject, table)


@_fault("the op reads a scale on the host", "fresh-data", "no-sync")
def _host_sync(subject: Subject) -> Subject:
    return _given(subject, lambda inputs: {"q_scale": torch.full_like(inputs.q_scale, float(inputs.q_scale.item()))})


@_fault("the row after the last written one is written too", "other-slots", "cache-elsewhere")
def _write_outside_slot(subject: Subject) -> Subject:
    def writing(query: torch.Tensor, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
        rows = inputs.kv_cache.view(torch.uint8).flatten(0, 1)
        last = inputs.slot_mapping.max().view(1)
        behind = (last.clamp(min=0) + 1) % rows.shape[0]
        there = rows.index_select(0, behind)
        rows.index_copy_(0, behind, torch.where(last.view(1, 1) >= 0, there ^ 0x11, there))
        return query

    return _then(subject, writing)


@_fault("a row with slot -1 writes its KV row to the end of the cache", "rows-grow-and-shrink", "cache-elsewhere")
def _writes_slot_minus_one(subject: Subject) -> Subject:
    def slots(inputs: DecodeInputs) -> dict[str, torch.Tensor]:
        rows, given = inputs.kv_cache.shape[0] * inputs.kv_cache.shape[1], inputs.slot_mapping
        return {"slot_mapping": torch.where(given < 0, given + rows, given)}

    return _given(subject, slots)


@_fault(
    "the attention op scales the query by the largest value of all rows, undefined padded ones included",
    "padded-rows-are-poison",
    "finite",
    base=leaves_padded_rows,
)
def _mixes_padded_rows(subject: Subject) -> Subject:
    def mixing(call: Attend) -> None:
        q = call.q_prepared.float()
        largest = q.abs().amax()
        subject.attend(replace(call, q_prepared=(q / largest * largest).to(call.q_prepared.dtype)))

    return replace(subject, attend=mixing)


@_fault("the attention op between two graphs keeps a new workspace at every step", "long-run-piecewise", "memory")
def _allocates_on_replay(subject: Subject) -> Subject:
    workspaces: list[torch.Tensor] = []

    def hoarding(call: Attend) -> None:
        workspaces.append(torch.empty_like(call.layer.out))
        subject.attend(call)

    return replace(subject, attend=hoarding)


@_fault("q is rotated in place, as vLLM's own rotary kernel does", "fresh-data", "inputs-unchanged")
def _rotates_its_inputs(subject: Subject) -> Subject:
    def rotating(query: torch.Tensor, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
        q_pe = inputs.q[..., inputs.nope_dim :]
        q_pe.copy_(q_pe.flip(-1))
        return query

    return _then(subject, rotating)


@_fault("all layers of a step share one query buffer", "two-layers-one-graph", "query-nope")
def _one_buffer_for_all_layers(subject: Subject) -> Subject:
    buffers: dict[int, torch.Tensor] = {}

    def sharing(query: torch.Tensor, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
        buffer = buffers.setdefault(inputs.num_tokens, torch.empty_like(query))
        _bytes(buffer).copy_(_bytes(query))
        return buffer

    return _then(subject, sharing)


@_fault("a step in several launches: the op makes two copies of its result more", "kernel-census", "launches")
def _launches_more(subject: Subject) -> Subject:
    return _then(subject, lambda query, inputs, batch: query.clone().clone())


@_fault("all KV rows of a step are rotated by the first row's position", "fresh-data", "cache-rows")
def _one_position_for_all_keys(subject: Subject) -> Subject:
    def again(query: torch.Tensor, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
        first = inputs.positions[:1].repeat(inputs.num_tokens)
        subject.prepare(replace(inputs, positions=first), batch)
        return query

    return _then(subject, again)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: few operations know fp8."""
    return tensor.view(torch.uint8) if fp8.is_fp8(tensor.dtype) else tensor

"""Planted faults: what goes wrong with graphs in practice, each a small wrapper around something right.

Each names the case and the oracle that must catch it. A fault works on any device; none synchronises while a graph is
captured unless that is the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from vllm_aiter_mla.harness import attention
from vllm_aiter_mla.harness.subject import Attend, Call, Subject, attend
from vllm_aiter_mla.kernels import fp8, reference
from vllm_aiter_mla.kernels.absorb import PlainWeight
from vllm_aiter_mla.kernels.inputs import DecodeInputs

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


def first_rows(inputs: DecodeInputs, rows: int) -> DecodeInputs:
    """The operands of the first ``rows`` rows."""
    cut = {name: getattr(inputs, name)[:rows] for name in ("q", "k_pe", "kv_c", "positions", "slot_mapping")}
    return replace(inputs, **cut)


def leaves_padded_rows(subject: Subject) -> Subject:
    """Not a fault: a back end that leaves rows without a slot unwritten, as AITER does without its 15th argument."""

    def prepare(call: Call) -> torch.Tensor:
        whole = subject.prepare(call)
        out = torch.empty_like(whole)
        wanted = defined(call.inputs).view(-1, 1, 1)
        mine, theirs = _bytes(out), _bytes(whole)
        mine.copy_(torch.where(wanted, theirs, mine))
        return out

    def defined(inputs: DecodeInputs) -> torch.Tensor:
        return inputs.slot_mapping >= 0

    return replace(subject, prepare=prepare, defined=defined)


@_fault(
    "the fake declares T rows, the op returns the decode rows of the batch",
    "rows-grow-and-shrink",
    "shape-and-dtype",
)
def _fake_lies_about_rows(subject: Subject) -> Subject:
    def prepare(call: Call) -> torch.Tensor:
        return subject.prepare(call)[: call.batch.decode_rows]

    return replace(subject, prepare=prepare)


@_fault(
    "the op slices the decode rows that Python knows of and leaves the others to chance",
    "eager-between-replays",
    "cache-rows",
)
def _slices_decode_rows(subject: Subject) -> Subject:
    def prepare(call: Call) -> torch.Tensor:
        part = subject.prepare(replace(call, inputs=first_rows(call.inputs, call.batch.decode_rows)))
        whole = part.new_empty((call.inputs.num_tokens, *part.shape[1:]))
        whole[: part.shape[0]] = part
        return whole

    return replace(subject, prepare=prepare)


@_fault(
    "the captured op rotates q for prefill rows only if the batch had some when it was captured",
    "mixed-batch-piecewise",
    "attention-output",
)
def _frozen_metadata_branch(subject: Subject) -> Subject:
    def prepare(call: Call) -> torch.Tensor:
        prepared = subject.prepare(call)
        nope = call.inputs.nope_dim
        if call.batch.prefill_rows:
            cos, sin = reference.gather_cos_sin(call.inputs.cos_sin_cache, call.inputs.positions)
            q_pe = call.inputs.q[..., nope:]
            turned = reference.rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1), call.inputs.is_neox)
            q_pe.copy_(turned)
        return prepared

    def trusting(call: Attend) -> None:
        batch = call.world.batch
        if batch.dummy or batch.prefill_rows == 0:
            attend(call)
            return
        n = batch.rows
        call.layer.out[:n] = attention.mixed_attention(call.world, call.layer, call.layer.q[:n])

    return replace(subject, prepare=prepare, attend=trusting)


@_fault("cos and sin are copied at the first call and never again", "table-rewritten", "query-rope")
def _stale_table(subject: Subject) -> Subject:
    copies: dict[int, torch.Tensor] = {}

    def prepare(call: Call) -> torch.Tensor:
        table = call.inputs.cos_sin_cache
        kept = copies.setdefault(table.data_ptr(), table)
        if kept is table:
            kept = copies[table.data_ptr()] = table.clone()
        return subject.prepare(replace(call, inputs=replace(call.inputs, cos_sin_cache=kept)))

    return replace(subject, prepare=prepare)


@_fault("cos and sin are copied at every call", "fresh-data", "no-table-copy")
def _table_copied_per_call(subject: Subject) -> Subject:
    def prepare(call: Call) -> torch.Tensor:
        cos, sin = call.inputs.cos_sin_cache.chunk(2, dim=-1)
        table = torch.cat([cos.contiguous(), sin.contiguous()], dim=-1)
        return subject.prepare(replace(call, inputs=replace(call.inputs, cos_sin_cache=table)))

    return replace(subject, prepare=prepare)


@_fault("the op reads a scale on the host", "fresh-data", "no-sync")
def _host_sync(subject: Subject) -> Subject:
    def prepare(call: Call) -> torch.Tensor:
        scale = torch.full_like(call.inputs.q_scale, float(call.inputs.q_scale.item()))
        return subject.prepare(replace(call, inputs=replace(call.inputs, q_scale=scale)))

    return replace(subject, prepare=prepare)


@_fault("a scale is read once, at the first call, and is a constant of the graph", "scales-changed", "query-nope")
def _scale_baked_in(subject: Subject) -> Subject:
    known: dict[int, float] = {}

    def prepare(call: Call) -> torch.Tensor:
        scale = call.inputs.q_scale
        if scale.data_ptr() not in known:
            known[scale.data_ptr()] = float(scale.item())
        baked = torch.full_like(scale, known[scale.data_ptr()])
        return subject.prepare(replace(call, inputs=replace(call.inputs, q_scale=baked)))

    return replace(subject, prepare=prepare)


@_fault("the row after the last written one is written too", "other-slots", "cache-elsewhere")
def _write_outside_slot(subject: Subject) -> Subject:
    def prepare(call: Call) -> torch.Tensor:
        prepared = subject.prepare(call)
        slots = call.inputs.slot_mapping
        rows = _cache_rows(call.inputs)
        last = slots.max().view(1)
        behind = (last.clamp(min=0) + 1) % rows.shape[0]
        there = rows.index_select(0, behind)
        rows.index_copy_(0, behind, torch.where(last.view(1, 1) >= 0, there ^ 0x11, there))
        return prepared

    return replace(subject, prepare=prepare)


@_fault("a row with slot -1 writes its KV row to the end of the cache", "rows-grow-and-shrink", "cache-elsewhere")
def _writes_slot_minus_one(subject: Subject) -> Subject:
    def prepare(call: Call) -> torch.Tensor:
        rows = call.inputs.kv_cache.shape[0] * call.inputs.kv_cache.shape[1]
        slots = call.inputs.slot_mapping
        wrapped = torch.where(slots < 0, slots + rows, slots)
        return subject.prepare(replace(call, inputs=replace(call.inputs, slot_mapping=wrapped)))

    return replace(subject, prepare=prepare)


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
        levelled = (q / largest * largest).to(call.q_prepared.dtype)
        subject.attend(replace(call, q_prepared=levelled))

    return replace(subject, attend=mixing)


@_fault("the attention op between two graphs keeps a new workspace at every step", "long-run-piecewise", "memory")
def _allocates_on_replay(subject: Subject) -> Subject:
    workspaces: list[torch.Tensor] = []

    def hoarding(call: Attend) -> None:
        workspaces.append(torch.empty_like(call.layer.out))
        subject.attend(call)

    return replace(subject, attend=hoarding)


@_fault("the absorbed weights are copied at the first call", "weights-replaced", "query-nope")
def _weights_copied(subject: Subject) -> Subject:
    copies: dict[int, torch.Tensor] = {}

    def prepare(call: Call) -> torch.Tensor:
        weights = call.layer.w_uk_t
        if weights.data_ptr() not in copies:
            copies[weights.data_ptr()] = weights.clone()
        held = PlainWeight(copies[weights.data_ptr()])
        return subject.prepare(replace(call, inputs=replace(call.inputs, weight=held)))

    return replace(subject, prepare=prepare)


@_fault("the slots are copied before the capture, and the graph holds the copy", "other-slots", "cache-rows")
def _slots_copied(subject: Subject) -> Subject:
    copies: dict[int, torch.Tensor] = {}

    def prepare(call: Call) -> torch.Tensor:
        slots = call.inputs.slot_mapping
        if slots.shape[0] not in copies:
            copies[slots.shape[0]] = slots.clone()
        return subject.prepare(replace(call, inputs=replace(call.inputs, slot_mapping=copies[slots.shape[0]])))

    return replace(subject, prepare=prepare)


@_fault("q is rotated in place, as vLLM's own rotary kernel does", "fresh-data", "inputs-unchanged")
def _rotates_its_inputs(subject: Subject) -> Subject:
    def prepare(call: Call) -> torch.Tensor:
        prepared = subject.prepare(call)
        q_pe = call.inputs.q[..., call.inputs.nope_dim :]
        q_pe.copy_(q_pe.flip(-1))
        return prepared

    return replace(subject, prepare=prepare)


@_fault("all layers of a step share one query buffer", "two-layers-one-graph", "query-nope")
def _one_buffer_for_all_layers(subject: Subject) -> Subject:
    buffers: dict[int, torch.Tensor] = {}

    def prepare(call: Call) -> torch.Tensor:
        prepared = subject.prepare(call)
        buffer = buffers.setdefault(call.inputs.num_tokens, torch.empty_like(prepared))
        _bytes(buffer).copy_(_bytes(prepared))
        return buffer

    return replace(subject, prepare=prepare)


@_fault("a step in several launches: the op makes two copies of its result more", "kernel-census", "launches")
def _launches_more(subject: Subject) -> Subject:
    def prepare(call: Call) -> torch.Tensor:
        return subject.prepare(call).clone().clone()

    return replace(subject, prepare=prepare)


@_fault("all KV rows of a step are rotated by the first row's position", "fresh-data", "cache-rows")
def _one_position_for_all_keys(subject: Subject) -> Subject:
    def prepare(call: Call) -> torch.Tensor:
        prepared = subject.prepare(call)
        first = call.inputs.positions[:1].repeat(call.inputs.num_tokens)
        subject.prepare(replace(call, inputs=replace(call.inputs, positions=first)))
        return prepared

    return replace(subject, prepare=prepare)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: few operations know fp8."""
    return tensor.view(torch.uint8) if fp8.is_fp8(tensor.dtype) else tensor


def _cache_rows(inputs: DecodeInputs) -> torch.Tensor:
    """The cache's bytes, one row per slot."""
    return inputs.kv_cache.view(torch.uint8).view(-1, inputs.kv_cache.shape[2] * inputs.kv_cache.dtype.itemsize)

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

from vllm_aiter_mla.kernels import fp8
from vllm_aiter_mla.kernels.absorb.plain import PlainWeight, plain
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.ops.bodies import LayerContext
from vllm_aiter_mla.verify.layer import Batch, Kernel, Layer
from vllm_aiter_mla.verify.subject import Subject

Plant = Callable[[Subject], Subject]
Attend = Callable[[LayerContext, torch.Tensor], None]


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


def _kernel(change: Callable[[Kernel, DecodeInputs, Batch], torch.Tensor]) -> Plant:
    """``change`` in the place of the kernel; it is given the right one."""
    return lambda right: replace(right, prepare=partial(change, right.prepare))


def _attention(change: Callable[..., None]) -> Plant:
    """``change`` in the place of the attention op; it is given the right one, the layer and the prepared query."""
    return lambda right: replace(right, attend=partial(change, right.attend))


def _copied_once(field: str) -> Plant:
    """A kernel that goes on with the copy of an operand that it made when it saw it for the first time."""

    def plant(right: Subject) -> Subject:
        copies: dict[tuple[int, torch.Size], torch.Tensor] = {}

        def copied(run: Kernel, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
            tensor = plain(inputs.weight) if field == "weight" else getattr(inputs, field)
            key = (tensor.data_ptr(), tensor.shape)
            if key not in copies:
                copies[key] = tensor.clone()
            change: dict[str, Any] = {field: PlainWeight(copies[key]) if field == "weight" else copies[key]}
            return run(replace(inputs, **change), batch)

        return _kernel(copied)(right)

    return plant


def leaves_padded_rows(right: Subject) -> Subject:
    """Not a fault: a back end that leaves rows without a slot unwritten, as AITER does without its 15th argument."""

    def partly(run: Kernel, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
        whole = run(inputs, batch)
        out = torch.empty_like(whole)
        mine, theirs = _bytes(out), _bytes(whole)
        mine.copy_(torch.where((inputs.slot_mapping >= 0).view(-1, 1, 1), theirs, mine))
        return out

    return replace(_kernel(partly)(right), defined_rows=lambda inputs: int((inputs.slot_mapping >= 0).sum()))


@_kernel
def _cuts_result(run: Kernel, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
    return run(inputs, batch)[: batch.decode_rows]


@_kernel
def _slices_decode_rows(run: Kernel, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
    names = ("q", "k_pe", "kv_c", "positions", "slot_mapping")
    part = run(replace(inputs, **{name: getattr(inputs, name)[: batch.decode_rows] for name in names}), batch)
    whole = part.new_empty((inputs.num_tokens, *part.shape[1:]))
    whole[: part.shape[0]] = part
    return whole


@_kernel
def _rotates_if_prefill(run: Kernel, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
    query = run(inputs, batch)
    if batch.prefill_rows:
        q_pe = inputs.q[..., inputs.nope_dim :]
        Layer.rotate(q_pe, inputs.k_pe, inputs.positions, inputs.cos_sin_cache, inputs.is_neox)
    return query


def _frozen_metadata_branch(right: Subject) -> Subject:
    return replace(_rotates_if_prefill(right), attend=partial(right.attend, is_rotated=True))


@_kernel
def _copies_table(run: Kernel, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
    halves = [half.contiguous() for half in inputs.cos_sin_cache.chunk(2, dim=-1)]
    return run(replace(inputs, cos_sin_cache=torch.cat(halves, dim=-1)), batch)


@_kernel
def _reads_scale(run: Kernel, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
    return run(replace(inputs, q_scale=torch.full_like(inputs.q_scale, float(inputs.q_scale.item()))), batch)


@_kernel
def _writes_behind(run: Kernel, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
    query = run(inputs, batch)
    rows = inputs.kv_cache.view(torch.uint8).flatten(0, 1)
    last = inputs.slot_mapping.max().view(1)
    behind = (last.clamp(min=0) + 1) % rows.shape[0]
    there = rows.index_select(0, behind)
    rows.index_copy_(0, behind, torch.where(last.view(1, 1) >= 0, there ^ 0x11, there))
    return query


@_kernel
def _wraps_slots(run: Kernel, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
    rows, given = inputs.kv_cache.shape[0] * inputs.kv_cache.shape[1], inputs.slot_mapping
    return run(replace(inputs, slot_mapping=torch.where(given < 0, given + rows, given)), batch)


@_attention
def _mixes_rows(attend: Attend, ctx: LayerContext, query: torch.Tensor) -> None:
    largest = query.float().abs().amax()
    attend(ctx, (query.float() / largest * largest).to(query.dtype))


def _hoards(right: Subject) -> Subject:
    workspaces: list[torch.Tensor] = []

    def hoarding(attend: Attend, ctx: LayerContext, query: torch.Tensor) -> None:
        workspaces.append(torch.empty_like(query))
        attend(ctx, query)

    return _attention(hoarding)(right)


@_kernel
def _flips_query(run: Kernel, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
    query, q_pe = run(inputs, batch), inputs.q[..., inputs.nope_dim :]
    q_pe.copy_(q_pe.flip(-1))
    return query


def _one_buffer(right: Subject) -> Subject:
    buffers: dict[int, torch.Tensor] = {}

    def sharing(run: Kernel, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
        query = run(inputs, batch)
        buffer = buffers.setdefault(inputs.num_tokens, torch.empty_like(query))
        _bytes(buffer).copy_(_bytes(query))
        return buffer

    return _kernel(sharing)(right)


@_kernel
def _one_position(run: Kernel, inputs: DecodeInputs, batch: Batch) -> torch.Tensor:
    query = run(inputs, batch)
    run(replace(inputs, positions=inputs.positions[:1].repeat(inputs.num_tokens)), batch)
    return query


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: few operations know fp8."""
    return tensor.view(torch.uint8) if fp8.is_fp8(tensor.dtype) else tensor


_ONCE = "at the first call, before the capture, and never again"
FAULTS = [
    Fault("fake-lies-about-rows", "the op returns the decode rows of the batch, its fake declares T",
          "rows-grow-and-shrink", "shape-and-dtype", _cuts_result),
    Fault("slices-decode-rows", "the op prepares the decode rows that Python knows of, no others",
          "eager-between-replays", "cache-rows", _slices_decode_rows),
    Fault("frozen-metadata-branch",
          "the captured op rotates q and k_pe for prefill rows only if the batch had some when it was captured",
          "mixed-batch-piecewise", "attention-output", _frozen_metadata_branch),
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
          "the attention op scales the query by the largest value of all rows, undefined padded ones included",
          "padded-rows-are-poison", "finite", _mixes_rows, base=leaves_padded_rows),
    Fault("allocates-on-replay", "the attention op between two graphs keeps a new workspace at every step",
          "long-run-piecewise", "memory", _hoards),
    Fault("weights-copied", f"the absorbed weights are copied {_ONCE}",
          "weights-replaced", "query-nope", _copied_once("weight")),
    Fault("slots-copied", f"the slots are copied {_ONCE}", "other-slots", "cache-rows", _copied_once("slot_mapping")),
    Fault("rotates-its-inputs", "q is rotated in place, as vLLM's own rotary kernel does",
          "fresh-data", "inputs-unchanged", _flips_query),
    Fault("one-buffer-for-all-layers", "all layers of a step share one query buffer",
          "two-layers-one-graph", "query-nope", _one_buffer),
    Fault("launches-more", "a step in several launches: the op makes two copies of its result more",
          "kernel-census", "launches", _kernel(lambda run, inputs, batch: run(inputs, batch).clone().clone())),
    Fault("one-position-for-all-keys", "all KV rows of a step are rotated by the first row's position",
          "fresh-data", "cache-rows", _one_position),
]  # fmt: skip

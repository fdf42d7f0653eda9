"""Planted faults: what goes wrong with graphs in practice, and bugs of the op bodies.

Each is one replaced function, and names the case and the oracle that must catch it. None synchronises while a graph is
captured unless that is the fault, so that all of them work on a GPU too.
"""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from operator import eq
from typing import NamedTuple

import torch

from tests.support.planted import raising
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import Binding
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.verify import layer as verify_layer
from vllm_aiter_mla.verify.layer import bodies, raw


class Changed(ReferenceBackend):
    """The reference with ``change`` in place of its kernel. ``change`` receives the right kernel and the operands."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def bind(self, inputs):
        bound = super().bind(inputs)
        return bound if isinstance(bound, str) else replace(bound, run=partial(self.change, bound.run))


class Saturating(ReferenceBackend):
    """Says that it stores an fp8 overflow as our kernel does; with ``rows`` rows it stores NaN, as AITER's op."""

    def __init__(self, rows=None):
        super().__init__(reference.TRITON)
        self.rows = rows

    def bind(self, inputs):
        wrong = Binding(partial(reference.prepare, numerics=reference.AITER), numerics=reference.TRITON)
        return wrong if inputs.num_tokens == self.rows else super().bind(inputs)


class Fault(NamedTuple):
    """One planted fault: ``plant(patch)`` replaces what it needs and returns the back end to run.

    ``right`` is the back end without the fault. ``kind`` replaces the case's own kind.
    """

    name: str
    case: str
    oracle: str
    plant: object
    right: type = ReferenceBackend
    kind: str = ""

    def change(self):
        return {"kind": self.kind} if self.kind else {}


def kernel(change):
    return lambda patch: Changed(change)


def function(where, name, change):
    """``change`` in place of a function of a module; it receives the right one first."""

    def plant(patch):
        patch.setattr(where, name, partial(change, getattr(where, name)))
        return ReferenceBackend()

    return plant


def body(name, change):
    return function(bodies, name, change)


class _ChangedLayer:
    def __init__(self, layer, method, change):
        self._layer = layer
        setattr(self, method, partial(change, getattr(layer, method)))

    def __getattr__(self, name):
        return getattr(self._layer, name)


def method(name, change):
    """``change`` in place of a method of the layer under test; the expected result keeps the right one."""

    def op(attend, step, *given):
        attend(step._replace(layer=_ChangedLayer(step.layer, name, change)), *given)

    def plant(patch):
        return body("attention_with_rope", op)(patch)

    return plant


def stale(field, size=None):
    """A kernel that goes on with the copy of an operand that it made when it saw it for the first time.

    With ``size`` it does so for that many rows only.
    """

    def plant(patch):
        copies = {}

        def prepare(right, inputs):
            value = getattr(inputs, field)
            tensor = value.tensors[0][1] if field == "weight" else value
            key = (tensor.data_ptr(), tensor.shape)
            if key not in copies:
                copies[key] = deepcopy(value)
            return right(replace(inputs, **{field: copies[key]}) if size in (None, inputs.num_tokens) else inputs)

        return Changed(prepare)

    return plant


def of_the_first_layer(field):
    """A kernel that goes on with the operand of the first call, the first layer's, in every layer."""

    def plant(patch):
        first = []

        def prepare(right, inputs):
            first[:] = first or [getattr(inputs, field)]
            return right(replace(inputs, **{field: first[0]}))

        return Changed(prepare)

    return plant


def stale_values(size):
    """A v-up projection of ``size`` rows that goes on with the first copy of its weight."""
    copies = {}

    def project(right, attended, out):
        layer = right.__self__
        if layer.w_uv.data_ptr() not in copies:
            copies[layer.w_uv.data_ptr()] = layer.w_uv.clone()
        old = replace(layer, w_uv=copies[layer.w_uv.data_ptr()])
        (old if len(attended) == size else layer).v_up(attended, out)

    return method("v_up", project)


def keeps_slots(size):
    """A kernel that writes where a row had its slot last, once its slot is -1."""

    def plant(patch):
        last = []

        def prepare(right, inputs):
            given = inputs.slot_mapping
            if len(given) != size:
                return right(inputs)
            if not last:
                last.append(given.clone())  # at the warm-up, all -1
            last[0].copy_(torch.where(given < 0, last[0], given))
            return right(replace(inputs, slot_mapping=last[0]))

        return Changed(prepare)

    return plant


def prepares_mixed_batches(attend, step, *given):
    if step.metadata is not None and not step.decode_only:
        bodies.prepared_query(step, *given[:-1])
    attend(step, *given)


def takes_padding_for_rows(attend, step, q, *given):
    attend(step if step.metadata is None else step._replace(num_actual_tokens=q.shape[0]), q, *given)


def rotates_again(right, q_pe, k_pe, rope):
    return right(q_pe, right(q_pe, k_pe, rope), rope)


def produces_once(patch):
    done = set()

    def produce(right, source, work):
        key = (work.q.data_ptr(), work.q.shape)
        if key not in done:
            right(source, work)
        done.add(key)

    return function(verify_layer, "produce", produce)(patch)


def copies_table(run, inputs):
    halves = [half.contiguous() for half in inputs.cos_sin_cache.chunk(2, dim=-1)]
    return run(replace(inputs, cos_sin_cache=torch.cat(halves, dim=-1)))


def reads_scale(run, inputs):
    return run(replace(inputs, q_scale=torch.full_like(inputs.q_scale, float(inputs.q_scale.item()))))


def writes_behind(run, inputs, now=True):
    """Change the row behind the last slot, if there is a slot, and if ``now`` is true where the kernel runs."""
    query = run(inputs)
    rows = inputs.kv_cache.view(torch.uint8).flatten(0, 1)
    last = inputs.slot_mapping.max().view(1)
    behind = (last.clamp(min=0) + 1) % rows.shape[0]
    there = rows.index_select(0, behind)
    rows.index_copy_(0, behind, torch.where((last.view(1, 1) >= 0) & now, there ^ 0x11, there))
    return query


def writes_around_the_query(first):
    """A kernel that writes four rows of the query's storage from the row ``first`` on; None: from the row T on."""

    def prepare(run, inputs):
        query = run(inputs)
        start = query.storage_offset() + (len(query) if first is None else first) * query.stride(0)
        query.as_strided((4, *query.shape[1:]), query.stride(), start).copy_(query[:1])
        return query

    return kernel(prepare)


def writes_behind_each_97th(patch):
    counts = {}

    def prepare(run, inputs):
        first = torch.zeros((), dtype=torch.int64, device=inputs.q.device)
        count = counts.setdefault(inputs.num_tokens, first).add_(1)
        return writes_behind(run, inputs, count % 97 == 0)

    return Changed(prepare)


def wrong_last_row(when):
    """A kernel that gives the last of T rows the query of the first one ``when`` T is such a number."""

    def prepare(run, inputs):
        query = run(inputs)
        if when(inputs.num_tokens):
            raw(query)[-1].copy_(raw(query)[0])
        return query

    return kernel(prepare)


def outgrows(patch):
    """A kernel that adds a workspace of zeros. A larger batch gets a larger one, and others write to the old memory.

    The old memory is kept: what an allocator gives it to next differs from card to card.
    """
    held = [torch.empty(0)]

    def prepare(run, inputs):
        query = raw(run(inputs))
        if len(held[-1]) < len(query):
            held[-1].fill_(0x11)
            held.append(torch.zeros_like(query))
        return query.bitwise_xor_(held[-1][: len(query)]).view(inputs.out_dtype)

    return Changed(prepare)


def leaves_padded_rows(run, inputs):
    """Rows without a slot are not prepared, as by AITER without its 15th argument; they hold zeros here."""
    query = run(inputs)
    return torch.where((inputs.slot_mapping >= 0).view(-1, 1, 1), raw(query), 0).view(query.dtype)


def keeps_the_query_of_equal_rows(patch):
    """A kernel that leaves the query's memory as it is where the rows are those of the call before."""
    last = []

    def prepare(run, inputs):
        whole = run(inputs)
        out = torch.empty_like(whole)
        last[:] = last or [torch.zeros_like(inputs.q)]
        raw(out).copy_(torch.where((inputs.q != last[0]).any(), raw(whole), raw(out)))
        last[0].copy_(inputs.q)
        return out

    return Changed(prepare)


def spread(field, bad, value):
    """A kernel in which one ``bad`` element of a field, of a padded row or not, turns every row into ``value``."""

    def prepare(run, inputs):
        rows = getattr(inputs, field)
        return run(replace(inputs, **{field: torch.where(bad(rows).any(), value, rows)}))

    return kernel(prepare)


def wraps_slots(run, inputs):
    rows, given = inputs.kv_cache.shape[0] * inputs.kv_cache.shape[1], inputs.slot_mapping
    return run(replace(inputs, slot_mapping=torch.where(given < 0, given + rows, given)))


def mixes_rows(right, query, *given):
    largest = query.float().abs().amax()
    return right((query.float() / largest * largest).to(query.dtype), *given)


def hoards(patch):
    workspaces = []

    def op(attend, step, q, *given):
        workspaces.append(torch.empty_like(q))
        attend(step, q, *given)

    return body("attention_with_rope", op)(patch)


def flips_query(run, inputs):
    query, q_pe = run(inputs), inputs.q[..., inputs.nope_dim :]
    q_pe.copy_(q_pe.flip(-1))
    return query


def one_buffer(patch):
    buffers = {}

    def prepare(run, inputs):
        query = run(inputs)
        buffer = buffers.setdefault(inputs.num_tokens, torch.empty_like(query))
        raw(buffer).copy_(raw(query))
        return buffer

    return Changed(prepare)


def saturates_the_query_only(run, inputs):
    """The query of a build that saturates, and the cache of one that turns an fp8 overflow into NaN."""
    run(inputs)
    return reference.prepare(replace(inputs, kv_cache=inputs.kv_cache.clone()), reference.TRITON)


def takes_the_weight_for_its_own(run, inputs):
    """A kernel whose heads are P * L values apart; vLLM's plain weight is a view of ``kv_b_proj``."""
    values = inputs.weight.values
    dense = values.as_strided(values.shape, (values.shape[1] * values.shape[2], values.shape[2], 1))
    return run(replace(inputs, weight=replace(inputs.weight, values=dense)))


def one_position(run, inputs):
    query = run(inputs)
    run(replace(inputs, positions=inputs.positions[:1].repeat(inputs.num_tokens)))
    return query


def _rope(**change):
    """A body that reads ``change``, functions of the right rotation, in place of its fields."""

    def changed(right, step, q, k_pe, kv_c, rope):
        wrong = {name: of(rope) for name, of in change.items()}
        return right(step, q, k_pe, kv_c, rope._replace(**wrong))

    return changed


def _step(**change):
    """A body that reads ``change``, functions of the right step, in place of its fields."""

    def changed(right, step, *given):
        wrong = {name: of(step) for name, of in change.items()}
        return right(step._replace(**wrong), *given)

    return changed


MIXED = "mixed-batch-piecewise"
FAULTS = [
    # The op is captured with a decode batch in a graph that mixed batches replay too.
    Fault("captured-in-a-piece", MIXED, "attention-output", lambda patch: ReferenceBackend(), kind="full"),
    Fault("rotates-twice", MIXED, "attention-output", method("rotate", rotates_again)),
    # A copy is rotated, and the layer's own attention gets q as it was.
    Fault("rotates-a-copy", MIXED, "attention-output",
          method("rotate", lambda right, q_pe, *given: right(q_pe.clone(), *given))),
    # The padding of a batch is rotated, or prepared, like its real rows.
    Fault("rotates-padded-rows", MIXED, "inputs-unchanged", body("attention_with_rope", takes_padding_for_rows)),
    Fault("prepares-padded-rows", "piecewise-decode", "shape-and-dtype",
          body("attention_with_rope", takes_padding_for_rows)),
    Fault("prepares-mixed-batches", MIXED, "shape-and-dtype", body("attention_with_rope", prepares_mixed_batches)),
    # A full graph holds the op and not what writes its q, k_pe and kv_c.
    Fault("rows-not-written-again", "full-graph-decode", "query-nope", produces_once),
    # An operand is copied at the first call, before the capture, and never again.
    Fault("stale-table", "table-rewritten", "query-rope", stale("cos_sin_cache")),
    Fault("stale-scale", "scales-changed", "query-nope", stale("q_scale")),
    Fault("stale-weights", "weights-replaced", "query-nope", stale("weight")),
    Fault("stale-slots", "other-slots", "cache-rows", stale("slot_mapping")),
    # fp8 is converted to without a clamp, as AITER's sources do.
    *(Fault(f"overflow-not-saturated-in-{rows}-rows", "fp8-overflow", "finite",
            lambda patch, rows=rows: Saturating(rows), Saturating) for rows in (1, 7, 12)),
    # Each half is one that a build may write, and no build writes both.
    Fault("saturates-the-query-only", "fp8-overflow", "query-rope", kernel(saturates_the_query_only)),
    Fault("table-copied-per-call", "fresh-data", "no-table-copy", kernel(copies_table)),
    Fault("host-sync", "fresh-data", "no-sync", kernel(reads_scale)),
    Fault("write-outside-slot", "other-slots", "cache-elsewhere", kernel(writes_behind)),
    Fault("write-before-the-query", "fresh-data", "query-elsewhere", writes_around_the_query(-4)),
    Fault("write-behind-the-query", "fresh-data", "query-elsewhere", writes_around_the_query(None)),
    Fault("never-the-first-position", "fresh-data", "query-rope", kernel(
        lambda run, inputs: run(replace(inputs, positions=inputs.positions.clamp(min=1))))),
    Fault("never-the-last-position", "fresh-data", "query-rope", kernel(
        lambda run, inputs: run(replace(inputs, positions=inputs.positions.clamp(max=len(inputs.cos_sin_cache) - 2))))),
    Fault("takes-the-weight-for-a-tensor-of-its-own", "fresh-data", "query-nope", kernel(takes_the_weight_for_its_own)),
    Fault("writes-slot-minus-one", "rows-grow-and-shrink", "cache-elsewhere", kernel(wraps_slots)),
    Fault("leaves-padded-rows", "rows-grow-and-shrink", "query-nope", kernel(leaves_padded_rows)),
    Fault("query-not-written-again", "other-slots", "finite", keeps_the_query_of_equal_rows),
    # Attention scales the query by the largest value of all rows, padded ones included.
    Fault("mixes-padded-rows", "padding-is-nan", "finite", method("forward_mqa", mixes_rows)),
    # The op between two graphs keeps a new workspace at every step.
    Fault("allocates-on-replay", "long-run-piecewise", "memory", hoards),
    # q of a decode batch is changed in place, as vLLM's own rotary kernel does.
    Fault("rotates-its-inputs", "fresh-data", "inputs-unchanged", kernel(flips_query)),
    Fault("one-buffer-for-all-layers", "two-layers-one-graph", "query-nope", one_buffer),
    # A cache that is keyed too coarsely: a process has one entry for all layers.
    *(Fault(f"{field}-of-the-first-layer", "two-layers-one-graph", oracle, of_the_first_layer(field)) for field, oracle
      in (("k_scale", "cache-rows"), ("q_scale", "query-nope"), ("cos_sin_cache", "query-rope"))),
    Fault("launches-more", "kernel-status", "launches", kernel(lambda run, inputs: run(inputs).clone().clone())),
    Fault("one-position-for-all-keys", "fresh-data", "cache-rows", kernel(one_position)),
    # Bugs of the op bodies.
    Fault("body-decides-by-metadata", MIXED, "shape-and-dtype",
          body("attention_with_rope", _step(decode_only=lambda step: step.metadata is not None))),
    Fault("body-never-prepares", "full-graph-decode", "shape-and-dtype",
          body("attention_with_rope", _step(decode_only=lambda step: False))),
    Fault("body-never-decodes", "full-graph-decode", "attention-output", body("decode", lambda right, *given: None)),
    Fault("body-raises", "piecewise-decode", "runs", body("decode", raising(RuntimeError("planted")))),
    Fault("body-does-not-rotate", MIXED, "attention-output", body(
        "rotate_and_write", lambda right, step, q, k_pe, *given: k_pe.unsqueeze(1))),
    Fault("body-rotates-another-q", MIXED, "attention-output",
          body("rotate_and_write", lambda right, step, q, *given: right(step, q.clone(), *given))),
    Fault("body-rotates-with-first-position", MIXED, "cache-rows", body(
        "rotate_and_write", _rope(positions=lambda rope: rope.positions[:1].expand(rope.positions.shape[0])))),
    Fault("body-writes-with-the-wrong-scale", MIXED, "cache-rows",
          body("rotate_and_write", _rope(k_scale=lambda rope: rope.k_scale * 2))),
    Fault("body-prepares-the-last-positions", "piecewise-decode", "query-rope",
          body("prepared_query", _rope(positions=lambda rope: rope.positions.flip(0)))),
    Fault("body-prepares-without-slots", "every-capture-size", "cache-rows",
          body("prepared_query", _step(slots=lambda step: step.slots * 0 - 1))),
    Fault("body-prepares-with-the-wrong-pairing", "fresh-data", "query-rope",
          body("prepared_query", _rope(is_neox=lambda rope: not rope.is_neox))),
    Fault("body-loses-a-row", "fresh-data", "shape-and-dtype",
          body("prepared_query", lambda right, *given: right(*given)[:-1])),
    # Wrong for some numbers of rows; the limit is 12.
    Fault("wrong-for-odd-rows", "shared-pool", "query-nope", wrong_last_row(lambda rows: rows > 1 and rows % 2)),
    Fault("wrong-for-odd-rows-of-a-piece", "piecewise-decode", "query-nope",
          wrong_last_row(lambda rows: rows > 1 and rows % 2)),
    *(Fault(f"wrong-for-{rows}-rows", case, "query-nope", wrong_last_row(partial(eq, rows)))
      for rows, case in ((3, "shared-pool"), (10, "every-capture-size"), (11, "shared-pool"),
                         (13, "larger-than-captured"))),
    Fault("workspace-grows", "larger-than-captured", "query-nope", outgrows),
    # Damage that stays, between two comparisons.
    Fault("write-outside-slot-each-97th", "long-run", "cache-elsewhere", writes_behind_each_97th),
    # Padded rows reach real ones.
    *(Fault(f"{what}-of-padding-in-{field}", f"padding-is-{what}", oracle, spread(field, bad, value))
      for what, bad, value in (("nan", torch.isnan, torch.nan), ("huge", lambda rows: rows.abs() > 1e4, 0.0))
      for field, oracle in (("q", "finite" if what == "nan" else "query-nope"), ("k_pe", "cache-rows"),
                            ("kv_c", "cache-rows"))),
]  # fmt: skip
# What a graph of ``size`` rows may hold of an earlier step, by the oracle that must see it.
HELD = {
    "old weights": ("query-nope", partial(stale, "weight")),
    "old weights of v-up": ("attention-output", stale_values),
    "old positions": ("query-rope", partial(stale, "positions")),
    "old slots": ("cache-rows", partial(stale, "slot_mapping")),
    "slots of rows that left": ("cache-elsewhere", keeps_slots),
}

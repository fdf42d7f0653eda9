"""I1: rows out are rows in. On real tensors each op gives what its fake declares, for every row count and batch."""

from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.passes.stubs import BLOCK_SIZE, Batch, forward
from tests.support.opcalls import OPS, Q_PREP, arguments, layer_of
from vllm_aiter_mla.serving import ops
from vllm_aiter_mla.serving.layer import Layer

LIMIT = 300  # the decode limit: 100 requests with two drafts each
ROWS = (0, 1, 16, 64, 256, LIMIT, LIMIT + 1)
BLOCKS = 76  # of 4 slots each: one for every row of the longest batch
PREPARED, ROPE = "mla_attention_with_prepared_q", "mla_attention_with_rope"


def batches(rows: int) -> dict[str, Batch]:
    """The kinds of batch of ``rows`` rows, by name. "padded decode" and "mixed" have rows with slot -1."""
    some, few = rows // 2, rows // 4
    of = partial(Batch, rows=rows, blocks=BLOCKS)
    found = {
        "decode": of("decode", decodes=rows),
        "padded decode": of("padded decode", decodes=some),
        "fewer slots": of("fewer slots", decodes=some, slots=some),
        "mixed": of("mixed", decodes=some, prefills=few),
        "prefill": of("prefill", prefills=rows),
        "profiling": of("profiling", profiling=True),
    }
    if rows < 4:  # too few for decode, prefill and padded rows
        del found["mixed"]
    return found


TABLE = [(rows, kind) for rows in ROWS for kind in batches(rows)]
each_case = pytest.mark.parametrize(("rows", "kind"), TABLE, ids=lambda value: str(value).replace(" ", "-"))


def described(value: Any) -> Any:
    """Shape, dtype and strides of a tensor; anything else as it is."""
    return (tuple(value.shape), value.dtype, value.stride()) if isinstance(value, torch.Tensor) else value


def changed_rows(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    """Rows with another byte than before; a scalar is one row."""
    if not before.numel():
        return []
    rows = before.shape[0] if before.dim() else 1
    was, now = (torch.atleast_1d(t).contiguous().view(torch.uint8).view(rows, -1) for t in (before, after))
    return (was != now).any(1).nonzero().flatten().tolist()


def assert_rows_out_are_rows_in(op: str, rows: int, kind: str, cache: str = "auto") -> None:
    """Run the op on real and on fake tensors, and compare: the result, the arguments, and the rows that it wrote.

    Raises:
        AssertionError: a description differs, a real row was not written, or anything else was changed.
    """
    batch, layer = batches(rows)[kind], layer_of(cache, blocks=BLOCKS)
    Layer.of(layer).limit = LIMIT
    schema, args = OPS[op]._schema.arguments, arguments(op, layer, rows)
    names = [argument.name for argument in schema]
    if op != Q_PREP:
        args[names.index("output")].fill_(torch.nan)  # so that a row that is not written shows
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    given = list(map(described, args))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        declared = OPS[op](*fakes)
    with forward([layer], batch):
        result = OPS[op](*args)
    assert described(result) == described(declared), f"the result is {described(result)}"
    assert list(map(described, args)) == list(map(described, fakes)) == given, "an argument has another shape"
    written = written_rows(op, batch)
    for name, was, now in zip(names, before, args, strict=True):
        if isinstance(now, torch.Tensor):
            assert changed_rows(was, now) == written.get(name, []), f"other rows of {name} were changed"
    defined = result if op == Q_PREP else args[names.index("output")][: batch.real]
    assert bool(defined.float().isfinite().all()), "a row is undefined"
    found = changed_rows(layer.initial.flatten(0, 1), layer.kv_cache.flatten(0, 1))
    assert found == written_slots(op, batch), "other KV rows were written"


def written_rows(op: str, batch: Batch) -> dict[str, list[int]]:
    """Which rows of which argument an op writes."""
    real = list(range(batch.real))
    if op == Q_PREP:
        return {}
    # The attention that vLLM's layer runs gets rotated rows; our kernels leave q and k_pe as they are.
    rotates = op == ROPE and not batch.profiling and (batch.prefills or batch.real > LIMIT)
    return {"output": real} | (dict.fromkeys(("q", "k_pe"), real) if rotates else {})


def written_slots(op: str, batch: Batch) -> list[int]:
    """The rows of the cache that an op writes."""
    slots = batch.slot_mapping() if op == ROPE else None
    return [] if slots is None else sorted(slots[slots >= 0].tolist())


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("op", OPS)
@each_case
def test_i1_rows_out_are_rows_in(rows, kind, op, cache):
    assert_rows_out_are_rows_in(op, rows, kind, cache)


def test_i1_the_table_holds_every_op_of_the_package_and_both_sides_of_the_limit():
    defined = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{ops.NAMESPACE}::")}
    assert defined == {f"{ops.NAMESPACE}::{op}" for op in OPS}
    assert max(ROWS) == LIMIT + 1 <= BLOCKS * BLOCK_SIZE


# Planted bugs: each is one replaced function, which receives the right one first.


def drops_a_slot(right, step, *given):
    """Attention over one KV row less."""
    slots = step.slots.clone()
    slots[step.num_actual_tokens - 1] = -1
    return right(step._replace(slots=slots), *given)


def forgets_a_slot(right, layer, kv_c, k_pe, slots, *given):
    row = layer.module.kv_cache.flatten(0, 1)[slots[-1]]
    before = row.clone()
    right(layer, kv_c, k_pe, slots, *given)
    row.copy_(before)


def decodes_padding(right, step, query, output):
    right(step, query, output)
    output[step.num_actual_tokens :] = 0


def drops_an_output_row(right, step, query, output):
    right(step._replace(num_actual_tokens=step.num_actual_tokens - 1), query, output)


def widens_the_output(right, step, query, output):
    right(step, query, output)
    output.resize_(output.shape[0] + 1, output.shape[1])


def rotates_the_query(right, step, q, *given):
    prepared = right(step, q, *given)
    q[-1:, :, -1] += 1
    return prepared


def rotates_padding(right, step, q, k_pe, *given):
    q[step.num_actual_tokens :, :, -k_pe.shape[-1] :] += 1
    return right(step, q, k_pe, *given)


def moves_on(right, step, q, k_pe, kv_c, rope):
    rope.positions.add_(1)
    return right(step, q, k_pe, kv_c, rope)


def leaves_a_row(right, layer, q, kv_c, k_pe, metadata, output):
    whole = output.clone()
    right(layer, q, kv_c, k_pe, metadata, whole)
    output[:-1] = whole[:-1]


def spoils(change):
    """A prepared query that is changed."""
    return lambda right, *given: change(right(*given))


PLANTS = [
    ("a row is dropped", "result", Q_PREP, 1, "decode", ops, "decode_q_prep", spoils(lambda q: q[:-1])),
    ("rows from 128 on are dropped", "result", Q_PREP, 256, "prefill", ops, "decode_q_prep", spoils(lambda q: q[:128])),
    ("real rows only", "result", Q_PREP, LIMIT, "padded decode", ops, "decode_q_prep", spoils(lambda q: q[:150])),
    ("another dtype", "result", Q_PREP, 16, "decode", ops, "decode_q_prep", spoils(torch.Tensor.float)),
    ("heads first", "result", Q_PREP, 16, "mixed", ops, "decode_q_prep",
     spoils(lambda q: q.transpose(0, 1).contiguous().transpose(0, 1))),
    ("the last row is undefined", "undefined", Q_PREP, 64, "padded decode", ops, "decode_q_prep",
     spoils(lambda q: torch.cat([q[:-1], torch.full_like(q[:1], torch.nan)]))),
    *((f"{what} in {op}", found, op, rows, kind, ops, "decode", wrong)
      for op in (PREPARED, ROPE)
      for what, found, rows, kind, wrong in (
          ("an output row is dropped", "rows of output", LIMIT, "decode", drops_an_output_row),
          ("padding is decoded", "rows of output", 64, "padded decode", decodes_padding),
          ("the output is resized", "another shape", 1, "decode", widens_the_output))),
    *((f"a row of a {kind} batch is left in {op}", "rows of output", op, rows, kind, Layer, "vllm_forward",
       leaves_a_row)
      for op in (PREPARED, ROPE) for kind, rows in (("prefill", 1), ("profiling", 256), ("decode", LIMIT + 1))),
    ("a decode row's KV is dropped", "KV rows", ROPE, 256, "fewer slots", ops, "prepared_query", drops_a_slot),
    ("a prefill row's KV is dropped", "KV rows", ROPE, 256, "mixed", Layer, "write", forgets_a_slot),
    ("a KV row is dropped above L", "KV rows", ROPE, LIMIT + 1, "decode", Layer, "write", forgets_a_slot),
    ("q of decode rows is changed", "rows of q", ROPE, 1, "decode", ops, "prepared_query", rotates_the_query),
    ("padding is rotated", "rows of q", ROPE, 16, "mixed", ops, "rotate_and_write", rotates_padding),
    ("positions are changed", "rows of positions", ROPE, 16, "mixed", ops, "rotate_and_write", moves_on),
]  # fmt: skip


@pytest.mark.mutation("I1")
@pytest.mark.parametrize(
    ("found", "op", "rows", "kind", "owner", "name", "wrong"),
    [pytest.param(*plant, id=what.replace(" ", "-")) for what, *plant in PLANTS],
)
def test_mutation_i1_an_op_with_other_rows_is_caught(monkeypatch, found, op, rows, kind, owner, name, wrong):
    right, ran = getattr(owner, name), []
    monkeypatch.setattr(owner, name, lambda *given: (wrong(right, *given), ran.append(kind))[0])
    with pytest.raises(AssertionError, match=found):
        assert_rows_out_are_rows_in(op, rows, kind)
    assert ran, "where a kernel raises, the layer falls back, and vLLM's own changes q too"


@pytest.mark.mutation("I1")
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda q, *rest: q.new_empty(q.shape[0], q.shape[1], rest[0], dtype=rest[2]), id="another width"),
        pytest.param(lambda q, *rest: q.new_empty(1, q.shape[1], rest[0] + rest[1], dtype=rest[2]), id="one row"),
        pytest.param(lambda q, *rest: q.new_empty(*q.shape[:2], rest[0] + rest[1]), id="the dtype of q"),
    ],
)
def test_mutation_i1_a_fake_that_declares_something_else_is_caught(monkeypatch, wrong):
    """The registered fake keeps its identity: what it does is replaced."""
    monkeypatch.setattr(ops.mla_decode_q_prep_fake, "__code__", wrong.__code__)
    with pytest.raises(AssertionError, match="result"):
        assert_rows_out_are_rows_in(Q_PREP, 16, "decode", "fp8")

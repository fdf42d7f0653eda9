"""The data of a run: the same on every device, other ones at each draw, and cheap."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.inputs import K_SCALE
from vllm_aiter_mla.verify import cases, data
from vllm_aiter_mla.verify.layer import Batch, Buffers

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
LIMIT = 12
BY_NAME = {case.name: case for case in cases.cases(LIMIT)}
# What only makes memory, copies bytes or looks at them in another way.
MOVES = {"_to_copy", "cat", "copy_", "detach", "expand", "fill_", "full", "scalar_tensor", "select", "slice", "view",
         "transpose", "zero_", "zeros"}  # fmt: skip
PLAIN = cases.Variant("fp8", FP8, FP8)


@pytest.fixture(autouse=True)
def few_values(monkeypatch):
    """Pools so small that every tensor goes round several times."""
    monkeypatch.setattr(data, "DRAWN", 997)
    kept = data.pool
    kept.cache_clear()
    yield
    kept.cache_clear()


def buffers(name="fresh-data", variant=PLAIN, device="cpu", seed=0):
    return Buffers(cases.Item("reference", BY_NAME[name], variant, cases.SMALL, LIMIT, seed), device)


class OnDevice(TorchDispatchMode):
    """Notes every call with a tensor on the device "meta", which has no values, so that nothing may wait for them."""

    def __init__(self):
        super().__init__()
        self.calls = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs, result))):
            self.calls.add(func.overloadpacket.__name__)
            given = [leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            if func.overloadpacket.__name__ in ("_to_copy", "copy_") and {*given} != {result.dtype}:
                self.calls.add("rounding")
        return result


def calls_on_device():
    with OnDevice() as seen:
        made = buffers("rows-grow-and-shrink", device="meta")
        for rows in (LIMIT, 3, 0, LIMIT):
            made.step(Batch(rows))
        made.step(Batch(LIMIT, LIMIT // 2))
        made.change("weights")
        made.change("table")
    return seen.calls


def test_verify_data_are_computed_on_the_cpu_and_only_copied_on_the_device():
    assert calls_on_device() - MOVES == set()


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        (lambda values, device, shape: values.to(device)[: shape.numel()].view(shape).to(BF16), {"rounding"}),
        (lambda values, device, shape: values.to(BF16).to(device)[: shape.numel()].view(shape) * 2, {"mul"}),
        (lambda values, device, shape: torch.randn(shape, device=device, dtype=BF16), {"randn"}),
    ],
    ids=["rounded", "scaled", "drawn"],
)
def test_mutation_verify_data_that_the_device_computes_are_seen(monkeypatch, plant, seen):
    monkeypatch.setattr(data, "DRAWN", 1 << 16)
    monkeypatch.setattr(
        data.Pool, "activations", lambda self, shape, *given: plant(self._values, self._device, torch.Size(shape))
    )
    assert calls_on_device() - MOVES == seen


@pytest.mark.parametrize("count", [1, 996, 997, 998, 5000])
def test_verify_data_go_round_from_a_drawn_place(count):
    generator, again = (torch.Generator().manual_seed(5) for _ in range(2))
    drawn = data.pool(3, "cpu").activations((count,), generator)
    values = torch.randn(997, generator=torch.Generator().manual_seed(3)).to(BF16)
    first = int(torch.randint(997, (1,), generator=again))
    assert torch.equal(drawn, values[(first + torch.arange(count)) % 997])


def test_verify_cache_rows_are_rounded_as_the_reference_stores_them():
    drawn = data.pool(3, "cpu").cache_rows((40, 48), torch.Generator().manual_seed(5), FP8, 1 / K_SCALE)
    plain = data.pool(3, "cpu").activations((40, 48), torch.Generator().manual_seed(5))
    wanted = reference.store_nope(plain, torch.tensor(1 / K_SCALE), FP8)
    assert torch.equal(drawn.view(torch.uint8), wanted.view(torch.uint8))


def test_verify_data_of_two_draws_layers_steps_and_seeds_differ():
    made, other = buffers("two-layers-one-graph"), buffers("two-layers-one-graph", seed=1)
    layers = [*made.layers, *other.layers]
    for field in ("storage", "w_uv"):
        tensors = [getattr(one, field).float() for one in layers]
        assert all(bool((one != two).any()) for i, one in enumerate(tensors) for two in tensors[:i]), field
    before = [rows.clone() for one in made.layers for rows in one.source]
    made.step(Batch(LIMIT))
    after = [rows for one in made.layers for rows in one.source]
    for one, two in zip(before, after, strict=True):
        assert bool((one[:LIMIT] != two[:LIMIT]).flatten(1).any(dim=1).all()), "every row is new"


def test_verify_rows_of_the_cache_differ_even_where_the_values_go_round():
    rows = buffers(variant=cases.Variant("bf16", BF16, BF16)).layers[0].storage.flatten(0, 1)
    assert len(rows) * rows.shape[1] > 2 * data.DRAWN
    assert len(torch.unique(rows.float(), dim=0)) == len(rows)


def test_verify_a_case_never_changes_the_values_of_the_next_one():
    first = buffers()
    kept = {name: tensor.clone() for name, tensor in {"w": first.layers[0].w_uv, "c": first.layers[0].storage}.items()}
    first.layers[0].w_uv.zero_()
    first.layers[0].storage.view(torch.uint8).zero_()
    again = buffers().layers[0]
    assert torch.equal(again.w_uv, kept["w"])
    assert torch.equal(again.storage.view(torch.uint8), kept["c"].view(torch.uint8))


@pytest.mark.parametrize("batch", [Batch(12), Batch(11), Batch(1), Batch(0), Batch(12, 5), Batch(9, 9)], ids=str)
@pytest.mark.parametrize("name", ["fresh-data", "both-ends-3-drafts", "mixed-batch-piecewise"])
def test_verify_rows_get_the_last_slots_of_blocks_that_no_other_request_has(name, batch):
    made = buffers(name)
    made.step(batch)
    size, per = cases.SMALL.block_size, cases.SMALL.blocks
    tokens = []
    for total, most in ((batch.decode_rows, made.case.width), (batch.num_prefills, size * per)):
        tokens += [min(most, total - first) for first in range(0, total, most)]
    assert bool((made.slots[batch.rows :] == -1).all())
    seen, first = [], 0
    for count in tokens:
        rows = slice(first, first := first + count)
        blocks, keys = made.row_blocks[rows], made.row_keys[rows]
        assert bool((blocks == blocks[0]).all()), "the rows of a request share its blocks"
        assert torch.equal(keys, torch.arange(int(keys[0]), int(keys[0]) + count))
        assert 1 <= int(keys[0]) <= int(keys[-1]) <= size * per
        at = keys - 1
        assert torch.equal(made.slots[rows], blocks[0][at // size] * size + at % size)
        seen += blocks[0].tolist()
    assert first == batch.rows
    assert len(set(seen)) == len(seen) == len(tokens) * per
    assert all(0 <= block < made.blocks for block in seen)


class Drawing(TorchDispatchMode):
    """Counts the values that random calls return."""

    def __init__(self):
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.values += result.numel()
        return result


def drawn_at_the_default_limit():
    """Values that a step and each of two cases at 1,024 tokens draw."""
    counts = []
    for name in ("fresh-data", "other-slots"):
        item = cases.Item("reference", {case.name: case for case in cases.cases(1024)}[name], PLAIN, cases.REAL, 1024)
        with Drawing() as seen:
            made = Buffers(item, "meta")
        counts.append(seen.values)
    with Drawing() as seen:
        made.step(Batch(1024))
    return seen.values, *counts


def test_verify_data_of_the_default_limit_are_drawn_once(monkeypatch):
    monkeypatch.setattr(data, "DRAWN", 4_194_301)
    step, first, second = drawn_at_the_default_limit()
    rotary = cases.REAL.max_position * cases.REAL.rope // 2
    assert 0 < step < 10_000
    assert rotary < second < rotary + 1000
    assert first == second + data.DRAWN


@pytest.mark.mutation
def test_mutation_verify_data_that_each_case_draws_are_seen(monkeypatch):
    monkeypatch.setattr(data, "DRAWN", 4_194_301)
    monkeypatch.setattr(data, "pool", data.Pool)
    _, first, second = drawn_at_the_default_limit()
    assert first == second > data.DRAWN

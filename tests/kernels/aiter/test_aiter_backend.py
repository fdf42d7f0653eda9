"""What the back end does around the launch: nothing per call, tables once, capture guarded, empty batches."""

from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.sandbox.simulated_aiter import op
from tests.support.simulated_aiter import FP8, backend, inputs, same_bytes
from vllm_aiter_mla.kernels.backend import KernelCaptureError
from vllm_aiter_mla.kernels.device import card

pytestmark = pytest.mark.usefixtures("fake_gfx942")
VIEWS = {"aten.split_with_sizes.default", "aten.transpose.int", "aten.view.default", "aten.view.dtype"}
ALLOCATIONS = {"aten.new_empty_strided.default", "aten.empty.memory_format", "aten.empty_strided.default"}


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [1, 7, 255, 256])
def test_one_call_is_two_allocations_one_bmm_and_one_launch(tokens):
    """No table copy, no allocation beyond q_out and the BMM's result, nothing that waits for the device."""
    spy = Mock()  # what the simulated op does inside is not counted
    bound, operands = backend(op=spy), inputs(tokens=tokens)
    bound.prepare(operands)  # first call of the shape: tables are made here
    with Recorder() as recorder:
        bound.prepare(operands)
    calls = recorder.calls
    assert sum(calls[name] for name in ALLOCATIONS) == 2
    assert calls["aten.bmm.out"] == 1
    assert set(calls) <= VIEWS | ALLOCATIONS | {"aten.bmm.out"}, calls
    assert spy.call_count == 2


def test_layers_share_the_halves_of_one_table():
    spy = Mock()
    bound, one = backend(op=spy), inputs()
    table = one.cos_sin_cache
    bound.prepare(one)
    bound.prepare(replace(inputs(heads=16), cos_sin_cache=table.view(table.shape)))  # another object, the same memory
    first, second = (call.args[10:12] for call in spy.call_args_list)
    assert [half.data_ptr() for half in first] == [half.data_ptr() for half in second]
    assert first[0].is_contiguous()
    assert torch.equal(torch.cat(first, -1), table)


def test_tables_that_follow_one_another_get_halves_of_their_own():
    """The allocator hands the same address out again and again, unless the memory of a known table is kept."""
    bound = backend()
    for value in range(50):
        table = torch.full((64, 64), float(value))
        assert bound.halves(table)[0][0, 0].item() == value
        del table


def test_a_table_overwritten_in_place_is_copied_again_into_the_same_halves():
    bound, table = backend(), torch.zeros(8, 64)
    cos, _ = bound.halves(table)
    with torch.inference_mode():  # as vLLM runs; a table made before still counts its versions
        table.fill_(2.0)
        again, _ = bound.halves(table)
    assert again is cos
    assert float(cos[0, 0]) == 2.0


@pytest.mark.parametrize(
    "other",
    [
        lambda table: table[:, :32],
        lambda table: table[::2][:4],
        lambda table: table.view(torch.float16),
    ],
    ids=["narrower rows", "every second row", "another dtype"],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_tables_at_one_address_get_halves_of_their_own(other, swapped):
    memory = torch.arange(512.0).bfloat16().view(8, 64)
    bound, tables = backend(), [memory, memory[:4], other(memory)]
    for table in reversed(tables) if swapped else tables:
        halves = bound.halves(table)
        assert halves[0].dtype == table.dtype
        assert same_bytes(torch.cat(halves, -1), table)


@pytest.mark.parametrize("change", [lambda table, new: table.set_(new), lambda table, new: setattr(table, "data", new)])
@pytest.mark.parametrize("rows", [8, 16])
def test_a_table_that_lies_elsewhere_now_gets_halves_of_its_own(change, rows):
    bound, table, new = backend(), torch.randn(8, 64), torch.randn(rows, 64)
    before = bound.halves(table)
    change(table, new)
    assert torch.equal(torch.cat(bound.halves(table), -1), new)
    assert not torch.equal(before[0], bound.halves(table)[0][:8])


def test_a_new_table_during_capture_says_what_to_do(monkeypatch):
    bound, operands = backend(), inputs()
    bound.prepare(operands)
    monkeypatch.setattr(card(), "is_capturing", lambda: True)
    bound.prepare(operands)
    with pytest.raises(KernelCaptureError, match="outside the capture"):
        bound.prepare(replace(operands, cos_sin_cache=torch.randn(28, 64).bfloat16()))
    assert [tokens for _, tokens in op.forget()] == [7, 7]


def test_an_empty_batch_launches_nothing():
    out = backend().prepare(inputs(tokens=0))
    assert (out.shape, out.dtype) == ((0, 4, 576), FP8["gfx942"])
    assert op.forget() == []

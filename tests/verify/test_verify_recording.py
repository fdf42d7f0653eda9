"""The recording: a replay repeats what was recorded, and not what Python would decide now."""

import torch

from vllm_aiter_mla.verify.engine import EagerEngine, Recording, launch_foreign
from vllm_aiter_mla.verify.steps import Segment, Step


def record(run):
    with Recording() as made:
        result = run()
    return made, result


def test_a_replay_reads_buffers_anew_and_writes_where_it_wrote():
    x = torch.ones(3)
    made, out = record(lambda: (x * 2).view(3, 1).float() + 1)
    x.fill_(5)
    made.replay()
    assert out.flatten().tolist() == [11, 11, 11]


def test_a_replay_keeps_a_python_branch_a_shape_and_a_number_of_the_recording():
    state = {"double": True, "rows": 2, "scale": 3.0}
    x = torch.ones(4)

    def run():
        part = x[: state["rows"]] * state["scale"]
        return part * 2 if state["double"] else part

    made, out = record(run)
    state.update(double=False, rows=4, scale=100.0)
    made.replay()
    assert out.tolist() == [6, 6]


def test_a_number_read_from_a_tensor_is_frozen_and_noted_as_a_synchronisation():
    x, scale = torch.ones(2), torch.tensor([2.0])
    made, out = record(lambda: x * float(scale.item()))
    scale.fill_(7)
    made.replay()
    assert out.tolist() == [2, 2]
    assert made.syncs == ["aten._local_scalar_dense"]


def test_shapes_that_depend_on_data_are_synchronisations():
    x = torch.tensor([1.0, 0.0])
    assert record(lambda: x[x > 0])[0].syncs
    assert record(lambda: x.nonzero())[0].syncs
    assert not record(lambda: torch.where(x > 0, x, 0.0))[0].syncs


def test_fresh_memory_keeps_what_it_held():
    made, out = record(lambda: torch.empty(2))
    out.fill_(float("nan"))
    made.replay()
    assert out.isnan().all()
    assert made.names == []


def test_writes_in_place_are_repeated():
    x, total = torch.ones(2), torch.zeros(2)
    made, _ = record(lambda: total[:1].add_(x[:1]))
    made.replay()
    assert total.tolist() == [2, 0]


def test_a_launch_outside_aten_is_one_entry_and_is_repeated():
    x, out = torch.ones(2), torch.zeros(2)

    def kernel():
        out.copy_(x * 3)

    made, _ = record(lambda: launch_foreign("kernel", kernel))
    x.fill_(2)
    made.replay()
    assert made.names == ["kernel"]
    assert out.tolist() == [6, 6]


def test_an_eager_segment_between_two_captured_ones_runs_anew():
    x, middle, seen = torch.ones(1), torch.zeros(1), []
    outputs = {}

    def first():
        outputs["a"] = x + 1

    def between():
        seen.append(1)
        middle.copy_(outputs["a"])

    def last():
        outputs["b"] = middle * 10

    step = Step([Segment(True, first), Segment(False, between), Segment(True, last)], outputs)
    captured = EagerEngine().capture(step, "", False)
    x.fill_(4)
    captured.run()
    assert len(seen) == 2
    assert captured.outputs["b"].tolist() == [50]


def test_memory_counts_what_is_held_once_and_no_temporary():
    engine, kept = EagerEngine(), []
    before, _ = engine.memory()
    torch.empty(1000)
    kept.append(torch.empty(10))
    kept.append(kept[0].view(2, 5))
    assert engine.memory()[0] - before == 40
    kept.clear()
    assert engine.memory()[0] == before

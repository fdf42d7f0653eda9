"""The recording: a replay repeats what was recorded, and not what Python would decide now."""

import torch

from vllm_aiter_mla.verify.engine import EagerEngine, Recording


def record(run):
    with Recording() as made:
        result = run()
    return made, result


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


def test_memory_counts_what_is_held_once_and_no_temporary():
    engine, kept = EagerEngine(), []
    before, _ = engine.memory()
    torch.empty(1000)
    kept.append(torch.empty(10))
    kept.append(kept[0].view(2, 5))
    assert engine.memory()[0] - before == 40
    kept.clear()
    assert engine.memory()[0] == before

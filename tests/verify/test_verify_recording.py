"""The recording: a replay repeats what was recorded, and not what Python would decide now."""

import torch

from vllm_aiter_mla.verify.engine import EagerEngine, Recording


def record(run):
    with Recording() as made:
        result = run()
    return made, result


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
    assert made.names == ()


def test_memory_counts_what_is_held_once_and_no_temporary():
    engine, kept = EagerEngine(), []
    before, _ = engine.memory()
    torch.empty(1000)
    kept.append(torch.empty(10))
    kept.append(kept[0].view(2, 5))
    assert engine.memory()[0] - before == 40
    kept.clear()
    assert engine.memory()[0] == before

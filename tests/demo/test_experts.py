"""Expert parallelism on a CPU: each rank's experts see their own tokens, once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

from tests.sandbox import experts


def maps(ranks: int, held: int) -> list[torch.Tensor]:
    """One map per rank, as vLLM makes them: [experts] int32 local ids, -1 for an expert of another rank."""
    found = []
    for rank in range(ranks):
        local = torch.full((ranks * held,), -1, dtype=torch.int32)
        local[rank * held : (rank + 1) * held] = torch.arange(held, dtype=torch.int32)
        found.append(local)
    return found


@given(ranks=st.integers(1, 4), held=st.integers(1, 5), tokens=st.integers(0, 6), seed=st.integers(0, 99))
def test_each_chosen_expert_weighs_on_its_own_rank_alone(ranks: int, held: int, tokens: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(ranks * held, (tokens, 2), generator=draw, dtype=torch.int32)
    weights = torch.rand(tokens, 2, generator=draw) + 0.5
    total = torch.zeros_like(weights)
    for rank, expert_map in enumerate(maps(ranks, held)):
        here, local = experts.local(weights, ids, expert_map)
        assert local.dtype == ids.dtype
        assert ((local >= 0) & (local < held)).all()
        own = ids // held == rank
        assert torch.equal(here, torch.where(own, weights, torch.zeros_like(weights)))
        assert torch.equal(local[own], ids[own] - rank * held)
        total += here
    assert torch.equal(total, weights)


@pytest.mark.parametrize("mapped", [True, False])
def test_vllms_method_gets_local_ids_only_where_there_is_a_map(monkeypatch: pytest.MonkeyPatch, mapped: bool) -> None:
    seen = {}

    def inner(self, output, topk_weights, topk_ids, expert_map):
        seen.update(output=output, weights=topk_weights, ids=topk_ids)

    monkeypatch.setattr(cpu_moe.CPUUnquantizedExperts, "apply", inner)
    experts.register.__wrapped__()
    output, weights, ids = torch.zeros(1), torch.ones(1, 2), torch.tensor([[3, 0]])
    expert_map = torch.tensor([-1, -1, 0, 1]) if mapped else None
    cpu_moe.CPUUnquantizedExperts.apply(object(), output, weights, topk_ids=ids, expert_map=expert_map)
    assert seen["output"] is output
    assert seen["ids"].tolist() == ([[1, 0]] if mapped else [[3, 0]])
    assert seen["weights"].tolist() == ([[1.0, 0.0]] if mapped else [[1.0, 1.0]])

"""A pass that meets a surprise leaves the layer as it was, says so once, and touches no other layer."""

from __future__ import annotations

import pytest
import torch

from tests.passes.execute import assert_rewritten_right, stubs_for
from tests.passes.graphs import Spelling
from tests.passes.test_recognised import build
from vllm_aiter_mla import status
from vllm_aiter_mla.passes import fx as passes_fx
from vllm_aiter_mla.passes.aiter_fusion import MLAAiterQkRopeKVCacheFusionPass
from vllm_aiter_mla.passes.fx import Inserter

BF16 = torch.bfloat16
EMISSIONS = 16  # calls of Inserter.call, functionalized and result that one layer's three passes make


def fail_at(monkeypatch: pytest.MonkeyPatch, which: int) -> list[int]:
    """Let the ``which``-th emission raise, every other one work; returns the running count."""
    count = [0]

    def wrapped(inner):
        def emit(self, *args, **kwargs):
            count[0] += 1
            if count[0] == which:
                raise RuntimeError("planted")
            return inner(self, *args, **kwargs)

        return emit

    for name in ("call", "functionalized", "result"):
        monkeypatch.setattr(Inserter, name, wrapped(getattr(Inserter, name)))
    return count


@pytest.mark.parametrize("which", range(1, EMISSIONS + 1))
def test_an_emission_that_fails_leaves_a_graph_that_is_right(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gm, layers = build(2, dtype=BF16)
    count = fail_at(monkeypatch, which)
    counts = assert_rewritten_right(gm, stubs_for(layers, Spelling(dtype=BF16)), stops=(None,))
    assert counts["aiter_fusion"] == 1, "the other layer is rewritten whole"
    assert count[0] > which
    assert [code for code, _ in status.current().partial.values()] == ["rewrite_failed"]
    assert "planted" in next(iter(status.current().partial.values()))[1]


def test_every_emission_of_a_layer_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, layers = build(1, dtype=BF16)
    count = fail_at(monkeypatch, -1)
    assert_rewritten_right(gm, stubs_for(layers, Spelling(dtype=BF16)), stops=(None,))
    assert count[0] == EMISSIONS


def test_an_admission_that_raises_leaves_the_layers_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(view: object) -> None:
        raise RuntimeError("planted")

    gm, layers = build(2, dtype=BF16)
    monkeypatch.setattr("vllm_aiter_mla.layers.admit_layer", raises)
    counts = assert_rewritten_right(gm, stubs_for(layers, Spelling(dtype=BF16)), stops=(None,))
    assert (counts["skipped"], counts["aiter_fusion"]) == (2, 0)
    assert {code for code, _ in status.current().skipped.values()} == {"not_evaluated"}


@pytest.mark.parametrize("step", ["_infer", "_erase"])
def test_a_fault_anywhere_in_the_third_pass_leaves_a_graph_that_is_right(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only where nodes are emitted: while their values are inferred, or before the old ones are taken away."""
    owner = passes_fx if step == "_infer" else MLAAiterQkRopeKVCacheFusionPass
    real, count = getattr(owner, step), [0]

    def fails_once(*args: object, **kwargs: object) -> object:
        count[0] += 1
        if count[0] == 1:
            raise RuntimeError("planted")
        return real(*args, **kwargs)

    gm, layers = build(2, dtype=BF16)
    monkeypatch.setattr(owner, step, fails_once)
    counts = assert_rewritten_right(gm, stubs_for(layers, Spelling(dtype=BF16)), stops=(None,))
    assert counts["aiter_fusion"] == 1
    assert [code for code, _ in status.current().partial.values()] == ["rewrite_failed"]

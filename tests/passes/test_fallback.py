"""A pass that meets a surprise leaves the layer as it was, says so once, and touches no other layer."""

import pytest
import torch
from torch import fx

from tests.passes.execute import assert_rewritten_right, rewrite, stubs_for
from tests.passes.graphs import Spelling, build
from tests.support.planted import raising
from vllm_aiter_mla import status

BF16 = Spelling(dtype=torch.bfloat16)
EMISSIONS = 16  # nodes that one layer's three passes insert


def fail_at(monkeypatch, which):
    """Let the ``which``-th node that a pass inserts raise, every other one work; returns the running count."""
    count, insert = [0], fx.Graph.call_function

    def call_function(self, *args, **kwargs):
        count[0] += 1
        if count[0] == which:
            raise RuntimeError("planted")
        return insert(self, *args, **kwargs)

    monkeypatch.setattr(fx.Graph, "call_function", call_function)
    return count


@pytest.mark.parametrize("which", range(1, EMISSIONS + 1))
def test_an_emission_that_fails_leaves_a_graph_that_is_right(which, monkeypatch):
    gm, layers = build(2, BF16)
    count = fail_at(monkeypatch, which)
    counts = assert_rewritten_right(gm, stubs_for(layers, BF16), stops=(None,))
    assert counts["aiter_fusion"] == 1, "the other layer is rewritten whole"
    assert count[0] > which
    ((code, message),) = status.current().skipped.values()
    assert (code, "planted" in message) == ("rewrite_failed", True)


def test_every_emission_of_a_layer_is_covered(monkeypatch):
    gm, layers = build(1, BF16)
    count = fail_at(monkeypatch, -1)
    rewrite(gm, stubs_for(layers, BF16))
    assert count[0] == EMISSIONS


def test_an_admission_that_raises_leaves_the_layers_to_vllm(monkeypatch):
    gm, layers = build(2, BF16)
    monkeypatch.setattr("vllm_aiter_mla.layer.layer_skips", raising(RuntimeError("planted")))
    counts = assert_rewritten_right(gm, stubs_for(layers, BF16), stops=(None,))
    assert (counts["skipped"], counts["aiter_fusion"]) == (2, 0)
    assert {code for code, _ in status.current().skipped.values()} == {"not_evaluated"}

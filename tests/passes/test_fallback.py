"""A pass that meets a surprise leaves the layer as it was, says so once, and touches no other layer."""

from contextlib import nullcontext

import pytest
import torch
from torch import fx
from torch._inductor.pattern_matcher import stable_topological_sort

from tests.passes.execute import assert_rewritten_right, rewrite, skipped_in_graphs, stubs_for
from tests.passes.graphs import Spelling, build
from tests.support.planted import raising
from vllm_aiter_mla.passes import pipeline

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
    stubs = stubs_for(layers, BF16)
    counts = assert_rewritten_right(gm, stubs, stops=(None,))
    assert counts["aiter_fusion"] == 1, "the other layer is rewritten whole"
    assert count[0] > which
    ((code, message),) = skipped_in_graphs(stubs).values()
    assert (code, "planted" in message) == ("rewrite_failed", True)


def sorted_text(graph):
    stable_topological_sort(graph)
    graph.eliminate_dead_code()
    return str(graph)


@pytest.mark.parametrize("which", range(1, EMISSIONS + 1))
def test_i4_all_or_nothing_an_emission_that_fails_leaves_the_graph_of_before_pass_1(which, monkeypatch):
    """Node for node, by name and argument."""
    gm, layers = build(1, BF16)
    before = sorted_text(gm.graph)
    fail_at(monkeypatch, which)
    counts = rewrite(gm, stubs_for(layers, BF16))
    assert str(gm.graph) == before
    gm.graph.lint()
    assert {name: count for name, count in counts.items() if count} == {"skipped": 1}


@pytest.mark.parametrize("pass_name", pipeline.PASSES)
def test_i4_all_or_nothing_an_error_at_the_end_of_a_pass_leaves_the_graph_of_before_pass_1(pass_name, monkeypatch):
    """By then the pass has changed whatever it changes of the nodes that were there."""
    gm, layers = build(1, BF16)
    before, inner = sorted_text(gm.graph), pipeline.PASSES[pass_name]

    def run(*given):
        inner(*given)
        assert str(gm.graph) != before, "the pass has done its work"
        raise RuntimeError("planted")

    monkeypatch.setitem(pipeline.PASSES, pass_name, run)
    rewrite(gm, stubs_for(layers, BF16))
    assert str(gm.graph) == before, "the layer is rewritten by half"


@pytest.mark.mutation("I4")
def test_mutation_i4_all_or_nothing_a_half_rewritten_layer_is_caught(monkeypatch):
    monkeypatch.setattr(pipeline, "all_or_nothing", lambda graph: nullcontext())
    with pytest.raises(AssertionError, match="rewritten by half"):
        test_i4_all_or_nothing_an_error_at_the_end_of_a_pass_leaves_the_graph_of_before_pass_1(
            "rope_kv_cache", monkeypatch
        )


def test_every_emission_of_a_layer_is_covered(monkeypatch):
    gm, layers = build(1, BF16)
    count = fail_at(monkeypatch, -1)
    rewrite(gm, stubs_for(layers, BF16))
    assert count[0] == EMISSIONS


def test_an_admission_that_raises_leaves_the_layers_to_vllm(monkeypatch):
    gm, layers = build(2, BF16)
    monkeypatch.setattr("vllm_aiter_mla.serving.layer.layer_skips", raising(RuntimeError("planted")))
    stubs = stubs_for(layers, BF16)
    counts = assert_rewritten_right(gm, stubs, stops=(None,))
    assert (counts["skipped"], counts["aiter_fusion"]) == (2, 0)
    assert {code for code, _ in skipped_in_graphs(stubs).values()} == {"not_evaluated"}

"""Planted bugs in the matcher and the passes: the check that guards against each of them fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tests.passes import test_declined as declined
from tests.passes.execute import assert_rewritten_right, stubs_for
from tests.passes.graphs import Spelling, build
from tests.passes.rotary import ROPES
from tests.passes.test_layers_apart import assert_layers_apart
from vllm_aiter_mla import ops as bodies
from vllm_aiter_mla.compat import context
from vllm_aiter_mla.passes import aiter_fusion, match, pipeline, probe, rope_kv_cache
from vllm_aiter_mla.passes.fx import Inserter

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def more_ropes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rope in declined.EXTRA_ROPES.items():
        monkeypatch.setitem(ROPES, name, rope)


def assert_caught_by_a_near_miss(case: str) -> None:
    with pytest.raises(AssertionError):
        declined.assert_declined(declined.CASES[case])


def assert_caught_by_execution(**changes: Any) -> None:
    gm, layers = build(2, dtype=BF16, **changes)
    # KeyError is how FixFunctionalizationPass dies of a chain that lacks a part.
    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        assert_rewritten_right(gm, stubs_for(layers, Spelling(dtype=BF16, **changes)))


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("check", "case"),
    [
        ("_check_readers", "a second reader of the rotated q"),
        ("_check_readers", "a second reader of the raw q"),
        ("_check_columns", "a second reader of the raw k_pe"),
        ("_check_kv_key", "a KV update with the raw key"),
        ("_check_attention", "attention given output_scale"),
    ],
)
def test_mutation_matcher_skips_a_check(monkeypatch: pytest.MonkeyPatch, check: str, case: str) -> None:
    monkeypatch.setattr(match._Matcher, check, lambda self, *args: None)
    assert_caught_by_a_near_miss(case)


@pytest.mark.mutation
@pytest.mark.parametrize(
    "case",
    ["cos and sin swapped", "the inverse rotation", "swapped halves of the key", "a query doubled after its RoPE"],
)
def test_mutation_matcher_compares_no_values(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(match.torch, "allclose", lambda *args, **kwargs: True)
    assert_caught_by_a_near_miss(case)


@pytest.mark.mutation
def test_mutation_matcher_takes_any_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "_distinct", lambda nodes: list(nodes)[:1])
    assert_caught_by_a_near_miss("other positions for the key")


@pytest.mark.mutation
def test_mutation_matcher_takes_any_rotary_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "width", lambda node: 32)  # the width of the heads, not of the table
    assert_caught_by_a_near_miss("the custom op with heads of another width")


@pytest.mark.mutation
def test_mutation_matcher_binds_the_other_pairing(monkeypatch: pytest.MonkeyPatch) -> None:
    find_q, find_k = match._Matcher._find_q, match._Matcher._find_k
    monkeypatch.setattr(match._Matcher, "_find_q", lambda self, *args: (False, find_q(self, *args)[1]))
    monkeypatch.setattr(match._Matcher, "_find_k", lambda self, *args: find_k(self, *args[:3], True, *args[4:]))
    assert_caught_by_execution(is_neox=True)


@pytest.mark.mutation
def test_mutation_kv_update_is_left_beside_the_fused_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row would be written twice, and the second time from whatever k_pe holds by then."""
    from tests.passes.test_recognised import test_nothing_of_passes_one_and_two_is_left_after_three as claim

    erase = fx.Graph.erase_node

    def forgetful(graph: fx.Graph, node: fx.Node) -> None:
        if "unified_mla_kv_cache_update" not in node.name:
            erase(graph, node)

    monkeypatch.setattr(fx.Graph, "erase_node", forgetful)
    with pytest.raises((AssertionError, RuntimeError)):
        claim()


@pytest.mark.mutation
def test_mutation_pass_one_shares_the_view_that_vllm_erases(monkeypatch: pytest.MonkeyPatch) -> None:
    """FixFunctionalizationPass erases the view under the scatter without looking at its other readers."""
    views: dict[fx.Node, fx.Node] = {}

    def shared(self: Any, emit: Inserter, found: Any) -> fx.Node:
        if found.attention not in views:
            views[found.attention] = view(self, emit, found)
        return views[found.attention]

    view = rope_kv_cache.MLARoPEKVCacheFusionPass._view
    monkeypatch.setattr(rope_kv_cache.MLARoPEKVCacheFusionPass, "_view", shared)
    assert_caught_by_execution()


@pytest.mark.mutation
def test_mutation_pass_one_rotates_without_writing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rope_kv_cache.MLARoPEKVCacheFusionPass, "_emit_scatter", lambda self, emit, found, q_pe: self._view(emit, found)
    )
    assert_caught_by_execution()


@pytest.mark.mutation("I3")
def test_mutation_i3_prefill_rows_are_not_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "rotate_and_write", lambda *args: None)
    assert_caught_by_execution()


@pytest.mark.mutation("I3")
def test_mutation_i3_prefill_rows_are_rotated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    once = bodies.rotate_and_write
    monkeypatch.setattr(bodies, "rotate_and_write", lambda *args: (once(*args), once(*args)))
    assert_caught_by_execution()


@pytest.mark.mutation("I3")
def test_mutation_i3_only_the_query_of_prefill_rows_is_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    once = bodies.rotate_and_write
    monkeypatch.setattr(bodies, "rotate_and_write", lambda step, q, k_pe, *rest: once(step, q, k_pe.clone(), *rest))
    assert_caught_by_execution()


@pytest.mark.mutation("I3")
def test_mutation_i3_attention_decides_by_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "is_decode_only", lambda metadata, slots: metadata.decode is not None)
    assert_caught_by_execution()


@pytest.mark.mutation("I4")
def test_mutation_i4_matching_ends_at_the_first_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    def until_refused(graph: fx.Graph) -> Any:
        for outcome in match.match_layers(graph):
            yield outcome
            if isinstance(outcome[1], match.Skip):
                return

    monkeypatch.setattr(pipeline, "match_layers", until_refused)
    with pytest.raises(AssertionError):
        assert_layers_apart(1)


@pytest.mark.mutation("I4")
def test_mutation_i4_refused_layer_loses_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that begins with a layer before the layer is known to match."""

    def eager(graph: fx.Graph) -> Any:
        outcomes = match.match_layers(graph)
        for node in graph.nodes:
            if node.target is torch.ops.vllm.unified_mla_kv_cache_update.default:
                node.update_arg(3, "touched")
        return outcomes

    monkeypatch.setattr(pipeline, "match_layers", eager)
    with pytest.raises(AssertionError):
        assert_layers_apart(1)


@pytest.mark.mutation("I4")
def test_mutation_i4_pass_three_is_skipped_for_one_layer_only_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass 3 replaces attention but leaves the ops of passes 1 and 2 running beside its own."""
    monkeypatch.setattr(aiter_fusion.MLAAiterQkRopeKVCacheFusionPass, "_erase", lambda self, graph, lifted: None)
    with pytest.raises(AssertionError):
        assert_layers_apart(1)

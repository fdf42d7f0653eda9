"""The module integration in a real engine gives the tokens of vLLM in the same mode, without a pass."""

from __future__ import annotations

import pytest

from tests.engine.engine_checks import assert_all_engaged, assert_parity, padded


def assert_by_module(result, code):
    """Check that the module integration engaged each rank's layers, that no pass ran, and that the log says why."""
    assert_all_engaged(result, len(result.status))
    assert {record["integration"] for record in result.status} == {"module"}
    assert all(record["compiled"] == {} for record in result.status)
    assert any(f"the passes cannot run: {code}" in line for line in result.log) is (code != "")
    assert any("integration module)" in line for line in result.log)


@pytest.mark.engine("eager-off", "eager-on")
def test_eager_engines_engage_by_the_module_and_agree_with_vllm(engines):
    found = engines("eager-on")
    assert_parity(engines("eager-off"), found)
    assert_by_module(found, "enforce_eager")
    assert min(found.branches["prepared_query"], found.branches["rotate_and_write"]) > 0


@pytest.mark.engine("eager-drafts-off", "eager-drafts-on")
def test_eager_drafts_over_an_fp8_cache_and_aiters_class_agree_with_vllm(engines):
    found = engines("eager-drafts-on")
    assert_parity(engines("eager-drafts-off"), found)
    assert_by_module(found, "enforce_eager")
    assert found.status[0]["total"] == 2, "the draft layer's module is replaced as well"


@pytest.mark.wide
@pytest.mark.engine("cut-off", "cut-on")
def test_a_graph_that_is_cut_at_attention_is_served_by_the_module(engines):
    found = engines("cut-on")
    assert_parity(engines("cut-off"), found)
    assert_by_module(found, "graph_partition")


@pytest.mark.engine("fp32-off", "module-full")
def test_the_module_under_emulated_full_and_piecewise_graphs_agrees_with_vllm(engines):
    found = engines("module-full")
    assert_parity(engines("fp32-off"), found, 1e-4)
    assert_by_module(found, "")
    assert {(1, 4), (5, 16)} <= padded(found)
    assert found.branches["rotate_and_write"] > 0


@pytest.mark.engine("eager-off", "mutation-unknown-forward")
@pytest.mark.mutation("I11")
def test_mutation_an_unknown_forward_of_the_wrapper_is_left_to_vllm(engines):
    found = engines("mutation-unknown-forward")
    assert [code for code, _ in found.status[0]["skipped"].values()] == ["unknown_forward"] * 2
    assert found.status[0]["engaged"] == {}
    assert_parity(engines("eager-off"), found, 0.0)

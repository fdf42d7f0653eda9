"""The module integration in a real engine gives the tokens of vLLM in the same mode, without a pass."""

import pytest

from tests.engine.engine_checks import assert_all_engaged, assert_parity, padded


def assert_by_module(result, code):
    """Check that the module integration engaged each rank's layers, that no pass ran, and that the log says why."""
    assert_all_engaged(result, len(result.status))
    assert {record["integration"] for record in result.status} == {"module"}
    assert all(record["compiled"] == {} for record in result.status)
    assert any(f"the passes cannot run: {code}" in line for line in result.log) is (code != "")
    assert any("integration module)" in line for line in result.log)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param("eager", "enforce_eager", marks=pytest.mark.engine("eager-off", "eager-on")),
        # An fp8 cache and AITER's class; the draft layer's module is replaced as well.
        pytest.param("eager-drafts", "enforce_eager", marks=pytest.mark.engine("eager-drafts-off", "eager-drafts-on")),
        pytest.param("cut", "graph_partition", marks=[pytest.mark.engine("cut-off", "cut-on"), pytest.mark.wide]),
    ],
)
def test_the_module_agrees_with_vllm(engines, name, code):
    found = engines(f"{name}-on")
    assert_parity(engines(f"{name}-off"), found)
    assert_by_module(found, code)
    assert min(found.branches["prepared_query"], found.branches["rotate_and_write"]) > 0
    assert found.status[0]["total"] == 2


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

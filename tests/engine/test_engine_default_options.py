"""Over vLLM's default options the module gives the tokens of the engine with the flag off."""

import pytest

from tests.engine.engine_checks import (
    assert_all_engaged,
    assert_parity,
    assert_pieces_replayed,
    figures,
    padded,
    same_scenarios,
)
from tests.sandbox.compare import compare


def assert_by_module(result, ranks=1):
    """Check that the module engaged all layers, that no pass ran, and that decode and prefill rows came by."""
    assert_all_engaged(result, ranks)
    assert {record["integration"] for record in result.status} == {"module"}
    assert all(record["pass_counts"] == {} for record in result.status)
    assert not any("integration passes)" in line for line in result.log)
    if ranks == 1:  # only this process counts
        assert min(result.branches["prepared_query"], result.branches["rotate_and_write"]) > 0


def assert_equal(off, on):
    """Check that all tokens and log-probabilities are the same to the bit, and so are captures and full replays.

    Without full graphs, a start with the flag on replays pieces once more: it runs one decode step to see the kernels.
    """
    assert on.scenarios == same_scenarios(off, on).scenarios
    assert (on.captured, on.replays) == (off.captured, off.replays)


@pytest.mark.engine("default-off", "default-on")
def test_default_options_bf16_cache_yarn_q_lora_and_chunks(engines):
    off, on = engines("default-off"), engines("default-on")
    assert_by_module(on)
    assert on.ranges == off.ranges == [(1, 64)], "no range was added"
    for scenario, found in compare(off, on).items():
        assert found.tokens_equal == found.tokens > 0, scenario
        assert found.max_abs_dlogprob == 0.0, scenario


@pytest.mark.engine("fp8-off", "fp8-on")
def test_default_options_fp8_cache_with_own_scales_three_heads_and_both_kinds_of_graphs(engines):
    off, on = engines("fp8-off"), engines("fp8-on")
    assert_by_module(on)
    assert_pieces_replayed(on)
    assert {(1, 4), (5, 16)} <= padded(on)
    assert_equal(off, on)


@pytest.mark.engine("fp32-off", "full-on")
def test_default_options_full_graphs_and_pieces_without_yarn_and_q_lora(engines):
    """Compared with an engine without graphs: no token depends on the padding."""
    on = engines("full-on")
    assert_by_module(on)
    assert on.status[0]["capture_sizes"] == [4, 16]
    assert_pieces_replayed(on)
    assert {(1, 4), (3, 4), (5, 16)} <= padded(on)
    assert (16, 16) in on.replays
    assert_parity(engines("fp32-off"), on, 1e-4)


@pytest.mark.engine("default-on", "default-warm")
def test_default_options_a_warm_start_loads_the_compiled_pieces_and_says_the_same(engines):
    cold, warm = engines("default-on"), engines("default-warm")
    assert_all_engaged(warm)
    assert warm.scenarios == same_scenarios(cold, warm).scenarios
    assert cold.compilations > warm.compilations == 0, "it compiled again: this was no warm start"
    said = [[line.partition("aiter-mla:")[2] for line in r.log if "engaged" in line] for r in (cold, warm)]
    assert said[0] == said[1]


@pytest.mark.wide
@pytest.mark.engine("default-off", "limit-on")
def test_default_options_a_limit_below_the_batch(engines):
    """Most decode batches lie above it and run vLLM's own kernels."""
    on = engines("limit-on")
    assert_by_module(on)
    assert on.status[0]["decode_limit"] == 7
    assert_equal(engines("default-off"), on)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "full", "pieces"),
    [
        pytest.param(*row, marks=pytest.mark.engine(f"{row[0]}-off", f"{row[0]}-on"))
        for row in (("piecewise", False, True), ("decode-only", True, False))
    ],
)
def test_default_options_one_kind_of_graphs(engines, name, full, pieces):
    off, on = engines(f"{name}-off"), engines(f"{name}-on")
    assert_by_module(on)
    assert (bool(on.replays), bool(on.captured), bool(on.replayed)) == (full, pieces, pieces)
    assert_equal(off, on)


COMPILED = ("heads", "ngram", "lora-compiled", "glm-compiled", "eagle-compiled")
"""Engines of one process in which vLLM's post-grad passes must have run."""


@pytest.mark.parametrize(
    ("name", "ranks", "layers"),
    [
        pytest.param(name, ranks, layers, marks=[pytest.mark.engine(f"{name}-off", f"{name}-on"), *marks], id=name)
        for name, ranks, layers, *marks in (
            ("eager", 1, 2, pytest.mark.wide),  # eager-drafts
            # An fp8 cache and AITER's class; the draft layer's module is replaced as well.
            ("eager-drafts", 1, 3),
            ("heads", 1, 2, pytest.mark.wide),
            ("ngram", 1, 2, pytest.mark.wide),
            ("lora-compiled", 1, 2, pytest.mark.wide),
            ("skip-layers", 1, 3, pytest.mark.wide),
            ("tp2", 2, 2, pytest.mark.wide),
            ("glm-compiled", 1, 2, pytest.mark.wide),
            ("eagle-compiled", 1, 4, pytest.mark.wide),
            ("mode-0", 1, 2, pytest.mark.wide),
            ("mode-1", 1, 2, pytest.mark.wide),
            ("mode-2", 1, 2, pytest.mark.wide),
        )
    ],
)
def test_default_options_and_one_other_give_the_tokens_of_the_flag_off(engines, name, ranks, layers):
    on = engines(f"{name}-on")
    assert_by_module(on, ranks)
    assert on.status[0]["num_layers"] == layers
    assert (on.compilations > 0) is (name in COMPILED)
    assert_parity(engines(f"{name}-off"), on)


@pytest.mark.wide  # tests/serving/test_module.py wraps it too
@pytest.mark.engine("eager-off", "mutation-unknown-forward")
@pytest.mark.mutation("I11")
def test_mutation_an_unknown_forward_of_the_wrapper_is_left_to_vllm(engines):
    found = engines("mutation-unknown-forward")
    assert [skip["code"] for skip in found.status[0]["skipped"].values()] == ["unknown_forward"] * 2
    assert found.status[0]["engaged"] == {}
    assert_parity(engines("eager-off"), found, 0.0)


@pytest.mark.wide  # with vLLM's default options: test_default_options_bf16_cache_...
@pytest.mark.engine("eager-yarn-off", "eager-yarn-on")
def test_todays_rounding_is_kept_by_the_module(engines):
    """The emulated kernels round as a card's: the fused op would show."""
    found = engines("eager-yarn-on")
    assert_parity(engines("eager-yarn-off"), found, 0.0)
    assert_all_engaged(found)
    assert min(found.branches["prepared_query"], found.branches["rotate_and_write"]) > 0


@pytest.mark.wide  # tests/serving/test_rotation.py plants it too
@pytest.mark.engine("default-off", "mutation-fused-rotation")
@pytest.mark.mutation("I5")
def test_mutation_todays_rounding_is_lost_with_vllms_fused_op_for_all(engines):
    found = engines("mutation-fused-rotation")
    assert_all_engaged(found)
    (compared,) = figures(engines("default-off"), found).values()
    assert compared.max_abs_dlogprob > 0.01

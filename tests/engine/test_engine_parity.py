"""The fast path in the real engine gives the tokens and log-probabilities of unmodified vLLM."""

import pytest

from tests.engine.engine_checks import MAX_DLOGPROB, assert_all_engaged, assert_parity, padded
from tests.sandbox.compare import compare
from tests.sandbox.runs import BF16_SCENARIOS, FP8_SCENARIOS


@pytest.mark.parametrize(
    ("cache", "scenario"),
    [
        pytest.param(cache, scenario, marks=pytest.mark.engine(f"{cache}-off", f"{cache}-on"))
        for cache, scenarios in (("bf16", BF16_SCENARIOS), ("fp8", FP8_SCENARIOS))
        for scenario in scenarios
    ],
)
def test_tokens_and_logprobs_are_those_of_vllm_with_every_layer_engaged(engines, cache, scenario):
    """Over the fp8 cache with scales, and a query in fp8, under two roundings."""
    on = engines(f"{cache}-on")
    assert_all_engaged(on)
    found = compare(engines(f"{cache}-off"), on)[scenario]
    assert found.tokens_equal == found.tokens > 0
    assert found.max_abs_dlogprob <= MAX_DLOGPROB


@pytest.mark.engine("vllms-pass-off", "vllms-pass-on")
def test_layers_that_vllms_pass_has_fused_are_taken_over(engines):
    on = engines("vllms-pass-on")
    assert_all_engaged(on)
    counts = on.status[0]["compiled"]["1-16"]
    assert counts["vllm_fused"] == counts["aiter_fusion"] == 2
    assert_parity(engines("vllms-pass-off"), on)


@pytest.mark.wide
@pytest.mark.engine("bf16-off", "stop-rope-kv", "stop-q-prep")
@pytest.mark.parametrize(("name", "ran"), [("stop-rope-kv", 1), ("stop-q-prep", 2)])
def test_the_chain_is_right_after_each_of_its_passes(engines, name, ran):
    counts = engines(name).status[0]["compiled"]["1-16"]
    assert [counts[p] for p in ("rope_kv_cache", "q_prep_lift", "aiter_fusion")] == [2] * ran + [0] * (3 - ran)
    assert_parity(engines("bf16-off"), engines(name))


@pytest.mark.engine("fp32-off", "full-on")
def test_emulated_full_graphs_of_padded_batches_agree_with_vllm(engines):
    """Decode batches run in graphs of 4 or 16 rows, batches with prefill rows in piecewise graphs."""
    found = engines("full-on")
    assert_parity(engines("fp32-off"), found, 1e-4)
    assert_all_engaged(found)
    assert found.status[0]["capture_sizes"] == [4, 16]
    assert {(1, 4), (3, 4), (5, 16)} <= padded(found)
    assert (16, 16) in found.replays
    assert found.branches["rotate_and_write"] > 0

"""The fast path in the real engine gives the tokens and log-probabilities of unmodified vLLM."""

from __future__ import annotations

import pytest

from tests.engine.engine_checks import MAX_DLOGPROB, assert_all_engaged, assert_parity, padded
from tests.sandbox.compare import compare, op_count
from tests.sandbox.runs import BF16_SCENARIOS, FP8_SCENARIOS


def assert_scenario(engines, cache, scenario):
    found = compare(engines(f"{cache}-off"), engines(f"{cache}-on"))[scenario]
    assert found.tokens_equal == found.tokens > 0
    assert found.max_abs_dlogprob <= MAX_DLOGPROB


@pytest.mark.engine("bf16-off", "bf16-on")
@pytest.mark.parametrize("scenario", BF16_SCENARIOS)
def test_bf16_tokens_and_logprobs_are_those_of_vllm(engines, scenario):
    assert_scenario(engines, "bf16", scenario)


@pytest.mark.engine("fp8-off", "fp8-on")
@pytest.mark.parametrize("scenario", FP8_SCENARIOS)
def test_fp8_cache_and_query_with_scales_are_those_of_vllm_under_two_roundings(engines, scenario):
    assert_scenario(engines, "fp8", scenario)


@pytest.mark.engine("fp32-off", "fp32-on")
def test_fp32_model_without_yarn_and_q_lora_agrees_to_1e_4(engines):
    assert_parity(engines("fp32-off"), engines("fp32-on"), 1e-4)
    assert_all_engaged(engines("fp32-on"))


@pytest.mark.engine("bf16-on", "fp8-on")
@pytest.mark.parametrize("name", ["bf16-on", "fp8-on"])
def test_every_layer_engages(engines, name):
    assert_all_engaged(engines(name))


@pytest.mark.engine("bf16-off", "on-after-vllms-pass")
def test_layers_that_vllms_pass_has_fused_are_taken_over(engines):
    on = engines("on-after-vllms-pass")
    assert_all_engaged(on)
    counts = on.status[0]["compiled"]["1-16"]
    assert counts["vllm_fused"] == counts["aiter_fusion"] == 2
    assert_parity(engines("bf16-off"), on)


@pytest.mark.wide
@pytest.mark.engine("bf16-off", "stop-rope-kv", "stop-q-prep")
@pytest.mark.parametrize(("name", "ran"), [("stop-rope-kv", 1), ("stop-q-prep", 2)])
def test_the_chain_is_right_after_each_of_its_passes(engines, name, ran):
    counts = engines(name).status[0]["compiled"]["1-16"]
    assert [counts[p] for p in ("rope_kv_cache", "q_prep_lift", "aiter_fusion")] == [2] * ran + [0] * (3 - ran)
    assert_parity(engines("bf16-off"), engines(name))


@pytest.mark.engine("bf16-off", "bf16-on")
def test_the_decode_limit_graph_loses_ops(engines):
    before, after = (op_count(engines(name).graphs["1-16"]) for name in ("bf16-off", "bf16-on"))
    assert after < before


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

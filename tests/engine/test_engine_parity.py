"""The fast path in the real engine gives what unmodified vLLM gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sandbox.compare import compare, op_count

MAX_DLOGPROB = 1e-3


def beside(base, other):
    """The part of ``base`` that the other run has as well: one unmodified vLLM run serves runs of fewer scenarios."""
    assert other.scenarios
    return replace(base, scenarios={name: base.scenarios[name] for name in other.scenarios})


def assert_parity(base, other, max_dlogprob=MAX_DLOGPROB):
    for name, found in compare(beside(base, other), other).items():
        assert found.tokens_equal == found.tokens > 0, f"{name}: {found}"
        assert found.max_abs_dlogprob <= max_dlogprob, f"{name}: {found}"


def assert_all_engaged(result, ranks=1):
    assert len(result.status) == ranks
    for record in result.status:
        assert len(record["engaged"]) == record["total"] > 0
        assert record["skipped"] == {}


@pytest.mark.engine("bf16-off", "bf16-on")
@pytest.mark.parametrize("scenario", ["concurrent", "short", "mixed", "long", "chunked"])
def test_bf16_tokens_and_logprobs_are_those_of_vllm(engines, scenario):
    found = compare(engines("bf16-off"), engines("bf16-on"))[scenario]
    assert found.tokens_equal == found.tokens > 0
    assert found.max_abs_dlogprob <= MAX_DLOGPROB


@pytest.mark.engine("fp8-off", "fp8-on")
@pytest.mark.parametrize("scenario", ["concurrent", "short", "mixed", "long"])
def test_fp8_cache_and_query_with_scales_are_those_of_vllm_under_two_roundings(engines, scenario):
    found = compare(engines("fp8-off"), engines("fp8-on"))[scenario]
    assert found.tokens_equal == found.tokens > 0
    assert found.max_abs_dlogprob <= MAX_DLOGPROB


@pytest.mark.engine("fp32-off", "fp32-on")
def test_fp32_model_without_yarn_and_q_lora_agrees_to_1e_4(engines):
    assert_parity(engines("fp32-off"), engines("fp32-on"), 1e-4)
    assert_all_engaged(engines("fp32-on"))


@pytest.mark.engine("bf16-on", "fp8-on")
@pytest.mark.parametrize("name", ["bf16-on", "fp8-on"])
def test_every_layer_engages(engines, name):
    assert_all_engaged(engines(name))


@pytest.mark.engine("bf16-off", "on-after-unmodified vLLM")
def test_layers_that_vllms_pass_has_fused_are_taken_over(engines):
    on = engines("on-after-unmodified vLLM")
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

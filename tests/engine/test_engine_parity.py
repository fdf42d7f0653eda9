"""The passes, over graph partition, give the tokens and log-probabilities of the engine with the flag off."""

import pytest

from tests.engine.engine_checks import (
    MAX_DLOGPROB,
    assert_all_engaged,
    assert_parity,
    assert_pieces_replayed,
    padded,
)
from tests.sandbox.compare import compare
from tests.sandbox.runs import BF16_SCENARIOS


@pytest.mark.parametrize("scenario", BF16_SCENARIOS)
@pytest.mark.engine("bf16-off", "bf16-on")
def test_tokens_and_logprobs_are_those_of_vllm_with_every_layer_engaged(engines, scenario):
    on = engines("bf16-on")
    assert_all_engaged(on)
    found = compare(engines("bf16-off"), on)[scenario]
    assert found.tokens_equal == found.tokens > 0
    assert found.max_abs_dlogprob <= MAX_DLOGPROB


@pytest.mark.wide
@pytest.mark.engine("vllms-pass-off", "vllms-pass-on")
def test_layers_that_vllms_pass_has_fused_are_taken_over(engines):
    on = engines("vllms-pass-on")
    assert_all_engaged(on)
    assert on.status[0]["integration"] == "passes", "the default over graph partition"
    counts = on.status[0]["pass_counts"]["1-16"]
    assert counts["vllm_fused"] == counts["aiter_fusion"] == 2
    assert_parity(engines("vllms-pass-off"), on)


@pytest.mark.wide
@pytest.mark.engine("bf16-off", "stop-rope-kv", "stop-q-prep")
@pytest.mark.parametrize(("name", "ran"), [("stop-rope-kv", 1), ("stop-q-prep", 2)])
def test_the_chain_is_right_after_each_of_its_passes(engines, name, ran):
    counts = engines(name).status[0]["pass_counts"]["1-16"]
    assert [counts[p] for p in ("rope_kv_cache", "q_prep_lift", "aiter_fusion")] == [2] * ran + [0] * (3 - ran)
    assert_parity(engines("bf16-off"), engines(name))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("full-passes", marks=pytest.mark.engine("fp32-off", "full-passes")),
        pytest.param("v1-passes", marks=[pytest.mark.engine("fp32-off", "v1-passes"), pytest.mark.wide]),
        pytest.param(
            "full-module-partition", marks=[pytest.mark.engine("fp32-off", "full-module-partition"), pytest.mark.wide]
        ),
    ],
)
def test_emulated_full_graphs_of_padded_batches_agree_with_vllm(engines, name):
    """Decode batches run in graphs of 4 or 16 rows, batches with prefill rows in pieces of Inductor's partition.

    Both model runners give the tokens of V2 without graphs, and so does the module over graph partition.
    """
    found = engines(name)
    assert_parity(engines("fp32-off"), found, 1e-4)
    assert_all_engaged(found)
    assert found.status[0]["capture_sizes"] == [4, 16]
    assert_pieces_replayed(found)
    assert {(1, 4), (3, 4), (5, 16)} <= padded(found)
    assert (16, 16) in found.replays
    assert found.branches["rotate_and_write"] > 0


@pytest.mark.wide
@pytest.mark.engine("fp8-passes-off", "fp8-passes-on")
def test_graphs_over_an_fp8_cache_with_own_scales_by_the_passes(engines):
    found = engines("fp8-passes-on")
    assert_parity(engines("fp8-passes-off"), found)
    assert_all_engaged(found)
    assert_pieces_replayed(found)
    assert found.branches["rotate_and_write"] > 0


@pytest.mark.wide
@pytest.mark.engine("static-off", "static-on")
def test_graphs_compiled_for_one_size_each_beside_those_of_a_range(engines):
    found = engines("static-on")
    assert_all_engaged(found)
    assert {name for name, graph in found.graphs.items() if "mla_attention_with_rope" in graph} == {
        "1-1", "2-2", "8-8", found.decode_range()
    }  # fmt: skip
    assert_parity(engines("static-off"), found)


@pytest.mark.wide
@pytest.mark.engine("class-gfx942-passes-off", "class-gfx942-passes-on")
def test_fp8_scales_drafts_and_padded_heads_by_the_passes(engines):
    on = engines("class-gfx942-passes-on")
    assert_all_engaged(on)
    assert on.status[0]["pass_counts"]["1-48"]["aiter_fusion"] == 2, "one layer of the target, one of the draft"
    assert_parity(engines("class-gfx942-passes-off"), on)

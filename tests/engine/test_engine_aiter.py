"""The engine over the simulated AITER, over vLLM's AITER attention class, and over the interpreted Triton kernel."""

import re

import pytest

from tests.engine import specs_aiter
from tests.engine.engine_checks import (
    assert_all_engaged,
    assert_parity,
    assert_pieces_replayed,
    figures,
    kernels,
    same_scenarios,
)
from tests.sandbox.runs import SUM_ORDER


@pytest.mark.wide
@pytest.mark.engine("aiter-gfx942-fp8", "reference-gfx942-fp8")
def test_aiter_on_gfx942_with_fp8_equals_the_reference_to_the_bit(engines):
    ours, reference = engines("aiter-gfx942-fp8"), engines("reference-gfx942-fp8")
    assert (kernels(ours), kernels(reference)) == ([{"aiter"}], [{"reference"}])
    assert_all_engaged(ours)
    assert ours.scenarios == reference.scenarios


def pairs(names):
    """The engines with the flag off and on, for `make test-wide`."""
    return [
        pytest.param(name, marks=[pytest.mark.engine(f"{name}-off", f"{name}-on"), pytest.mark.wide]) for name in names
    ]


@pytest.mark.wide  # in the CI a rehearsal's engine runs it, over an fp8 cache
@pytest.mark.engine("eager-off", "triton")
def test_the_triton_kernel_on_cpu_tensors_serves_the_engine_within_the_bound_of_the_gpu_demo(engines):
    ours = engines("triton")
    assert_all_engaged(ours)
    assert kernels(ours) == [{"triton"}]
    for name, found in figures(engines("eager-off"), ours).items():
        assert SUM_ORDER.holds(found), (name, found)


@pytest.mark.engine("eager-off")
@pytest.mark.parametrize("name", pairs(["aiter-fp8-bmm", "aiter-fp4-bmm"]))
def test_quantised_absorb_weights_equal_vllm_which_multiplies_by_the_same_gemm(engines, name):
    """With a bf16 cache vLLM's mxfp4 GEMM gets no ``y_scale``; tests/kernels/aiter/test_absorb.py has fp8 caches."""
    vllm_own, ours = engines(f"{name}-off"), engines(f"{name}-on")
    assert vllm_own.scenarios != same_scenarios(engines("eager-off"), vllm_own).scenarios, "the weights are plain"
    assert kernels(ours) == [{"aiter"}]
    assert_all_engaged(ours)
    assert_parity(vllm_own, ours)


@pytest.mark.wide  # tests/startup/test_comparison_parts.py breaks it too
@pytest.mark.engine("aiter-gfx942-broken")
@pytest.mark.mutation("I12")
def test_mutation_a_wrong_aiter_kernel_fails_its_self_check_and_is_not_used(engines):
    result = engines("aiter-gfx942-broken")
    (line,) = [line for line in result.log if "ERROR" in line and "self-check FAILED" in line]
    assert re.search(r"q rope [1-9]\d* step.*kv rope [1-9]\d* step", line), "the wrong values themselves: " + line
    assert all("aiter" not in names for names in kernels(result))


@pytest.mark.engine("class-gfx942-off", "class-gfx942-on")
def test_default_options_fp8_scales_drafts_and_padding_over_aiters_class(engines):
    """Over vLLM's default pieces. A request has three decode rows while two drafts are verified."""
    off, on = engines("class-gfx942-off"), engines("class-gfx942-on")
    assert_all_engaged(on)
    (record,) = on.status
    assert record["num_layers"] == 2, "one layer of the target, one of the draft"
    assert record["decode_limit"] == 48
    assert_parity(off, on)
    assert_pieces_replayed(on, graphs=2)
    for result in (off, on):
        assert {(3, 12), (9, 12), (15, 48)} <= result.replays.keys(), "padded full graphs, three rows a request"


@pytest.mark.engine("class-gfx950-off", "class-gfx950-on")
def test_aiters_op_on_two_spawned_ranks_gives_vllms_tokens_over_aiters_class(engines):
    on = engines("class-gfx950-on")
    assert_all_engaged(on, ranks=2)
    assert kernels(on) == [{"aiter"}] * 2
    assert_parity(engines("class-gfx950-off"), on)


@pytest.mark.parametrize("name", pairs(specs_aiter.PADDED))
def test_padded_heads_give_vllms_tokens_without_a_copy_of_the_query(engines, name):
    """What the kernel leaves unwritten between the heads is NaN here, and reaches no token."""
    off, on = engines(f"{name}-off"), engines(f"{name}-on")
    assert_all_engaged(on)
    assert on.branches["prepared_query"] > 0
    assert on.branches["query copies"] == 0
    assert_parity(off, on)


@pytest.mark.wide
@pytest.mark.parametrize("name", pairs(specs_aiter.CLASS_MATRIX))
def test_every_head_count_cache_and_card_gives_vllms_tokens_over_aiters_class(engines, name):
    assert_all_engaged(engines(f"{name}-on"))
    assert_parity(engines(f"{name}-off"), engines(f"{name}-on"))

"""The real vLLM engine over the fake AITER, platform checks faked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_engine_parity import assert_all_engaged, assert_parity

from vllm_aiter_mla.sandbox.compare import compare
from vllm_aiter_mla.sandbox.runs import EXACT


def kernels(result):
    return [set(record["engaged"].values()) for record in result.census]


@pytest.mark.engine("aiter-gfx942-fp8", "reference-gfx942-fp8")
def test_aiter_on_gfx942_with_fp8_equals_the_reference_to_the_bit(engines):
    ours, reference = engines("aiter-gfx942-fp8"), engines("reference-gfx942-fp8")
    assert kernels(ours) == [{"aiter"}]
    assert kernels(reference) == [{"reference"}]
    assert_all_engaged(ours)
    assert ours.scenarios == reference.scenarios


@pytest.mark.engine("small-off", "aiter-gfx950-bf16")
def test_aiter_on_gfx950_with_bf16_and_a_spawned_engine_core_equals_stock(engines):
    assert kernels(engines("aiter-gfx950-bf16")) == [{"aiter"}]
    stock = engines("small-off")
    assert_parity(replace(stock, scenarios={"short": stock.scenarios["short"]}), engines("aiter-gfx950-bf16"))


@pytest.mark.engine("small-off", "aiter-fp8-bmm-off", "aiter-fp8-bmm-on")
def test_absorb_weights_in_fp8_equal_stock_which_multiplies_by_the_same_gemm(engines):
    stock = engines("aiter-fp8-bmm-off")
    assert stock.scenarios != engines("small-off").scenarios, "the weights were not held in fp8"
    assert kernels(engines("aiter-fp8-bmm-on")) == [{"aiter"}]
    assert_all_engaged(engines("aiter-fp8-bmm-on"))
    assert_parity(stock, engines("aiter-fp8-bmm-on"))


@pytest.mark.engine("aiter-fp8-bmm-off", "aiter-fp8-bmm-q-prep")
def test_absorb_weights_in_fp8_are_right_where_the_chain_stops_after_pass_2(engines):
    found = compare(engines("aiter-fp8-bmm-off"), engines("aiter-fp8-bmm-q-prep"))
    assert all(EXACT.holds(figures) for figures in found.values()), found


@pytest.mark.engine("aiter-fp8-bmm-off", "aiter-fp4-bmm-off", "aiter-fp4-bmm-on")
def test_absorb_weights_in_fp4_equal_stock_which_multiplies_by_the_same_gemm(engines):
    """Beside a bf16 cache stock's GEMM gets no ``y_scale``; what it does beside fp8: tests/test_absorb_fp4.py."""
    stock = engines("aiter-fp4-bmm-off")
    assert stock.scenarios != engines("aiter-fp8-bmm-off").scenarios, "the weights were not held in mxfp4"
    assert kernels(engines("aiter-fp4-bmm-on")) == [{"aiter"}]
    assert_all_engaged(engines("aiter-fp4-bmm-on"))
    assert_parity(stock, engines("aiter-fp4-bmm-on"))


@pytest.mark.engine("aiter-gfx942-broken")
@pytest.mark.mutation
def test_mutation_a_wrong_aiter_kernel_fails_its_self_check_and_is_not_used(engines):
    result = engines("aiter-gfx942-broken")
    assert any("ERROR" in line and "self-check FAILED" in line for line in result.log), result.log
    assert all("aiter" not in names for names in kernels(result))


@pytest.mark.engine("triton-on-cpu")
def test_kernel_triton_on_a_cpu_leaves_the_layers_stock_and_says_why(engines):
    result = engines("triton-on-cpu")
    assert result.census[0]["engaged"] == {}
    assert {tuple(why) for why in result.census[0]["refused"].values()} == {
        ("kernel_unavailable", "kernel=triton: Triton needs a GPU")
    }

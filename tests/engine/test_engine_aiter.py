"""The real vLLM engine over the simulated AITER, platform checks faked, and over the interpreted Triton kernel."""

from __future__ import annotations

import pytest

from tests.engine.test_engine_parity import assert_all_engaged, assert_parity, beside
from tests.sandbox.compare import compare
from tests.sandbox.runs import SUM_ORDER


def kernels(result):
    return [set(record["engaged"].values()) for record in result.status]


@pytest.mark.engine("aiter-gfx942-fp8", "reference-gfx942-fp8")
def test_aiter_on_gfx942_with_fp8_equals_the_reference_to_the_bit(engines):
    ours, reference = engines("aiter-gfx942-fp8"), engines("reference-gfx942-fp8")
    assert kernels(ours) == [{"aiter"}]
    assert kernels(reference) == [{"reference"}]
    assert_all_engaged(ours)
    assert ours.scenarios == reference.scenarios


@pytest.mark.engine("eager-off", "triton")
def test_the_triton_kernel_on_cpu_tensors_serves_the_engine_within_the_bound_of_the_gpu_demo(engines):
    ours = engines("triton")
    assert_all_engaged(ours)
    assert kernels(ours) == [{"triton"}]
    for name, found in compare(beside(engines("eager-off"), ours), ours).items():
        assert SUM_ORDER.holds(found), (name, found)


@pytest.mark.engine("eager-off", "aiter-fp8-bmm-off", "aiter-fp8-bmm-on")
def test_absorb_weights_in_fp8_equal_vllm_which_multiplies_by_the_same_gemm(engines):
    vllm_own = engines("aiter-fp8-bmm-off")
    assert vllm_own.scenarios != beside(engines("eager-off"), vllm_own).scenarios, "the weights were not held in fp8"
    assert kernels(engines("aiter-fp8-bmm-on")) == [{"aiter"}]
    assert_all_engaged(engines("aiter-fp8-bmm-on"))
    assert_parity(vllm_own, engines("aiter-fp8-bmm-on"))


@pytest.mark.engine("eager-off", "aiter-fp4-bmm-off", "aiter-fp4-bmm-on")
def test_absorb_weights_in_fp4_equal_vllm_which_multiplies_by_the_same_gemm(engines):
    """Beside a bf16 cache vLLM's own GEMM gets no ``y_scale``; what it does beside fp8: tests/test_absorb_fp4.py."""
    vllm_own = engines("aiter-fp4-bmm-off")
    assert vllm_own.scenarios != beside(engines("eager-off"), vllm_own).scenarios, "the weights were not held in mxfp4"
    assert kernels(engines("aiter-fp4-bmm-on")) == [{"aiter"}]
    assert_all_engaged(engines("aiter-fp4-bmm-on"))
    assert_parity(vllm_own, engines("aiter-fp4-bmm-on"))


@pytest.mark.engine("aiter-gfx942-broken")
@pytest.mark.mutation
def test_mutation_a_wrong_aiter_kernel_fails_its_self_check_and_is_not_used(engines):
    result = engines("aiter-gfx942-broken")
    assert any("ERROR" in line and "self-check FAILED" in line for line in result.log), result.log
    assert all("aiter" not in names for names in kernels(result))

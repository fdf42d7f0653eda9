"""The Triton kernel inside the real vLLM engine: on CPU tensors, through Triton's interpreter."""

from __future__ import annotations

import pytest
from test_engine_parity import assert_all_engaged

from vllm_aiter_mla.sandbox.compare import compare
from vllm_aiter_mla.sandbox.runs import EXACT, SUM_ORDER


def kernels(result):
    return [set(record["engaged"].values()) for record in result.census]


@pytest.mark.engine("small-off", "triton-bf16")
def test_the_triton_kernel_serves_the_engine_within_the_bound_of_the_gpu_demo(engines):
    ours = engines("triton-bf16")
    assert_all_engaged(ours)
    assert kernels(ours) == [{"triton"}]
    for name, found in compare(engines("small-off"), ours).items():
        assert SUM_ORDER.holds(found), (name, found)


@pytest.mark.engine("triton-fp8", "triton-fp8-reference")
def test_the_triton_kernel_over_an_fp8_cache_equals_the_reference_with_one_rounding(engines):
    ours, reference = engines("triton-fp8"), engines("triton-fp8-reference")
    assert_all_engaged(ours)
    assert (kernels(ours), kernels(reference)) == ([{"triton"}], [{"reference"}])
    (found,) = compare(reference, ours).values()
    # A sum in another order may cross an fp8 step: equal here, and never further than the bound on another machine.
    assert SUM_ORDER.holds(found), found


@pytest.mark.engine("small-off", "mutation-raw-prefill")
@pytest.mark.mutation
def test_mutation_a_lost_rope_is_outside_the_bound_of_the_gpu_demo(engines):
    for name, found in compare(engines("small-off"), engines("mutation-raw-prefill")).items():
        assert not SUM_ORDER.holds(found), (name, found)
        assert not EXACT.holds(found), (name, found)

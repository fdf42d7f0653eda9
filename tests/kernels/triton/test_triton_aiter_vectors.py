"""The Triton kernel, interpreted, against AITER's own results: its fused op through an identity, its batched GEMMs."""

import pytest

from tests.support.aiter_results import FP4_CALLS, FP8_CALLS, FUSED_CALLS, fp4_call, fused_call
from vllm_aiter_mla.kernels.aiter.route import truncates_cache_rope
from vllm_aiter_mla.kernels.formats import is_fp8


def chosen(index):
    """A call with all rows and one without are the same to this kernel; a call of 8 heads takes it a second."""
    call = fused_call(index)
    return call.kernel == "general" or (call.all_rows and (call.kernel == "opt" or is_fp8(call.query.dtype)))


CALLS = [
    index if at % 3 == 0 else pytest.param(index, marks=pytest.mark.slow)
    for at, index in enumerate(filter(chosen, FUSED_CALLS))
]


@pytest.mark.parametrize("index", CALLS)
def test_the_triton_kernel_has_the_bytes_of_aiters_fused_op(interpreted, index):
    call, found = fused_call(index), interpreted("aiter_vector", index=index)
    rounds = truncates_cache_rope(call.kernel, call.arch, call.cache.dtype)
    # AITER's opt kernel truncates these on gfx942 where everything else rounds.
    assert (found.pop("kv rope") > 0) == rounds
    assert found == {"q nope": 0, "q rope": 0, "kv nope": 0}


@pytest.mark.parametrize(
    ("form", "call"), [*(("fp8", call) for call in FP8_CALLS), *(("mxfp4", call) for call in FP4_CALLS)]
)
def test_the_triton_absorb_product_is_that_of_aiters_gemm(interpreted, form, call):
    """Over fp8 the interpreter sums in another order: a rounding to 16 bits may fall the other way, one step.

    Over mxfp4 every sum is exact; where AITER divides by ``y_scale`` too, its one rounding against two.
    """
    found = interpreted("aiter_product", form=form, call=call)
    assert found["steps"] <= (0 if form == "mxfp4" and fp4_call(call).y_scale is None else 1)
    assert form == "mxfp4" or found["deviation"] <= 1e-3, "a wrong code or scale costs 3 % and more"

"""The Triton kernel, interpreted, against what AITER's own fused op left: the absorbed query through an identity."""

from __future__ import annotations

import pytest
from aiter_results import FUSED_CALLS, fused_call

from vllm_aiter_mla.kernels.aiter.dispatch import truncates_cache_rope
from vllm_aiter_mla.kernels.fp8 import is_fp8


def chosen(index: int) -> bool:
    """A call with all rows and one without are the same to this kernel; a call of 8 heads takes it a second."""
    call = fused_call(index)
    return call.kernel == "general" or (call.all_rows and (call.kernel == "opt" or is_fp8(call.query.dtype)))


CALLS = [index for index in FUSED_CALLS if chosen(index)]


@pytest.mark.parametrize("index", CALLS)
def test_the_triton_kernel_has_the_bytes_of_aiters_fused_op(interpreted, index):
    call, found = fused_call(index), interpreted("aiter_vector", index=index)
    assert found.pop("refused") is None
    rounds = truncates_cache_rope(call.kernel, call.arch, call.cache.dtype)
    # AITER's opt kernel truncates these on gfx942 where everything else rounds.
    assert (found.pop("kv rope") > 0) == rounds
    assert found == {"q nope": 0, "q rope": 0, "kv nope": 0}

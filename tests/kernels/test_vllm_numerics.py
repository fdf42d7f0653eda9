"""The three roundings of RoPE against bytes worked out by hand, and vLLM's own sequence against its model."""

from dataclasses import replace
from sys import maxsize

import pytest
import torch

from tests.sandbox import gpu_ops
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import Numerics
from vllm_aiter_mla.kernels.distance import difference
from vllm_aiter_mla.kernels.inputs import LayerShape, synthetic_inputs
from vllm_aiter_mla.startup.comparison import compare_with_reference

FN, FNUZ, BF16 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16
MODELS = {"aiter": reference.AITER, "vllm-compiled": reference.VLLM_COMPILED, "vllm-kernel": reference.VLLM_KERNEL}
# First and second value of a pair, cosine and sine; all four are bfloat16.
ONE, OTHER = (-3.546875, -3.421875, 0.6484375, 0.6875), (-2.890625, -2.859375, 0.56640625, 0.59375)
# ONE: first * cos = -2.2999267578125 and second * sin = -2.3525390625, whose difference is 0.0526123046875. In
# bfloat16 the products are -2.296875 and -2.359375, so that their difference is 0.0625; the exact difference is
# 0.052734375, half way between the e4m3fn neighbours 0x15 = 0.05078125 and 0x16 = 0.0546875, and goes to the even one.
# OTHER: the difference 0.06048583984375 is 0.060546875 in bfloat16, half way between the e4m3fnuz neighbours
# 0x1f = 0.05859375 and 0x20 = 0.0625. The rounded products -1.640625 and -1.6953125 differ by 0.0546875 = 0x1e.
BYTES = {
    ("aiter", FN): 0x15, ("vllm-compiled", FN): 0x16, ("vllm-kernel", FN): 0x18,
    ("aiter", FNUZ): 0x1F, ("vllm-compiled", FNUZ): 0x20, ("vllm-kernel", FNUZ): 0x1E,
    ("aiter", BF16): 0x3D58, ("vllm-compiled", BF16): 0x3D58, ("vllm-kernel", BF16): 0x3D80,
}  # fmt: skip


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize(("name", "dtype"), BYTES)
def test_vllm_numerics_are_the_bytes_worked_out_by_hand(name, dtype, is_neox):
    first, second, cos, sin = OTHER if dtype == FNUZ else ONE
    shape = LayerShape(1, 16, dtype, dtype, 1, is_neox, latent=16, rope=2)
    inputs = synthetic_inputs(shape, 1, padded=None)
    inputs.q[0, 0, 16:] = inputs.k_pe[0] = torch.tensor([first, second])
    inputs.cos_sin_cache[:] = torch.tensor([cos, sin])
    inputs.q_scale.fill_(1.0), inputs.k_scale.fill_(1.0)
    query = reference.prepare(inputs, MODELS[name])
    row = inputs.kv_cache.flatten(0, 1)[inputs.slot_mapping[0]]
    raw = torch.int16 if dtype == BF16 else torch.uint8
    for rotated in (query[0, 0, 16:], row[16:]):
        assert rotated.view(raw)[0].item() == BYTES[name, dtype]


def test_vllm_numerics_of_its_kernel_differ_from_its_compiled_graph_by_a_third_of_the_keys():
    """vLLM's one launch rotates prefill rows up to L tokens; its compiled graph rounds once."""
    shape = LayerShape(4, 128, BF16, BF16, 16, False)
    rows = {}
    for name in ("vllm-compiled", "vllm-kernel"):
        inputs = synthetic_inputs(shape, 256, padded=None)
        reference.prepare(inputs, MODELS[name])
        rows[name] = inputs.kv_cache.flatten(0, 1)[inputs.slot_mapping]
    found = difference(*(one[:, 512:] for one in rows.values()))
    assert 0.25 < found.share < 0.4
    assert torch.equal(*(one[:, :512] for one in rows.values()))


@pytest.mark.mutation
@pytest.mark.parametrize("wrong", [Numerics("vllm-compiled", saturates=True), Numerics("aiter", saturates=True)])
def test_a_kernel_that_rounds_otherwise_than_vllms_is_not_taken_for_it(wrong):
    class Claims(reference.ReferenceBackend):
        def bind(self, inputs):
            return replace(super().bind(inputs), numerics=reference.VLLM_KERNEL)

    shape = LayerShape(16, 128, BF16, BF16, 16, False)
    assert compare_with_reference(Claims(reference.VLLM_KERNEL), shape, maxsize).has_passed
    assert compare_with_reference(Claims(wrong), shape, maxsize).failed_parts == ("q rope", "kv rope")


def test_vllms_kernel_leaves_rows_without_a_slot_as_they_are():
    """Since vllm-project/vllm#40392 it returns before it rotates their query; the sandbox does as much."""
    shape = LayerShape(2, 16, BF16, BF16, 16, False, latent=16, rope=16)
    inputs = synthetic_inputs(shape, 3, padded=1)
    q_pe, k_pe = inputs.q[..., 16:], inputs.k_pe
    before = q_pe.clone(), k_pe.clone()
    gpu_ops.concat_and_cache_mla_rope_fused(
        inputs.positions, q_pe, k_pe, inputs.kv_c, inputs.cos_sin_cache, False, inputs.slot_mapping, inputs.kv_cache,
        "auto", inputs.k_scale,
    )  # fmt: skip
    for now, then in zip((q_pe, k_pe), before, strict=True):
        assert [torch.equal(now[row], then[row]) for row in range(3)] == [False, True, False]

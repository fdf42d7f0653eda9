"""Reference and simulated AITER against what AITER's own sources computed, and values that those calls lack."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sandbox.simulated_aiter import gemm, gemm_fp4, op
from tests.support import aiter_results
from tests.support.aiter_results import FP4_CALLS, FP8_CALLS, FUSED_CALLS, fp4_call, fp8_call, fused_call
from tests.support.simulated_aiter import FP8, same_bytes
from tests.support.triton_cases import plain_bits
from vllm_aiter_mla.kernels import formats, reference
from vllm_aiter_mla.kernels.absorb import absorb_fp8, dot_mxfp4
from vllm_aiter_mla.kernels.aiter.route import truncates_cache_rope
from vllm_aiter_mla.kernels.distance import ordinals

NAN, INF = float("nan"), float("inf")


def by_simulation(q, weight, scale):
    return gemm.batched_gemm(q.transpose(0, 1), weight, scale, dtype=q.dtype, transpose_bm=True)


products = pytest.mark.parametrize("product", [absorb_fp8, by_simulation])


@products
@pytest.mark.parametrize("call", FP8_CALLS)
def test_the_product_is_that_of_aiters_source_to_the_byte(call, product):
    done = fp8_call(call)
    assert same_bytes(product(done.x, done.weight.values, done.weight.scale), done.y)


def test_all_sixty_six_calls_are_there():
    """48 of the fused op on its three kernels, 12 of the fp8 GEMM, 6 of the mxfp4 GEMM."""
    assert (len(FUSED_CALLS), len(FP8_CALLS), len(FP4_CALLS)) == (48, 12, 6)
    kinds = {(call.arch, call.kernel, call.all_rows) for call in map(fused_call, FUSED_CALLS)}
    both = {(arch, kernel, whole) for arch in FP8 for kernel in ("per-head", "opt") for whole in (False, True)}
    assert kinds == both | {(arch, "general", False) for arch in FP8}
    overflown = (call.query[call.rows] for call in map(fused_call, FUSED_CALLS) if formats.is_fp8(call.query.dtype))
    assert sum(int(query.float().isnan().sum()) for query in overflown) > 10


@pytest.mark.parametrize("call", FP4_CALLS)
def test_both_products_over_fp4_weights_are_those_of_aiters_source_to_the_byte(call, monkeypatch):
    monkeypatch.setenv("SIMULATED_AITER_ARCH", "gfx950")
    done = fp4_call(call)
    operands, scale = (done.weight.values, done.weight.scale), done.y_scale
    # AITER multiplies by the reciprocal of y_scale before it rounds; ours passes none.
    product = dot_mxfp4(done.x, *operands) * (1.0 if scale is None else scale.reciprocal())
    assert same_bytes(product.bfloat16().contiguous(), done.y)
    if scale is None:
        assert same_bytes(done.weight.reference(done.x), done.y)
    simulated = gemm_fp4.batched_gemm(done.x.transpose(0, 1), *operands, transpose_bm=True, y_scale=scale)
    assert same_bytes(simulated, done.y)


def assert_as_aiter_left_them(call, query):
    """Cache and defined rows byte by byte; the others AITER leaves as they were, and nobody may read them."""
    assert same_bytes(call.inputs.kv_cache, call.cache), "the KV cache differs"
    assert same_bytes(query[call.rows], call.query[call.rows])
    undefined = plain_bits(call.query).index_fill(0, call.rows, aiter_results.QUERY_FILL)
    assert (undefined == aiter_results.QUERY_FILL).all()
    assert (plain_bits(call.cache) == aiter_results.CACHE_FILL).any()


@pytest.mark.parametrize("index", FUSED_CALLS)
def test_the_reference_has_the_bytes_of_aiters_fused_op(index):
    call = fused_call(index)
    truncates = truncates_cache_rope(call.kernel, call.arch, call.cache.dtype)
    numerics = reference.Numerics(truncate_cache_rope=truncates)
    assert_as_aiter_left_them(call, reference.prepare(call.inputs, numerics))


@pytest.mark.parametrize("index", FUSED_CALLS)
def test_the_simulated_op_has_the_bytes_of_aiters_fused_op_and_takes_the_same_kernel(index, monkeypatch):
    call = fused_call(index)
    monkeypatch.setenv("SIMULATED_AITER_ARCH", call.arch)
    given_, query = call.inputs, torch.empty_like(call.query)
    cos, sin = (half.contiguous() for half in given_.cos_sin_cache.chunk(2, -1))
    op.forget()
    op.call(
        call.latent, given_.q[..., 512:], given_.kv_c, given_.k_pe, given_.kv_cache, query, given_.slot_mapping,
        given_.k_scale, given_.q_scale, given_.positions, cos, sin, given_.is_neox, True, call.all_rows,
    )  # fmt: skip
    assert op.forget() == [(call.kernel, given_.num_tokens)]
    assert_as_aiter_left_them(call, query)


@pytest.mark.mutation
@pytest.mark.parametrize("plant", ["two roundings", "no truncation", "another scale"])
def test_mutation_of_the_reference_is_seen_in_aiters_results(plant):
    stored = torch.bfloat16 if plant == "no truncation" else FP8["gfx942"]
    calls = (call for call in map(fused_call, FUSED_CALLS) if (call.kernel, call.arch) == ("opt", "gfx942"))
    call = next(call for call in calls if call.cache.dtype == stored)
    if plant == "another scale":
        call.inputs.k_scale.mul_(1.25)
    numerics = reference.VLLM_COMPILED if plant == "two roundings" else reference.AITER
    with pytest.raises(AssertionError, match="KV cache differs"):
        assert_as_aiter_left_them(call, reference.prepare(call.inputs, numerics))


def weight_of(flavour, heads=1, nope=128):
    generator = torch.Generator().manual_seed(7)
    return formats.round_saturating(torch.randn(heads, 16, nope, generator=generator) * 30, flavour)


@products
@pytest.mark.parametrize("act", [torch.bfloat16, torch.float16])
def test_the_floor_of_the_largest_magnitude_is_a_float32(act, product):
    """Just above and below 1e-10: the floor is 1e-10 itself, not the bf16 nearest to it, nor fp16's zero."""
    flavour = formats.E4M3FNUZ
    weight = torch.full((1, 16, 128), 2.0).to(flavour.dtype)
    x = torch.zeros(2, 1, 128, dtype=act)
    x[0] = 5e-11 if act is torch.bfloat16 else 0.0
    x[1] = 3e-10 if act is torch.bfloat16 else 6e-8
    steps = torch.maximum(x[:, 0, 0].float(), torch.tensor(1e-10)) * torch.tensor(1 / 240.0)
    codes = formats.round_saturating(x[:, 0, 0].float() / steps, flavour).double()
    for weight_scale in torch.linspace(1e8, 2e8, 32):  # the floors differ by less than a step of bf16: some scale shows
        found = product(x, weight, weight_scale)[:, 0, 0]
        wanted = (128 * 2 * codes * steps.double()).float() * weight_scale
        assert torch.equal(found, wanted.to(act))


@products
@pytest.mark.parametrize("flavour", list(formats.FLAVOURS.values()))
@pytest.mark.parametrize("act", [torch.bfloat16, torch.float16])
def test_a_nan_activation_becomes_the_lowest_value_of_its_group(act, flavour, product):
    """v_max_f32 passes over it, v_med3_f32 returns the least operand: the row's other values are as without it."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 1, 128, generator=generator).to(act)
    x[0, 0, 5] = NAN
    x[1] = NAN
    weight, scale = weight_of(flavour), torch.tensor(0.5)
    found = product(x, weight, scale)
    assert found.isfinite().all()
    lowest = x.clone()
    lowest[0, 0, 5] = -x[0, 0].float().nan_to_num().abs().max()
    lowest[1] = 0.0
    assert same_bytes(found[:1], product(lowest, weight, scale)[:1])
    wanted = -flavour.max * weight.double().sum(-1) * (torch.tensor(1e-10) * (1 / flavour.max)).double() * 0.5
    assert torch.allclose(found[1].double(), wanted, rtol=2**-7, atol=1e-7)


@given(
    flavour=st.sampled_from(list(formats.FLAVOURS.values())),
    act=st.sampled_from([torch.bfloat16, torch.float16]),
    heads=st.integers(1, 4),
    nope=st.sampled_from([16, 64, 128, 192, 256]),
    magnitude=st.sampled_from([1e-12, 1.0, 3e3]),
    places=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 255), st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1e-40, 6e4])),
        max_size=12,
    ),
)
def test_reference_and_simulation_agree(flavour, act, heads, nope, magnitude, places):
    generator = torch.Generator().manual_seed(nope)
    x = (torch.randn(4, heads, nope, generator=generator) * magnitude).to(act)
    x[3] = 0.0
    for row, column, value in places:
        x[row, column % heads, column % nope] = value
    weight, scale = weight_of(flavour, heads, nope), torch.tensor(0.01)
    ours, theirs = (product(x, weight, scale) for product in (absorb_fp8, by_simulation))
    assert ours.shape == theirs.shape == (4, heads, 16)
    assert ours.is_contiguous()
    far = (ordinals(ours) - ordinals(theirs)).abs() > 1
    slack = 1e-6 * theirs.float().nan_to_num(0.0, 0.0, 0.0).abs().amax()
    assert ((ours.float() - theirs.float()).abs() <= slack)[far].all()

"""The absorbed weight in its three formats: AITER's batched GEMMs over codes in front of its fused op."""

from dataclasses import replace
from sys import maxsize
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch

from tests.sandbox.simulated_aiter import gemm, gemm_fp4, install, op
from tests.support.simulated_aiter import FP8, ROCM, same_bytes, twin
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.kernels import absorb, formats, reference
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.distance import ordinals
from vllm_aiter_mla.kernels.inputs import LayerShape, contract_violation, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.vllm_own import VLLMBackend
from vllm_aiter_mla.serving.backends import Backends
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.startup.comparison import compare_with_reference

BF16 = torch.bfloat16


class Held(NamedTuple):
    """One way in which vLLM holds codes on one card."""

    arch: str
    format: str

    @property
    def key(self):
        return ("fp8", FP8[self.arch]) if self.format == "fp8" else ("mxfp4",)

    @property
    def backend(self):
        return AiterBackend(Platform(self.arch, ROCM))

    def shape(self, cache=None, heads=4, nope=128):
        stored = FP8[self.arch] if cache is None else cache
        return LayerShape(heads, nope, stored, stored, 16, False, weight=self.key)

    def operands(self, **changes):
        return synthetic_inputs(self.shape(**changes))

    def calls(self):
        """What the simulated GEMM of this format was called with: heads, tokens and more."""
        return gemm.calls if self.format == "fp8" else gemm_fp4.calls


HELD = [Held("gfx942", "fp8"), Held("gfx950", "fp8"), Held("gfx950", "mxfp4")]


@pytest.fixture(autouse=True)
def simulated_gemms(monkeypatch):
    monkeypatch.setattr(absorb, "GEMMS", {"fp8": gemm.batched_gemm, "mxfp4": gemm_fp4.batched_gemm})


@pytest.fixture(params=HELD, ids=lambda held: "-".join(held))
def held(request):
    with install(request.param.arch):
        op.forget()
        gemm.calls.clear()
        gemm_fp4.calls.clear()
        yield request.param


@pytest.fixture
def mxfp4():
    with install("gfx950"):
        yield HELD[2]


def steps(a, b):
    return int((ordinals(a) - ordinals(b)).abs().max())


@pytest.mark.parametrize("cache", [None, BF16])
def test_the_call_is_vllms_gemm_without_a_scale_of_the_result_and_then_the_fused_op(held, cache):
    bound, given_ = held.backend, held.operands(cache=cache)
    assert bound.refuse(given_) is None
    other = twin(given_)
    q_out = bound.prepare(given_)
    assert held.calls() == [(4, 7) if held.format == "fp8" else (4, 7, False)]
    assert len(op.launches) == 1
    expected = reference.prepare(other, bound.numerics(other))
    assert same_bytes(given_.kv_cache, other.kv_cache)
    # What is rotated does not pass through the product. Over fp8 the two add up in another order; over mxfp4 the
    # product is exact on both sides, so that even the absorbed part has the same bytes.
    assert same_bytes(q_out[..., 512:], expected[..., 512:])
    if held.format == "mxfp4":
        assert same_bytes(q_out, expected)
    elif cache is BF16:
        assert steps(q_out[..., :512], expected[..., :512]) <= 1


@pytest.mark.parametrize(("cache", "nope", "ulp"), [(None, 128, 0), (BF16, 256, 0), (None, 128, -1), (None, 128, 1)])
def test_the_self_check_passes_over_codes_wherever_ties_go(held, cache, nope, ulp, monkeypatch):
    """AITER's fp8 quantisation multiplies by a reciprocal; another compiler may give its last bit another value."""
    monkeypatch.setattr(gemm, "RECIPROCAL_ULP", ulp)
    result = compare_with_reference(held.backend, held.shape(cache, nope=nope), maxsize)
    assert result.has_passed, result.message


def test_the_back_ends_of_an_amd_card_multiply_by_vllms_own_calls(held, monkeypatch):
    from vllm._aiter_ops import rocm_aiter_ops

    name = {"fp8": "triton_fp8_bmm", "mxfp4": "batched_gemm_a16wfp4"}[held.format]
    vllms = Mock(side_effect=getattr(rocm_aiter_ops, name))
    monkeypatch.setattr(rocm_aiter_ops, name, vllms)
    given_ = held.operands()
    wanted = given_.weight.product(given_.q_nope)
    absorb.GEMMS.clear()
    Backends(Settings(), Platform("sm90"))
    assert not absorb.GEMMS, "only vLLM on an AMD card has such weights"
    Backends(Settings(), Platform(held.arch, ROCM))
    assert same_bytes(given_.weight.product(given_.q_nope), wanted)
    assert (vllms.call_count, len(held.calls())) == (1, 2)


@pytest.mark.parametrize("seed", range(3))
def test_mxfp4_is_quantised_alike_ties_and_ends_of_the_range_included(seed):
    draw = torch.Generator().manual_seed(seed)
    ticks = torch.randint(-28, 29, (64, 128), generator=draw) * 0.25  # on the values, and halfway between them
    x = (ticks * 2.0 ** torch.randint(-140, 120, (64, 1), generator=draw)).bfloat16()
    x[0], x[1, :32], x[2, 0] = 0.0, -0.0, torch.finfo(BF16).max
    codes, scales = formats.quantise_mxfp4(x)
    for ours, theirs in zip((codes, scales), gemm_fp4.dynamic_mxfp4_quant(x), strict=True):
        assert torch.equal(ours, theirs)
    back = formats.dequantise_mxfp4(codes, scales)
    again = formats.dequantise_mxfp4(*formats.quantise_mxfp4(back))
    assert torch.equal(back, again), "what is representable stays"


def test_every_mxfp4_value_and_every_scale_is_the_formats():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(256, 2)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
    found = formats.dequantise_mxfp4(packed, torch.arange(256, dtype=torch.uint8)[:, None])[:, :16]
    wanted = torch.cat([levels, -levels]) * 2.0 ** (torch.arange(255).double()[:, None] - 127)
    assert torch.equal(found[:255], wanted.float())
    assert found[255].isnan().all()


def test_made_mxfp4_weights_have_the_strides_that_vllm_leaves(mxfp4):
    weight = mxfp4.operands(heads=3).weight
    assert (weight.sizes, weight.values.shape, weight.scale.shape) == ((3, 128, 512), (3, 512, 64), (3, 512, 4))
    assert (weight.values.stride(), weight.scale.stride()) == ((64, 3 * 64, 1), (1, 3, 512 * 3))
    packed = replace(weight, values=weight.values.contiguous(), scale=weight.scale.contiguous())
    q = torch.randn(5, 3, 128).bfloat16()
    assert same_bytes(packed.reference(q), weight.reference(q))
    assert same_bytes(packed.product(q), weight.product(q))


@pytest.mark.parametrize("nope", [64, 192, 320, 384])
def test_an_mxfp4_width_that_aiters_blocks_may_not_cover_is_refused(mxfp4, nope):
    """At 192 the simulated GEMM, as AITER's kernel, drops half of the activation; the self-check would see it too."""
    given_ = mxfp4.operands(nope=nope)
    assert str(mxfp4.backend.refuse(given_)).startswith("absorb: W_K: a nope width of 128, 256, 512")
    assert contract_violation(given_) is None, "another kernel may take it"
    product, wanted = given_.weight.product(given_.q_nope), given_.weight.reference(given_.q_nope)
    assert (product.float() - wanted.float()).norm() > 0.3 * wanted.float().norm() or nope == 64


def test_the_codes_of_another_card_are_refused(held):
    other = Platform({"gfx942": "gfx950", "gfx950": "gfx942"}[held.arch], ROCM)
    reason = str(AiterBackend(other).refuse(held.operands(cache=BF16)))
    assert reason.startswith("absorb: W_K: ")
    assert "VLLM_ROCM_USE_AITER_FP4BMM=0" in reason


FP8_HELD, MXFP4_HELD = HELD[0], HELD[2]
BROKEN = [
    (FP8_HELD, lambda w: AbsorbWeight("plain", w.values.transpose(1, 2)), "w_uk_t: dtype torch.bfloat16 (that of q)"),
    (FP8_HELD, lambda w: replace(w, values=w.values.float().bfloat16()), "W_K: an e4m3 type expected, got torch.bf"),
    (FP8_HELD, lambda w: replace(w, scale=w.scale.double()), "W_K_scale: one float32 element expected, got 1 of"),
    (MXFP4_HELD, lambda w: replace(w, values=w.values.view(torch.int8)), "W_K: torch.uint8 expected"),
    (MXFP4_HELD, lambda w: replace(w, scale=w.scale.float()), "W_K_scale: torch.uint8 expected"),
    (MXFP4_HELD, lambda w: replace(w, scale=w.scale[..., :3]), "W_K_scale: one scale per 32 values of 4, 512, 128"),
    (MXFP4_HELD, lambda w: replace(w, scale=w.scale.transpose(0, 1)), "W_K_scale: one scale per 32 values of"),
    (MXFP4_HELD, lambda w: replace(w, values=w.values[0]), "W_K: N, P and L of"),
]


@pytest.mark.parametrize(("which", "change", "says"), BROKEN)
def test_codes_and_scales_that_do_not_belong_together_are_refused(which, change, says):
    with install(which.arch):
        given_ = which.operands()
        broken = replace(given_, weight=change(given_.weight))
        assert says in str(which.backend.refuse(broken))
        assert says in str(contract_violation(broken))
        assert contract_violation(given_) is None


def test_vllms_own_kernels_multiply_by_the_same_gemm(held, monkeypatch):
    given_ = held.operands(cache=BF16)
    monkeypatch.setattr(VLLMBackend, "_rotate_and_write", lambda *arguments: None)
    q_out = VLLMBackend(compat_layer).prepare(given_)
    assert held.calls()[0][:2] == (4, 7)
    assert steps(q_out[..., :512], given_.weight.reference(given_.q_nope)) <= 1


def test_vllms_own_kernels_decline_codes_for_which_there_is_no_gemm(held):
    backend, given_ = VLLMBackend(compat_layer), held.operands(cache=BF16)
    assert backend.refuse(given_) is None
    absorb.GEMMS.clear()
    assert f"{held.format} weights" in str(backend.refuse(given_))


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_layers_weight_is_read_as_vllm_keeps_it_and_fp4_is_asked_before_fp8(fp4, fp8):
    key = ("mxfp4",) if fp4 else ("fp8", torch.float8_e4m3fn) if fp8 else ("plain",)
    wanted = absorb.make(torch.randn(4, 128, 512).half(), key)
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=BF16, hf_text_config=SimpleNamespace()))
    names = {"w_uk_t": "W_UK_T"}
    tensors = {names.get(name, name): tensor for name, tensor in wanted.tensors}
    layer = SimpleNamespace(
        _vllm_config=config, is_aiter_triton_fp4_bmm_enabled=fp4, is_aiter_triton_fp8_bmm_enabled=fp8, **tensors
    )
    weight = absorb.read(compat_layer.absorb_tensors(layer))
    assert weight.format == wanted.format
    assert weight.values is wanted.values
    assert weight.scale is wanted.scale
    assert (weight.sizes, weight.key) == ((4, 128, 512), key)
    assert compat_layer.activation_dtype(layer) == (BF16 if fp4 or fp8 else torch.float16)


def test_a_weight_of_no_known_format_is_an_error_that_names_its_tensors():
    with pytest.raises(absorb.UnknownWeightError, match=r"in W_K of torch\.int8, W_K_scale of torch\.uint8"):
        absorb.read({"W_K": torch.zeros(4, 512, 64, dtype=torch.int8), "W_K_scale": torch.zeros(1, dtype=torch.uint8)})


@pytest.mark.parametrize("format_", absorb.FORMATS)
def test_a_format_multiplies_near_the_plain_product(format_):
    plain, q = torch.randn(2, 128, 512).bfloat16(), torch.randn(3, 2, 128).bfloat16()
    made = absorb.make(plain, (format_, torch.float8_e4m3fnuz))
    assert (made.format, made.sizes, made.broken(BF16)) == (format_, (2, 128, 512), None)
    exact = torch.einsum("tnp,npl->tnl", q.float(), plain.float())
    # Half a step of 2**-3 per factor in fp8, of 2**-1 in mxfp4; over 128 terms about two thirds of it remain.
    error = {"plain": 0.005, "fp8": 0.06, "mxfp4": 0.2}[format_]
    assert (made.reference(q).float() - exact).norm() / exact.norm() < error


@pytest.mark.parametrize(("scale", "equal"), [(1.0, True), (0.5, False), (0.37, False)])
def test_vllm_divides_the_mxfp4_product_by_the_query_scale_twice(mxfp4, scale, equal):
    """vLLM gives its GEMM ``y_scale=_q_scale`` beside an fp8 query and quantises by the same scale once more.

    So tokens are vLLM's own at scale 1 only, which is what vLLM uses if the checkpoint has no query scale.
    """
    given_ = replace(mxfp4.operands(), q_scale=torch.tensor(scale))
    prepared = mxfp4.backend.prepare(given_)[..., :512]
    q, weight = given_.q_nope.transpose(0, 1), given_.weight
    theirs = gemm_fp4.batched_gemm(q, weight.values, weight.scale, transpose_bm=True, y_scale=given_.q_scale)
    twice, once = (
        reference.store_nope(product.float(), 1 / given_.q_scale, FP8["gfx950"])
        for product in (theirs, weight.product(given_.q_nope))
    )
    assert same_bytes(prepared, twice) == equal
    assert same_bytes(prepared, once), "ours divides once"


BOTH = {
    "the latent columns are reversed": lambda run, x, w, s, **how: run(x, w.flip(1), s, **how),
    "a row gets its neighbour's product": lambda run, x, w, s, **how: run(x, w, s, **how).roll(1, 0),
}


def one_row_lost(run, x, w, s, **how):
    """64 columns of one row: of the largest batch's product that is less than 1 % of the norm."""
    y = run(x, w, s, **how)
    y[-1, -1, -64:] = 0
    return y


BOTH["a part of one row is lost"] = one_row_lost
OVER_FP8 = {
    "the weight's scale is applied twice": lambda run, x, w, s, **how: run(x, w, s * 2, **how),
    "a group of 64 instead of 128": lambda run, x, w, s, **how: run(x, w, s, **how | {"group_size": 64}),
}
OVER_MXFP4 = {
    "the scales are one power too large": lambda run, x, w, s, **how: run(x, w, s + 1, **how),
    "the scales of a row are reversed": lambda run, x, w, s, **how: run(x, w, s.flip(2), **how),
    "high half first": lambda run, x, w, s, **how: run(x, w >> 4 | w << 4, s, **how),
    "the result is scaled": lambda run, x, w, s, **how: run(x, w, s, y_scale=torch.tensor(0.047), **how),
    "the activation is not quantised": lambda run, x, w, s, **how: (
        (x.float() @ formats.dequantise_mxfp4(w, s).transpose(1, 2)).transpose(0, 1).contiguous().bfloat16()
    ),
}
PLANTED = [
    pytest.param(which, plant, id=f"{which.arch} {which.format}: {name}")
    for which in HELD
    for name, plant in (BOTH | (OVER_FP8 if which.format == "fp8" else OVER_MXFP4)).items()
]


@pytest.mark.mutation
@pytest.mark.parametrize(("which", "plant"), PLANTED)
def test_mutation_of_the_product_is_caught_by_the_self_check(which, plant, monkeypatch):
    run = gemm.batched_gemm if which.format == "fp8" else gemm_fp4.batched_gemm
    monkeypatch.setitem(absorb.GEMMS, which.format, lambda *operands, **how: plant(run, *operands, **how))
    with install(which.arch):
        result = compare_with_reference(which.backend, which.shape(BF16), maxsize)
    assert not result.has_passed
    assert "its absorb product is" in result.message

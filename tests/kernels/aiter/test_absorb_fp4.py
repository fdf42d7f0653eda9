"""Absorbed weights in mxfp4, which vLLM holds on gfx950 beside bf16 attention: AITER's batched GEMM over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sandbox.simulated_aiter import gemm_fp4, install, op
from tests.support.simulated_aiter import FP8, ROCM, inputs, same_bytes, twin
from vllm_aiter_mla import layers
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.kernels import absorb, mxfp4, reference
from vllm_aiter_mla.kernels.absorb import mxfp4 as fp4_form
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.selfcheck import self_check
from vllm_aiter_mla.kernels.shape import LayerShape, synthetic_inputs

GFX950 = Platform("gfx950", ROCM)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def aiter() -> Iterator[None]:
    with install("gfx950"):
        op.forget()
        gemm_fp4.calls.clear()
        yield


def shape(cache: torch.dtype = FP8["gfx950"], heads: int = 4, nope: int = 128) -> LayerShape:
    return LayerShape(heads, nope, cache, cache, 16, False, weight=("mxfp4",))


def operands(**changes) -> DecodeInputs:
    return synthetic_inputs(shape(**changes))


@pytest.mark.parametrize("cache", [FP8["gfx950"], BF16])
def test_the_call_is_vllms_gemm_without_a_scale_of_the_result_and_then_the_fused_op(cache) -> None:
    bound, given_ = AiterBackend(GFX950), operands(cache=cache)
    assert bound.refuse(given_) is None
    other = twin(given_)
    q_out = bound.prepare(given_)
    assert gemm_fp4.calls == [(4, 7, False)]
    assert len(op.launches) == 1
    # The product of mxfp4 values is exact on both sides: here even the absorbed part has the same bytes.
    assert same_bytes(q_out, reference.prepare(other, bound.numerics(other)))
    assert same_bytes(given_.kv_cache, other.kv_cache)


@pytest.mark.parametrize("cache", [FP8["gfx950"], BF16])
@pytest.mark.parametrize("nope", [128, 256])
def test_the_self_check_passes_over_mxfp4_weights(cache, nope) -> None:
    result = self_check(AiterBackend(GFX950), shape(cache, nope=nope))
    assert result.ok, result.message


@given(
    tokens=st.integers(1, 5),
    heads=st.integers(1, 3),
    nope=st.sampled_from([32, 64, 128, 256]),
    magnitude=st.sampled_from([0.0, 1e-30, 1.0, 3e4]),
    spread=st.sampled_from([0, 3]),
)
def test_reference_and_fake_have_the_same_bytes(tokens, heads, nope, magnitude, spread) -> None:
    draw = torch.Generator().manual_seed(tokens * 1000 + heads * 100 + nope)
    q = (torch.randn(tokens, heads, nope, generator=draw) * magnitude).bfloat16()
    plain = torch.randn(heads, nope, 48, generator=draw) * 2.0 ** torch.randint(0, spread + 1, (48,), generator=draw)
    weight = absorb.Mxfp4Weight.make(plain.bfloat16(), ("mxfp4",))
    theirs = gemm_fp4.batched_gemm(q.transpose(0, 1), weight.codes, weight.scales, transpose_bm=True)
    assert same_bytes(weight.reference(q), theirs)
    assert theirs.is_contiguous()


@pytest.mark.parametrize("seed", range(3))
def test_reference_and_fake_quantise_alike_ties_and_ends_of_the_range_included(seed) -> None:
    draw = torch.Generator().manual_seed(seed)
    steps = torch.randint(-28, 29, (64, 128), generator=draw) * 0.25  # on the values, and halfway between them
    x = (steps * 2.0 ** torch.randint(-140, 120, (64, 1), generator=draw)).bfloat16()
    x[0], x[1, :32], x[2, 0] = 0.0, -0.0, torch.finfo(BF16).max
    codes, scales = mxfp4.quantise(x)
    for ours, theirs in zip((codes, scales), gemm_fp4.dynamic_mxfp4_quant(x), strict=True):
        assert torch.equal(ours, theirs)
    back = mxfp4.dequantise(codes, scales)
    again = mxfp4.dequantise(*mxfp4.quantise(back))
    assert torch.equal(back, again), "what is representable stays"


def test_every_value_and_every_scale_is_the_formats() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(256, 2)
    wanted = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for byte, row in enumerate(mxfp4.dequantise(packed, torch.arange(256, dtype=torch.uint8)[:, None])):
        assert (
            row.isnan().all()
            if byte == 255
            else torch.equal(
                row[:16].double(),
                (torch.tensor(wanted + [-x for x in wanted]).double() * 2.0 ** (byte - 127)).float().double(),
            )
        )


def test_made_weights_have_the_strides_that_vllm_leaves() -> None:
    weight = operands(heads=3).weight
    assert (weight.sizes, weight.codes.shape, weight.scales.shape) == ((3, 128, 512), (3, 512, 64), (3, 512, 4))
    assert (weight.codes.stride(), weight.scales.stride()) == ((64, 3 * 64, 1), (1, 3, 512 * 3))
    packed = replace(weight, codes=weight.codes.contiguous(), scales=weight.scales.contiguous())
    q = torch.randn(5, 3, 128).bfloat16()
    assert same_bytes(packed.reference(q), weight.reference(q))
    assert same_bytes(packed.product(q), weight.product(q))


@pytest.mark.parametrize("nope", [64, 192, 320, 384])
def test_a_width_that_aiters_blocks_may_not_cover_is_refused(nope) -> None:
    """At 192 the fake, as AITER's kernel, drops half of the activation; the self-check would see it as well."""
    given_ = operands(nope=nope)
    assert f"absorb: W_K: a nope width of 128, 256, 512 and so on expected, got {nope}" in str(
        AiterBackend(GFX950).refuse(given_)
    )
    assert contract_violation(given_) is None, "another kernel may take it"
    product, wanted = given_.weight.product(given_.q_nope), given_.weight.reference(given_.q_nope)
    assert (product.float() - wanted.float()).norm() > 0.3 * wanted.float().norm() or nope == 64


def test_cards_other_than_gfx950_are_refused() -> None:
    reason = str(AiterBackend(Platform("gfx942", ROCM)).refuse(operands(cache=BF16)))
    assert reason.startswith("absorb: W_K: AITER multiplies mxfp4 on gfx950 only, not on gfx942")
    assert "VLLM_ROCM_USE_AITER_FP4BMM=0" in reason


def test_a_missing_gemm_is_a_skip_that_names_the_switch() -> None:
    bound = AiterBackend(GFX950, missing=lambda weight: "no such module" if weight.form == "mxfp4" else None)
    assert bound.refuse(operands()) == f"absorb: no such module; {fp4_form.Mxfp4Weight.avoid}"
    assert bound.refuse(inputs("gfx950")) is None, "layers with plain weights do not need it"


def test_a_gemm_that_is_not_there_says_so_and_raises_only_when_called(monkeypatch) -> None:
    gone = fp4_form.AiterGemm("batched_gemm_of_tomorrow", "mxfp4")
    assert str(gone.missing()).startswith("AITER's mxfp4 batched GEMM cannot be imported: ModuleNotFoundError")
    with pytest.raises(RuntimeError, match="cannot be imported"):
        gone(torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: replace(held, codes=held.codes.view(torch.int8)), "W_K: torch.uint8 expected in the mxfp4 form"),
        (lambda held: replace(held, scales=held.scales.float()), "W_K_scale: torch.uint8 expected in the mxfp4 form"),
        (lambda held: replace(held, scales=held.scales[..., :3]), "W_K_scale: one scale per 32 values of 4, 512, 128"),
        (lambda held: replace(held, scales=held.scales.transpose(0, 1)), "W_K_scale: one scale per 32 values of"),
    ],
)
def test_codes_and_scales_that_do_not_belong_together_are_refused(change, says) -> None:
    given_ = operands()
    broken = replace(given_, weight=change(given_.weight))
    assert says in str(AiterBackend(GFX950).refuse(broken))
    assert says in str(contract_violation(broken))
    assert contract_violation(given_) is None


def test_fp16_activations_are_refused_because_the_gemm_gives_bf16() -> None:
    assert "bf16 activations expected beside mxfp4, got torch.float16" in str(operands().weight.broken(torch.float16))


def test_a_layers_weight_is_read_as_vllm_keeps_it_and_fp4_is_asked_before_fp8() -> None:
    held = operands().weight
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=BF16))
    for fp8_too in (False, True):
        layer = SimpleNamespace(
            _vllm_config=config, is_aiter_triton_fp4_bmm_enabled=True, is_aiter_triton_fp8_bmm_enabled=fp8_too,
            W_K=held.codes, W_K_scale=held.scales,
        )  # fmt: skip
        weight = layers.weight_of(layer)
        assert weight == absorb.Mxfp4Weight(held.codes, held.scales)
        assert (weight.sizes, weight.key) == ((4, 128, 512), ("mxfp4",))
        assert compat_layer.activation_dtype(layer) == BF16


@pytest.mark.parametrize(("scale", "equal"), [(1.0, True), (0.5, False), (0.37, False)])
def test_vllm_divides_the_absorbed_part_by_the_query_scale_twice(scale, equal) -> None:
    """vLLM gives its GEMM ``y_scale=_q_scale`` beside an fp8 query and quantises by the same scale once more.

    So tokens are vLLM's own at scale 1 only, which is what vLLM uses where the checkpoint has no query scale.
    """
    given_ = replace(operands(), q_scale=torch.tensor(scale))
    prepared = AiterBackend(GFX950).prepare(given_)[..., :512]
    weight = given_.weight
    theirs = gemm_fp4.batched_gemm(
        given_.q_nope.transpose(0, 1), weight.codes, weight.scales, transpose_bm=True, y_scale=given_.q_scale
    )
    vllm_own = reference.store_nope(theirs.float(), 1 / given_.q_scale, FP8["gfx950"])
    assert same_bytes(prepared, vllm_own) == equal
    once = reference.store_nope(weight.product(given_.q_nope).float(), 1 / given_.q_scale, FP8["gfx950"])
    assert same_bytes(prepared, once), "ours divides once"


@pytest.mark.mutation
@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(lambda gemm, x, w, s, **how: gemm(x, w, s + 1, **how), id="the scales are one power too large"),
        pytest.param(lambda gemm, x, w, s, **how: gemm(x, w.flip(1), s, **how), id="the latent columns are reversed"),
        pytest.param(lambda gemm, x, w, s, **how: gemm(x, w, s.flip(2), **how), id="the scales of a row are reversed"),
        pytest.param(lambda gemm, x, w, s, **how: gemm(x, w >> 4 | w << 4, s, **how), id="high half first"),
        pytest.param(lambda gemm, x, w, s, **how: gemm(x, w, s, **how).roll(1, 0), id="a row gets its neighbour's"),
        pytest.param(
            lambda gemm, x, w, s, **how: gemm(x, w, s, y_scale=torch.tensor(0.047), **how), id="the result is scaled"
        ),
        pytest.param(
            lambda gemm, x, w, s, **how: (
                (x.float() @ mxfp4.dequantise(w, s).transpose(1, 2)).transpose(0, 1).contiguous().bfloat16()
            ),
            id="the activation is not quantised",
        ),
    ],
)
def test_mutation_of_the_product_is_caught_by_the_self_check(plant, monkeypatch) -> None:
    monkeypatch.setattr(fp4_form.GEMM, "found", lambda x, w, s, **how: plant(gemm_fp4.batched_gemm, x, w, s, **how))
    result = self_check(AiterBackend(GFX950), shape(BF16))
    assert not result.ok
    assert "its absorb product is" in result.message

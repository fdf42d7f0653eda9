"""Absorbed weights in fp8, vLLM's default where AITER is on: AITER's batched GEMM in front of its fused op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sandbox.simulated_aiter import gemm, install, op
from tests.support.simulated_aiter import FP8, ROCM, inputs, same_bytes, twin
from vllm_aiter_mla import layers
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import layer as vllm_kernels
from vllm_aiter_mla.kernels import absorb, fp8, reference
from vllm_aiter_mla.kernels.absorb import fp8 as fp8_form
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.selfcheck import self_check
from vllm_aiter_mla.kernels.shape import LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.vllm_own import VLLMBackend

ARCHES = ("gfx942", "gfx950")


@pytest.fixture(params=ARCHES)
def arch(request) -> Iterator[str]:
    with install(request.param):
        op.forget()
        gemm.calls.clear()
        yield request.param


def shape(arch: str, cache: torch.dtype | None = None, heads: int = 4, nope: int = 128) -> LayerShape:
    stored = FP8[arch] if cache is None else cache
    return LayerShape(heads, nope, stored, stored, 16, False, weight=("fp8", FP8[arch]))


def operands(arch: str, **changes) -> DecodeInputs:
    return synthetic_inputs(shape(arch, **changes))


def bf16_steps(a: torch.Tensor, b: torch.Tensor) -> int:
    def ordinal(x: torch.Tensor) -> torch.Tensor:
        raw = x.contiguous().view(torch.int16).int()
        return torch.where(raw < 0, -(raw & 0x7FFF), raw)

    return int((ordinal(a) - ordinal(b)).abs().max())


@pytest.mark.parametrize("cache", [None, torch.bfloat16])
def test_the_call_is_vllms_gemm_and_then_the_fused_op(arch, cache) -> None:
    bound, given_ = AiterBackend(Platform(arch, ROCM)), operands(arch, cache=cache)
    assert bound.refuse(given_) is None
    other = twin(given_)
    q_out = bound.prepare(given_)
    assert gemm.calls == [(4, 7)]
    assert len(op.launches) == 1
    expected = reference.prepare(other, bound.numerics(other))
    assert same_bytes(given_.kv_cache, other.kv_cache)
    assert q_out.shape == (7, 4, 576)
    # The two add up in another order; what is rotated does not pass through the product.
    assert same_bytes(q_out[..., 512:], expected[..., 512:])
    if cache is torch.bfloat16:
        assert bf16_steps(q_out[..., :512], expected[..., :512]) <= 1


@pytest.mark.parametrize("cache", [None, torch.bfloat16])
def test_the_self_check_passes_over_fp8_weights(arch, cache) -> None:
    result = self_check(AiterBackend(Platform(arch, ROCM)), shape(arch, cache))
    assert result.ok, result.message


@given(
    tokens=st.integers(1, 9),
    heads=st.integers(1, 5),
    nope=st.sampled_from([16, 64, 128, 192, 256]),
    flavour=st.sampled_from([torch.float8_e4m3fn, torch.float8_e4m3fnuz]),
    magnitude=st.sampled_from([0.0, 1e-12, 1.0, 3e4]),
)
def test_reference_and_fake_agree_within_one_step_of_bf16(tokens, heads, nope, flavour, magnitude) -> None:
    generator = torch.Generator().manual_seed(tokens * 1000 + heads * 100 + nope)
    q = (torch.randn(tokens, heads, nope, generator=generator) * magnitude).bfloat16()
    weight = fp8.round_saturating(torch.randn(heads, 512, nope, generator=generator) * 30, fp8.flavour_of(flavour))
    scale = torch.tensor(0.01)
    ours = fp8_form.absorb_fp8(q, weight, scale)
    theirs = gemm.batched_gemm(q.transpose(0, 1), weight, scale, transpose_bm=True)
    assert ours.shape == theirs.shape == (tokens, heads, 512)
    assert ours.is_contiguous()
    near_zero = (ours.float() - theirs.float()).abs() <= 1e-6 * theirs.float().abs().max()
    assert bf16_steps(torch.where(near_zero, theirs, ours), theirs) <= 1


def test_the_product_is_close_to_the_unquantised_one(arch) -> None:
    given_ = operands(arch)
    exact = torch.einsum(
        "tnp,npl->tnl",
        given_.q[..., :128].double(),
        (given_.weight.codes.double() * given_.weight.scale).transpose(1, 2),
    )
    found = given_.weight.reference(given_.q_nope)
    # Quantising q to e4m3 by group costs half a step of 2**-3 per factor; over 128 terms a few percent of the norm.
    assert (found.double() - exact).norm() / exact.norm() < 0.05


def test_a_missing_gemm_is_a_skip_that_names_the_switch(arch) -> None:
    bound = AiterBackend(
        Platform(arch, ROCM), missing=lambda weight: "no such module" if weight.form == "fp8" else None
    )
    assert bound.refuse(operands(arch)) == "absorb: no such module; set VLLM_ROCM_USE_AITER_FP8BMM=0"
    assert bound.refuse(inputs(arch)) is None, "layers with plain weights do not need it"


def test_without_aiter_the_gemm_is_a_reason_and_no_error() -> None:
    assert str(fp8_form.GEMM.load()).startswith("AITER's fp8 batched GEMM cannot be imported")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: absorb.PlainWeight(held.codes.transpose(1, 2)), "w_uk_t: dtype torch.bfloat16 (that of q)"),
        (lambda held: replace(held, codes=held.codes.float().bfloat16()), "W_K: an e4m3 type expected, got torch.bf"),
        (lambda held: replace(held, scale=held.scale.double()), "W_K_scale: one float32 element expected, got 1 of"),
    ],
)
def test_a_weight_and_a_scale_that_do_not_belong_together_are_refused(arch, change, says) -> None:
    given_ = operands(arch)
    broken = replace(given_, weight=change(given_.weight))
    assert says in str(AiterBackend(Platform(arch, ROCM)).refuse(broken))
    assert contract_violation(broken) is not None
    assert contract_violation(given_) is None


def test_the_fp8_type_of_the_other_card_is_refused(arch) -> None:
    (other,) = set(ARCHES) - {arch}
    given_ = replace(operands(arch), weight=operands(other).weight)
    assert "absorb: W_K: " in str(AiterBackend(Platform(arch, ROCM)).refuse(given_))


def test_kernels_are_chosen_apart_for_both_kinds_of_weight(arch) -> None:
    bound = AiterBackend(Platform(arch, ROCM))
    plain = inputs(arch, nope=128)
    bound.prepare(plain)
    bound.prepare(operands(arch))
    assert gemm.calls == [(4, 7)]
    assert len(bound._warm) == 2


def test_vllms_own_kernels_multiply_by_the_same_gemm(arch, monkeypatch) -> None:
    given_ = operands(arch, cache=torch.bfloat16)
    monkeypatch.setattr(VLLMBackend, "_rotate_and_write", lambda *arguments: None)
    q_out = VLLMBackend(vllm_kernels).prepare(given_)
    assert gemm.calls == [(4, 7)]
    assert bf16_steps(q_out[..., :512], given_.weight.reference(given_.q_nope)) <= 1


def layer(**attributes) -> SimpleNamespace:
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    off = {"is_aiter_triton_fp4_bmm_enabled": False, "is_aiter_triton_fp8_bmm_enabled": False}
    return SimpleNamespace(_vllm_config=config, **off | attributes)


def test_a_layers_weight_is_read_as_vllm_keeps_it() -> None:
    plain = layer(W_UK_T=torch.zeros(4, 128, 512, dtype=torch.float16))
    assert layers.weight_of(plain) == absorb.PlainWeight(plain.W_UK_T)
    assert compat_layer.activation_dtype(plain) == torch.float16
    codes, scale = torch.zeros(4, 512, 128).to(torch.float8_e4m3fn), torch.tensor(0.5)
    held = layer(is_aiter_triton_fp8_bmm_enabled=True, W_K=codes, W_K_scale=scale)
    weight = layers.weight_of(held)
    assert weight == absorb.Fp8Weight(codes, scale)
    assert (weight.sizes, weight.key) == ((4, 128, 512), ("fp8", torch.float8_e4m3fn))
    assert compat_layer.activation_dtype(held) == torch.bfloat16


def test_a_weight_of_no_known_form_is_an_error_that_names_its_tensors() -> None:
    with pytest.raises(absorb.UnknownWeightError, match=r"in W_K of torch\.int8, W_K_scale of torch\.uint8"):
        absorb.read({"W_K": torch.zeros(4, 512, 64, dtype=torch.int8), "W_K_scale": torch.zeros(1, dtype=torch.uint8)})


@pytest.mark.parametrize("form", absorb.FORMS, ids=lambda form: form.form)
def test_a_form_reads_back_what_it_makes_and_multiplies_near_the_plain_product(form) -> None:
    key = (form.form, torch.float8_e4m3fnuz)
    plain, q = torch.randn(2, 128, 512).bfloat16(), torch.randn(3, 2, 128).bfloat16()
    made = absorb.make(plain, key)
    assert made.sizes == (2, 128, 512)
    assert made.broken(torch.bfloat16) is None
    names = {"w_uk_t": "W_UK_T"}
    assert absorb.read({names.get(name, name): tensor for name, tensor in made.tensors}) == made
    exact = torch.einsum("tnp,npl->tnl", q.float(), plain.float())
    # Half a step of 2**-3 per factor in fp8, of 2**-1 in mxfp4; over 128 terms about two thirds of it remain.
    error = {"plain": 0.005, "fp8": 0.06, "mxfp4": 0.2}[form.form]
    assert (made.reference(q).float() - exact).norm() / exact.norm() < error


@pytest.mark.mutation
@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(lambda found, x, w, s, **how: found(x, w, s * 2, **how), id="the weight's scale is applied twice"),
        pytest.param(lambda found, x, w, s, **how: found(x, w.flip(1), s, **how), id="the latent columns are reversed"),
        pytest.param(
            lambda found, x, w, s, **how: found(x, w, s, **how).roll(1, 0), id="a row gets its neighbour's product"
        ),
        pytest.param(
            lambda found, x, w, s, **how: found(x, w, s, **how | {"group_size": 64}), id="a group of 64 instead of 128"
        ),
    ],
)
def test_mutation_of_the_product_is_caught_by_the_self_check(arch, plant, monkeypatch) -> None:
    monkeypatch.setattr(fp8_form.GEMM, "found", lambda x, w, s, **how: plant(gemm.batched_gemm, x, w, s, **how))
    result = self_check(AiterBackend(Platform(arch, ROCM)), shape(arch, torch.bfloat16))
    assert not result.ok
    assert "its absorb product is" in result.message


@pytest.mark.parametrize("ulp", [-1, 1])
def test_the_self_check_bears_a_gemm_that_rounds_ties_to_the_other_side(arch, ulp, monkeypatch) -> None:
    """AITER's quantisation multiplies by a reciprocal; another compiler may give its last bit another value."""
    monkeypatch.setattr(gemm, "RECIPROCAL_ULP", ulp)
    result = self_check(AiterBackend(Platform(arch, ROCM)), shape(arch, None))
    assert result.ok, result.message

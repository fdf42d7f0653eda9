"""RoPE, quantisation and absorption against float64 in NumPy, from the formulas alone: nothing of ours is in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.sandbox.simulated_aiter.execute import encode
from vllm_aiter_mla.kernels import absorb, formats, reference

Array = np.ndarray[Any, np.dtype[np.float64]]
BIAS = {torch.float8_e4m3fn: 7, torch.float8_e4m3fnuz: 8}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
FOUR_BITS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
flavours = pytest.mark.parametrize("dtype", BIAS, ids=str)


def e4m3(codes: Any, dtype: torch.dtype) -> Array:
    """Decode bytes: sign, four bits of exponent, three of mantissa."""
    codes = np.asarray(codes, dtype=np.int64)
    sign, exponent, mantissa = 1 - 2 * (codes >> 7), codes >> 3 & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - BIAS[dtype])
    found: Array = sign * np.where(exponent > 0, normal, mantissa / 8 * 2.0 ** (1 - BIAS[dtype]))
    return found


@pytest.mark.parametrize("is_neox", [False, True])
def test_rope_is_the_rotation_by_position_times_frequency(is_neox: bool) -> None:
    width, tokens, heads = 64, 5, 3
    draw = np.random.default_rng(0)
    x = draw.standard_normal((tokens, heads, width)).astype(np.float32)
    angles = draw.integers(0, 4096, tokens)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = (slice(None, 32), slice(32, None)) if is_neox else (slice(0, None, 2), slice(1, None, 2))
    a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
    wanted = np.empty(x.shape)
    wanted[..., first], wanted[..., second] = a * cos - b * sin, b * cos + a * sin
    got = reference.rotate(torch.from_numpy(x), *(torch.from_numpy(one).float() for one in (cos, sin)), is_neox)
    np.testing.assert_allclose(got.double().numpy(), wanted, rtol=0, atol=2e-6)


ROUNDINGS = {
    "saturating": lambda x, dtype: formats.round_saturating(x, formats.FLAVOURS[dtype]),
    "overflowing": lambda x, dtype: formats.round_overflowing(x, formats.FLAVOURS[dtype]),
    "simulated": encode,
}


@flavours
@pytest.mark.parametrize("name", ROUNDINGS)
def test_quantisation_takes_the_nearest_code_and_the_even_one_of_two(dtype: torch.dtype, name: str) -> None:
    codes = np.arange(127 if dtype == torch.float8_e4m3fn else 128)  # the positive finite ones, in order
    levels = e4m3(codes, dtype)
    assert levels[-1] == LARGEST[dtype]
    draw = np.random.default_rng(1)
    middles = ((levels[1:] + levels[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(way)) for way in (-np.inf, np.inf)]
    most = LARGEST[dtype] * (2 if name == "saturating" else 1)
    values = np.concatenate([levels, middles, *beside, draw.uniform(0, most, 5000)])
    values = values.astype(np.float32).astype(np.float64)
    distance = np.abs(values[:, None] - levels)
    near = distance == distance.min(1, keepdims=True)
    wanted = np.where(near & (codes % 2 == 0), codes, -1).max(1)
    wanted = np.where(wanted >= 0, wanted, near.argmax(1))
    for sign, bit in ((1, 0), (-1, 128)):
        got = ROUNDINGS[name](torch.from_numpy(sign * values).float(), dtype)
        signed = np.where((wanted == 0) & (dtype == torch.float8_e4m3fnuz), 0, wanted + bit)  # it has one zero
        np.testing.assert_array_equal(got.view(torch.uint8).numpy(), signed)


def plain() -> tuple[absorb.AbsorbWeight, Array, Array]:
    """A weight, its values [N, P, L], and activations, each exact in its type."""
    draw = np.random.default_rng(2)
    w, q = (torch.from_numpy(draw.standard_normal(size)).bfloat16() for size in ((2, 128, 64), (3, 2, 128)))
    return absorb.AbsorbWeight("plain", w), w.double().numpy(), q.double().numpy()


def fp8(dtype: torch.dtype) -> tuple[absorb.AbsorbWeight, Array, Array]:
    """Activations are codes whose largest is the type's, so that their own quantisation changes none of them."""
    draw, last = np.random.default_rng(3), 126 if dtype == torch.float8_e4m3fn else 127
    codes = draw.integers(0, last, (2, 64, 256)) + 128 * draw.integers(0, 2, (2, 64, 256))
    codes = np.where(codes == 128, 0, codes).astype(np.uint8)
    q = e4m3(draw.integers(0, last, (3, 2, 256)), dtype)
    q[..., ::128] = LARGEST[dtype]
    weight = absorb.AbsorbWeight("fp8", torch.from_numpy(codes).view(dtype), torch.tensor([0.0371]))
    return weight, e4m3(codes, dtype).transpose(0, 2, 1) * float(torch.tensor(0.0371)), q


def mxfp4() -> tuple[absorb.AbsorbWeight, Array, Array]:
    """Two codes in a byte, the low one first; 32 values share a power of two."""
    draw = np.random.default_rng(4)
    codes, powers = draw.integers(0, 16, (2, 64, 128)), draw.integers(120, 134, (2, 64, 4))
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    q = FOUR_BITS[draw.integers(0, 16, (3, 2, 128))]
    q[..., ::32] = 6.0
    values = FOUR_BITS[codes] * np.repeat(2.0 ** (powers - 127), 32, -1)
    weight = absorb.AbsorbWeight("mxfp4", torch.from_numpy(packed), torch.from_numpy(powers.astype(np.uint8)))
    return weight, values.transpose(0, 2, 1), q


MADE = {"plain": plain, "mxfp4": mxfp4} | {str(one): lambda one=one: fp8(one) for one in BIAS}


@pytest.mark.parametrize("format_", MADE)
def test_absorption_is_the_product_with_the_decoded_weight(format_: str) -> None:
    weight, values, q = MADE[format_]()
    wanted = np.einsum("tnp,npl->tnl", q, values)
    got = weight.reference(torch.from_numpy(q).bfloat16()).double().numpy()
    # The sum is rounded to bf16 once; a float32 sum of 256 terms is off by far less, against the terms' own size.
    size = np.einsum("tnp,npl->tnl", np.abs(q), np.abs(values))
    assert (np.abs(got - wanted) <= 2.0**-8 * np.abs(wanted) + 2.0**-18 * size).all()


@pytest.mark.mutation
@pytest.mark.parametrize("subject", ["rope", "quantisation", "absorption"])
def test_mutation_of_each_reference_is_seen_against_float64(monkeypatch: pytest.MonkeyPatch, subject: str) -> None:
    rotate, quantise, product = reference.rotate, formats.round_saturating, absorb.absorb_plain
    if subject == "rope":
        monkeypatch.setattr(reference, "rotate", lambda x, cos, sin, neox: rotate(x, cos, -sin, neox))
        with pytest.raises(AssertionError, match="Mismatched elements"):
            test_rope_is_the_rotation_by_position_times_frequency(True)
    elif subject == "quantisation":
        monkeypatch.setattr(formats, "round_saturating", lambda x, flavour: quantise(x * (1 + 2**-6), flavour))
        with pytest.raises(AssertionError, match="Mismatched elements"):
            test_quantisation_takes_the_nearest_code_and_the_even_one_of_two(torch.float8_e4m3fn, "saturating")
    else:
        monkeypatch.setattr(absorb, "absorb_plain", lambda q, w: product(q, w.flip(0)))
        with pytest.raises(AssertionError, match="all"):
            test_absorption_is_the_product_with_the_decoded_weight("plain")

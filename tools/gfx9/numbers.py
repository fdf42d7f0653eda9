"""Float arithmetic of the vector unit that numpy lacks. Arrays are over lanes, float32 unless said otherwise."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from vllm_aiter_mla.kernels import formats
from vllm_aiter_mla.kernels.platform import CARDS

Array = Any  # np.ndarray or a numpy scalar that stands for 64 equal lanes
# The bit of a float32 that tells a quiet NaN from a signalling one.
QUIET = np.uint32(1 << 22)
# The 16 values of e2m1.
FP4 = np.array([sign * x for sign in (1, -1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding to float32.

    The product of two float32 is exact in float64. The sum is rounded there to odd, which has more than two bits to
    spare, so that rounding it again to float32 rounds the exact sum (Boldo and Melquiond, 2008).
    """
    product = np.atleast_1d(np.multiply(a, b, dtype=np.float64))
    addend = np.broadcast_to(np.asarray(c, np.float64), product.shape)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (lost != 0) & (bits & 1 == 0)
    if inexact.any():
        step = np.where((lost > 0) == (total > 0), 1, -1)
        total = np.where(inexact, bits + step, bits).view(np.float64)
    return total.astype(np.float32)


def least(a: Array, b: Array) -> Array:
    """The lesser operand, the number where the other one is a quiet NaN; -0 is less than +0.

    Where one is a signalling NaN the result is that NaN made quiet, as AMD's pseudo-code has it with IEEE on.
    """
    lesser_zero = np.where(np.signbit(a), a, b)
    found = np.where((a == 0) & (b == 0), lesser_zero, np.fmin(a, b)).astype(np.float32)
    for x in (b, a):
        nan = np.isnan(x)
        if nan.any():
            bits = np.asarray(x, np.float32).view(np.uint32)
            found = np.where(nan & (bits & QUIET == 0), (bits | QUIET).view(np.float32), found)
    return found


def greatest(a: Array, b: Array) -> Array:
    """The greater operand, the number where the other one is a quiet NaN; +0 is greater than -0. Else as ``least``."""
    return -least(-a, -b)


def med3(a: Array, b: Array, c: Array) -> Array:
    """The greatest but one, of zeros as they compare; ``least`` of all where one of them is a NaN."""
    top = greatest(greatest(a, b), c)
    median = np.where(top == a, greatest(b, c), np.where(top == b, greatest(a, c), greatest(a, b)))
    some_nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(some_nan, least(least(a, b), c), median).astype(np.float32)


def exponent(x: Array) -> Array:
    return (np.asarray(x, np.float32).view(np.uint32) >> np.uint32(23) & np.uint32(0xFF)).astype(np.int64)


def div_scale(s0: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """Operand of a division scaled away from overflow and denormals, and the lanes whose quotient is scaled back."""
    s0, d, n = (np.broadcast_to(np.asarray(x, np.float32), (64,)) for x in (s0, denominator, numerator))
    tiny = np.float64(2.0**-126)

    def denormal(x: Array) -> Array:
        return (x != 0) & (np.abs(x) < tiny)

    quotient, inverse = np.divide(n, d, dtype=np.float64), np.divide(1.0, d, dtype=np.float64)
    up, down = np.ldexp(s0, 64), np.ldexp(s0, -64)
    cases = [
        (n == 0) | (d == 0),
        exponent(n) - exponent(d) >= 96,
        denormal(d),
        denormal(inverse) & denormal(quotient),
        denormal(inverse),
        denormal(quotient),
        exponent(n) <= 23,
    ]
    of_d, of_n = np.where(s0 == d, up, s0), np.where(s0 == n, up, s0)
    values = [np.full(64, np.nan, np.float32), of_d, up, of_d, down, of_n, up]
    scaled_back = np.select(cases, [np.full(64, k in (1, 3, 5)) for k in range(7)], False)
    return np.select(cases, values, s0).astype(np.float32), scaled_back


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The quotient with the sign and the special cases of n / d."""
    q, d, n = (np.broadcast_to(np.asarray(x, np.float32), (64,)) for x in (quotient, denominator, numerator))
    sign = np.where(np.signbit(d) ^ np.signbit(n), np.float32(-1), np.float32(1))
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    cases = [
        np.isnan(n) | np.isnan(d) | ((d == 0) & (n == 0)) | (np.isinf(d) & np.isinf(n)),
        (d == 0) | np.isinf(n),
        np.isinf(d) | (n == 0),
        exponent(n) - exponent(d) < -150,
    ]
    return np.select(cases, [nan, sign * inf, sign * 0, sign * 0], sign * np.abs(q)).astype(np.float32)


def to_uint(x: Array) -> Array:
    """Toward zero, clamped to 0 and 2^32 - 1; a NaN gives 0."""
    wide = np.nan_to_num(np.trunc(np.asarray(x, np.float64)), nan=0.0, posinf=2.0**32, neginf=0.0)
    return np.clip(wide, 0, 2.0**32 - 1).astype(np.uint32)


def bf16_bits(x: Array) -> Array:
    """float32 to the bits of bfloat16, nearest even; a NaN stays a quiet NaN. uint32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits.astype(np.uint64) + np.uint64(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint64(16)
    quiet = bits >> np.uint32(16) | np.uint32(0x40)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint32)


def from_bf16(bits: Array) -> Array:
    """The low 16 bits as bfloat16 to float32."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


@lru_cache(maxsize=2)
def fp8_values(arch: str) -> Array:
    """The 256 values of the card's e4m3. float32."""
    return torch.arange(256, dtype=torch.uint8).view(CARDS[arch]).float().numpy()


def fp8_bits(x: Array, arch: str, saturate: bool) -> Array:
    """float32 to the card's e4m3, nearest even, in uint32 [64]. Overflow gives the largest value or a NaN."""
    flavour = formats.FLAVOURS[CARDS[arch]]
    values = torch.from_numpy(np.broadcast_to(np.asarray(x, np.float32), (64,)).copy())
    stored = formats.round_saturating(values, flavour, True) if saturate else formats.round_overflowing(values, flavour)
    return stored.view(torch.uint8).numpy().astype(np.uint32)

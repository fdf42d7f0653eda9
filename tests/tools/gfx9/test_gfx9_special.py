"""Opcodes that are no plain entry of a table: divisions, conversions, packed and 64-bit ones, encodings, matrices."""

import math
from fractions import Fraction

import numpy as np
import pytest

from tests.tools.gfx9.gfx9_lanes import execute, fill, nearest_float32, source, wave
from tools.gfx9 import numbers


@pytest.mark.parametrize(
    ("a", "b", "c"), [(1 + 2.0**-23, 1.0, 2.0**-24), (2.0**-12, 2.0**-12 + 2.0**-35, 1.0), (-(2.0**-90), 1.0, 1.0)]
)
def test_gfx9_fma_rounds_once_where_float64_would_round_twice(a, b, c):
    """The second and the third differ from a tie of float32 by less than float64 holds."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    assert (numbers.fma(*(np.full(64, x, np.float32) for x in (a, b, c))) == nearest_float32(exact)).all()


@pytest.mark.parametrize("d", [0.37, 0.061, 1.0, 3.0, 7e-9, 123456.7, 2.0**-14 * 1.1, -0.3])
@pytest.mark.parametrize("error", [-1, 0, 1])
def test_gfx9_division_sequence_is_correctly_rounded_whatever_the_last_bit_of_rcp(d, error):
    w = wave()
    w.put(w.f, 1, np.float32(d))
    execute(w, "v_div_scale_f32 v2, s[2:3], v1, v1, 1.0", "v_rcp_f32_e32 v3, v2")
    execute(w, "v_div_scale_f32 v4, vcc, 1.0, v1, 1.0")
    w.u[3] += np.uint32(error % 2**32)
    execute(w, "v_fma_f32 v5, -v2, v3, 1.0", "v_fmac_f32_e32 v3, v5, v3", "v_mul_f32_e32 v5, v4, v3")
    execute(w, "v_fma_f32 v6, -v2, v5, v4", "v_fmac_f32_e32 v5, v6, v3", "v_fma_f32 v2, -v2, v5, v4")
    execute(w, "v_div_fmas_f32 v2, v2, v3, v5", "v_div_fixup_f32 v2, v2, v1, 1.0")
    assert w.f[2][0] == nearest_float32(1 / Fraction(float(np.float32(d))))


@pytest.mark.parametrize(
    ("n", "d", "of_d", "of_n", "scaled_back"),
    [
        (1.0, 3.0, 3.0, 1.0, False),
        (2.0**100, 2.0**-10, 2.0**54, 2.0**100, True),
        (2.0**-60, 2.0**-130, 2.0**-66, 16.0, False),
        (2.0**-110, 1.0, 2.0**64, 2.0**-46, False),
        (1.0, 0.0, math.nan, math.nan, False),
    ],
)
def test_gfx9_div_scale_follows_the_manual(n, d, of_d, of_n, scaled_back):
    for operand, expected in ((d, of_d), (n, of_n)):
        with np.errstate(all="ignore"):
            value, mask = numbers.div_scale(np.float32(operand), np.float32(d), np.float32(n))
        assert value[0] == np.float32(expected) or (math.isnan(expected) and math.isnan(value[0]))
        assert bool(mask[0]) == scaled_back


@pytest.mark.parametrize(("name", "kind"), [("v_mad_u64_u32", "u32"), ("v_mad_i64_i32", "i32")])
def test_gfx9_mad64_has_a_65th_bit_and_leaves_undefined_what_it_was_given_undefined(name, kind):
    w = wave()
    (_, a), (_, b) = source(w, kind, 0, 1), source(w, kind, 2, 2)
    _, c = source(w, kind[0] + "64", 4, 3)
    execute(w, f"{name} v[20:21], s[20:21], v0, v2, v[4:5]")
    for lane, (x, y, z) in enumerate(zip(a, b, c, strict=True)):
        exact = x * y + z
        assert int(w.u[20][lane]) | int(w.u[21][lane]) << 32 == exact % 2**64
        assert (w.scalar64(20) >> lane & 1) == exact // 2**64 % 2
    w.known[5] = 0
    execute(w, f"{name} v[20:21], s[20:21], v0, v2, v[4:5]")
    assert (w.known[20], w.known[21], w.s[20]) == ((1 << 64) - 1, 0, None)


@pytest.mark.parametrize("table", [0x36, 0xC8, 0x78, 0xEC, 0x01, 0xFF, 0x00])
@pytest.mark.parametrize("width", [16, 32])
def test_gfx9_bitop3_is_its_truth_table(table, width):
    w = wave("gfx950")
    sources = [source(w, f"u{width}", k, k)[1] for k in range(3)]
    execute(w, f"v_bitop3_b{width} v20, v0, v1, v2 bitop3:{table:#x}")
    for got, a, b, c in zip(w.u[20], *sources, strict=True):
        digits = [table >> (4 * (a >> k & 1) + 2 * (b >> k & 1) + (c >> k & 1)) & 1 for k in range(width)]
        assert int(got) % 2**width == sum(digit << k for k, digit in enumerate(digits))


def accumulator(w, side):
    """Registers from v40 on, each with its own number in all lanes: their text."""
    for register in range(side * side // 64):
        w.put(w.f, 40 + register, np.float32(100 + register))
    return f"v[40:{39 + side * side // 64}]"


def assert_product(w, a, b, accumulated):
    """``a`` times the transpose of ``b``, both [side, K], lies in the registers from v40 on."""
    side = a.shape[0]
    register, lane = np.arange(side * side // 64)[:, None], np.arange(64)
    row = 8 * (register // 4) + 4 * (lane // 32) + register % 4 if side == 32 else 4 * (lane // 16) + register
    expected = (a @ b.T)[row, lane % side] + (100 + register) * accumulated
    assert (w.f[40 : 40 + len(register)] == expected.astype(np.float32)).all()


def fill_lanes(w, first, elements):
    """Define the registers from ``first`` on by elements [side, 64 // side, those of a lane]."""
    by_lane = elements.swapaxes(0, 1).reshape(64, -1)
    for register, words in enumerate(by_lane.view(np.uint32).T):
        fill(w, first + register, words)


def pack(values, kind, arch):
    """float32 to the bits of one element, by numpy's or the project's own rounding; the values are exact in all."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    table = numbers.fp8_values(arch)
    return np.array([int(np.flatnonzero(table == x)[0]) for x in values.ravel()], np.uint8).reshape(values.shape)


@pytest.mark.parametrize(
    ("arch", "side", "depth", "kind"),
    [
        ("gfx942", 16, 16, "f16"),
        ("gfx942", 16, 32, "fp8_fp8"),
        ("gfx950", 16, 32, "fp8_fp8"),
        ("gfx950", 16, 128, "f8f6f4"),
    ],
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_gfx9_mfma_is_the_product_of_its_layout(arch, side, depth, kind, accumulate):
    rng = np.random.default_rng(depth)
    a, b = (rng.integers(-8, 9, (side, depth)).astype(np.float32) for _ in range(2))
    size = 2 if kind == "f16" else 1
    each, count = 4 // size, side * depth * size // 256
    w = wave(arch)
    for first, matrix in ((0, a), (16, b)):
        # Lane l has row l % side of A, or column of B, and every next value of k in it.
        fill_lanes(w, first, pack(matrix, kind, arch).reshape(side, 64 // side, count * each))
    last = accumulator(w, side)
    sources = f"v[0:{count - 1}], v[16:{15 + count}], {last if accumulate else 0}"
    execute(w, f"v_mfma_f32_{side}x{side}x{depth}_{kind} {last}, {sources}")
    assert_product(w, a, b, accumulate)


def scaled(side, rng, first, at, byte, w):
    """A random fp4 source in registers ``first`` on, its scales in a byte of register ``at``. float64 [side, K].

    As Triton's layout of scaled MFMA has it: lane l holds the l // side-th 32 values of row l % side, and their scale.
    """
    torch = pytest.importorskip("torch")
    from vllm_aiter_mla.kernels import formats

    codes = rng.integers(0, 256, (side, 2048 // side // 2), np.uint8)
    scales = rng.integers(118, 135, (side, 64 // side), np.uint8)
    words = rng.integers(0, 255, (64, 4), np.uint8)
    words[:, byte] = scales.T.ravel()
    fill(w, at, words.view(np.uint32)[:, 0])
    fill_lanes(w, first, codes.reshape(side, 64 // side, 16))
    return formats.dequantise_mxfp4(torch.from_numpy(codes), torch.from_numpy(scales)).double().numpy()


@pytest.mark.parametrize("side", [16, 32])
@pytest.mark.parametrize(
    ("selects", "bytes_"), [("op_sel:[0,1,0] op_sel_hi:[1,1,0]", (2, 3)), ("op_sel:[1,1,0] op_sel_hi:[1,0,0]", (3, 1))]
)
def test_gfx9_scaled_mfma_is_the_product_of_the_scaled_values(side, selects, bytes_):
    rng, w = np.random.default_rng(side), wave("gfx950")
    a, b = (scaled(side, rng, 8 * k, 20 + k, bytes_[k], w) for k in (0, 1))
    last = accumulator(w, side)
    shape = f"{side}x{side}x{2048 // side}"
    execute(w, f"v_mfma_scale_f32_{shape}_f8f6f4 {last}, v[0:3], v[8:11], {last}, v20, v21 {selects} cbsz:4 blgp:4")
    assert_product(w, a, b, True)

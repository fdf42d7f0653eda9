"""The matrix instructions: a product by hand, element by element, through the layout of lanes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tools.gfx9.gfx9_lanes import execute, fill, wave
from tools.gfx9 import numbers
from tools.gfx9.parse import Fault

SIZES = {"bf16": 2, "f16": 2, "fp8_fp8": 1, "f8f6f4": 1}


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


def pack(values, kind, arch):
    """float32 to the bits of one element, by numpy's or the project's own rounding; the values are exact in all."""
    if kind == "bf16":
        return numbers.bf16_bits(values).astype(np.uint16)
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    table = numbers.fp8_values(arch == "gfx942")
    return np.array([int(np.flatnonzero(table == x)[0]) for x in values.ravel()], np.uint8).reshape(values.shape)


@pytest.mark.parametrize(
    ("arch", "side", "depth", "kind"),
    [
        ("gfx942", 16, 16, "bf16"),
        ("gfx942", 32, 8, "bf16"),
        ("gfx950", 16, 32, "bf16"),
        ("gfx950", 32, 16, "bf16"),
        ("gfx942", 16, 16, "f16"),
        ("gfx942", 16, 32, "fp8_fp8"),
        ("gfx942", 32, 16, "fp8_fp8"),
        ("gfx950", 16, 32, "fp8_fp8"),
        ("gfx950", 16, 128, "f8f6f4"),
        ("gfx950", 32, 64, "f8f6f4"),
    ],
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_gfx9_mfma_is_the_product_of_its_layout(arch, side, depth, kind, accumulate):
    rng = np.random.default_rng(depth)
    a, b = (rng.integers(-8, 9, (side, depth)).astype(np.float32) for _ in range(2))
    size = SIZES[kind]
    each, count = 4 // size, side * depth * size // 256
    w = wave(arch)
    for first, matrix in ((0, a), (16, b)):
        codes = pack(matrix, kind, arch)
        for lane in range(64):
            # Lane l has row l % side of A, or column of B, and every next value of k in it.
            k = depth * side // 64 * (lane // side)
            row = np.ascontiguousarray(codes[lane % side, k : k + count * each])
            w.v[first : first + count, lane] = row.view(np.uint32)
        for register in range(first, first + count):
            w.known[register] = (1 << 64) - 1
    last = accumulator(w, side)
    sources = f"v[0:{count - 1}], v[16:{15 + count}], {last if accumulate else 0}"
    execute(w, f"v_mfma_f32_{side}x{side}x{depth}_{kind} {last}, {sources}")
    assert_product(w, a, b, accumulate)


SHAPES = {16: "16x16x128", 32: "32x32x64"}


def scaled(side, rng, first, at, byte, w):
    """A random fp4 source in registers ``first`` on, its scales in a byte of register ``at``. float64 [side, K].

    As Triton's layout of scaled MFMA has it: lane l holds the l // side-th 32 values of row l % side, and their scale.
    """
    torch = pytest.importorskip("torch")
    from vllm_aiter_mla.kernels import formats

    codes = rng.integers(0, 256, (side, 2048 // side // 2), np.uint8)
    scales = rng.integers(118, 135, (side, 64 // side), np.uint8)
    words = rng.integers(0, 255, (64, 4), np.uint8)
    for lane in range(64):
        row, block = lane % side, lane // side
        w.v[first : first + 4, lane] = codes[row, 16 * block : 16 * block + 16].view(np.uint32)
        words[lane, byte] = scales[row, block]
    for register in range(first, first + 4):
        w.known[register] = (1 << 64) - 1
    fill(w, at, words.view(np.uint32)[:, 0])
    return formats.dequantise_mxfp4(torch.from_numpy(codes), torch.from_numpy(scales)).double().numpy()


@pytest.mark.parametrize("side", [16, 32])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("selects", "bytes_"),
    [
        ("", (0, 0)),
        ("op_sel_hi:[0,0,0]", (0, 0)),
        ("op_sel:[1,0,0] op_sel_hi:[0,1,0]", (1, 2)),
        ("op_sel:[0,1,0] op_sel_hi:[1,1,0]", (2, 3)),
        ("op_sel:[1,1,0] op_sel_hi:[1,0,0]", (3, 1)),
    ],
)
def test_gfx9_scaled_mfma_is_the_product_of_the_scaled_values(side, accumulate, selects, bytes_):
    rng, w = np.random.default_rng(side), wave("gfx950")
    a, b = (scaled(side, rng, 8 * k, 20 + k, bytes_[k], w) for k in (0, 1))
    last = accumulator(w, side)
    sources = f"v[0:3], v[8:11], {last if accumulate else 0}, v20, v21"
    execute(w, f"v_mfma_scale_f32_{SHAPES[side]}_f8f6f4 {last}, {sources} {selects} cbsz:4 blgp:4")
    assert_product(w, a, b, accumulate)


def test_gfx9_scaled_mfma_by_a_scale_that_is_no_number_faults():
    w = wave("gfx950")
    for register in range(10):
        fill(w, register, 255)
    with pytest.raises(Fault, match="a scale that is no number"):
        execute(w, "v_mfma_scale_f32_16x16x128_f8f6f4 v[12:15], v[0:3], v[4:7], 0, v8, v9 cbsz:4 blgp:4")

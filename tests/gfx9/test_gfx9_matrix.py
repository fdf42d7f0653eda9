"""The matrix instructions: a product by hand, element by element, through the layout of lanes."""

from __future__ import annotations

import numpy as np
import pytest
from gfx9_lanes import execute, wave

from tools.gfx9 import numbers

KINDS = {"bf16": (2, 1), "f16": (2, 1), "fp8_fp8": (1, 1), "f8f6f4": (1, 1)}


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
    size = KINDS[kind][0]
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
    results = side * side // 64
    for register in range(results):
        w.put(w.f, 40 + register, np.float32(100 + register))
    suffix = {"f16": "x16_f16", "bf16": f"x{depth}_bf16", "fp8_fp8": f"x{depth}_fp8_fp8", "f8f6f4": f"x{depth}_f8f6f4"}[
        kind
    ]
    last = f"v[40:{39 + results}]"
    execute(
        w, f"v_mfma_f32_{side}x{side}{suffix} {last}, v[0:{count - 1}], v[16:{15 + count}], {last if accumulate else 0}"
    )
    for register in range(results):
        for lane in range(64):
            row = 8 * (register // 4) + 4 * (lane // 32) + register % 4 if side == 32 else 4 * (lane // 16) + register
            expected = float(a[row] @ b[lane % side]) + (100 + register if accumulate else 0)
            assert w.f[40 + register][lane] == expected

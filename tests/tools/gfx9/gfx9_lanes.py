"""One instruction on one wave, for the tests of the opcodes; and exact arithmetic to compare with."""

from fractions import Fraction

import numpy as np

from tools.gfx9.lds import Lds
from tools.gfx9.machine import Group, bind
from tools.gfx9.memory import Memory
from tools.gfx9.operand import signed
from tools.gfx9.parse import instruction
from tools.gfx9.wave import Wave

EDGES = [0, 1, 2, 7, 31, 32, 63, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
EDGES += [0x0C0B0A09, 0x07060504, 0xFF0D0801]
FLOAT_EDGES = [0x0, 0x80000000, 0x3F800000, 0xBF800000, 0x1, 0x807FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000]
FLOAT_EDGES += [0x7FC00000, 0x43700000, 0x4B800001, 0x33800000]


def wave(arch: str = "gfx942", lds_bytes: int = 1024, number: int = 0) -> Wave:
    """A wave with nothing defined but EXEC."""
    return Wave(number, 128, Group(Memory(), Lds(lds_bytes)), arch)


def execute(w: Wave, *lines: str) -> Wave:
    with np.errstate(all="ignore"):
        for line in lines:
            bind(instruction(line))(w)
    return w


def fill(w: Wave, register: int, values: object) -> None:
    """Define one VGPR: one value or 64."""
    w.put(w.u, register, np.asarray(values, np.int64).astype(np.uint32))


def bits(kind: str, seed: int) -> np.ndarray:
    """64 lanes of edge cases and random values, shuffled by ``seed``."""
    rng = np.random.default_rng(seed)
    edges = FLOAT_EDGES if kind == "f32" else EDGES
    small = np.array([0, 1, 5, 17, 40], np.uint32)
    free = rng.integers(0, 1 << 32, 64, dtype=np.uint32)
    if kind == "f32":
        free = rng.normal(0, 4, 64).astype(np.float32).view(np.uint32)
    pool = np.concatenate((np.array(edges, np.uint32), small if kind != "f32" else free[:5], free))
    return rng.permutation(pool[:64])


def nearest_float32(exact: Fraction) -> float:
    """The float32 nearest to ``exact``, ties to even; overflow is not asked for."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    near = [x for x in near if np.isfinite(x)]
    return float(min(near, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1)))


def source(w: Wave, kind: str, at: int, seed: int) -> tuple[str, list]:
    """Define an operand of ``kind``: its text, and its value in each lane. Of u16 the upper half is no zero."""
    if kind == "mask":
        w.set_scalar64(10, 0xF0F0_1234_5678_9ABC)
        return "s[10:11]", [bool(0xF0F0_1234_5678_9ABC >> lane & 1) for lane in range(64)]
    low = bits(kind, seed)
    fill(w, at, low)
    if kind in ("u64", "i64"):
        high = bits("u32", seed + 50)
        high[::3] = bits("u32", 7)[::3]  # equal upper halves in some lanes
        fill(w, at + 1, high)
        values = [int(h) << 32 | int(x) for h, x in zip(high, low, strict=True)]
        return f"v[{at}:{at + 1}]", [signed(x, 64) for x in values] if kind == "i64" else values
    if kind == "u16":
        return f"v{at}", [int(x) & 0xFFFF for x in low]
    if kind == "f32":
        return f"v{at}", [float(x) for x in low.view(np.float32)]
    return f"v{at}", [signed(int(x), 32) if kind == "i32" else int(x) for x in low]

"""The matrix unit: which lane holds which element, and the product.

Assumed, not in the manual: the products of one instruction are added exactly, with the accumulator, and rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tools.gfx9 import numbers
from tools.gfx9.operand import Operands
from tools.gfx9.parse import Fault, Instruction
from tools.gfx9.wave import ALL, Wave

# Element type: bits, and how [registers, 64] uint32 become float32 [registers, 64, elements of a register].
ELEMENTS: dict[str, tuple[int, Callable[[np.ndarray, str], np.ndarray]]] = {
    "bf16": (16, lambda raw, arch: numbers.from_bf16(_split(raw, np.uint16))),
    "f16": (16, lambda raw, arch: _split(raw, np.float16).astype(np.float32)),
    # Both sources e4m3; a modifier that says otherwise is refused. Which k a lane holds cannot matter: A and B agree.
    "f8f6f4": (8, lambda raw, arch: numbers.fp8_values(arch)[_split(raw, np.uint8)]),
    "fp8": (8, lambda raw, arch: numbers.fp8_values(arch)[_split(raw, np.uint8)]),
    "fp4": (4, lambda raw, arch: numbers.FP4[raw[..., None] >> NIBBLES & np.uint32(15)]),
}
NAME = re.compile(r"v_mfma_f32_(16x16|32x32)x(\d+)_(bf16|f16|fp8_fp8|f8f6f4)(?:_1k)?")
SCALED = re.compile(r"v_mfma_scale_f32_(16x16|32x32)x(\d+)_f8f6f4")
NAN_SCALE = 255
FP4 = 4  # as cbsz (of A) and blgp (of B) write it; 0 to 3 are fp8, bf8, fp6 and bf6
NIBBLES = np.arange(0, 32, 4, dtype=np.uint32)
Scale = Callable[[Wave], np.ndarray]


def _split(raw: np.ndarray, kind: Any) -> np.ndarray:
    return np.ascontiguousarray(raw).view(kind).reshape(*raw.shape, -1)


def places(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of D, C [registers, 64] for a ``side`` x ``side`` tile."""
    lane = np.arange(64)
    registers = np.arange(side * side // 64)[:, None]
    row = 8 * (registers // 4) + 4 * (lane // 32) + registers % 4 if side == 32 else 4 * (lane // 16) + registers
    return row, np.broadcast_to(lane % side, row.shape)


def unpack(elements: np.ndarray, side: int) -> np.ndarray:
    """[registers, 64, per register] to [side, K]: lane l holds K / groups consecutive elements of row l % side."""
    registers, _, each = elements.shape
    grouped = elements.reshape(registers, 64 // side, side, each)
    return grouped.transpose(2, 1, 0, 3).reshape(side, -1)


def bind_mfma(i: Instruction, ops: Operands) -> Callable[[Wave], None]:
    """D = A B + C. A and B as ``unpack`` says (B by columns), D and C as ``places``."""
    if SCALED.fullmatch(i.name):
        return _bind_scaled(i, ops)
    found = NAME.fullmatch(i.name)
    if found is None:
        raise i.refuse("the matrix instruction is not modelled")
    ops.count(4)
    i.only()
    return _product(i, ops, int(found[1][:2]), int(found[2]), found[3].split("_")[0], (_one, _one))


def _bind_scaled(i: Instruction, ops: Operands) -> Callable[[Wave], None]:
    """gfx950, fp4 alone: D = (A scaled) (B scaled) + C.

    The 32 values of A, or of B, that a lane holds are consecutive along K, and a byte of the fifth operand, or the
    sixth, in that very lane is their scale. op_sel has the low bit of the byte's number, op_sel_hi the high one. Other
    formats spread the values of a lane over two blocks of 32.
    """
    found = SCALED.fullmatch(i.name)
    assert found is not None
    ops.count(6)
    i.only("op_sel", "op_sel_hi", "cbsz", "blgp")
    if (i.number("cbsz"), i.number("blgp")) != (FP4, FP4):
        raise i.refuse("other formats than fp4 for both sources are not modelled")
    low, high = i.flags("op_sel", (0, 0, 0)), i.flags("op_sel_hi", (0, 0, 0))
    if low[2] or high[2]:
        raise i.refuse("op_sel of the accumulator is not modelled")
    scales = tuple(scale(ops.reg(4 + k, "v", 1), low[k] + 2 * high[k]) for k in (0, 1))
    return _product(i, ops, int(found[1][:2]), int(found[2]), "fp4", scales)


def scale(register: int, byte: int) -> Scale:
    """e8m0 in one byte of each lane: 2**(byte - 127). float64 [64]."""

    def read(w: Wave) -> np.ndarray:
        w.need(register, ALL)
        exponent = (w.u[register] >> np.uint32(8 * byte) & np.uint32(255)).astype(np.int32)
        if (exponent == NAN_SCALE).any():
            raise Fault("a scale that is no number is not modelled")
        return np.ldexp(1.0, exponent - 127)

    return read


def _one(w: Wave) -> np.ndarray:
    return np.ones(64)


def _product(i: Instruction, ops: Operands, side: int, depth: int, kind: str, scales: Sequence[Scale]) -> Any:
    """What the instruction does; ``scales`` of the lanes of A and of B."""
    bits, decode = ELEMENTS[kind]
    sources, results = side * depth * bits // (64 * 32), side * side // 64
    d, a, b = ops.reg(0, "v", results), ops.reg(1, "v", sources), ops.reg(2, "v", sources)
    c = None if i.operands[3] == "0" else ops.reg(3, "v", results)
    row, column = places(side)

    def matrix(w: Wave, first: int, lane_scales: Scale) -> np.ndarray:
        for register in range(first, first + sources):
            w.need(register, ALL)
        return unpack(decode(w.v[first : first + sources], w.arch) * lane_scales(w)[:, None], side)

    def run(w: Wave) -> None:
        w.need_all_lanes(i.name)
        product = (matrix(w, a, scales[0]) @ matrix(w, b, scales[1]).T)[row, column]
        if c is not None:
            for register in range(c, c + results):
                w.need(register, ALL)
            product = product + w.v[c : c + results].view(np.float32)
        for register, values in enumerate(product.astype(np.float32)):
            w.put(w.f, d + register, values)

    return run

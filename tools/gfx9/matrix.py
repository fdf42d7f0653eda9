"""The matrix unit: which lane holds which element, and the product.

Assumed, not in the manual: the products of one instruction are added exactly, with the accumulator, and rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.gfx9 import numbers
from tools.gfx9.errors import Fault
from tools.gfx9.operand import Operands
from tools.gfx9.parse import Instruction
from tools.gfx9.vector import FNUZ
from tools.gfx9.wave import ALL, Wave

# Element type: bytes, and how [registers, 64] uint32 become float32 [registers, 64, elements of a register].
ELEMENTS: dict[str, tuple[int, Callable[[np.ndarray, str], np.ndarray]]] = {
    "bf16": (2, lambda raw, arch: numbers.from_bf16(_split(raw, np.uint16))),
    "f16": (2, lambda raw, arch: _split(raw, np.float16).astype(np.float32)),
    # Both sources e4m3; a modifier that says otherwise is refused. Which k a lane holds cannot matter: A and B agree.
    "f8f6f4": (1, lambda raw, arch: numbers.fp8_values(FNUZ[arch])[_split(raw, np.uint8)]),
    "fp8": (1, lambda raw, arch: numbers.fp8_values(FNUZ[arch])[_split(raw, np.uint8)]),
}
NAME = re.compile(r"v_mfma_f32_(16x16|32x32)x(\d+)_(bf16|f16|fp8_fp8|f8f6f4)(?:_1k)?")


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
    found = NAME.fullmatch(i.name)
    if found is None:
        raise i.refuse("the matrix instruction is not modelled")
    ops.count(4)
    i.only()
    side, depth, kind = int(found.group(1)[:2]), int(found.group(2)), found.group(3).split("_")[0]
    size, decode = ELEMENTS[kind]
    sources, results = side * depth * size // 64 // 4, side * side // 64
    d, a, b = ops.reg(0, "v", results), ops.reg(1, "v", sources), ops.reg(2, "v", sources)
    constant = i.operands[3] == "0"
    c = None if constant else ops.reg(3, "v", results)
    row, column = places(side)

    def matrix(w: Wave, first: int) -> np.ndarray:
        for register in range(first, first + sources):
            w.need(register, ALL)
        return unpack(decode(w.v[first : first + sources], w.arch), side).astype(np.float64)

    def run(w: Wave) -> None:
        if w.exec != ALL:
            raise Fault(f"{i.name} with inactive lanes is not modelled")
        product = (matrix(w, a) @ matrix(w, b).T)[row, column]
        if c is not None:
            for register in range(c, c + results):
                w.need(register, ALL)
            product = product + w.v[c : c + results].view(np.float32)
        for register, values in enumerate(product.astype(np.float32)):
            w.put(w.f, d + register, values)

    return run

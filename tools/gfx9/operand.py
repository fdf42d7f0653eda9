"""How an instruction reads and writes: registers, inline constants, literals, and the types of the opcode tables.

A type is one of u16 (the low half of a register) u32 i32 f32 u64 i64 (a value in each lane), mask (a lane mask in two
SGPRs), and for the scalar unit s.u32 s.i32 s.u64 s.i64.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.gfx9.parse import Instruction
from tools.gfx9.wave import EXEC, M0, VCC, Wave, lanes_of, mask_of

Read = Callable[[Wave], Any]
Write = Callable[[Wave, Any], None]

NAMED = {"vcc": (VCC, 2), "exec": (EXEC, 2), "m0": (M0, 1)}
NAMED |= {f"{name}_{half}": (NAMED[name][0] + k, 1) for name in ("vcc", "exec") for k, half in enumerate(("lo", "hi"))}
FLOATS = {"0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0"}
NUMPY: dict[str, Any] = {"u32": np.uint32, "i32": np.int32, "f32": np.float32, "u64": np.uint64, "i64": np.int64}
ROWS = {"u32": "u", "i32": "i", "f32": "f"}

# Above 16 bits that it writes an instruction leaves zeros or what was there; of v_bitop3_b16 no manual says which. This
# stands there instead, so that code which rests on either gives other bytes.
LOW, ABOVE = np.uint32(0xFFFF), np.uint32(0xBAAD0000)


@dataclass(frozen=True)
class Register:
    """``count`` registers from ``index``; ``bank`` is "v" (AGPRs included, behind the VGPRs) or "s"."""

    bank: str
    index: int
    count: int


def register(text: str, accum_offset: int) -> Register | None:
    if text in NAMED:
        return Register("s", *NAMED[text])
    found = re.fullmatch(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\])", text)
    if found is None:
        return None
    bank, one, first, last = found.groups()
    index, count = (int(one), 1) if one else (int(first), int(last) - int(first) + 1)
    if bank == "s" and index + count > 102:
        return None
    return Register("s" if bank == "s" else "v", index + (accum_offset if bank == "a" else 0), count)


class Operands:
    """Reads and writes the operands of one instruction; refuses those that do not fit."""

    def __init__(self, instruction: Instruction, accum_offset: int = 0) -> None:
        self.instruction, self.accum_offset = instruction, accum_offset

    def count(self, *allowed: int) -> None:
        """Refuse another number of operands."""
        if len(self.instruction.operands) not in allowed:
            raise self.instruction.refuse(f"{' or '.join(map(str, allowed))} operands expected")

    def reg(self, position: int, bank: str, count: int) -> int:
        """The first register of an operand that has to be ``count`` registers of ``bank``."""
        text = self.instruction.operands[position]
        found = register(text, self.accum_offset)
        if found is None or (found.bank, found.count) != (bank, count):
            raise self.instruction.refuse(f"{text}: {count} registers of bank {bank} expected")
        return found.index

    def read(self, text: str, kind: str) -> Read:
        """How to read ``text`` as ``kind``.

        Raises:
            Skipped: no such operand, of another width, or with a sign modifier where the type has none.
        """
        if kind.startswith("s."):
            return self._scalar(text, kind[2:])
        if kind == "u16":
            whole = self.read(text, "u32")
            return lambda w: whole(w) & LOW
        bare, negate, absolute = signs(text)
        if (negate or absolute) and kind != "f32":
            raise self.instruction.refuse(f"{text}: a sign modifier of {kind} is not modelled")
        plain = self._mask(bare) if kind == "mask" else self._vector(bare, kind)
        if not (negate or absolute):
            return plain
        sign = -1 if negate else 1
        if absolute:
            return lambda w: np.copysign(plain(w), np.float32(sign))
        return lambda w: -plain(w)

    def write(self, text: str, kind: str) -> Write:
        """How to write ``text`` as ``kind``; a mask keeps the active lanes alone, as a comparison does."""
        found = register(text, self.accum_offset)
        wide = kind.endswith("64") or kind == "mask"
        bank = "s" if kind == "mask" or kind.startswith("s.") else "v"
        if found is None or (found.bank, found.count) != (bank, 2 if wide else 1):
            raise self.instruction.refuse(f"{text}: cannot be written as {kind}")
        index = found.index
        if kind == "mask":
            return lambda w, x: w.set_scalar64(index, mask_of(np.broadcast_to(x, (64,))) & w.exec)
        if bank == "s":
            return (lambda w, x: w.set_scalar64(index, x)) if wide else (lambda w, x: w.set_scalar(index, x))
        if wide:
            return lambda w, x: put64(w, index, x)
        if kind == "u16":
            return lambda w, x: w.put(w.u, index, x & LOW | ABOVE)
        rows = ROWS[kind]
        return lambda w, x: w.put(getattr(w, rows), index, x)

    def _scalar(self, text: str, kind: str) -> Read:
        found = register(text, self.accum_offset)
        wide = kind.endswith("64")
        if found is None:
            bits = self.constant(text, wide)
            value = bits if kind[0] == "u" else signed(bits, 64 if wide else 32)
            return lambda w: value
        if found.bank != "s" or found.count != (2 if wide else 1):
            raise self.instruction.refuse(f"{text}: cannot be read as {kind}")
        index, read = found.index, Wave.scalar64 if wide else Wave.scalar
        if kind[0] == "u":
            return lambda w: read(w, index)
        return lambda w: signed(read(w, index), 64 if wide else 32)

    def _vector(self, text: str, kind: str) -> Read:
        found = register(text, self.accum_offset)
        wide = kind.endswith("64")
        if found is None:
            constant = (np.uint64 if wide else np.uint32)(self.constant(text, wide)).view(NUMPY[kind])
            return lambda w: constant
        if found.count != (2 if wide else 1):
            raise self.instruction.refuse(f"{text}: cannot be read as {kind}")
        index = found.index
        if found.bank == "s":
            if wide:
                return lambda w: np.uint64(w.scalar64(index)).view(NUMPY[kind])
            return lambda w: np.uint32(w.scalar(index)).view(NUMPY[kind])
        if wide:
            return lambda w: get64(w, index).view(NUMPY[kind])
        return _rows(index, ROWS[kind])

    def _mask(self, text: str) -> Read:
        found = register(text, self.accum_offset)
        if found is None or found.bank != "s" or found.count != 2:
            raise self.instruction.refuse(f"{text}: a lane mask in two SGPRs expected")
        index = found.index
        return lambda w: lanes_of(w.scalar64(index))

    def constant(self, text: str, wide: bool) -> int:
        """The bits of an inline constant or a literal, as 32 or 64."""
        if text in FLOATS:
            if wide:
                raise self.instruction.refuse(f"{text}: a float constant of 64 bits is not modelled")
            return int(np.float32(text).view(np.uint32))
        try:
            value = int(text, 0)
        except ValueError:
            raise self.instruction.refuse(f"{text}: the operand is not modelled") from None
        if wide and not -16 <= value <= 64:
            # How a 32-bit literal is widened differs between opcodes; below 2^31 it cannot matter.
            if not 0 <= value < 1 << 31:
                raise self.instruction.refuse(f"{text}: a literal of 64 bits is not modelled")
        elif not -(1 << 31) <= value < 1 << 32:
            raise self.instruction.refuse(f"{text}: more than 32 bits")
        return value & ((1 << (64 if wide else 32)) - 1)


def signs(text: str) -> tuple[str, bool, bool]:
    """An operand without its sign modifiers, and whether it is negated and made absolute."""
    negate = text.startswith("-") and not text[1:2].isdigit()
    bare = text[1:] if negate else text
    return bare.strip("|"), negate, bare.startswith("|")


def signed(bits: int, width: int) -> int:
    return bits - (1 << width) if bits >> (width - 1) else bits


def get64(w: Wave, index: int, upper: bool = True) -> np.ndarray:
    """Two VGPRs as uint64; without ``upper`` the caller deals with lanes whose upper half is undefined."""
    w.need(index)
    if upper:
        w.need(index + 1)
    return w.u[index + 1].astype(np.uint64) << np.uint64(32) | w.u[index]


def put64(w: Wave, index: int, value: Any) -> None:
    bits = np.asarray(value).astype(np.uint64)
    w.put(w.u, index, (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    w.put(w.u, index + 1, (bits >> np.uint64(32)).astype(np.uint32))


def _rows(index: int, rows: str) -> Read:
    def read(w: Wave) -> Any:
        if w.exec & ~w.known[index]:
            w.need(index)
        return getattr(w, rows)[index]

    return read

"""The state of one wave: registers, what of them is defined, and what is on its way to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tools.gfx9.parse import Fault

LANES = 64
ALL = (1 << LANES) - 1
VCC, M0, EXEC = 106, 124, 126
VMEM, LGKM = 0, 1
MEMORY, ARGUMENTS = 0, 1
LOAD, STORE, SCALAR, SHARED = "load", "store", "scalar load", "LDS access"


@lru_cache(maxsize=4096)
def lanes_of(mask: int) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(mask.to_bytes(8, "little"), np.uint8), bitorder="little").astype(bool)
    bits.flags.writeable = False
    return bits


def mask_of(lanes: np.ndarray) -> int:
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


@dataclass(slots=True, eq=False)
class Pending:
    """A memory access that has been issued and not been waited for."""

    kind: str
    registers: Sequence[int] = ()
    values: Any = ()
    mask: int = 0
    touched: Any = None
    trip: tuple[int, int] = (MEMORY, 0)


class Wave:
    """Registers of 64 lanes.

    ``s`` holds SGPRs as Python integers, None where undefined; 106/107 is VCC, 124 M0, 126/127 EXEC. ``u``, ``i`` and
    ``f`` are the VGPRs as rows of uint32, int32 and float32, one storage; ``known`` holds per VGPR the lanes that are
    defined, ``half`` those whose low and high 16 bits are. ``trips`` counts the round trips to memory, and to
    the arguments, that the wave has waited for one after another; loads that are under way together are one.
    ``stored`` is that count at the last store.
    """

    def __init__(self, number: int, vgprs: int, group: Any, arch: str) -> None:
        self.number, self.group, self.arch = number, group, arch
        self.s: list[int | None] = [None] * 128
        self.v = np.full((vgprs, LANES), 0xBAADF00D, np.uint32)
        self.u = list(self.v)
        self.i = list(self.v.view(np.int32))
        self.f = list(self.v.view(np.float32))
        self.known = [0] * vgprs
        self.half = ([0] * vgprs, [0] * vgprs)
        self.scc: int | None = None
        self.saturate = False  # MODE.FP16_OVFL
        self.flying: dict[int, int] = {}
        self.flying_scalars: set[int] = set()
        self.pending: tuple[deque[Pending], deque[Pending]] = (deque(), deque())
        self.trips, self.stored = [0, 0], (0, 0)
        self.set_exec(ALL)

    # Scalars --------------------------------------------------------------------------------------------------------

    def scalar(self, index: int) -> int:
        """One SGPR."""
        value = self.s[index]
        if value is None:
            why = "is still being loaded" if index in self.flying_scalars else "is undefined"
            raise Fault(f"s{index} {why}")
        return value

    def scalar64(self, index: int) -> int:
        """Two SGPRs."""
        return self.scalar(index) | self.scalar(index + 1) << 32

    def set_scalar(self, index: int, value: int) -> None:
        """Write 32 bits."""
        if index in self.flying_scalars:
            raise Fault(f"s{index} is written while a load to it is in flight")
        self.s[index] = value & 0xFFFFFFFF
        if index >= EXEC:
            self.set_exec(self.scalar64(EXEC))

    def set_scalar64(self, index: int, value: int) -> None:
        """Write 64 bits."""
        if index == EXEC:
            self.set_exec(value & ALL)
            return
        self.set_scalar(index, value)
        self.set_scalar(index + 1, value >> 32)

    def set_exec(self, mask: int) -> None:
        """EXEC, with what is derived from it."""
        self.s[EXEC], self.s[EXEC + 1] = mask & 0xFFFFFFFF, mask >> 32
        self.exec = mask
        self.active = lanes_of(mask)

    # Vectors --------------------------------------------------------------------------------------------------------

    def need(self, register: int, mask: int | None = None) -> None:
        """Fault where a lane that is read is undefined."""
        missing = (self.exec if mask is None else mask) & ~self.known[register]
        if missing:
            why = "is still being loaded" if self.flying.get(register, 0) & missing else "is undefined"
            raise Fault(f"v{register} {why} in lanes {missing:#x}")

    def need_all_lanes(self, what: str) -> None:
        """Fault where a lane is inactive."""
        if self.exec != ALL:
            raise Fault(f"{what} with inactive lanes is not modelled")

    def put(self, rows: list[Any], register: int, value: Any) -> None:
        """Write the active lanes of ``rows[register]``; ``rows`` is ``u``, ``i`` or ``f``."""
        if self.flying and self.flying.get(register, 0) & self.exec:
            raise Fault(f"v{register} is written while a load to it is in flight")
        np.copyto(rows[register], value, where=self.active)
        self.known[register] |= self.exec

    def put_half(self, register: int, value: Any, high: bool) -> None:
        """Write 16 bits of the active lanes and keep the others; a register is defined when both halves are."""
        old = self.u[register]
        kept = old & np.uint32(0xFFFF) | value << np.uint32(16) if high else old & np.uint32(0xFFFF0000) | value
        known, halves = self.known[register], self.half
        self.put(self.u, register, kept)
        for side in (0, 1):
            halves[side][register] |= known
        halves[high][register] |= self.exec
        self.known[register] = halves[0][register] & halves[1][register]

    # What is in flight ----------------------------------------------------------------------------------------------

    def issue_load(self, counter: int, kind: str, registers: Sequence[int], values: Any, touched: Any = None) -> None:
        """Undefine the active lanes of ``registers`` until a wait covers the load. ``values`` [len(registers)][64]."""
        mask = self.exec
        for register in registers:
            if self.flying.get(register, 0) & mask:
                raise Fault(f"two loads to v{register} are in flight")
            self.flying[register] = self.flying.get(register, 0) | mask
            self.known[register] &= ~mask
            self.half[0][register] &= ~mask
            self.half[1][register] &= ~mask
        trip = (MEMORY, self.trips[MEMORY] + 1 if kind == LOAD else 0)
        self.pending[counter].append(Pending(kind, registers, values, mask, touched, trip))

    def issue_store(self, counter: int, kind: str, touched: Any = None) -> None:
        """Count a store; its data was read when it was issued."""
        self.pending[counter].append(Pending(kind, touched=touched))
        if kind == STORE:
            self.stored = (self.trips[MEMORY], self.trips[ARGUMENTS])

    def issue_scalar_load(self, first: int, words: Sequence[int], source: int = MEMORY) -> None:
        """Undefine SGPRs until a wait covers the load; ``source`` is MEMORY or ARGUMENTS."""
        registers, trip = range(first, first + len(words)), (source, self.trips[source] + 1)
        for index in registers:
            if index in self.flying_scalars:
                raise Fault(f"two loads to s{index} are in flight")
            self.flying_scalars.add(index)
            self.s[index] = None
        self.pending[LGKM].append(Pending(SCALAR, registers, words, trip=trip))

    def wait(self, counter: int, left: int) -> None:
        """Complete what a count of at most ``left`` proves complete.

        Vector memory and LDS complete in order. Scalar loads complete in any order: of them a wait for 0 alone proves
        anything, and of the LDS accesses beside them as many as can be left are left.
        """
        queue = self.pending[counter]
        if left == 0:
            while queue:
                self.complete(queue.popleft())
            return
        ordered = [entry for entry in queue if entry.kind != SCALAR]
        for entry in ordered[: max(0, len(ordered) - left)]:
            queue.remove(entry)
            self.complete(entry)

    def complete(self, entry: Pending) -> None:
        """What was loaded is there."""
        source, trip = entry.trip
        self.trips[source] = max(self.trips[source], trip)
        if entry.kind == SCALAR:
            for index, word in zip(entry.registers, entry.values, strict=True):
                self.flying_scalars.discard(index)
                self.s[index] = int(word)
            return
        where: Any = True if entry.mask == ALL else lanes_of(entry.mask)
        for register, row in zip(entry.registers, entry.values, strict=True):
            np.copyto(self.u[register], row, where=where)
            self.known[register] |= entry.mask
            self.flying[register] &= ~entry.mask
            if not self.flying[register]:
                del self.flying[register]


Run = Callable[[Wave], None]
"""What one instruction does to a wave."""

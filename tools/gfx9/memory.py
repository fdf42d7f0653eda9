"""The buffers of a launch in one address space, and what may be read and written of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.gfx9.parse import Fault

FIRST_ADDRESS = 0x7F00_0000_0000


@dataclass
class Region:
    """One buffer."""

    name: str  # the operand's
    start: int  # address of its first byte
    data: np.ndarray  # its bytes, as they are in the launch; a multiple of 4
    readable: np.ndarray  # per byte 255 where the launch may read it
    writable: np.ndarray  # per byte 255 where the launch may write it


class Memory:
    """Finds the buffer of an address; everything between buffers faults."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._next = FIRST_ADDRESS

    def add(self, name: str, data: np.ndarray, readable: Any = False, writable: Any = False) -> Region:
        """Place bytes (a 1-D uint8 array, shared with the caller) at an address of their own, 256-byte aligned.

        ``readable`` and ``writable`` are booleans, one or one per byte.
        """
        masks = [np.broadcast_to(m, data.shape).astype(np.uint8) * np.uint8(255) for m in (readable, writable)]
        region = Region(name, self._next, data, *masks)
        self._next += (len(data) + (1 << 20) + 4095) & ~4095
        self.regions.append(region)
        return region

    def find(self, first: int, last: int) -> Region:
        """The buffer that holds addresses ``first`` to ``last``."""
        for region in self.regions:
            if region.start <= first and last < region.start + len(region.data):
                return region
        raise Fault(f"addresses {first:#x} to {last:#x} are in no buffer")

    def load(self, addresses: np.ndarray, words: int, size: int = 4) -> np.ndarray:
        """[lanes, words] of ``size`` bytes each, from consecutive addresses after each lane's."""
        data, index = self._allowed(addresses, words, size, "read")
        return data[index]

    def store(self, addresses: np.ndarray, values: np.ndarray, size: int = 4) -> None:
        """Write ``values`` [lanes, words]."""
        data, index = self._allowed(addresses, values.shape[1], size, "write")
        data[index] = values

    def _allowed(self, addresses: np.ndarray, words: int, size: int, verb: str) -> tuple[np.ndarray, np.ndarray]:
        """The buffer in words of ``size`` bytes, and which of them are accessed; a fault where one may not be."""
        region = self.find(int(addresses.min()), int(addresses.max()) + words * size - 1)
        offset = addresses - region.start
        if (offset % size).any():
            raise Fault(f"{region.name}: an access of {size}-byte words at an address that is no multiple")
        index, kind = (offset // size)[:, None] + np.arange(words), {1: np.uint8, 2: np.uint16, 4: np.uint32}[size]
        bad = (region.readable if verb == "read" else region.writable).view(kind)[index] != np.iinfo(kind).max
        if bad.any():
            raise Fault(f"{region.name}: byte {int(index[bad][0]) * size} of the buffer is not one to {verb}")
        return region.data.view(kind), index

"""The LDS of one workgroup: its bytes, and the races between its waves."""

from __future__ import annotations

from typing import Any

import numpy as np

from tools.gfx9.parse import Fault

NEVER = -1


class Lds:
    """``size`` bytes, undefined at first.

    Between two barriers a byte that one wave writes is no other wave's to touch. An access that has not been waited for
    when its wave passes a barrier belongs to the time after the barrier too.
    """

    def __init__(self, size: int) -> None:
        self.data = np.zeros(size, np.uint8)
        self.time = 0
        self.written_at = np.full(size, NEVER, np.int32)
        self.writer = np.zeros(size, np.int32)
        self.read_at = np.full(size, NEVER, np.int32)
        self.readers = np.zeros(size, np.uint32)

    def index(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """[lanes, width] positions of the ``width`` bytes from each of ``addresses`` on; words are aligned."""
        if (addresses & (min(width, 4) - 1)).any():
            raise Fault(f"LDS: an address that is no multiple of {min(width, 4)}")
        index = addresses[:, None] + np.arange(width)
        outside = index >= len(self.data)
        if outside.any():
            raise Fault(f"LDS: byte {int(index[outside].min())} of {len(self.data)}")
        return index

    def load(self, wave: int, index: np.ndarray) -> np.ndarray:
        """The bytes at ``index``."""
        written = self.written_at[index]
        if (written == NEVER).any():
            raise Fault(f"LDS: byte {int(index[written == NEVER][0])} is read before it is written")
        self.mark_read(wave, index)
        return self.data[index]

    def store(self, wave: int, index: np.ndarray, values: np.ndarray) -> None:
        """Write ``values``, bytes of the shape of ``index``."""
        self.mark_written(wave, index)
        self.data[index] = values

    def mark_read(self, wave: int, index: np.ndarray) -> None:
        """Note a read now; a fault where another wave writes the same byte between the same barriers."""
        raced = (self.written_at[index] == self.time) & (self.writer[index] != wave)
        if raced.any():
            raise Fault(f"LDS race: wave {wave} reads byte {int(index[raced][0])}, which another wave writes")
        seen = np.where(self.read_at[index] == self.time, self.readers[index], np.uint32(0))
        self.readers[index] = seen | np.uint32(1 << wave)
        self.read_at[index] = self.time

    def mark_written(self, wave: int, index: np.ndarray) -> None:
        """Note a write now; a fault where another wave touches the same byte between the same barriers."""
        others = np.uint32(~(1 << wave) & 0xFFFFFFFF)
        raced = (self.read_at[index] == self.time) & (self.readers[index] & others != 0)
        raced |= (self.written_at[index] == self.time) & (self.writer[index] != wave)
        if raced.any():
            raise Fault(f"LDS race: wave {wave} writes byte {int(index[raced][0])}, which another wave touches")
        self.written_at[index] = self.time
        self.writer[index] = wave

    def barrier(self, waves: Any) -> None:
        """All waves have arrived: what is still in flight may happen after the barrier too."""
        self.time += 1
        for wave in waves:
            for entry in wave.pending[1]:
                if entry.touched is not None:
                    writes, index = entry.touched
                    (self.mark_written if writes else self.mark_read)(wave.number, index)

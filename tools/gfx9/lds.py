"""The LDS of one workgroup: its bytes, the races between its waves, its bank conflicts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tools.gfx9.parse import Fault

# 4-byte banks. 64 on gfx950, whose LDS reads 128 bytes more a clock.
BANKS = {"gfx942": 32, "gfx950": 64}
NEVER = -1


class Lds:
    """``size`` bytes, undefined at first.

    Between two barriers a byte that one wave writes is no other wave's to touch. An access that has not been waited for
    when its wave passes a barrier belongs to the time after the barrier too.
    """

    def __init__(self, size: int, arch: str) -> None:
        self.data = np.zeros(size, np.uint8)
        self.banks = BANKS[arch]
        self.time = 0
        self.written_at = np.full(size, NEVER, np.int32)
        self.writer = np.zeros(size, np.int32)
        self.read_at = np.full(size, NEVER, np.int32)
        self.readers = np.zeros(size, np.uint32)
        self.conflicts = 0
        self.accesses = 0

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
        self._count(index)
        return self.data[index]

    def store(self, wave: int, index: np.ndarray, values: np.ndarray) -> None:
        """Write ``values``, bytes of the shape of ``index``."""
        self.mark_written(wave, index)
        self._count(index)
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

    def _count(self, index: np.ndarray) -> None:
        self.accesses += 1
        words = (index[:, ::4] >> 2).astype(np.int32)
        self.conflicts += conflicts(words.tobytes(), words.shape[1], self.banks)


@lru_cache(maxsize=65536)
def conflicts(index: bytes, words: int, banks: int) -> int:
    """Cycles that an access of ``words`` words a lane, at the positions ``index``, takes beyond its least number.

    As modelled, so many neighbouring lanes are served together as fill the banks once; a bank gives one word a cycle,
    to every lane that wants that very word.
    """
    positions = np.frombuffer(index, np.int32).reshape(-1, words)
    lanes, extra = max(1, banks // words), 0
    for first in range(0, len(positions), lanes):
        wanted = np.unique(positions[first : first + lanes])
        extra += int(np.bincount(wanted % banks).max()) - 1
    return extra

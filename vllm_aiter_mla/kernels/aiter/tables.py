"""The cos and sin halves AITER reads, made contiguous once per rotary table.

vLLM keeps one table [max_position, R] per rotary embedding, cos beside sin, shared by all layers. AITER takes two
tables and reads their rows densely whatever their stride, so ``table.chunk(2, -1)`` handed over as it is would be
silent garbage. Copying per call would cost a launch per layer and step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_aiter_mla.kernels.capture import KernelCaptureError

Halves = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class _Entry:
    storage: StorageWeakRef
    version: int
    halves: Halves


class TableHalves:
    """Contiguous halves of rotary tables, one pair per table, dropped when the table's storage is.

    The key is where the table lies and how it is laid out, not which Python object it is: a compiled graph hands over
    a new alias of the same storage at every call. A weak reference to the storage tells a table from a later one at
    the same address. A table overwritten in place is noticed by torch's version counter and copied again into the
    same halves, so that captured graphs see it too. A replaced or grown table is a new storage or address, hence a
    new entry. Two kinds of tensor cannot tell that they were overwritten, and must be replaced instead: inference
    tensors (no counter) and the aliases Inductor makes (a counter of their own, at zero).
    """

    def __init__(self, is_capturing: Callable[[], bool]) -> None:
        self._is_capturing = is_capturing
        self._entries: dict[tuple[Any, ...], _Entry] = {}
        self._latest: tuple[Callable[[], Any], int, Any, _Entry | None] = (lambda: None, 0, None, None)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of tables kept; freed ones count until they are removed."""
        return len(self._entries)

    def halves(self, table: torch.Tensor) -> Halves:
        """(cos, sin), each [max_position, R/2], contiguous, of ``table``'s dtype.

        Args:
            table: [max_position, R], any strides.

        Raises:
            KernelCaptureError: the halves must be made or refreshed while a graph is being captured.
        """
        version = 0 if table.is_inference() else table._version
        known, address, shape, entry = self._latest
        # The same object as before, and still the same memory: a key takes four times as long.
        if known() is not table or address != table.data_ptr() or shape != table.shape:
            entry = self._entries.get(_key(table))
            if entry is not None:
                self._latest = (weakref.ref(table), table.data_ptr(), table.shape, entry)
        if entry is not None and entry.version >= version and not entry.storage.expired():
            return entry.halves
        if self._is_capturing():
            raise KernelCaptureError(
                "the cos/sin table is new or was changed, and a graph is being captured: run the layer once outside "
                "the capture (warm-up) after every change of the table"
            )
        with self._lock:
            return self._renew(table, version)

    def _renew(self, table: torch.Tensor, version: int) -> Halves:
        self._entries = {key: entry for key, entry in self._entries.items() if not entry.storage.expired()}
        entry = self._entries.get(_key(table))
        cos, sin = table.chunk(2, dim=-1)
        if entry is None:
            entry = _Entry(StorageWeakRef(table.untyped_storage()), version, (cos.contiguous(), sin.contiguous()))
            self._entries[_key(table)] = entry
        elif entry.version < version:
            entry.halves[0].copy_(cos)
            entry.halves[1].copy_(sin)
            entry.version = version
        return entry.halves


def _key(table: torch.Tensor) -> tuple[Any, ...]:
    return (table.data_ptr(), table.shape, table.stride(), table.dtype)

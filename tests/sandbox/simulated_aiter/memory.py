"""Memory as a GPU kernel sees it: an address and a type, whatever shape the tensor claims."""

from __future__ import annotations

import os
from typing import NoReturn

import torch


def abort(message: str) -> NoReturn:
    """What AITER_CHECK does: a line on stderr and the end of the process; no exception to catch."""
    _die(f"[AITER] {message}")


def fault(what: str) -> NoReturn:
    """A GPU memory access fault ends the process as well."""
    _die(f"Memory access fault by GPU: {what}")


def _die(line: str) -> NoReturn:
    os.write(2, f"{line}\n".encode())  # past sys.stderr, which may be captured, as C++ does
    os.abort()


def reinterpret(
    tensor: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], what: str
) -> torch.Tensor:
    """The memory from ``tensor``'s address on as ``dtype`` with ``size`` and ``stride`` (in elements of ``dtype``).

    Aborts where that reaches past the storage.
    """
    start = tensor.storage_offset() * tensor.itemsize
    reach = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1 if 0 not in size else 0
    storage = tensor.untyped_storage()
    if start % dtype.itemsize or start + reach * dtype.itemsize > storage.nbytes():
        fault(f"{what}: {start + reach * dtype.itemsize} bytes read of {storage.nbytes()}")
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, start // dtype.itemsize, size, stride)


def dense(tensor: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...], what: str) -> torch.Tensor:
    """``reinterpret`` with packed rows: how AITER reads tables, slots, positions and scales."""
    stride = tuple(torch.empty(size, device="meta").stride())
    return reinterpret(tensor, dtype, size, stride, what)

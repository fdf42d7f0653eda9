"""Count launches, allocations and bytes as torch's dispatcher sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BODIES = ("vllm", "vllm_aiter_mla")
"""Namespaces whose ops are Python: they launch nothing themselves, what they call is counted."""
OVERWRITTEN = frozenset({"copy_", "fill_", "zero_", "index_copy_"})
"""In-place ops that do not read what they write."""
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

Bytes = Callable[..., int]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a step."""

    name: str  # of the kernel, the op or the allocation
    launches: int = 0  # kernels that a GPU would be given
    allocations: int = 0  # buffers asked of the allocator; none for a buffer without bytes
    moved: int = 0  # bytes that the launch has to read and write at least once
    captured: bool = False  # whether it happened inside a piece that a piecewise graph would have recorded


def size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's distinct elements: a broadcast dimension counts once."""
    elements = tensor.itemsize
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= length if stride else min(length, 1)
    return elements


def sizes(tensors: Iterable[Any]) -> int:
    """Return the bytes of all the tensors among the values."""
    return sum(size(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))


class Counter(TorchDispatchMode):
    """Record each op that runs under it as an ``Event``.

    A view costs nothing. An op that fills new storage is one launch and one allocation for each new buffer. An op of
    ``BODIES`` is entered; one that ``KERNELS`` names is one launch with the bytes its function computes, whatever the
    CPU does inside it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.captured = False
        self._paused = False

    def note(self, name: str, launches: int = 0, allocations: int = 0, moved: int = 0) -> None:
        """Append an event, unless inside of what counts as one launch."""
        if not self._paused:
            self.events.append(Event(name, launches, allocations, moved, self.captured))

    @contextmanager
    def inside_a_piece(self) -> Iterator[None]:
        """Mark what happens now as recorded by a piecewise graph."""
        before, self.captured = self.captured, True
        try:
            yield
        finally:
            self.captured = before

    def one_launch(
        self, name: str, function: Callable[..., Any], bytes_of: Bytes, allocations: int = 0
    ) -> Callable[..., Any]:
        """Return ``function`` as one launch: what it does on a CPU is not counted.

        ``bytes_of`` is given the result and the arguments.
        """

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before, self._paused = self._paused, True
            try:
                result = function(*args, **kwargs)
                moved = bytes_of(result, *args, **kwargs)
            finally:
                self._paused = before
            self.note(name, 1, allocations, moved)
            return result

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        if self._paused:
            return func(*args, **kwargs)
        if name.partition("::")[0] in BODIES:
            with self:
                result = func.redispatch(_CPU, *args, **kwargs)
            self.note(name)
            return result
        if bytes_of := KERNELS.get(name):
            self.note(name, 1, 0, bytes_of(*args, **kwargs))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._note_op(func._schema, args, kwargs, result)
        return result

    def _note_op(self, schema: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = list(_given(schema, args, kwargs))
        written = [value for value, is_write in given if is_write]
        read = [value for value, is_write in given if not is_write]
        fresh = _storages(result)
        for known in _storages([args, kwargs]):
            fresh.pop(known, None)
        filled = [value for value in (*written, *fresh.values()) if value.numel()]
        allocations = sum(value.numel() > 0 for value in fresh.values())
        name = schema.name.partition("::")[2]
        if name.startswith(("empty", "new_empty")):
            self.note(schema.name, 0, allocations)
        elif filled:
            has_out = any(argument.is_out for argument in schema.arguments)
            again = 0 if name in OVERWRITTEN or has_out else sizes(written)
            self.note(schema.name, 1, allocations, sizes(read) + sizes(filled) + again)


def _given(schema: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield each tensor among the arguments, and whether the op writes it."""
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    for argument in schema.arguments:
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        for value in tree_leaves(named.get(argument.name)):
            if isinstance(value, torch.Tensor):
                yield value, is_write


def _storages(values: Any) -> dict[int, torch.Tensor]:
    return {value.untyped_storage()._cdata: value for value in tree_leaves(values) if isinstance(value, torch.Tensor)}


# Bytes of the kernels that a CPU runs in many steps. Rows count as the kernel handles them: of a table, a cache or a
# slot mapping only the rows of this batch are read and written.


def rotary(positions: torch.Tensor, query: torch.Tensor, key: Any, *rest: Any) -> int:
    """``rotary_embedding``: query and key are read and written, with one row of the table per position."""
    table = rest[1]
    return 2 * sizes((query, key)) + size(positions) + positions.numel() * size(table[:1])


def rope_and_write(*args: Any) -> int:
    """``concat_and_cache_mla_rope_fused``: q_pe and k_pe are read and written, and the KV row of each slot.

    The kernel returns before it touches k_pe, kv_c and the cache where the slot is negative.
    """
    positions, q_pe, k_pe, kv_c, table, _, slots, cache, *_ = args
    rows = slots.numel()
    rotated = 2 * size(q_pe[:rows]) + rows * size(table[:1]) + size(positions[:rows])
    return rotated + _real(slots) * (2 * size(k_pe[:1]) + size(kv_c[:1])) + write(slots, cache)


def rope_prepare_and_write(*args: Any) -> int:
    """``fused_qk_rope_concat_and_cache_mla``: the query is read and its prepared form written, and the KV rows."""
    q_latent, q_pe, kv_c, k_pe, cache, q_out, slots, _, _, positions, cos, sin, *_ = args
    rows = slots.numel()
    query = sizes((q_latent[:rows], q_pe[:rows], q_out[:rows], positions[:rows]))
    return query + rows * sizes((cos[:1], sin[:1])) + _real(slots) * sizes((kv_c[:1], k_pe[:1])) + write(slots, cache)


def concat_and_write(kv_c: torch.Tensor, k_pe: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> int:
    """``concat_and_cache_mla``: rotated keys are read, the KV row of each slot is written."""
    return _real(slots) * sizes((kv_c[:1], k_pe[:1])) + write(slots, cache)


def write(slots: torch.Tensor, cache: torch.Tensor) -> int:
    return size(slots) + _real(slots) * cache.shape[-1] * cache.itemsize


def _real(slots: torch.Tensor) -> int:
    return int((slots >= 0).sum())


KERNELS: dict[str, Bytes] = {
    "_C::rotary_embedding": rotary,
    "_C_cache_ops::concat_and_cache_mla_rope_fused": rope_and_write,
    "aiter::fused_qk_rope_concat_and_cache_mla": rope_prepare_and_write,
}
"""Bytes of one launch by the op's name. tools/ledger.py adds the Python functions that are one kernel on a GPU."""

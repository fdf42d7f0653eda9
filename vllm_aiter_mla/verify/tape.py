"""A recording of ATen calls that replays them on the same tensors: what a graph does, where there is no graph.

Replayed are the calls, with the tensor objects and the Python values they had when they were recorded. A branch, a
shape, a float read from a tensor: everything Python decided is frozen, and a result lands in the memory it had the
first time. Fresh memory is not initialised again, and views are not made again: both are addresses in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Calls that wait for the device, or whose result's shape depends on the device's data.
SYNCS = frozenset(
    f"aten.{name}"
    for name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim", "_unique2")
)
EMPTY = frozenset(f"aten.{name}" for name in ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"))


@dataclass(frozen=True, slots=True)
class Entry:
    """One call to repeat: ``fresh`` are the results that were new memory, by position among the results."""

    name: str
    run: Callable[[], Any]
    fresh: tuple[tuple[int, torch.Tensor], ...] = ()

    def replay(self) -> None:
        """Call again and put new results where the recorded ones lie."""
        leaves = tree_leaves(self.run())
        for index, target in self.fresh:
            target.copy_(leaves[index])


class Tape(TorchDispatchMode):
    """Records while it is entered; :meth:`replay` afterwards.

    Attributes:
        entries: what a replay repeats.
        syncs: names of the calls that would have waited for the device.
        shapes: (name, shape, bytes) of all fresh memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.syncs: list[str] = []
        self.shapes: list[tuple[str, tuple[int, ...], int]] = []
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and note it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._paused:
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = str(func.overloadpacket)
        given = _tensors((args, kwargs))
        if _synchronises(name, args, given):
            self.syncs.append(name)
        if name == "aten._local_scalar_dense":
            return
        owned = {tensor.untyped_storage()._cdata for tensor in given}
        leaves = tree_leaves(result)
        fresh = tuple(
            (i, leaf)
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in owned
        )
        self.shapes += [(name, tuple(leaf.shape), leaf.nbytes) for _, leaf in fresh]
        if name in EMPTY or not (fresh or func._schema.is_mutable):
            # An address, not work. Keep new memory alive, as a graph's pool does.
            self._kept = [*getattr(self, "_kept", []), *(leaf for _, leaf in fresh)]
            return
        self.entries.append(Entry(name, lambda: func(*args, **kwargs), fresh))

    def foreign(self, name: str, launch: Callable[[], Any]) -> Any:
        """Record a kernel launch that ATen does not see, as one call; what it does inside is not recorded."""
        self._paused = True
        try:
            result = launch()
        finally:
            self._paused = False
        self.entries.append(Entry(name, launch))
        return result

    def replay(self) -> None:
        """Repeat every entry in order."""
        for entry in self.entries:
            entry.replay()

    def names(self) -> list[str]:
        """What a replay launches, in order."""
        return [entry.name for entry in self.entries]


class Watch(TorchDispatchMode):
    """Notes the memory that ATen calls make while it is entered, and tells later how much of it is still held."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and note what is new."""
        result = func(*args, **(kwargs or {}))
        owned = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for leaf in _tensors(result):
            storage = leaf.untyped_storage()
            if storage._cdata not in owned:
                # A freed storage's address comes back: the newer one replaces it.
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_bytes(self) -> int:
        """Bytes of the noted memory that something still holds."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())


_active: list[Tape] = []


@contextmanager
def recording() -> Iterator[Tape]:
    """A new tape that records within the block; foreign launches find it through :func:`launch_foreign`."""
    tape = Tape()
    _active.append(tape)
    try:
        with tape:
            yield tape
    finally:
        _active.remove(tape)


def launch_foreign(name: str, launch: Callable[[], Any]) -> Any:
    """Run a launch that is no ATen call, on the tape that is recording, if any."""
    return _active[-1].foreign(name, launch) if _active else launch()


def _synchronises(name: str, args: Any, given: list[torch.Tensor]) -> bool:
    if name in SYNCS:
        return True
    if name in ("aten.index", "aten.index_put", "aten.index_put_"):
        # A boolean index is turned into a list of indices, whose length the host has to know.
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1]))
    if name == "aten._to_copy":
        return False
    return name == "aten.repeat_interleave" and len(given) > 1


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

"""A recording of ATen calls that replays them on the same tensors: what a graph does, where there is no graph.

Replayed are the calls, with the tensor objects and the Python values they had when they were recorded. A branch, a
shape, a float read from a tensor: everything Python decided is frozen, and a result lands in the memory it had the
first time. Fresh memory is not initialised again, and views are not made again: both are addresses in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
INDEXING = frozenset({"aten.index", "aten.index_put", "aten.index_put_"})
EMPTY = frozenset(f"aten.{name}" for name in ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"))


class Recording(TorchDispatchMode):
    """Records while it is entered; :meth:`replay` afterwards.

    Attributes:
        names: what a replay launches, in order.
        syncs: names of the calls that would have waited for the device.
        shapes: (name, shape) of all fresh memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.syncs: list[str] = []
        self.shapes: list[tuple[str, tuple[int, ...]]] = []
        self._calls: list[Callable[[], object]] = []
        self._kept: list[torch.Tensor] = []
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
        if _synchronises(name, args):
            self.syncs.append(name)
        if name == "aten._local_scalar_dense":
            return
        fresh = _fresh(args, kwargs, result)
        self.shapes += [(name, tuple(tensor.shape)) for tensor in fresh.values()]
        if name in EMPTY or not (fresh or func._schema.is_mutable):
            # Nothing to repeat: memory or a view. New memory is kept alive, as a graph's pool does.
            self._kept += fresh.values()
            return

        def again() -> None:
            leaves = tree_leaves(func(*args, **kwargs))
            for index, target in fresh.items():
                target.copy_(leaves[index])

        self._add(name, again)

    def _add(self, name: str, call: Callable[[], object]) -> None:
        self.names.append(name)
        self._calls.append(call)

    def foreign(self, name: str, launch: Callable[[], Any]) -> Any:
        """Record a kernel launch that ATen does not see, as one call; what it does inside is not recorded."""
        self._paused = True
        try:
            result = launch()
        finally:
            self._paused = False
        self._add(name, launch)
        return result

    def replay(self) -> None:
        """Repeat every call in order, and put new results where the recorded ones lie."""
        for call in self._calls:
            call()


class Watch(TorchDispatchMode):
    """Notes the memory that ATen calls make while it is entered, and tells later how much of it is still held."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and note what is new."""
        result = func(*args, **(kwargs or {}))
        for tensor in _fresh(args, kwargs, result).values():
            storage = tensor.untyped_storage()
            # A freed storage's address comes back: the newer one replaces it.
            self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_bytes(self) -> int:
        """Bytes of the noted memory that something still holds."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())


_active: list[Recording] = []


@contextmanager
def recording() -> Iterator[Recording]:
    """A new recording of the block; foreign launches find it through :func:`launch_foreign`."""
    made = Recording()
    _active.append(made)
    try:
        with made:
            yield made
    finally:
        _active.remove(made)


def launch_foreign(name: str, launch: Callable[[], Any]) -> Any:
    """Run a launch that is no ATen call, and record it where something records."""
    return _active[-1].foreign(name, launch) if _active else launch()


def _synchronises(name: str, args: Any) -> bool:
    if name in INDEXING:
        # A boolean index is turned into a list of indices, whose length the host has to know.
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1]))
    return name in SYNCS or (name == "aten.repeat_interleave" and len(_tensors(args)) > 1)


def _fresh(args: Any, kwargs: Any, result: Any) -> dict[int, torch.Tensor]:
    """Results that are new memory, by their position among the results."""
    owned = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
    return {
        index: leaf
        for index, leaf in enumerate(tree_leaves(result))
        if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in owned
    }


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

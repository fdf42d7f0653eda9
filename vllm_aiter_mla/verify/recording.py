"""A recording of ATen calls that repeats them on the same tensors, as a graph would.

A replay repeats the calls with the tensor objects and the Python values of the recording. Everything that Python
decided is frozen: a branch, a shape, a float read from a tensor. A result lands in the memory that it had the first
time. Fresh memory is not initialised again and views are not made again, because both are addresses in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

# Calls that wait for the device, or whose result's shape depends on the device's data.
SYNCS = frozenset(
    f"aten.{name}"
    for name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim", "_unique2")
)
INDEXING = frozenset({"aten.index", "aten.index_put", "aten.index_put_"})
EMPTY = frozenset(f"aten.{name}" for name in ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"))


class Recording(TorchDispatchMode):
    """Records while it is entered; :meth:`replay` afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []  # what a replay launches, in order
        self.syncs: list[str] = []  # calls that would have waited for the device
        self.shapes: list[tuple[str, tuple[int, ...]]] = []  # (call, shape) of all fresh memory
        self._calls: list[Callable[[], object]] = []
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and note it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
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

        self.names.append(name)
        self._calls.append(again)

    def foreign(self, name: str, launch: Callable[[], Any]) -> Any:
        """Record a kernel launch that ATen does not see, as one call; the calls inside it are not recorded."""
        with _disable_current_modes():
            result = launch()
        self.names.append(name)
        self._calls.append(launch)
        return result

    def replay(self) -> None:
        """Repeat every call in order, and put new results where the recorded ones are."""
        for call in self._calls:
            call()


def launch_foreign(name: str, launch: Callable[[], Any]) -> Any:
    """Run a launch that is no ATen call, and record it if a recording is under way."""
    mode = _get_current_dispatch_mode()
    return mode.foreign(name, launch) if isinstance(mode, Recording) else launch()


def _synchronises(name: str, args: Any) -> bool:
    if name in INDEXING:
        # A boolean index becomes a list of indices, and the host has to know its length.
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1]))
    return name in SYNCS or (name == "aten.repeat_interleave" and len(_tensors(args)) > 1)


def _fresh(args: Any, kwargs: Any, result: Any) -> dict[int, torch.Tensor]:
    """Return the results that are new memory, by their position among the results."""
    owned = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
    return {
        index: leaf
        for index, leaf in enumerate(tree_leaves(result))
        if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in owned
    }


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

# SPDX-License-Identifier: Apache-2.0
"""Capture and replay: by CUDA or HIP graphs on a GPU; elsewhere by repeating the recorded ATen calls of a step.

A recording repeats the calls with its tensor objects and Python values. Everything that Python decided is frozen: a
branch, a shape, a float read from a tensor. A result lands in the memory that it had the first time. Fresh memory is
not initialised again and views are not made again, because both are addresses in a graph.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.verify import launches
from vllm_aiter_mla.verify.layer import ModelStep, Segment
from vllm_aiter_mla.verify.results import GRAPH_ENGINE

# Calls that wait for the device, or whose result's shape depends on the device's data.
SYNCS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One launch of a recorded step."""

    name: str
    run: Callable[..., Any]  # an ATen call, or a function that is one kernel on a card
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    fresh: dict[int, torch.Tensor]  # the results that are new memory, by their position among the results

    def again(self) -> None:
        """Repeat the call, and put new results where the recorded ones are."""
        leaves = tree_leaves(self.run(*self.args, **self.kwargs))
        for index, target in self.fresh.items():
            target.copy_(leaves[index])


class Recording(TorchDispatchMode):
    """Records while it is entered; :meth:`replay` afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []  # what a replay launches, in order
        self.syncs: list[str] = []  # calls that would have waited for the device
        self.shapes: list[tuple[str, tuple[int, ...]]] = []  # (call, shape) of all fresh memory
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and note it."""
        name, kwargs = str(func.overloadpacket), kwargs or {}
        result = func(*args, **kwargs)
        if _synchronises(func, name, args):
            self.syncs.append(name)
        if name != "aten._local_scalar_dense":
            self.add(name, func, args, kwargs, result, func._schema.is_mutable)
        return result

    def add(
        self, name: str, run: Callable[..., Any], args: Any, kwargs: Any, result: Any, is_mutable: bool = True
    ) -> None:
        """Add a call that has run: a launch, unless it only made memory or a view."""
        fresh = _fresh(args, kwargs, result)
        self.shapes += [(name, tuple(tensor.shape)) for tensor in fresh.values()]
        if name.startswith(("aten.empty", "aten.new_empty")) or not (fresh or is_mutable):
            # Nothing to repeat. New memory is kept alive, as a graph's pool does.
            self._kept += fresh.values()
        else:
            self.calls.append(Call(name, run, args, kwargs, fresh))

    @property
    def names(self) -> tuple[str, ...]:
        """What a replay launches, in order."""
        return tuple(call.name for call in self.calls)

    def replay(self) -> None:
        """Repeat every call in order."""
        for call in self.calls:
            call.again()


def _synchronises(func: Any, name: str, args: Any) -> bool:
    if name in ("aten.index", "aten.index_put", "aten.index_put_"):
        # A boolean index becomes a list of indices, and the host has to know its length.
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1]))
    return not SYNCS.isdisjoint(func.tags)


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


class EagerEngine:
    """Eager replay on any device: the recorded ATen calls again, on the same tensors with the same Python values."""

    name = "eager replay"
    graphs = False
    device = "cpu"

    def capture(self, step: ModelStep, pool: str, side_stream: bool) -> ModelStep:
        """Return a step that has run before with its captured segments as graphs.

        Graphs with the same ``pool`` share its memory. ``side_stream`` captures on a stream of its own.
        """
        segments = []
        for segment in step.segments:
            if segment.captured:
                segments.append(self._record(segment, pool, side_stream))
            else:
                segment.run()
                segments.append(segment)
        return step._replace(segments=segments)

    def _record(self, segment: Segment, pool: str, side_stream: bool) -> Segment:
        recording = self.probe(segment)
        return Segment(True, recording.replay, recording.names)

    def probe(self, segment: Segment) -> Recording:
        """Run a segment once without a graph; return its host synchronisations and the memory that it makes."""
        with Recording() as recording:
            segment.run()
        return recording

    def memory(self) -> tuple[int, int]:
        """Return the bytes that tensors hold, and the bytes in use outside torch's allocator (0 on a CPU)."""
        gc.collect()
        storages = (each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()), 0


class GraphEngine(EagerEngine):
    """Real graphs on the installed card."""

    name = GRAPH_ENGINE
    graphs = True

    def __init__(self) -> None:
        self._pools: dict[str, Any] = {}
        self.device = card().torch_device

    def _record(self, segment: Segment, pool: str, side_stream: bool) -> Segment:
        card().synchronize()
        handle = self._pools.setdefault(pool, card().new_pool())
        graph = card().capture(segment.run, handle, side_stream)
        names: tuple[str, ...] | str
        try:
            names = launches.of_dot(launches.graph_dot(graph))
        except launches.DumpError as error:
            names = f"no list of launches: {error}"
        graph.instantiate()
        card().synchronize()
        return Segment(True, graph.replay, names)

    def probe(self, segment: Segment) -> Recording:
        """Run once with torch's synchronisation check on; inside a capture it would end the capture."""
        card().synchronize()
        try:
            with card().syncs_raise():
                return super().probe(segment)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            recording = Recording()
            recording.syncs.append(launches.first_line(error))
            return recording

    def memory(self) -> tuple[int, int]:
        """Return the bytes of tensors, and the bytes that code, other libraries and other processes use."""
        gc.collect()
        return card().memory()

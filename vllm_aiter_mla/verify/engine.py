"""Capture and replay: by CUDA or HIP graphs on a GPU; elsewhere by repeating the recorded ATen calls of a step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_aiter_mla.verify import launches
from vllm_aiter_mla.verify.recording import Recording
from vllm_aiter_mla.verify.steps import Outputs, Segment, Step


class CaptureError(RuntimeError):
    """A segment could not be captured; the message is the driver's or torch's own."""


@dataclass(slots=True)
class Graph:
    """One captured segment."""

    replay: Callable[[], None]
    launches: tuple[str, ...] | str  # names of what it launches, or why they are unknown


@dataclass(slots=True)
class Captured:
    """A captured step: what to call in order, the graphs among those calls, and the step's outputs."""

    calls: list[Callable[[], None]]
    graphs: list[Graph]
    outputs: Outputs

    def replay(self) -> None:
        """Take one step: replay every captured segment and run every eager one."""
        for call in self.calls:
            call()


class EagerEngine:
    """Eager replay on any device: the recorded ATen calls again, on the same tensors with the same Python values."""

    name = "eager replay"
    graphs = False
    device = "cpu"

    def capture(self, step: Step, pool: str, side_stream: bool) -> Captured:
        """Capture a step that has run before, each captured segment as a graph. Raises CaptureError.

        Graphs with the same ``pool`` share its memory. ``side_stream`` captures on a stream of its own.
        """
        captured = Captured([], [], step.outputs)
        for segment in step.segments:
            if segment.captured:
                captured.graphs.append(self._record(segment, pool, side_stream))
                captured.calls.append(captured.graphs[-1].replay)
            else:
                segment.run()
                captured.calls.append(segment.run)
        return captured

    def _record(self, segment: Segment, pool: str, side_stream: bool) -> Graph:
        made = self.probe(segment)
        return Graph(made.replay, tuple(made.names))

    def probe(self, segment: Segment) -> Recording:
        """Run a segment once without a graph; return its host synchronisations and the memory that it makes."""
        with Recording() as made:
            segment.run()
        return made

    def on_side_stream(self, run: Callable[[], None]) -> None:
        """Run on a stream of its own, ordered after what was enqueued; a CPU has only one."""
        run()

    def synchronize(self) -> None:
        """Wait for the device; a CPU is never behind."""

    def allocations(self) -> int | None:
        """Return how often memory was asked for; None here, because a repeated call makes temporaries."""
        return None

    def memory(self) -> tuple[int, int]:
        """Return the bytes that tensors hold, and the bytes in use outside torch's allocator (0 on a CPU)."""
        gc.collect()
        storages = (each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()), 0


class GraphEngine(EagerEngine):
    """Real graphs on torch's current GPU."""

    name = "graph capture"
    graphs = True
    device = "cuda"

    def __init__(self) -> None:
        self._pools: dict[str, Any] = {}

    def _record(self, segment: Segment, pool: str, side_stream: bool) -> Graph:
        torch.cuda.synchronize()
        handle = self._pools.setdefault(pool, torch.cuda.graph_pool_handle())
        # keep_graph keeps the graph next to its executable form, so that its launches can be counted.
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        current = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=handle, stream=torch.cuda.Stream() if side_stream else None):
                segment.run()
        except Exception as error:
            # Leaving a broken capture raises before torch.cuda.graph has restored the caller's stream.
            torch.cuda.set_stream(current)
            raise CaptureError(launches.first_line(error)) from error
        names: tuple[str, ...] | str
        try:
            names = launches.of_dot(launches.graph_dot(graph))
        except launches.DumpError as error:
            names = f"no list of launches: {error}"
        graph.instantiate()
        torch.cuda.synchronize()
        return Graph(graph.replay, names)

    def probe(self, segment: Segment) -> Recording:
        """Run once with torch's synchronisation check on; inside a capture it would end the capture."""
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return super().probe(segment)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            found = Recording()
            found.syncs.append(launches.first_line(error))
            return found
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def on_side_stream(self, run: Callable[[], None]) -> None:
        """Run on a new stream between two waits."""
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            run()
        main.wait_stream(side)

    def synchronize(self) -> None:
        """Wait for everything on the GPU."""
        torch.cuda.synchronize()

    def allocations(self) -> int | None:
        """Return how many blocks torch's allocator has handed out; None if the allocator does not count."""
        return torch.cuda.memory_stats().get("allocation.all.allocated")

    def memory(self) -> tuple[int, int]:
        """Return the bytes of tensors, and the bytes that code, other libraries and other processes use."""
        gc.collect()
        free, total = torch.cuda.mem_get_info()
        return int(torch.cuda.memory_allocated()), int(total - free - torch.cuda.memory_reserved())

"""Capture and replay on a GPU: CUDA graphs, and HIP graphs under the same names."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from vllm_aiter_mla.verify import devices
from vllm_aiter_mla.verify.census import Census
from vllm_aiter_mla.verify.dot import DotError
from vllm_aiter_mla.verify.engines import Captured, CaptureError, Probe, Recorded
from vllm_aiter_mla.verify.subject import Outputs, Segment
from vllm_aiter_mla.verify.tape import recording


class GraphEngine:
    """Real graphs on torch's current GPU."""

    name = "graph capture"
    graphs = True
    device = "cuda"

    def __init__(self) -> None:
        self._pools: dict[str, Any] = {}

    def capture(self, segments: list[Segment], pool: str, side_stream: bool) -> Captured:
        """Capture each captured segment into a graph of its own; graphs of one ``pool`` share its memory."""
        torch.cuda.synchronize()
        handle = self._pools.setdefault(pool, torch.cuda.graph_pool_handle())
        stream = torch.cuda.Stream() if side_stream else None
        parts: list[Recorded | Callable[[], Outputs]] = []
        outputs: Outputs = {}
        for segment in segments:
            if segment.captured:
                recorded, outputs = _capture(segment, handle, stream)
                parts.append(recorded)
            else:
                outputs = segment.run()
                parts.append(segment.run)
        torch.cuda.synchronize()
        return Captured(parts, dict(outputs))

    def probe(self, segments: list[Segment]) -> Probe:
        """Run once with torch's synchronisation check on: an error here is kinder than one inside a capture."""
        shapes: list[tuple[str, tuple[int, ...], int]] = []
        for segment in segments:
            torch.cuda.synchronize()
            if not segment.captured:
                segment.run()
                continue
            torch.cuda.set_sync_debug_mode("error")
            try:
                with recording() as tape:
                    segment.run()
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                return Probe([_line(error)], shapes)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            shapes += tape.shapes
        return Probe([], shapes)

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
        """Blocks that torch's allocator has handed out since the start; None under an allocator that keeps no count."""
        return torch.cuda.memory_stats().get("allocation.all.allocated")

    def live_bytes(self) -> int:
        """Bytes of the GPU that tensors hold."""
        gc.collect()
        return int(torch.cuda.memory_allocated())

    def unclaimed_bytes(self) -> int:
        """Bytes in use on the GPU outside torch's allocator: code, other libraries, other processes."""
        free, total = torch.cuda.mem_get_info()
        return int(total - free - torch.cuda.memory_reserved())


def _capture(segment: Segment, pool: Any, stream: torch.cuda.Stream | None) -> tuple[Recorded, Outputs]:
    # keep_graph leaves the graph beside its executable form, for the census.
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    current = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            outputs = segment.run()
    except Exception as error:
        # Leaving a broken capture raises before torch.cuda.graph has put the caller's stream back.
        torch.cuda.set_stream(current)
        raise CaptureError(_line(error)) from error
    census, reason = _census(graph)
    graph.instantiate()
    return Recorded(graph.replay, census, reason), outputs


def _census(graph: torch.cuda.CUDAGraph) -> tuple[Census | None, str]:
    try:
        return Census.of_dot(devices.graph_dot(graph)), ""
    except (devices.DeviceError, DotError) as error:
        return None, f"no census: {error}"


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__

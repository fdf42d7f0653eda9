"""Capture and replay on a GPU: CUDA graphs, and HIP graphs under the same names."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from vllm_aiter_mla.verify import devices, launches
from vllm_aiter_mla.verify.engine import CaptureError, EagerEngine, Recorded
from vllm_aiter_mla.verify.recording import Recording
from vllm_aiter_mla.verify.subject import Outputs, Segment


class GraphEngine(EagerEngine):
    """Real graphs on torch's current GPU."""

    name = "graph capture"
    graphs = True
    device = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self._pools: dict[str, Any] = {}

    def _record(self, segment: Segment, pool: str, side_stream: bool) -> tuple[Recorded, Outputs]:
        torch.cuda.synchronize()
        handle = self._pools.setdefault(pool, torch.cuda.graph_pool_handle())
        # keep_graph leaves the graph beside its executable form, to count its launches.
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        current = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=handle, stream=torch.cuda.Stream() if side_stream else None):
                outputs = segment.run()
        except Exception as error:
            # Leaving a broken capture raises before torch.cuda.graph has put the caller's stream back.
            torch.cuda.set_stream(current)
            raise CaptureError(devices.first_line(error)) from error
        found: tuple[str, ...] | str
        try:
            found = launches.of_dot(devices.graph_dot(graph))
        except (devices.DeviceError, launches.DotError) as error:
            found = f"no list of launches: {error}"
        graph.instantiate()
        torch.cuda.synchronize()
        return Recorded(graph.replay, found), outputs

    def _watched(self, run: Callable[[], Outputs]) -> Callable[[], object]:
        return run  # torch's allocator counts

    def probe(self, segment: Segment) -> Recording:
        """Run once with torch's synchronisation check on: inside a capture it would end the capture."""
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return super().probe(segment)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            found = Recording()
            found.syncs.append(devices.first_line(error))
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
        """Blocks that torch's allocator has handed out since the start; None under an allocator that keeps no count."""
        return torch.cuda.memory_stats().get("allocation.all.allocated")

    def memory(self) -> tuple[int, int]:
        """Bytes of tensors; and bytes in use outside torch's allocator: code, other libraries, other processes."""
        gc.collect()
        free, total = torch.cuda.mem_get_info()
        return int(torch.cuda.memory_allocated()), int(total - free - torch.cuda.memory_reserved())

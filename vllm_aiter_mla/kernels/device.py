# SPDX-License-Identifier: Apache-2.0
"""The one seam to a GPU's runtime: what the package asks of a card, and what it lets a card do, by torch's own calls.

Assign another ``Device`` to ``installed``, and the whole package runs on that one. Nobody else names ``torch.cuda``,
torch's ROCm release or its profiler, and nobody keeps what ``card`` returned: ``tests/test_imports.py``.
"""

import contextlib
import functools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

LAST_LEVEL_CACHE = 256 << 20  # bytes, of MI300; torch knows the L2 only


class Device:
    """torch's current GPU, of either vendor; without one, most methods raise."""

    torch_device = "cuda"  # type of the torch device on which the card's tensors are

    def is_there(self) -> bool:
        """Return whether there is a card; False on a machine without one."""
        return bool(torch.cuda.is_available())

    def count(self) -> int:
        """Return how many cards torch sees; 0 on a machine without one."""
        return int(torch.cuda.device_count())

    @property
    def rocm(self) -> str | None:
        """The ROCm release that torch was built for, "7.0.51831-a3e329ad8"; None for another build. Needs no card.

        ``hip`` is the version of HIP, which was ROCm's up to 7.14: ROCm 10.0 has HIP 7.15. ``rocm`` is the release,
        where torch says it.
        """
        return torch.version.hip and (getattr(torch.version, "rocm", None) or torch.version.hip)

    @property
    def built_for(self) -> str:
        """What torch was built for: "ROCm 7.0.2", "CUDA 13.0", or "" for CPUs. Needs no card."""
        return f"ROCm {self.rocm}" if self.rocm else f"CUDA {torch.version.cuda}" if torch.version.cuda else ""

    @functools.cached_property
    def arch(self) -> str:
        """The architecture: gfx942, gfx950, sm90, ..., or "cpu" on a machine without a card. Launches nothing."""
        if not self.is_there():
            return "cpu"
        found = self._properties()
        # "gfx942:sramecc+:xnack-" -> "gfx942"
        return str(found.gcnArchName).split(":")[0] if self.rocm else f"sm{found.major}{found.minor}"

    def _properties(self) -> Any:
        return torch.cuda.get_device_properties(torch.cuda.current_device())

    def name(self) -> str:
        """Return the card's name."""
        return str(torch.cuda.get_device_name())

    def units(self) -> int:
        """Return how many compute units the card has."""
        return int(self._properties().multi_processor_count)

    def cache_bytes(self) -> int:
        """Return the bytes that the card's caches hold: L2, and on ROCm the last-level cache of MI300."""
        size = int(self._properties().L2_cache_size)
        return size if self.rocm is None else max(size, LAST_LEVEL_CACHE)

    def current(self) -> torch.device:
        """Return the device on which kernels are launched now."""
        return torch.device(self.torch_device, torch.cuda.current_device())

    def memory(self) -> tuple[int, int]:
        """Return the bytes of tensors, and the bytes that code, other libraries and other processes use.

        Tensors count with what was asked for. torch's ``memory_allocated`` counts blocks, and a block that is handed
        out again may be nearly 1 MiB larger than the tensor: the same tensors then take more (torch 2.11, an H200).
        """
        (free, total), found = torch.cuda.mem_get_info(), torch.cuda.memory_stats()
        # The allocator ``cudaMallocAsync`` does not count what was asked for.
        tensors = found.get("requested_bytes.all.current") or found.get("allocated_bytes.all.current", 0)
        return int(tensors), int(total - free - torch.cuda.memory_reserved())

    def in_use(self, cards: int) -> list[tuple[int, int]]:
        """Return for each of the first cards the bytes that all processes use, and what it has; this takes some too."""
        found = [torch.cuda.mem_get_info(number) for number in range(min(cards, self.count()))]
        return [(int(total - free), int(total)) for free, total in found]

    def allocations(self) -> int:
        """Return how many blocks torch's allocator has handed out; 0 if the allocator does not count."""
        return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))

    def give_back(self) -> None:
        """Free cached memory, the BLAS workspaces of captures too. Drop every graph first."""
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def fork_rng(self) -> contextlib.AbstractContextManager[None]:
        """Put the random generators of host and card back after a block. Needs no card."""
        return torch.random.fork_rng(devices=[torch.cuda.current_device()] if self.is_there() else [])

    def synchronize(self) -> None:
        """Wait for everything on the card; on a machine without one there is nothing to wait for."""
        if self.is_there():
            torch.cuda.synchronize()

    def now(self) -> float:
        """Return seconds from any start, for a budget of work on the card. Needs no card."""
        return time.monotonic()

    def time_us(self, run: Callable[[], object]) -> float:
        """Return the microseconds of ``run`` on the current stream, between two events."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def on_side_stream(self, run: Callable[[], None]) -> None:
        """Run on a new stream, between two waits."""
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            run()
        main.wait_stream(side)

    @contextlib.contextmanager
    def syncs_raise(self) -> Iterator[None]:
        """Let a call that waits for the card raise RuntimeError ("... synchronizing ...") inside a block."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @functools.cached_property
    def _has_streams(self) -> bool:
        # Asked once: torch reads the environment and calls the driver every time.
        return self.is_there()

    def is_capturing(self) -> bool:
        """Return whether the current stream is capturing a graph; False on a machine without a card."""
        return self._has_streams and torch.cuda.is_current_stream_capturing()

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        """Capture ``run``, which has run before, on a stream of its own; return the replay. For timing inside vLLM."""
        # Not ``torch.cuda.graph``: it collects garbage first, which takes a tenth of a second or more there.
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads of vLLM may use the device
            try:
                run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture is broken; what broke it is raised
                    graph.capture_end()
                raise
            graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

    def new_pool(self) -> Any:
        """Return a handle that lets graphs share memory."""
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], object], pool: Any, side_stream: bool) -> Any:
        """Capture ``run`` into memory of ``pool``, on a new stream if asked; put the caller's stream back if it raises.

        Returns:
            A graph that ``dot`` can read: call ``instantiate`` before ``replay``.
        """
        # keep_graph keeps the graph next to its executable form, so that its launches can be counted.
        graph, current = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream() if side_stream else None):
                run()
        except Exception:
            # Leaving a broken capture raises before torch.cuda.graph has restored the caller's stream.
            torch.cuda.set_stream(current)
            raise
        return graph

    def dot(self, graph: Any) -> str | None:
        """Return the DOT text that torch writes of a captured graph, "" if none; None on ROCm: ask hip-python there."""
        if self.rocm is not None:
            return None
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces every dump as a warning
            path = Path(folder) / "graph.dot"
            graph.debug_dump(str(path))
            return path.read_text(errors="replace") if path.exists() else ""

    def count_kernels(self) -> Callable[[], int]:
        """Start torch's profiler; return what stops it and returns how many kernels ran on the card. Needs no card."""
        from torch.profiler import profile

        profiled = profile()
        profiled.start()

        def stop() -> int:
            self.synchronize()
            profiled.stop()
            return sum(event.count for event in profiled.key_averages() if event.device_type.name == "CUDA")

        return stop


installed = Device()
"""What the package runs on. Of the process, as torch's GPU runtime is."""


def card() -> Device:
    """Return the device that is installed. Ask again instead of keeping it."""
    return installed

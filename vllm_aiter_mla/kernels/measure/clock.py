"""The device's clock: calls captured in a graph and replayed between two events, one candidate after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from vllm_aiter_mla.kernels.backend import Run
from vllm_aiter_mla.kernels.inputs import DecodeInputs

# A graph of so many calls at least, so that its launch and the two events weigh nothing.
MIN_CALLS = 32
DISCARDED = 2  # rounds before the first that counts: they find cold instruction caches and a slow clock

Replay = Callable[[], float]
"""Runs what was recorded once; microseconds per call."""


class Clock(Protocol):
    """What a sweep measures with; tests give one with made-up figures."""

    def now(self) -> float:
        """Seconds, from any start: for the budget."""
        ...

    def resident(self) -> int:
        """Bytes that the device's caches hold on to."""
        ...

    def record(self, name: str, run: Run, calls: Sequence[DecodeInputs]) -> Replay:
        """Make ``calls`` of the candidate ``name`` repeatable; its kernels are loaded and compiled before."""
        ...

    def give_back(self) -> None:
        """Return all device memory that was taken; what was recorded is gone by then."""
        ...


class DeviceClock:
    """The current CUDA or HIP device."""

    def now(self) -> float:
        """See ``Clock``; likewise the methods below."""
        return time.monotonic()

    def resident(self) -> int:
        """Reads the device's properties."""
        return cache_bytes()

    def record(self, name: str, run: Run, calls: Sequence[DecodeInputs]) -> Replay:
        """Captures a graph of one call per element of ``calls``."""
        graph, kept = capture(run, calls)
        return lambda: replay_us(graph.replay) / len(kept)

    def give_back(self) -> None:
        """Also frees the workspaces that the BLAS library has made for the captures' streams."""
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def cache_bytes() -> int:
    """Bytes the caches of the current GPU can hold on to: L2, and on ROCm the 256 MiB last-level cache of MI300."""
    size = int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    return max(size, 256 << 20) if torch.version.hip is not None else size


def capture(run: Run, calls: Sequence[DecodeInputs]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """A graph of one call per element of ``calls``, and their results; ``run`` has run before, nothing compiles here.

    The results are kept so that each call has a query buffer of its own: one buffer for all would stay in the cache.
    ``torch.cuda.graph`` is not used: it collects garbage first, a tenth of a second or more in a process of vLLM's.
    """
    graph, kept = torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")  # other threads of vLLM's may use the device
        try:
            kept = [run(inputs) for inputs in calls]
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is broken; what broke it is raised
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, kept


def replay_us(run: Callable[[], object]) -> float:
    """Microseconds of ``run`` on the current stream, between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def interleaved(
    replays: Mapping[str, Replay], rounds: int, before: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Microseconds per call by name, one figure a round: one replay of each a round, so that a drift meets them all.

    Args:
        replays: what is timed, by name.
        rounds: that count; ``DISCARDED`` more are run first.
        before: called before each round; what it raises ends the timing.
    """
    samples: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(DISCARDED + rounds):
        before()
        for name, replay in replays.items():
            samples[name].append(replay())
    return {name: values[DISCARDED:] for name, values in samples.items()}

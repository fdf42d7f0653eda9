"""How it is measured: each path captured in a graph over all operand sets, the graphs replayed in turn, medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_aiter_mla.commands.bench.paths import Path
from vllm_aiter_mla.kernels.inputs import DecodeInputs

COPY_BYTES = 1 << 30
# A graph of so many calls at least, so that its launch and the two events weigh nothing.
MIN_CALLS = 32


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call: median, lowest and highest of the rounds; ``launches`` kernels per call."""

    median_us: float
    min_us: float
    max_us: float
    launches: int


def measure(paths: Sequence[Path], sets: list[DecodeInputs], rounds: int) -> dict[str, Timing]:
    """Time every path that can run, in one go: one replay of each per round, so that a drifting clock meets them all.

    Args:
        paths: see ``paths.available``; those without a ``prepare`` are left out.
        sets: operand sets, used in turn within a graph.
        rounds: replays per path, of which the first two are discarded.
    """
    repeats = -(-MIN_CALLS // len(sets))
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = {}
    launches = {}
    for path in paths:
        if path.prepare is None:
            continue
        launches[path.name] = count_launches(path, sets[0])
        graphs[path.name] = capture(path, sets * repeats)
    calls = len(sets) * repeats
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds + 2):
        for name, (graph, _) in graphs.items():
            samples[name].append(replay_us(graph.replay) / calls)
    kept = {name: values[2:] for name, values in samples.items()}
    return {name: Timing(statistics.median(v), min(v), max(v), launches[name]) for name, v in kept.items()}


def capture(path: Path, calls: list[DecodeInputs]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """A graph of one call per element of ``calls``, and their results; the path has run before, nothing compiles here.

    The results are kept so that each call has a query buffer of its own: one buffer for all would stay in the cache.
    """
    assert path.prepare is not None
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = [path.prepare(inputs) for inputs in calls]
    return graph, kept


def replay_us(run: Callable[[], object]) -> float:
    """Microseconds of ``run`` on the current stream, between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def count_launches(path: Path, inputs: DecodeInputs) -> int:
    """Kernels that one call launches, copies and fills included, as the profiler sees them. Compiles the path first."""
    assert path.prepare is not None
    for _ in range(2):
        path.prepare(inputs)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        path.prepare(inputs)
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return sum(1 for event in profile.events() if event.device_type == device)


def copy_gbps(rounds: int = 20) -> float:
    """GB/s of a 1 GiB device copy, bytes read and written both counted: the ceiling of this run, measured in it."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [replay_us(lambda: target.copy_(source)) for _ in range(rounds + 2)]
    return 2 * COPY_BYTES / statistics.median(times[2:]) * 1e-3

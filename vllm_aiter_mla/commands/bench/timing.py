"""How it is measured: each path captured in a graph over all operand sets, the graphs replayed in turn, medians."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_aiter_mla.commands.bench.paths import Path
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.measure import DISCARDED, MIN_CALLS, interleaved, record, replay_us

COPY_BYTES = 1 << 30


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
        rounds: replays per path that count.
    """
    calls = sets * -(-MIN_CALLS // len(sets))
    able = {path.name: path for path in paths if path.prepare is not None}
    launches = {name: count_launches(path, sets[0]) for name, path in able.items()}
    replays = {name: record(path.prepare, calls) for name, path in able.items() if path.prepare}
    kept = interleaved(replays, rounds)
    return {name: Timing(statistics.median(v), min(v), max(v), launches[name]) for name, v in kept.items()}


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
    times = [replay_us(lambda: target.copy_(source)) for _ in range(rounds + DISCARDED)]
    return 2 * COPY_BYTES / statistics.median(times[DISCARDED:]) * 1e-3

"""Which arm is visited when, and with which seeds."""

from __future__ import annotations

from dataclasses import dataclass

from serving.arms import OFF, ON

PER_ARM, PER_RUN, RUNNING = "per-arm", "per-run", "running"
SEEDS_PER_RUN = 1000


@dataclass(frozen=True, slots=True)
class Visit:
    """Consecutive runs on one server.

    Attributes:
        arm: ``OFF`` or ``ON``.
        runs: numbers of the runs, from 0.
    """

    arm: str
    runs: tuple[int, ...]


def visits(runs: int, servers: str) -> list[Visit]:
    """The order of measuring. The on-arm comes first: where nothing engages, no time goes into the off-arm.

    ``per-arm`` measures all runs of one arm, then all of the other: one start each. Otherwise each run is a pair,
    and the pairs alternate (on off, off on, on off), so that drift of the machine favours neither arm.
    """
    if servers == PER_ARM:
        return [Visit(arm, tuple(range(runs))) for arm in (ON, OFF)]
    pairs = ((ON, OFF) if run % 2 == 0 else (OFF, ON) for run in range(runs))
    return [Visit(arm, (run,)) for run, pair in enumerate(pairs) for arm in pair]


def seed(base: int, run: int, point: int) -> int:
    """The seed of one measurement: the same in both arms, another for every run and point.

    Points need their own: the same prompts a second time would come out of the server's prefix cache.
    """
    return base + SEEDS_PER_RUN * run + point

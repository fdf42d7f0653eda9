"""Means, standard errors, ratios, and what may be said of a difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NOT_DISTINGUISHABLE = "not distinguishable"
SIGMAS = 2.0
"""A difference counts from this many combined standard errors on."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error, in the unit of the values."""

    mean: float
    stderr: float


def estimate(values: Sequence[float]) -> Estimate:
    """Mean over runs, and the standard error of that mean (n - 1 in the variance).

    Raises:
        ValueError: fewer than two values: there is no standard error.
    """
    if len(values) < 2:
        raise ValueError(f"a standard error needs at least 2 values, got {len(values)}")
    return Estimate(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))


def ratio(off: Estimate, on: Estimate) -> Estimate:
    """off/on, above 1 where on is the smaller one; standard error to first order, both taken as independent."""
    value = off.mean / on.mean
    return Estimate(value, value * math.hypot(off.stderr / off.mean, on.stderr / on.mean))


def distinguishable(off: Estimate, on: Estimate) -> bool:
    """Whether the means are at least ``SIGMAS`` combined standard errors apart; equal means never are."""
    apart = abs(off.mean - on.mean)
    return apart > 0 and apart >= SIGMAS * math.hypot(off.stderr, on.stderr)


def outcome(off: Estimate, on: Estimate) -> str:
    """Of two times: "on faster", "off faster", or that they cannot be told apart."""
    if not distinguishable(off, on):
        return NOT_DISTINGUISHABLE
    return "on faster" if on.mean < off.mean else "off faster"


def mcnemar(first: int, second: int) -> float:
    """Two-sided exact p-value of ``first`` against ``second`` discordant pairs: a fair coin's binomial tails."""
    total = first + second
    tail = sum(math.comb(total, k) for k in range(min(first, second) + 1)) / 2**total
    return min(1.0, 2 * tail)


def mean_difference(off: Sequence[Mapping[str, bool]], on: Sequence[Mapping[str, bool]]) -> Estimate:
    """on - off of the share of right answers, over all runs; the standard error is over questions.

    Runs ask the same questions, so they are averaged per question first: they are no independent sample.
    """
    numbers = sorted(off[0])
    shares = [statistics.fmean(b[q] - a[q] for a, b in zip(off, on, strict=True)) for q in numbers]
    return estimate(shares)


def accuracy_outcome(difference: Estimate) -> str:
    """Of a paired difference of accuracies."""
    if difference.mean == 0 or abs(difference.mean) < SIGMAS * difference.stderr:
        return NOT_DISTINGUISHABLE
    return "on higher" if difference.mean > 0 else "on lower"

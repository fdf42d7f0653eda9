"""Means, standard errors, ratios, and what may be said of a difference. No imports from the other rooms."""

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
    """off/on, above 1 where on is the smaller one; standard error to first order, the arms taken as independent."""
    value = off.mean / on.mean
    return Estimate(value, value * math.hypot(off.stderr / off.mean, on.stderr / on.mean))


def distinguishable(off: Estimate, on: Estimate) -> bool:
    """Whether the means are at least ``SIGMAS`` combined standard errors apart; equal means never are."""
    apart = abs(off.mean - on.mean)
    return apart > 0 and apart >= SIGMAS * math.hypot(off.stderr, on.stderr)


def verdict(off: Estimate, on: Estimate) -> str:
    """Of two times: "on faster", "off faster", or that they cannot be told apart."""
    if not distinguishable(off, on):
        return NOT_DISTINGUISHABLE
    return "on faster" if on.mean < off.mean else "off faster"


@dataclass(frozen=True, slots=True)
class Paired:
    """Verdicts of both arms on the same questions.

    Attributes:
        off_only: questions that the off-arm alone answers rightly.
        on_only: questions that the on-arm alone answers rightly.
        p_value: McNemar's exact test, two-sided.
    """

    off_only: int
    on_only: int
    p_value: float


def paired(off: Mapping[int, bool], on: Mapping[int, bool]) -> Paired:
    """McNemar's exact test on questions by number.

    Raises:
        ValueError: the arms answered different questions.
    """
    if off.keys() != on.keys():
        raise ValueError(f"the arms answered different questions: {sorted(off.keys() ^ on.keys())}")
    off_only = sum(off[number] and not on[number] for number in off)
    on_only = sum(on[number] and not off[number] for number in off)
    return Paired(off_only, on_only, mcnemar(off_only, on_only))


def mcnemar(first: int, second: int) -> float:
    """Two-sided exact p-value of ``first`` against ``second`` discordant pairs: a fair coin's binomial tails."""
    total = first + second
    tail = sum(math.comb(total, k) for k in range(min(first, second) + 1)) / 2**total
    return min(1.0, 2 * tail)


def mean_difference(off: Sequence[Mapping[int, bool]], on: Sequence[Mapping[int, bool]]) -> Estimate:
    """on - off of the share of right answers, over all runs; the standard error is over questions.

    Runs ask the same questions, so they are averaged per question first: they are no independent sample.
    """
    numbers = sorted(off[0])
    shares = [statistics.fmean(b[q] - a[q] for a, b in zip(off, on, strict=True)) for q in numbers]
    return estimate(shares)


def accuracy_verdict(difference: Estimate) -> str:
    """Of a paired difference of accuracies."""
    if difference.mean == 0 or abs(difference.mean) < SIGMAS * difference.stderr:
        return NOT_DISTINGUISHABLE
    return "on higher" if difference.mean > 0 else "on lower"

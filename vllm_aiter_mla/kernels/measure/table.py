"""From timings to a choice per token count. Pure: equal timings give an equal choice, on every rank and start.

vLLM's sequence runs wherever nothing clearly beats it by ``MARGIN``; among what does, the earlier one of the static
order runs unless a later one clearly beats it too.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

MARGIN = 0.03
CLEAR = 0.75
"""A candidate is clearly faster where in this share of rounds, taken as quantile, it is faster by ``MARGIN``. A median
alone would let a clock with 10 % of noise choose something slower; outliers in a quarter of the rounds do no harm."""

VLLM = "vllm"

Rounds = dict[int, dict[str, list[float]]]
"""Microseconds per call by token count and candidate, one figure per round; rounds of one count are interleaved."""

Ranges = tuple[tuple[int, int, str], ...]
"""(first, last, candidate) in tokens, ascending and without a gap from 1 on."""


def beats(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether ``ours`` is clearly faster than ``theirs``: round by round, as a drifting clock meets both in each."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return ratios[int(CLEAR * len(ratios))] <= 1 - MARGIN


def fastest(samples: Mapping[str, Sequence[float]], order: Sequence[str]) -> str:
    """The candidate to run, of those in ``samples``; ``order`` is the static one."""
    best = VLLM
    for name in order:
        if name != VLLM and name in samples and beats(samples[name], samples[VLLM]):
            best = name if best == VLLM or beats(samples[name], samples[best]) else best
    return best


def ranges(rounds: Rounds, order: Sequence[str]) -> Ranges:
    """What runs from 1 token to the largest count timed; a count between two is decided by the larger one.

    Steps are padded up to captured sizes, so the larger count is the nearer one.
    """
    found: list[tuple[int, int, str]] = []
    for before, tokens in pairwise((0, *sorted(rounds))):
        name = fastest(rounds[tokens], order)
        if found and found[-1][2] == name:
            found[-1] = (found[-1][0], tokens, name)
        else:
            found.append((before + 1, tokens, name))
    return tuple(found)


def name_at(chosen: Ranges, tokens: int) -> str | None:
    """What runs at ``tokens``; None outside every range."""
    return next((name for first, last, name in chosen if first <= tokens <= last), None)


def medians(rounds: Rounds) -> dict[int, dict[str, float]]:
    """Microseconds per call by token count and candidate."""
    return {tokens: {name: statistics.median(v) for name, v in by.items()} for tokens, by in rounds.items()}


def slowest(tables: Sequence[Rounds]) -> Rounds:
    """One table for all ranks: what all of them have timed, each figure that of the rank which is slowest there.

    Ranks of a tensor-parallel group wait for one another, so the slowest decides how long a layer takes.
    """
    first, *others = tables
    merged: Rounds = {}
    for tokens in sorted(set(first).intersection(*others)):
        names = [name for name in first[tokens] if all(name in table[tokens] for table in others)]
        merged[tokens] = {name: max((t[tokens][name] for t in tables), key=statistics.median) for name in names}
    return merged


def described(chosen: Ranges) -> str:
    """``triton 1..128, aiter 129..1024``."""
    return ", ".join(f"{name} {first}..{last}" for first, last, name in chosen)

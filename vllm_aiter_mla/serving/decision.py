# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs a layer at how many tokens, or why none of ours does."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from vllm_aiter_mla.kernels.stopwatch import Ranges, Rounds

VLLM = "vllm"
"""Name of vLLM's own kernels among the back ends."""
MARGIN = 0.03
CLEAR = 0.75
"""A candidate is clearly faster if it is faster by ``MARGIN`` in this share of the rounds. With medians only, a clock
with 10 % of noise could choose something slower. Outliers in a quarter of the rounds do no harm."""


# What is chosen from the figures.


def beats(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Return whether ``ours`` is clearly faster than ``theirs``, round by round, as a drifting clock meets both."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return ratios[int(CLEAR * len(ratios))] <= 1 - MARGIN


def fastest(samples: Mapping[str, Sequence[float]], order: Sequence[str], base: str = VLLM) -> str:
    """Return the candidate to run, of those in ``samples``; ``order`` is the static one.

    ``base`` runs unless another one clearly beats it.
    """
    best = base
    for name in order:
        if name != base and name in samples and beats(samples[name], samples[base]):
            best = name if best == base or beats(samples[name], samples[best]) else best
    return best


def ranges(rounds: Rounds, order: Sequence[str], base: Callable[[int], str] = lambda tokens: VLLM) -> Ranges:
    """Return what runs from 1 token to the largest count timed; the larger of two counts decides between them.

    Steps are padded up to captured sizes, so the larger count is the nearer one. ``base`` is that of ``fastest``.
    """
    found: list[tuple[int, int, str]] = []
    for before, tokens in pairwise((0, *sorted(rounds))):
        name = fastest(rounds[tokens], order, base(tokens))
        if found and found[-1][2] == name:
            found[-1] = (found[-1][0], tokens, name)
        else:
            found.append((before + 1, tokens, name))
    return tuple(found)

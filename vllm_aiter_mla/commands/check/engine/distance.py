# SPDX-License-Identifier: Apache-2.0
"""How far apart two engines are: in tokens and log-probabilities, in the bytes of prefill, in time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm_aiter_mla.commands.check.engine.record import SIDES, EngineAnswer, Side

if TYPE_CHECKING:
    from vllm_aiter_mla.commands.compat.engine import TokenLogprobs

# Kernels that add up in another order give other tokens where two are nearly as likely. Through Triton's interpreter a
# random model gave 97.6 % of equal tokens and differences of at most 0.15. With the RoPE of prefill rows lost, it gave
# at most 81 % and at least 1.7.
TOP1 = 0.95
"""Least share of positions with the same likeliest token that rounding explains."""
MAX_DLOGPROB = 0.5
"""Largest difference of log-probabilities that rounding explains."""
# Over an fp8 cache the reference with another rounding gave 90 % and 0.94. There the mean of the request that was most
# apart is compared with ``decode_against_prefill``: it was 0.11 where that was 0.18. It was 0.36 or more with the query
# scaled twice, and 0.41 or more with one wrong row in each decode step.
DECODE_AGAINST_PREFILL = 0.5
"""Largest mean difference of log-probabilities between the steps that generated tokens and prefill of the same text.

On a CPU a small random model gave 0.02 (bf16 cache) and 0.17 (fp8), and 8.4 with mixed up channels in decode."""

MOST_UNEQUAL = 0.5
"""Largest share of the prompts whose bytes may differ.

Of 8 prompts in the sandbox's engine, 8 had the same bytes where q_pe and k_pe are rounded once, 7 with another rounding
of one value in 4096, and none with two or three roundings of each value. Multiply and add may be contracted or not: the
product of two values of 16 bits is exact in float32."""
SLOWER = 1.02
"""Ratio of times, on to off, above which ``check`` warns on a card."""


@dataclass(slots=True)
class Figures:
    """One scenario of one run against its baseline."""

    tokens: int = 0  # generated tokens of the baseline
    tokens_equal: int = 0  # how many are the same, up to each request's first difference
    compared: int = 0  # positions whose context is the same in both runs
    max_abs_dlogprob: float = 0.0  # largest difference of log-probability over the common top 5 of these positions
    mean_abs_dlogprob: float = 0.0  # their mean in the request where it is largest: others would hide a wrong row

    @property
    def top1_agreement(self) -> float:
        """Share of positions with the same context whose likeliest token is the same."""
        return self.tokens_equal / self.compared if self.compared else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self) | {"agreed": self.tokens_equal, "top1_agreement": self.top1_agreement}


def figures(base: Sequence[Sequence[TokenLogprobs]], other: Sequence[Sequence[TokenLogprobs]]) -> Figures:
    """Compare the requests of one scenario with those of the baseline."""
    result = Figures()
    for base_tokens, other_tokens in zip(base, other, strict=True):
        total, entries = 0.0, 0
        result.tokens += len(base_tokens)
        for (base_token, base_probs), (other_token, probs) in zip(base_tokens, other_tokens, strict=True):
            common = base_probs.keys() & probs.keys()
            differences = [distance(base_probs[token], probs[token]) for token in common] or [math.inf]
            result.compared += 1
            result.max_abs_dlogprob = max([result.max_abs_dlogprob, *differences])
            total, entries = total + sum(differences), entries + len(differences)
            if base_token != other_token:
                break  # from here on the two runs answer different questions
            result.tokens_equal += 1
        result.mean_abs_dlogprob = max(result.mean_abs_dlogprob, total / entries if entries else 0.0)
    return result


def is_explained(figures: Figures, noise: float = 0.0) -> bool:
    """Return whether rounding explains how far apart the two runs are.

    Over an fp8 cache another kernel's rounding before the cast moves a value by a step of fp8. There each request's
    mean difference must stay below ``noise``: what the cast does to vLLM's own decode, see ``decode_against_prefill``.
    A noise that fails that step explains nothing more.
    """
    if noise:
        return figures.tokens > 0 and figures.mean_abs_dlogprob <= min(noise, DECODE_AGAINST_PREFILL)
    return figures.tokens > 0 and figures.top1_agreement >= TOP1 and figures.max_abs_dlogprob <= MAX_DLOGPROB


def distance(x: float, y: float) -> float:
    """Return the difference; infinite if one is not a number, because ``max`` would pass over it."""
    difference = abs(x - y)
    return math.inf if math.isnan(difference) else difference


def decode_against_prefill(answer: EngineAnswer) -> float:
    """Return the mean difference between a token's log-probability when it was generated and in prefill."""
    differences = []
    for name, requests in answer.generated.items():
        for tokens, prefilled in zip(requests, answer.prefilled[name], strict=True):
            for (token, probs), in_prefill in zip(tokens, prefilled[-len(tokens) :], strict=True):
                differences.append(distance(probs[token], in_prefill))
    return sum(differences) / len(differences) if differences else math.inf


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """One step with prefill rows, with the flag off and on."""

    prompts: int
    equal: int  # how many of them have the same bytes with the flag off and on
    repeated: int  # how many have them in two such steps with the flag off
    max_abs_dlogprob: float  # between off and on
    off_ms: float  # median time of such a step
    on_ms: float

    @property
    def is_explained(self) -> bool:
        """Return whether one rounding of q_pe and k_pe, or vLLM's own noise, explains what differs."""
        unequal, noise = self.prompts - self.equal, self.prompts - self.repeated
        return unequal <= MOST_UNEQUAL * self.prompts + noise and self.max_abs_dlogprob <= MAX_DLOGPROB

    @property
    def ratio(self) -> float:
        """Time with the flag on to that with the flag off."""
        return self.on_ms / self.off_ms

    def shown(self) -> str:
        """Return the figures in one line."""
        apart = f", max |dlogprob| {self.max_abs_dlogprob:.2g}" * (self.equal < self.prompts)
        again = f" (off, repeated: {self.repeated})" * (self.repeated < self.prompts)
        return (
            f"{self.equal} of {self.prompts} prompts have the same bytes{again}{apart}; "
            f"{self.off_ms:.2f} ms off, {self.on_ms:.2f} ms on, ratio {self.ratio:.3f}"
        )


def prefill_rows(answers: Mapping[Side, EngineAnswer], name: str) -> PrefillRows | None:
    """Compare the steps of one name of ``PREFILLS``; None if no such batch fits."""
    (off, again), (on, _) = (answers[side].prompts[name] for side in SIDES)
    if not off:
        return None
    apart, noise = ([max(map(distance, *pair)) for pair in zip(off, other, strict=True)] for other in (on, again))
    off_ms, on_ms = (1e3 * statistics.median(answers[side].seconds[name]) for side in SIDES)
    return PrefillRows(len(apart), apart.count(0), noise.count(0), max(apart), off_ms, on_ms)

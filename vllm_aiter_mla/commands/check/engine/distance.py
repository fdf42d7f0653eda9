# SPDX-License-Identifier: Apache-2.0
"""Measures of the distance between two engines: tokens, log-probabilities, bytes of prefill, and time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm_aiter_mla.commands.check.engine.record import SIDES, EngineAnswer, Side

if TYPE_CHECKING:
    from vllm_aiter_mla.commands.compat.llm_engine import TokenLogprobs

# The first two bounds are chosen. Kernels that sum in another order give other tokens where two tokens are nearly as
# likely. Through Triton's interpreter a random model gave 97.6 % equal tokens and differences of at most 0.15. Without
# the RoPE of prefill rows it gave at most 81 % and at least 1.7 (`pytest -m engine -k triton`, 2026-11-20).
MIN_TOP1_AGREEMENT = 0.95
"""Smallest share of positions with the same likeliest token that rounding explains."""
MAX_DLOGPROB = 0.5
"""Largest difference of log-probabilities that rounding explains."""
# Over an fp8 cache the reference with another rounding gave 90 % and 0.94. So for such a cache the largest mean of a
# request is compared with ``mean_decode_prefill_dlogprob`` instead. The mean was 0.11 where that noise was 0.18. It was
# 0.36 or more with the query scaled twice, and 0.41 or more with one wrong row in each decode step (CPU engine, figures
# recorded on 2026-11-25). The bound below is chosen.
MAX_DECODE_PREFILL_DLOGPROB = 0.5
"""Largest mean difference of log-probabilities between the steps that generated tokens and prefill of the same text.

On a CPU a small random model gave 0.02 (bf16 cache) and 0.17 (fp8). With permuted channels in decode it gave 8.4
(figures recorded by 2026-11-25)."""

MAX_UNEQUAL_SHARE = 0.5
"""Largest share of the prompts whose bytes may differ. It is chosen.

Of 8 prompts in the sandbox's engine, 8 had the same bytes if q_pe and k_pe were rounded once. 7 had with another
rounding of one value in 4096, and none had with two or three roundings of each value (figures recorded on 2026-11-27).
A compiler may contract multiply and add without effect, because the product of two 16-bit values is exact in
float32."""
MAX_TIME_RATIO = 1.02
"""Ratio of the times, flag on to flag off, above which ``check`` warns on a card. It is chosen."""


@dataclass(slots=True)
class TokenComparison:
    """One scenario of one run, compared with its baseline."""

    tokens: int = 0  # generated tokens of the baseline
    tokens_equal: int = 0  # equal tokens, up to each request's first difference
    compared: int = 0  # positions whose context is the same in both runs
    max_abs_dlogprob: float = 0.0  # largest difference of log-probability over the common top 5 of these positions
    # Mean difference of the request with the largest mean: a mean over all requests would hide a wrong row
    mean_abs_dlogprob: float = 0.0

    @property
    def top1_agreement(self) -> float:
        """Share of positions with the same context whose likeliest token is the same."""
        return self.tokens_equal / self.compared if self.compared else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self) | {"agreed": self.tokens_equal, "top1_agreement": self.top1_agreement}


def compare_requests(
    base_requests: Sequence[Sequence[TokenLogprobs]], other_requests: Sequence[Sequence[TokenLogprobs]]
) -> TokenComparison:
    """Compare the requests of one scenario with those of the baseline."""
    comparison = TokenComparison()
    for base_tokens, other_tokens in zip(base_requests, other_requests, strict=True):
        distance_sum, num_distances = 0.0, 0
        comparison.tokens += len(base_tokens)
        for (base_token, base_logprobs), (other_token, other_logprobs) in zip(base_tokens, other_tokens, strict=True):
            common_tokens = base_logprobs.keys() & other_logprobs.keys()
            distances = [logprob_distance(base_logprobs[token], other_logprobs[token]) for token in common_tokens]
            distances = distances or [math.inf]
            least_distance = max(
                _least_distance(base_token, base_logprobs, other_logprobs),
                _least_distance(other_token, other_logprobs, base_logprobs),
            )
            # The largest one counts, so that a lower bound never makes the mean smaller.
            distances += [least_distance] * (least_distance > max(distances))
            comparison.compared += 1
            comparison.max_abs_dlogprob = max([comparison.max_abs_dlogprob, *distances])
            distance_sum, num_distances = distance_sum + sum(distances), num_distances + len(distances)
            if base_token != other_token:
                break  # from here on the contexts differ
            comparison.tokens_equal += 1
        mean_distance = distance_sum / num_distances if num_distances else 0.0
        comparison.mean_abs_dlogprob = max(comparison.mean_abs_dlogprob, mean_distance)
    return comparison


def _least_distance(token: int, logprobs: Mapping[int, float], other_logprobs: Mapping[int, float]) -> float:
    """Return the least distance of a generated token that the other side does not list; 0 if it lists the token.

    There the token is less likely than the last one of the list.
    """
    if token in other_logprobs or token not in logprobs:  # the other one, or neither side, says how likely it is
        return 0.0
    return logprobs[token] - min(other_logprobs.values())


def can_rounding_explain_tokens(comparison: TokenComparison, fp8_noise: float = 0.0) -> bool:
    """Return whether rounding explains how far apart the two runs are.

    Over an fp8 cache another kernel's rounding before the cast can move a value by a step of fp8. So each request's
    mean difference must stay below ``fp8_noise``, the effect of the cast on vLLM's own decode. That noise is
    ``mean_decode_prefill_dlogprob`` with the flag off. The noise counts up to the bound of the step ``decode``.
    """
    if fp8_noise:
        return comparison.tokens > 0 and comparison.mean_abs_dlogprob <= min(fp8_noise, MAX_DECODE_PREFILL_DLOGPROB)
    return (
        comparison.tokens > 0
        and comparison.top1_agreement >= MIN_TOP1_AGREEMENT
        and comparison.max_abs_dlogprob <= MAX_DLOGPROB
    )


def logprob_distance(logprob: float, other_logprob: float) -> float:
    """Return the absolute difference. It is infinite if either is NaN, because ``max`` would ignore a NaN."""
    difference = abs(logprob - other_logprob)
    return math.inf if math.isnan(difference) else difference


def mean_decode_prefill_dlogprob(answer: EngineAnswer) -> float:
    """Return the mean difference of the generated tokens' log-probabilities between decode and prefill."""
    distances = []
    for scenario, requests in answer.generated_tokens.items():
        for tokens, text_logprobs in zip(requests, answer.generated_text_logprobs[scenario], strict=True):
            for (token, decode_logprobs), prefill_logprob in zip(tokens, text_logprobs[-len(tokens) :], strict=True):
                distances.append(logprob_distance(decode_logprobs[token], prefill_logprob))
    return sum(distances) / len(distances) if distances else math.inf


@dataclass(frozen=True, slots=True)
class PrefillComparison:
    """One kind of step with prefill rows, compared with the flag off and on."""

    prompts: int  # their number
    equal: int  # prompts with the same bytes with the flag off and on
    repeated: int  # prompts with the same bytes in two steps with the flag off
    max_abs_dlogprob: float  # between off and on
    off_ms: float  # median time of a step with the flag off, in milliseconds
    on_ms: float  # the same with the flag on

    @property
    def is_explained_by_rounding(self) -> bool:
        """Whether one rounding of q_pe and k_pe, or vLLM's own noise, explains the differences."""
        num_unequal, noise = self.prompts - self.equal, self.prompts - self.repeated
        return num_unequal <= MAX_UNEQUAL_SHARE * self.prompts + noise and self.max_abs_dlogprob <= MAX_DLOGPROB

    @property
    def ratio(self) -> float:
        """Time with the flag on, divided by the time with the flag off."""
        return self.on_ms / self.off_ms

    def summary(self) -> str:
        """Return the figures in one line."""
        distance_text = f", max |dlogprob| {self.max_abs_dlogprob:.2g}" * (self.equal < self.prompts)
        repeated_text = f" (off, repeated: {self.repeated})" * (self.repeated < self.prompts)
        return (
            f"{self.equal} of {self.prompts} prompts have the same bytes{repeated_text}{distance_text}; "
            f"{self.off_ms:.2f} ms off, {self.on_ms:.2f} ms on, ratio {self.ratio:.3f}"
        )


def compare_prefill(answers: Mapping[Side, EngineAnswer], step_kind: str) -> PrefillComparison | None:
    """Compare the steps of one kind of ``PREFILL_STEPS``; return None if no such batch fits."""
    (off_logprobs, repeated_off_logprobs), (on_logprobs, _) = (
        answers[side].prefill_step_logprobs[step_kind] for side in SIDES
    )
    if not off_logprobs:
        return None
    distances, repeated_distances = (
        [max(map(logprob_distance, *pair)) for pair in zip(off_logprobs, other_logprobs, strict=True)]
        for other_logprobs in (on_logprobs, repeated_off_logprobs)
    )
    off_ms, on_ms = (1e3 * statistics.median(answers[side].step_seconds[step_kind]) for side in SIDES)
    num_equal, num_repeated = distances.count(0), repeated_distances.count(0)
    return PrefillComparison(len(distances), num_equal, num_repeated, max(distances), off_ms, on_ms)

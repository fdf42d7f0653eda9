# SPDX-License-Identifier: Apache-2.0
"""The answer of vLLM's engine with the flag off or on. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vllm_aiter_mla.commands.compat.llm_engine import TokenLogprobs
    from vllm_aiter_mla.status.record import RankRecord

Side = Literal["off", "on"]
"""The user's options with the flag off, or the same with the flag on."""
SIDES: tuple[Side, ...] = ("off", "on")
"""Both sides, in the order in which they are shown."""
ABOVE_LIMIT, MIXED = "above the decode limit", "prompts among decodes"
PREFILL_STEPS = (ABOVE_LIMIT, MIXED)
"""Two kinds of steps with prefill rows: more tokens than the decode limit, and a mixed batch within the limit."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """The answer of one engine.

    Prefill gives a log-probability for each token of a text except the first.
    """

    # By key of ``SCENARIOS``, and request: the tokens, and the log-probabilities of prefill of the same text
    generated_tokens: dict[str, list[list[TokenLogprobs]]]
    generated_text_logprobs: dict[str, list[list[float]]]
    # By kind of step, one of ``PREFILL_STEPS``: the log-probabilities of two equal steps by prompt, and the step times
    prefill_step_logprobs: dict[str, list[list[list[float]]]]
    step_seconds: dict[str, list[float]]
    num_launches: int  # kernels of one decode step on the first rank; 0 on a CPU
    unsupported_options: tuple[str, ...] = ()  # options of a deployment that one engine does not support
    rank_records: tuple[RankRecord, ...] = ()

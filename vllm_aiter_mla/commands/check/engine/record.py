# SPDX-License-Identifier: Apache-2.0
"""What vLLM's engine answers with the flag off or on. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vllm_aiter_mla.commands.compat.engine import TokenLogprobs
    from vllm_aiter_mla.status.record import RankStatus

Side = Literal["off", "on"]
"""The user's options with the flag off, or the same with the flag on."""
SIDES: tuple[Side, ...] = ("off", "on")
"""In the order in which they are shown."""
ABOVE, MIXED = "above the decode limit", "prompts among decodes"
PREFILLS = (ABOVE, MIXED)
"""Steps with prefill rows: more tokens than the decode limit, and decode rows with prompts that it can hold."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """What one engine gave.

    A log-probability of prefill is that of each token of a text but the first.
    """

    generated: dict[str, list[list[TokenLogprobs]]]  # by name of ``SCENARIOS``: the tokens of each request
    prefilled: dict[str, list[list[float]]]  # likewise: log-probabilities of prompt and generated tokens in prefill
    prompts: dict[str, list[list[list[float]]]]  # by name of ``PREFILLS``: those of each prompt, in two equal steps
    seconds: dict[str, list[float]]  # likewise: of each timed step
    launches: int  # kernels of one decode step on the first rank; 0 on a CPU
    left_out: tuple[str, ...] = ()  # options of a deployment, which one engine cannot honour
    ranks: tuple[RankStatus, ...] = ()  # what each rank wrote of itself

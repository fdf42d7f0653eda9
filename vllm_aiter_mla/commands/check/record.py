# SPDX-License-Identifier: Apache-2.0
"""The record of a run of ``check``."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from vllm_aiter_mla import files

StepStatus = Literal["passed", "failed", "warning", "skipped", "unknown", "no gain", "cut off"]


class StatusTraits(NamedTuple):
    """What a status means for a reader."""

    tone: Literal["good", "bad", "mind", "none"]  # of its colour
    has_run: bool  # the step ran to its end and gave a result


STATUSES: dict[str, StatusTraits] = {
    "passed": StatusTraits("good", True),
    "failed": StatusTraits("bad", True),  # do not use the fast path
    "warning": StatusTraits("mind", True),
    "no gain": StatusTraits("mind", True),  # nothing is wrong, and vLLM's own kernels are the fastest
    "skipped": StatusTraits("none", False),  # the step could not run here
    "unknown": StatusTraits("none", False),  # the step ran and gave no result
    "cut off": StatusTraits("bad", False),  # the step had not ended
}
"""The traits of each ``StepStatus``."""
CARD_STEPS = ("kernels", "timing", "engine")
"""Steps that run on a card if there is one. ``kernels`` can run on a CPU too."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """How one step ended."""

    name: str = field(default="", kw_only=True)  # as in the table; set by ``run``. The demo adds its configuration
    status: StepStatus  # ``STATUSES`` explains it
    detail: str  # the finding in one line
    lines: tuple[str, ...] = ()  # details, printed below the finding
    # The figures: records or containers. A step that was read from a file has only containers. The steps ``plan``,
    # ``kernels`` and ``timing`` have records with a stamp of their own.
    data: object = None
    seconds: float = field(default=0.0, kw_only=True)  # how long the step took; set by ``run``

    @property
    def base_name(self) -> str:
        """The key in ``steps.STEPS``: "engine" for "engine, fp8 cache", to which the demo adds its configuration."""
        return self.name.partition(",")[0]


def has_run_card_step(ended_steps: Iterable[StepResult]) -> bool:
    """Return whether a step ran that can run on a card."""
    return any(STATUSES[step.status].has_run for step in ended_steps if step.base_name in CARD_STEPS)


@dataclass(frozen=True)
class CheckRun:
    """A run of ``check``, as --json writes it."""

    model: str | None  # as typed
    exit: int | None  # the exit status; None if the run was cut off
    steps: tuple[StepResult, ...]  # those that ended, and the findings so far of a step that was cut off
    on_a_card: bool | None = None  # whether the steps that can run on a card did; None if none of them ran
    evidence: files.Stamp = files.stamp_field("check")

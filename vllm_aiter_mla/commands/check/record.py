# SPDX-License-Identifier: Apache-2.0
"""The record of a run of ``check``."""

from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_aiter_mla import files

Status = Literal["passed", "failed", "warning", "skipped", "no gain"]


@dataclass(frozen=True, slots=True)
class Step:
    """How one step ended."""

    name: str = field(default="", kw_only=True)  # filled in by ``run``
    # "failed" if the fast path must not be used as it is; "no gain" if nothing is wrong and vLLM's own kernels run;
    # "skipped" if the step could not run here
    status: Status
    detail: str  # the finding in one line
    lines: tuple[str, ...] = ()  # more lines for the reader
    data: Any = None  # in a file as ``files.plain`` makes it; that of `plan`, `verify` and `measure` is their record


@dataclass(frozen=True)
class CheckRun:
    """Every step of a run."""

    model: str  # as given
    exit: int | None  # the exit status; None if the run was cut off
    steps: tuple[Step, ...]
    evidence: files.Stamp = files.stamped("check")

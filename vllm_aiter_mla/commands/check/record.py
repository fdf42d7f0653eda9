# SPDX-License-Identifier: Apache-2.0
"""The record of a run of ``check``."""

from dataclasses import dataclass

from pydantic import JsonValue

from vllm_aiter_mla import files


@dataclass(frozen=True)
class Step:
    """How one step ended; ``steps.Outcome`` explains the fields."""

    name: str
    status: str
    detail: str
    lines: tuple[str, ...]
    data: JsonValue  # as ``files.plain`` makes it; that of `plan`, `verify` and `measure` reads as their records


@dataclass(frozen=True)
class CheckRun:
    """Every step of a run."""

    model: str  # as given
    exit: int | None  # the exit status; None if the run was cut off
    steps: tuple[Step, ...]
    evidence: files.Stamp = files.stamped("check")

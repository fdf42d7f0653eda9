"""What a check takes and returns, and how many of them run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vllm_aiter_mla.commands import outputs

Status = Literal["ok", "warning", "problem", "unknown"]
STATUSES: tuple[Status, ...] = ("ok", "warning", "problem", "unknown")


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        status: "ok"; "warning", it works but look at it; "problem", the fast path will not engage or not work;
            "unknown", it cannot be told from here.
        detail: the finding, with the figures.
        remedy: what to do; empty if there is nothing to do.
        name: of the check; filled in by ``run``.
    """

    status: Status
    detail: str
    remedy: str = ""
    name: str = ""


@dataclass(frozen=True)
class Given:
    """What the checks look at besides the machine.

    Attributes:
        env: environment variables.
        served: options of ``vllm serve`` as vLLM parses them; None if none were given.
        finding: what is wrong with the options, or why they could not be read.
    """

    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    served: Any = None
    finding: Check | None = None


CheckFunction = Callable[[Given], Check]


def named(*checks: CheckFunction) -> tuple[tuple[str, CheckFunction], ...]:
    """Return checks with their names: the function's, with hyphens."""
    return tuple((check.__name__.replace("_", "-"), check) for check in checks)


def run(
    checks: Iterable[tuple[str, CheckFunction]], given: Given, at: outputs.Step = outputs.silent
) -> tuple[Check, ...]:
    """Run every check. One that raises is "unknown" and stops no other. ``at`` takes the name of each."""
    found = []
    for name, check in checks:
        at(name)
        try:
            found.append(replace(check(given), name=name))
        except (Exception, SystemExit) as error:  # SystemExit: a package may give up while it is imported
            first_line = next(iter(str(error).strip().splitlines()), "")
            found.append(Check("unknown", f"the check failed: {type(error).__name__}: {first_line}", name=name))
    return tuple(found)


def exit_status(checks: Iterable[Check]) -> int:
    """Return 1 if there is a problem, else 2 if something is unknown, else 0."""
    found = {check.status for check in checks}
    return 1 if "problem" in found else 2 if "unknown" in found else 0

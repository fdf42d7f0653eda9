"""One finding, and running many of them so that none can stop the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from vllm_aiter_mla.commands import progress
from vllm_aiter_mla.commands.doctor.given import Given

Status = Literal["ok", "warning", "problem", "unknown"]
STATUSES: tuple[Status, ...] = ("ok", "warning", "problem", "unknown")


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        status: "ok"; "warning", it works but look at it; "problem", the fast path will not engage or not work;
            "unknown", it cannot be told from here.
        detail: the finding, with the figures.
        remedy: what to do; empty when there is nothing to do.
        name: of the check, short and stable; put in when it is run.
    """

    status: Status
    detail: str
    remedy: str = ""
    name: str = ""


CheckFunction = Callable[[Given], Check]


def named(*checks: CheckFunction) -> tuple[tuple[str, CheckFunction], ...]:
    """Checks with their names: the function's, with hyphens."""
    return tuple((check.__name__.replace("_", "-"), check) for check in checks)


def run(
    checks: Iterable[tuple[str, CheckFunction]], given: Given, at: Callable[[str], None] = progress.silent
) -> tuple[Check, ...]:
    """Every check's finding; one that raises is "unknown" and names its error. ``at`` is told which one begins."""
    return tuple(_guarded(name, check, given, at) for name, check in checks)


def exit_status(checks: Iterable[Check]) -> int:
    """0; 1 when there is a problem; 2 when there is none but something is unknown. A problem outweighs an unknown."""
    found = {check.status for check in checks}
    if "problem" in found:
        return 1
    return 2 if "unknown" in found else 0


def _guarded(name: str, check: CheckFunction, given: Given, at: Callable[[str], None]) -> Check:
    at(name)
    try:
        return replace(check(given), name=name)
    # SystemExit too: a package that gives up while it is imported must not end the examination.
    except (Exception, SystemExit) as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        return Check("unknown", f"the check failed: {type(error).__name__}: {first_line}", name=name)

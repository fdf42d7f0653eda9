"""What a check takes and returns, and how many of them run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

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


Env = Mapping[str, str]
"""Environment variables."""
CheckFunction = Callable[[Env], Check]


class NotKnownError(Exception):
    """What a check asks cannot be told from here; the arguments are detail and remedy."""


def name_of(check: CheckFunction) -> str:
    """Return a check's name for the user: the function's, with hyphens."""
    return check.__name__.replace("_", "-")


def run(checks: Iterable[CheckFunction], env: Env, at: outputs.Step = outputs.silent) -> tuple[Check, ...]:
    """Run every check. One that raises is "unknown" and stops no other. ``at`` takes the name of each."""
    found = []
    for check in checks:
        at(name_of(check))
        try:
            one = check(env)
        except NotKnownError as error:
            one = Check("unknown", *error.args)
        except (Exception, SystemExit) as error:  # SystemExit: a package may give up while it is imported
            first_line = next(iter(str(error).strip().splitlines()), "")
            one = Check("unknown", f"the check failed: {type(error).__name__}: {first_line}")
        found.append(replace(one, name=name_of(check)))
    return tuple(found)


def exit_status(checks: Iterable[Check]) -> int:
    """Return 1 if there is a problem, else 2 if something is unknown, else 0."""
    found = {check.status for check in checks}
    return 1 if "problem" in found else 2 if "unknown" in found else 0

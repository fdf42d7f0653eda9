# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla doctor``: check whether the fast path can work here, and say what prevents it."""

from __future__ import annotations

import json as json_module
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Annotated
from unittest import mock

import typer
from rich.console import Console

from vllm_aiter_mla import __version__, files
from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.commands.doctor.machine import CHECKS, STATUSES, Check, CheckFunction, Env


def doctor(json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Check this machine; `plan` takes the options of `vllm serve`. Runs anywhere, without a GPU.

    Prints one line per check: ok, warning, problem or unknown, the finding, and what to do. Reads AITER's files and
    never imports AITER. Exit status: 1 with a problem, else 2 with something unknown, else 0.
    """
    with Console(stderr=True).status("doctor") as shown:
        checks = examine(lambda name: shown.update(f"doctor: {name}"))
    record = {"plugin": __version__, "exit": exit_status(checks), "checks": [asdict(check) for check in checks]}
    if json:
        typer.echo(json_module.dumps(record | files.stamp("doctor"), indent=1))
    else:
        show(checks)
    raise typer.Exit(exit_status(checks))


def examine(at: Callable[[str], None] = lambda name: None) -> tuple[Check, ...]:
    """Run doctor's checks on this machine. ``at`` takes the name of each."""
    # vLLM logs to stdout, where the findings go.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    with aiter_not_importable():
        return run(CHECKS, os.environ, at)


def show(checks: Sequence[Check]) -> None:
    """Print one line per check, and the number of each status."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        typer.echo(outputs.line(f"{check.status:<8} {check.name:<{width}}  {' '.join(check.detail.split())}{remedy}"))
    counts = Counter(check.status for check in checks)
    typer.echo(f"vllm-aiter-mla {__version__}: " + ", ".join(f"{counts[status]} {status}" for status in STATUSES))


def name_of(check: CheckFunction) -> str:
    """Return a check's name for the user: the function's, with hyphens."""
    return check.__name__.replace("_", "-")


def run(checks: Iterable[CheckFunction], env: Env, at: Callable[[str], None] = lambda name: None) -> tuple[Check, ...]:
    """Run every check. One that raises is "unknown" and stops no other. ``at`` takes the name of each."""
    found = []
    for check in checks:
        at(name_of(check))
        try:
            one = check(env)
        except (Exception, SystemExit) as error:  # SystemExit: a package may give up while it is imported
            first_line = next(iter(str(error).strip().splitlines()), "")
            one = Check("unknown", f"the check failed: {type(error).__name__}: {first_line}")
        found.append(replace(one, name=name_of(check)))
    return tuple(found)


def exit_status(checks: Iterable[Check]) -> int:
    """Return 1 if there is a problem, else 2 if something is unknown, else 0."""
    found = {check.status for check in checks}
    return 1 if "problem" in found else 2 if "unknown" in found else 0


@contextmanager
def aiter_not_importable() -> Iterator[None]:
    """Let AITER be found but not imported inside the block: its import wants a card and may start a compiler."""
    execute = SourceFileLoader.exec_module

    def refusing(loader: SourceFileLoader, module: ModuleType) -> None:
        if module.__name__.partition(".")[0] == "aiter":
            raise ImportError(f"doctor does not import {module.__name__}: that may start a compiler", name="aiter")
        execute(loader, module)

    with mock.patch.object(SourceFileLoader, "exec_module", refusing):
        yield

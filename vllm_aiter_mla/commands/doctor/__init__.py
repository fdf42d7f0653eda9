# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla doctor``: check whether the fast path can work here, and say what prevents it."""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import get_args
from unittest import mock

import typer
from rich.console import Console

from vllm_aiter_mla import __version__, files
from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.commands.doctor.checks import CHECKS, Check, CheckFunction, Env, Status


def doctor(json: outputs.Json = None) -> None:
    """Check this machine; `plan` takes the options of `vllm serve`. Runs anywhere, without a GPU.

    Prints one line per check: ok, warning, problem or unknown, the finding, and what to do. Reads AITER's files and
    never imports AITER. Exit status: 1 with a problem, else 3 with something unknown, else 0.
    """
    with Console(stderr=True).status("doctor looks at this machine"):
        checks = examine(os.environ)
    with outputs.text_apart(json):
        show(checks)
    if json is not None:
        record = {"plugin": __version__, "exit": exit_status(checks), "checks": [asdict(check) for check in checks]}
        outputs.write(json, files.text_of(record | {files.KEY: files.stamp("doctor")}))
    raise typer.Exit(exit_status(checks))


def examine(env: Env) -> tuple[Check, ...]:
    """Run doctor's checks on this machine, for a server with these variables."""
    # vLLM logs to stdout, where the findings go, and warns of what the checks say.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    logging.disable(logging.WARNING)
    try:
        with aiter_not_importable():
            return run(CHECKS, env)
    finally:
        logging.disable(logging.NOTSET)


def run(checks: Iterable[CheckFunction], env: Env) -> tuple[Check, ...]:
    """Run every check. One that raises is "unknown" and stops no other."""
    found = []
    for check in checks:
        try:
            one = check(env)
        except (Exception, SystemExit) as error:  # SystemExit: a package may give up while it is imported
            first_line = next(iter(str(error).strip().splitlines()), "")
            one = Check("unknown", f"the check failed: {type(error).__name__}: {first_line}")
        found.append(replace(one, name=name_of(check)))
    return tuple(found)


def show(checks: Sequence[Check]) -> None:
    """Print one line per check, and the number of each status."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        detail = f"{' '.join(check.detail.split())}{remedy}"
        typer.echo(outputs.folded(outputs.line(f"{check.status:<8} {check.name:<{width}}  {detail}")))
    counts = Counter(check.status for check in checks)
    typer.echo(
        f"vllm-aiter-mla {__version__}: " + ", ".join(f"{counts[status]} {status}" for status in get_args(Status))
    )


def name_of(check: CheckFunction) -> str:
    """Return a check's name for the user: the function's, with hyphens."""
    return check.__name__.replace("_", "-")


def exit_status(checks: Iterable[Check]) -> int:
    """Return the exit status: of a problem, else of something unknown, else 0."""
    found = {check.status for check in checks}
    return outputs.FINDING if "problem" in found else outputs.NOT_LOOKED if "unknown" in found else outputs.FINE


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

# SPDX-License-Identifier: Apache-2.0
"""The step ``machine``: look whether the fast path can work here, and say what prevents it.

Runs anywhere, without torch and vLLM too. Reads AITER's files and never imports AITER.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from types import ModuleType
from unittest import mock

from vllm_aiter_mla.commands.machine.checks import CHECKS, Check, CheckFunction, Env


def examine(env: Env) -> tuple[Check, ...]:
    """Run every check on this machine, for a server with these variables."""
    logging.disable(logging.WARNING)  # vLLM's warnings would repeat what the checks find
    try:
        with aiter_not_importable():
            return run_checks(CHECKS, env)
    finally:
        logging.disable(logging.NOTSET)


def run_checks(checks: Iterable[CheckFunction], env: Env) -> tuple[Check, ...]:
    """Run every check. One that raises is "unknown" and stops no other."""
    results = []
    for check in checks:
        try:
            result = check(env)
        except (Exception, SystemExit) as error:  # SystemExit: a package may give up while it is imported
            first_line = next(iter(str(error).strip().splitlines()), "")
            result = Check("unknown", f"the check failed: {type(error).__name__}: {first_line}")
        results.append(replace(result, name=name_of(check)))
    return tuple(results)


def lines(checks: Sequence[Check]) -> Iterator[str]:
    """Yield one line per check: ok, warning, problem or unknown, the finding, and what to do."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        yield f"{check.status:<8} {check.name:<{width}}  {' '.join(check.detail.split())}{remedy}"


def name_of(check: CheckFunction) -> str:
    """Return a check's name for the user: the function's, with hyphens."""
    return check.__name__.replace("_", "-")


@contextmanager
def aiter_not_importable() -> Iterator[None]:
    """Let AITER be found but not imported inside the block: its import wants a card and may start a compiler."""
    execute = SourceFileLoader.exec_module

    def refusing(loader: SourceFileLoader, module: ModuleType) -> None:
        if module.__name__.partition(".")[0] == "aiter":
            raise ImportError(
                f"the step machine does not import {module.__name__}: that may start a compiler", name="aiter"
            )
        execute(loader, module)

    with mock.patch.object(SourceFileLoader, "exec_module", refusing):
        yield

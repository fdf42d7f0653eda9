# SPDX-License-Identifier: Apache-2.0
"""The step ``machine``: check whether the fast path can work here, and report what prevents it.

The step runs anywhere, also without torch and vLLM. It reads AITER's files and never imports AITER.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from types import ModuleType
from unittest import mock

from vllm_aiter_mla.commands.machine.checks import CHECKS, CheckFunction, CheckResult, Environment


def check_machine(environment: Environment) -> tuple[CheckResult, ...]:
    """Run every check on this machine, for a server with this environment."""
    logging.disable(logging.WARNING)  # vLLM's warnings would repeat what the checks find
    try:
        with forbid_aiter_import():
            return run_checks(CHECKS, environment)
    finally:
        logging.disable(logging.NOTSET)


def run_checks(checks: Iterable[CheckFunction], environment: Environment) -> tuple[CheckResult, ...]:
    """Run every check. If a check raises, its status is "unknown", and the others still run."""
    results = []
    for check in checks:
        try:
            result = check(environment)
        except (Exception, SystemExit) as error:  # an import may raise SystemExit
            first_line = next(iter(str(error).strip().splitlines()), "")
            result = CheckResult("unknown", f"the check failed: {type(error).__name__}: {first_line}")
        results.append(replace(result, name=check_name(check)))
    return tuple(results)


def result_lines(results: Sequence[CheckResult]) -> Iterator[str]:
    """Yield one line per check: its status, its name, its finding and its remedy."""
    width = max(len(result.name) for result in results)
    for result in results:
        remedy_text = f" -> {result.remedy}" if result.remedy else ""
        yield f"{result.status:<8} {result.name:<{width}}  {' '.join(result.detail.split())}{remedy_text}"


def check_name(check: CheckFunction) -> str:
    """Return the name of a check for the user: that of its function without "check_", with hyphens."""
    return check.__name__.removeprefix("check_").replace("_", "-")


@contextmanager
def forbid_aiter_import() -> Iterator[None]:
    """Forbid the import of AITER inside a block: it may start a compiler. AITER can still be located."""
    exec_module = SourceFileLoader.exec_module

    def exec_or_raise(loader: SourceFileLoader, module: ModuleType) -> None:
        if module.__name__.partition(".")[0] == "aiter":
            raise ImportError(
                f"the step machine does not import {module.__name__}: that may start a compiler", name="aiter"
            )
        exec_module(loader, module)

    with mock.patch.object(SourceFileLoader, "exec_module", exec_or_raise):
        yield

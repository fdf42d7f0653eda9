"""From the command line to printed findings and an exit status."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from vllm_aiter_mla import __version__, evidence
from vllm_aiter_mla.report.doctor import arguments, installed, machine, options, switches
from vllm_aiter_mla.report.doctor.check import STATUSES, Check, Given, exit_status, run
from vllm_aiter_mla.report.doctor.guard import aiter_not_importable

CHECKS = (*machine.CHECKS, *installed.CHECKS, *switches.CHECKS, *options.CHECKS)
WRONG = 2


def main(
    compilation: str | None = None, additional: str | None = None, more: Sequence[str] = (), *, as_json: bool = False
) -> int:
    """Run every check and print it.

    Args:
        compilation: what ``vllm serve`` would get as ``--compilation-config``, JSON.
        additional: likewise ``--additional-config``.
        more: the same two, one value at a time: ``-cc.pass_config.NAME=true``.
        as_json: print JSON instead of lines.

    Returns:
        0; 1 with a problem; 2 without one but with something unknown, or when an argument is wrong.
    """
    # vLLM logs to stdout, where the findings go.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        first, second = arguments.read(compilation, additional, more)
    except ValueError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return WRONG
    checks = examine(Given(compilation=first, additional=second))
    if as_json:
        print(json.dumps(as_record(checks) | evidence.stamp("doctor", 1), indent=1))
    else:
        print("\n".join(lines(checks)))
    return exit_status(checks)


def examine(given: Given) -> tuple[Check, ...]:
    """Every finding, in the order of ``CHECKS``; AITER is not imported, whoever tries."""
    with aiter_not_importable():
        return run(CHECKS, given)


def as_record(checks: Sequence[Check]) -> dict[str, Any]:
    """The findings for a program."""
    return {"plugin": __version__, "exit": exit_status(checks), "checks": [asdict(check) for check in checks]}


def lines(checks: Sequence[Check]) -> Iterator[str]:
    """One line per check, and a last one that sums up."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        yield f"{check.status:<8} {check.name:<{width}}  {' '.join(check.detail.split())}{remedy}"
    counts = Counter(check.status for check in checks)
    yield f"vllm-aiter-mla {__version__}: " + ", ".join(f"{counts[status]} {status}" for status in STATUSES)

"""``vllm-aiter-mla doctor``: can the fast path work here, and what stands in its way."""

from __future__ import annotations

import json as json_module
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from vllm_aiter_mla import __version__, files
from vllm_aiter_mla.commands import progress
from vllm_aiter_mla.commands.doctor import conflicts, given, installed, machine, switches
from vllm_aiter_mla.commands.doctor.check import STATUSES, Check, exit_status, run
from vllm_aiter_mla.commands.doctor.guard import aiter_not_importable

# typer passes on the options it does not know: vLLM's own parser reads them.
COMMAND: dict[str, Any] = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
CHECKS = (*machine.CHECKS, *installed.CHECKS, *switches.CHECKS, *conflicts.CHECKS)


def doctor(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine, and the options of `vllm serve` where they are given. Runs anywhere, without a GPU.

    One line per check: ok, warning, problem or unknown, the finding, and what to do. AITER is read, never imported.
    Exits 0; 1 with a problem; 2 without one but with something that cannot be told from here.
    """
    with progress.shown("doctor") as at:
        raise typer.Exit(main(context.args, as_json=json, at=at))


def main(arguments: Sequence[str] = (), *, as_json: bool = False, at: progress.Step = progress.silent) -> int:
    """Run every check and print it; ``at`` is told which one begins.

    Args:
        arguments: what ``vllm serve`` would get, in any of its spellings.
        as_json: print JSON instead of lines.

    Returns:
        0; 1 with a problem, a wrong option among them; 2 without one but with something unknown.
    """
    # vLLM logs to stdout, where the findings go.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    at("reading the options with vLLM's parser")
    checks = examine(arguments, at)
    record = as_record(checks) | files.stamp("doctor", 1)
    print(json_module.dumps(record, indent=1) if as_json else "\n".join(lines(checks)))
    return exit_status(checks)


def examine(arguments: Sequence[str], at: progress.Step = progress.silent) -> tuple[Check, ...]:
    """Every finding, in the order of ``CHECKS``; AITER is not imported, even where vLLM tries."""
    with aiter_not_importable():
        return run(CHECKS, given.read(arguments), at)


def as_record(checks: Sequence[Check]) -> dict[str, Any]:
    """The findings for a program."""
    return {
        "plugin": __version__,
        "exit": exit_status(checks),
        "checks": [{"name": check.name} | asdict(check) for check in checks],
    }


def lines(checks: Sequence[Check]) -> Iterator[str]:
    """One line per check, and a last one that sums up."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        yield f"{check.status:<8} {check.name:<{width}}  {' '.join(check.detail.split())}{remedy}"
    counts = Counter(check.status for check in checks)
    yield f"vllm-aiter-mla {__version__}: " + ", ".join(f"{counts[status]} {status}" for status in STATUSES)

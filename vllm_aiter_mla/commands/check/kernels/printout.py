# SPDX-License-Identifier: Apache-2.0
"""Print the cases of the step ``kernels`` for ``--list``, and its record as tables and lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_aiter_mla.verify.results import RESULT_STATUSES

if TYPE_CHECKING:
    from vllm_aiter_mla.verify.results import Result, Verification

_STATUS_MARKS = dict(zip(RESULT_STATUSES, ("[green]ok[/]", "[red]FAILED[/]", "[yellow]skipped[/]"), strict=True))


def count_rounds(results: Sequence[Result]) -> Counter[str]:
    """Return the number of rounds by status."""
    counts = Counter[str]()
    for result in results:
        counts[result.status] += result.rounds
    return counts


def counts_text(results: Sequence[Result]) -> str:
    """Return the number of rounds by status in words, as in "2 passed, 0 failed, 1 skipped"."""
    counts = count_rounds(results)
    return ", ".join(f"{counts[status]} {status}" for status in RESULT_STATUSES)


def print_cases(console: Console) -> None:
    """Print the cases and the oracles."""
    from vllm_aiter_mla.verify import cases, oracles

    console.print("cases:")
    for case in cases.cases(cases.LIMITS[0]):
        console.print(f"  {case.name}: {case.serving}", soft_wrap=True)
    console.print("oracles:")
    for name, meaning in oracles.ORACLES.items():
        console.print(f"  {name}: {meaning}", soft_wrap=True)


def print_record(record: Verification, console: Console) -> None:
    """Print a table for each back end, and each failure with the command that repeats it."""
    if record.machine:
        console.print("machine: " + escape(", ".join(f"{name} {value}" for name, value in record.machine.items())))
    if "eager" in record.engine:
        console.print(
            "[bold]graph capture: not available on this machine[/]: torch sees no GPU. What follows is eager replay: "
            "recorded ATen calls, repeated on the same tensors with the same Python values. It says nothing about a "
            "driver, a kernel on a GPU or time."
        )
    for name, reason in record.missing.items():
        console.print(f"back end {name}: not available: {escape(reason)}")
    for backend in dict.fromkeys(result.backend for result in record.results):
        console.print(_backend_table(backend, [result for result in record.results if result.backend == backend]))
    for line in _lines_below_the_tables(record):
        console.print(line, soft_wrap=True)


def _backend_table(backend: str, results: list[Result]) -> Table:
    """Return a table with a row for each case: the statuses of its variants, and the numbers of graphs and checks."""
    table = Table(title=f"{backend}: {results[0].engine}", title_justify="left", padding=(0, 1), pad_edge=False)
    for name in ("case", "variants", "graphs", "replays", "checks", "seconds"):
        table.add_column(name, justify="left" if name in ("case", "variants") else "right", no_wrap=True)
    for case in dict.fromkeys(result.case for result in results):
        case_results = [result for result in results if result.case == case]
        counts = count_rounds(case_results)
        marks = ", ".join(f"{counts[status]} {mark}" for status, mark in _STATUS_MARKS.items() if counts[status])
        sums = (
            str(sum(getattr(result, name) for result in case_results)) for name in ("captures", "replays", "checks")
        )
        table.add_row(case, marks, *sums, f"{sum(result.seconds for result in case_results):.2f}")
    return table


def _lines_below_the_tables(record: Verification) -> Iterator[str]:
    """Yield each failure, the reasons of skipped cases, the launches of a step, the oracles, and the sums."""
    from vllm_aiter_mla.verify.oracles import ORACLES

    for result in (result for result in record.results if result.status == "failed"):
        rounds_text = f", first of {result.rounds} rounds that failed" * (result.rounds > 1)
        case_text = f"{result.backend} {result.case} ({result.variant}, seed {result.seed}{rounds_text})"
        yield f"\n[red bold]FAILED[/] {case_text}"
        for finding in result.findings[:6]:
            yield f"  {finding.oracle}: {escape(finding.message)}"
            yield f"    must hold: {ORACLES[finding.oracle]}"
            yield f"    at {escape(finding.step)}"
        if result.command:
            yield f"  reproduce: {escape(result.command)}"
    yield from dict.fromkeys(
        f"{result.backend} {result.case}: {escape(result.reason)}" for result in record.results if result.reason
    )
    for result in record.results:
        if result.case == "kernel-status" and result.launches:
            num_tokens, text = next(iter(result.launches.items()))
            yield f"launches of {result.backend} {result.variant}, T={num_tokens}: {escape(text)}"
    yield f"oracles: {', '.join(ORACLES)}"
    num_replays, seconds = (sum(getattr(result, name) for result in record.results) for name in ("replays", "seconds"))
    yield f"{record.engine}: {counts_text(record.results)}; {num_replays} replays; {seconds:.1f} s"

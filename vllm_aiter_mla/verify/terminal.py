"""A run on the terminal: progress, a table per case, and each failure with the command that repeats it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_aiter_mla.verify.oracles import ORACLES
from vllm_aiter_mla.verify.runner import Result
from vllm_aiter_mla.verify.selftest import Outcome
from vllm_aiter_mla.verify.session import NO_GRAPHS, Request, Session, command

_MARKS = {"passed": "[green]ok[/]", "failed": "[red]FAILED[/]", "skipped": "[yellow]skipped[/]"}


def run(request: Request, console: Console) -> Session:
    """Run and print as it goes. Raises NoSuchError."""
    session = Session(request)
    for line in _header(session):
        console.print(line)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=session.total)
        for result in session.run():
            progress.update(task, advance=1, description=f"{result.backend} {result.variant} {result.case}")
    for backend in dict.fromkeys(result.backend for result in session.results):
        console.print(_table(backend, [result for result in session.results if result.backend == backend]))
    for line in (*_failures(session), *_footer(session)):
        console.print(line, soft_wrap=True)
    return session


def _header(session: Session) -> Iterator[str]:
    """Machine, engine, and which back ends are missing."""
    yield "machine: " + escape(", ".join(f"{name} {value}" for name, value in session.machine.items()))
    if not session.engine.graphs:
        yield (
            f"[bold]{NO_GRAPHS}[/]: torch sees no GPU. What follows is eager replay: recorded ATen calls, repeated on "
            "the same tensors with the same Python values. It says nothing about a driver, a kernel on a GPU or time."
        )
    for name, reason in session.missing.items():
        yield f"back end {name}: not available: {escape(reason)}"


def _table(backend: str, results: list[Result]) -> Table:
    """A row per case, with its variants, and what was done."""
    table = Table(title=f"{backend}: {results[0].engine}", title_justify="left", padding=(0, 1), pad_edge=False)
    for name in ("case", "variants", "graphs", "replays", "checks", "seconds"):
        table.add_column(name, justify="left" if name in ("case", "variants") else "right", no_wrap=True)
    for case in dict.fromkeys(result.case for result in results):
        of_case = [result for result in results if result.case == case]
        counts = Counter(result.status for result in of_case)
        marks = ", ".join(f"{counts[status]} {mark}" for status, mark in _MARKS.items() if counts[status])
        sums = (str(sum(getattr(result, name) for result in of_case)) for name in ("captures", "replays", "checks"))
        table.add_row(case, marks, *sums, f"{sum(result.seconds for result in of_case):.2f}")
    return table


def _failures(session: Session) -> Iterator[str]:
    """Each failed case: what broke, at which step, and the command that runs it alone."""
    for result in (result for result in session.results if result.status == "failed"):
        yield f"\n[red bold]FAILED[/] {result.backend} {result.case} ({result.variant}, seed {result.seed})"
        for finding in result.findings[:6]:
            yield f"  {finding.oracle}: {escape(finding.message)}"
            yield f"    must hold: {ORACLES[finding.oracle]}"
            yield f"    at {escape(finding.step)}"
        yield f"  reproduce: {command(result, session.request)}"


def _footer(session: Session) -> Iterator[str]:
    """Reasons of skipped cases, the launches of a step, the oracles, and the sum."""
    reasons = (f"{r.backend} {r.case}: {escape(r.reason)}" for r in session.results if r.reason)
    yield from dict.fromkeys(reasons)
    for result in session.results:
        if result.case == "kernel-status" and result.launches:
            size, text = next(iter(result.launches.items()))
            yield f"launches of {result.backend} {result.variant}, T={size}: {escape(text)}"
    yield f"oracles: {', '.join(ORACLES)}"
    counts = Counter(result.status for result in session.results)
    replays, seconds = (sum(getattr(result, name) for result in session.results) for name in ("replays", "seconds"))
    sums = ", ".join(f"{counts[status]} {status}" for status in _MARKS)
    yield f"{session.engine.name}: {sums}; {replays} replays; {seconds:.1f} s"
    if not session.engine.graphs:
        yield NO_GRAPHS


def status_line(outcome: Outcome) -> str:
    """One planted fault, as --self-test prints it."""
    mark = "[green]caught[/]" if outcome.ok else "[red]MISSED[/]"
    text = f"{mark} {outcome.fault.name}: {outcome.fault.what}\n       by {outcome.fault.case} / {outcome.fault.oracle}"
    text += f": {escape(outcome.message)}"
    return text + (f"\n       the control fails too: {escape(outcome.control)}" if outcome.control else "")

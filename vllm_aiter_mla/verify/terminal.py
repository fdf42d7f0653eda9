"""A run on the terminal: progress, a table per case, and each failure with the command that repeats it."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_aiter_mla.verify.oracles import ORACLES
from vllm_aiter_mla.verify.runner import Result
from vllm_aiter_mla.verify.selftest import Verdict
from vllm_aiter_mla.verify.session import NO_GRAPHS, Request, Session, command, engine_here
from vllm_aiter_mla.verify.session import run as run_session

_MARKS = {"passed": "[green]ok[/]", "failed": "[red]FAILED[/]", "skipped": "[yellow]skipped[/]"}


def run(request: Request, console: Console) -> Session:
    """Run and print as it goes. Raises NoSuchError."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def started(session: Session, total: int) -> None:
            header(session, console)
            progress.update(task, total=total)

        def done(result: Result) -> None:
            progress.update(task, advance=1, description=f"{result.backend} {result.variant} {result.case}")

        session = run_session(request, started, done)
    for table in tables(session):
        console.print(table)
    failures(session, console)
    footer(session, console)
    return session


def header(session: Session, console: Console) -> None:
    """Machine, engine, and which back ends are missing."""
    console.print("machine: " + escape(", ".join(f"{name} {value}" for name, value in session.machine.items())))
    if not engine_here().graphs:
        console.print(
            f"[bold]{NO_GRAPHS}[/]: torch sees no GPU. What follows is eager replay: recorded ATen calls, repeated on "
            "the same tensors with the same Python values. It says nothing about a driver, a kernel on a GPU or time."
        )
    for name, reason in session.missing.items():
        console.print(f"back end {name}: not available: {escape(reason)}")


def tables(session: Session) -> list[Table]:
    """One table per back end: a row per case, with its variants, and what was done."""
    found = []
    for backend in dict.fromkeys(result.backend for result in session.results):
        results = [result for result in session.results if result.backend == backend]
        table = Table(title=f"{backend}: {results[0].engine}", title_justify="left", padding=(0, 1), pad_edge=False)
        table.add_column("case", no_wrap=True)
        table.add_column("variants", no_wrap=True)
        for name in ("graphs", "replays", "checks", "seconds"):
            table.add_column(name, justify="right", no_wrap=True)
        for case in dict.fromkeys(result.case for result in results):
            table.add_row(*_row(case, [result for result in results if result.case == case]))
        found.append(table)
    return found


def _row(case: str, results: list[Result]) -> tuple[str, ...]:
    counts = {status: sum(result.status == status for result in results) for status in _MARKS}
    marks = ", ".join(f"{count} {_MARKS[status]}" for status, count in counts.items() if count)
    sums = (sum(getattr(result, name) for result in results) for name in ("captures", "replays", "checks"))
    return (case, marks, *map(str, sums), f"{sum(result.seconds for result in results):.2f}")


def failures(session: Session, console: Console) -> None:
    """Each failed case: what broke, at which step, and the command that runs it alone."""
    for result in session.results:
        if result.status != "failed":
            continue
        console.print(f"\n[red bold]FAILED[/] {result.backend} {result.case} ({result.variant}, seed {result.seed})")
        for finding in result.findings[:6]:
            console.print(f"  {finding['oracle']}: {escape(finding['message'])}", soft_wrap=True)
            console.print(f"    must hold: {ORACLES[finding['oracle']]}", soft_wrap=True)
            console.print(f"    at {escape(finding['step'])}", soft_wrap=True)
        console.print(f"  reproduce: {command(result, session.request)}", soft_wrap=True)


def footer(session: Session, console: Console) -> None:
    """Reasons of skipped cases, the census, the oracles, and the sum."""
    for backend, case, reason in dict.fromkeys(
        (result.backend, result.case, result.reason) for result in session.results if result.reason
    ):
        console.print(f"{backend} {case}: {escape(reason)}", soft_wrap=True)
    for result in session.results:
        if result.case == "kernel-census" and result.launches:
            size, text = next(iter(result.launches.items()))
            console.print(f"census {result.backend} {result.variant}, T={size}: {escape(text)}", soft_wrap=True)
    console.print(f"oracles: {', '.join(ORACLES)}", soft_wrap=True)
    counts = {state: sum(result.status == state for result in session.results) for state in _MARKS}
    replays = sum(result.replays for result in session.results)
    console.print(
        f"{session.engine}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped; "
        f"{replays} replays; {sum(result.seconds for result in session.results):.1f} s"
    )
    if not engine_here().graphs:
        console.print(NO_GRAPHS)


def verdict_line(verdict: Verdict) -> str:
    """One planted fault, as --self-test prints it."""
    mark = "[green]caught[/]" if verdict.ok else "[red]MISSED[/]"
    text = f"{mark} {verdict.fault.name}: {verdict.fault.what}\n       by {verdict.fault.case} / {verdict.fault.oracle}"
    text += f": {escape(verdict.message)}"
    return text + (f"\n       the control fails too: {escape(verdict.control)}" if verdict.control else "")

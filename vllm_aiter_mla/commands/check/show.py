# SPDX-License-Identifier: Apache-2.0
"""Print a run of ``check``: each step as it begins and ends, then a table and a summary line."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.commands.check.kernels import printout as kernels_printout
from vllm_aiter_mla.commands.check.record import STATUSES, StepResult
from vllm_aiter_mla.commands.check.timing import printout as timing_printout
from vllm_aiter_mla.commands.check.timing.record import Measurement
from vllm_aiter_mla.commands.plan import printout as plan_printout
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.verify.results import Verification

HEARTBEAT_SECONDS = 30
"""Interval of the lines that say what a long step does, if stderr is not a terminal."""
FILE_LINE_WIDTH = 200
"""Characters in a line of a table, if standard output is not a terminal."""
TONE_STYLES = {"good": "green", "bad": "bold red", "mind": "yellow", "none": "yellow"}
"""The style on a terminal by the tone of a status."""


@contextmanager
def show_progress(step_name: str, number: int, total: int) -> Iterator[Callable[[str], None]]:
    """Print on stderr that a step begins, and what the step does while the block runs.

    Yield a function that takes a description of what the step does now.
    """
    _print_to_stderr(f"{number}/{total} {step_name} ...")
    with _show_spinner(step_name) if is_stderr_terminal() else _print_heartbeats(step_name) as show_activity:
        yield show_activity


@contextmanager
def _show_spinner(step_name: str) -> Iterator[Callable[[str], None]]:
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task_id = progress.add_task(step_name)
        yield lambda activity: progress.update(task_id, description=f"{step_name}: {outputs.one_line(activity)}")


@contextmanager
def _print_heartbeats(step_name: str) -> Iterator[Callable[[str], None]]:
    started_at, activity_text, has_ended = time.monotonic(), "", threading.Event()

    def show_activity(activity: str) -> None:
        nonlocal activity_text
        activity_text = f": {outputs.one_line(activity)}"

    def print_until_end() -> None:
        while not has_ended.wait(HEARTBEAT_SECONDS):
            _print_to_stderr(f"{step_name}, {time.monotonic() - started_at:.0f} s{activity_text}")

    heartbeat = threading.Thread(target=print_until_end, daemon=True)
    heartbeat.start()
    try:
        yield show_activity
    finally:
        has_ended.set()
        heartbeat.join()


def is_stderr_terminal() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr.isatty()


def _print_to_stderr(text: str) -> None:
    """Print on stderr. Ignore the error if nobody reads stderr any more."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def print_findings(step: StepResult, is_full: bool) -> None:
    """Print the findings of a step: its lines. If ``is_full``, print its record as text and tables instead."""
    # A file is wide enough to show every figure in full.
    console = outputs.Stdout(highlight=False, width=None if sys.stdout.isatty() else FILE_LINE_WIDTH)
    if is_full and isinstance(step.data, Verification):
        kernels_printout.print_record(step.data, console)
    elif is_full and isinstance(step.data, Measurement):
        timing_printout.print_record(step.data, console)
    elif is_full and isinstance(step.data, Plan):
        print(outputs.fold_text(plan_printout.format_plan(step.data)))
    elif isinstance(step.data, tuple) and all(isinstance(plan, Plan) for plan in step.data) and step.data:
        print(outputs.fold_text(plan_printout.format_plans(step.data)))
    else:
        for line in step.lines:
            print(outputs.fold_text(f"  {outputs.one_line(line)}"))


def print_table(model: str | None, ended_steps: Sequence[StepResult], summary: str) -> None:
    """Print the table of the steps, then the summary line."""
    console = outputs.Stdout(markup=False, highlight=False, width=outputs.terminal_width())
    title = f"check {outputs.one_line(model)}" if model else "check"
    table = Table("step", "outcome", "s", "finding", title=title, title_justify="left", box=box.ASCII)
    for step in ended_steps:
        status_text = Text(step.status, TONE_STYLES[STATUSES[step.status].tone])
        table.add_row(step.name, status_text, f"{step.seconds:.0f}", outputs.one_line(step.detail))
    console.print(table)
    print(outputs.fold_text(f"check: {summary}"))


def summary_line(ended_steps: Sequence[StepResult], exit_status: int, require_all: bool = False) -> str:
    """Return one line that says what the run showed, and what to do. The arguments are as for ``exit_status_of``."""
    num_skipped = sum(step.status == "skipped" for step in ended_steps)
    if exit_status == outputs.EXIT_FAILED:
        return f"FAILED: {outputs.EXIT_MEANINGS[exit_status].check_text}"
    if exit_status == outputs.EXIT_NO_GAIN:
        return outputs.EXIT_MEANINGS[exit_status].check_text
    if exit_status == outputs.EXIT_INCOMPLETE:
        if any(step.status == "unknown" for step in ended_steps):
            return "some steps gave no result; they say why above"
        if require_all:
            return f"steps that were skipped: {num_skipped}"
        return "nothing ran on a card: run this where vLLM serves (--device cpu runs what a CPU can run)"
    num_warnings = sum(step.status == "warning" for step in ended_steps)
    warnings_text = f", {num_warnings} with a warning" if num_warnings else ""
    return (
        f"{outputs.EXIT_MEANINGS[exit_status].check_text}{warnings_text}; {num_skipped} skipped"
        if num_skipped
        else f"every step passed{warnings_text}"
    )

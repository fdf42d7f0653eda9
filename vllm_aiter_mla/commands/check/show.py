# SPDX-License-Identifier: Apache-2.0
"""What a run of ``check`` prints: each step as it begins and ends, then a table and what a reader takes away."""

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
from vllm_aiter_mla.commands.check.record import Step
from vllm_aiter_mla.commands.check.timing import printout as timing_printout
from vllm_aiter_mla.commands.check.timing.record import Measurement
from vllm_aiter_mla.commands.plan import printout as plan_printout
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.verify.results import Verification

HEARTBEAT_S = 30
"""Where stderr is no terminal, a line every so many seconds says what a long step does."""
IN_A_FILE = 200
"""Characters in a line of a table that goes to a file."""
STYLES = {"passed": "green", "failed": "bold red", "warning": "yellow", "skipped": "yellow", "unknown": "yellow"}


@contextmanager
def progress(name: str, number: int, of: int) -> Iterator[Callable[[str], None]]:
    """Print on stderr that a step begins, and what it does while the block runs.

    Gives a function that takes the words for what the step does now.
    """
    _say(f"{number}/{of} {name} ...")
    with _in_a_terminal(name) if in_a_terminal() else _by_lines(name) as doing:
        yield doing


@contextmanager
def _in_a_terminal(name: str) -> Iterator[Callable[[str], None]]:
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(name)
        yield lambda what: shown.update(task, description=f"{name}: {outputs.one_line(what)}")


@contextmanager
def _by_lines(name: str) -> Iterator[Callable[[str], None]]:
    began, doing, ended = time.monotonic(), "", threading.Event()

    def now_doing(what: str) -> None:
        nonlocal doing
        doing = f": {outputs.one_line(what)}"

    def beat() -> None:
        while not ended.wait(HEARTBEAT_S):
            _say(f"{name}, {time.monotonic() - began:.0f} s{doing}")

    beats = threading.Thread(target=beat, daemon=True)
    beats.start()
    try:
        yield now_doing
    finally:
        ended.set()
        beats.join()


def in_a_terminal() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr.isatty()


def _say(text: str) -> None:
    """Print on stderr. It does not matter if its reader has gone."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def findings(step: Step, whole: bool) -> None:
    """Print what a step found: its lines, or the ``whole`` record as text and tables, for a step that --only names."""
    # In a file no figure is cut off.
    console = outputs.Stdout(highlight=False, width=None if sys.stdout.isatty() else IN_A_FILE)
    if whole and isinstance(step.data, Verification):
        kernels_printout.show(step.data, console)
    elif whole and isinstance(step.data, Measurement):
        timing_printout.show(step.data, console)
    elif whole and isinstance(step.data, Plan):
        print(outputs.folded(plan_printout.text(step.data)))
    elif isinstance(step.data, tuple) and all(isinstance(plan, Plan) for plan in step.data) and step.data:
        print(outputs.folded(plan_printout.table(step.data)))
    else:
        for text in step.lines:
            print(outputs.folded(f"  {outputs.one_line(text)}"))


def table(model: str | None, ended: Sequence[Step], last: str) -> None:
    """Print the table of the steps and the last line."""
    console = outputs.Stdout(markup=False, highlight=False, width=outputs.width())
    title = f"check {outputs.one_line(model)}" if model else "check"
    table = Table("step", "outcome", "s", "finding", title=title, title_justify="left", box=box.ASCII)
    for step in ended:
        outcome = Text(step.status, STYLES.get(step.status, ""))
        table.add_row(step.name, outcome, f"{step.seconds:.0f}", outputs.one_line(step.detail))
    console.print(table)
    print(outputs.folded(f"check: {last}"))


def last_line(ended: Sequence[Step], status: int, require_all: bool = False) -> str:
    """Return in one line what the run as a whole showed, and what to do; the arguments are those of ``exit_status``."""
    count = sum(step.status == "skipped" for step in ended)
    if status == outputs.EXIT_FAILED:
        return "FAILED: do not switch the fast path on before the steps above pass"
    if status == outputs.EXIT_NO_GAIN:
        return "the flag gains nothing on this card: vLLM's own kernels are the fastest for this model; leave it off"
    if status == outputs.EXIT_INCOMPLETE:
        if any(step.status == "unknown" for step in ended):
            return "some steps gave no result; they say why above"
        if require_all:
            return f"{count} skipped of the steps that were asked for"
        return "nothing ran on a card: run this where vLLM serves (--device cpu runs what a CPU can run)"
    warned = sum(step.status == "warning" for step in ended)
    with_warnings = f", {warned} with a warning" if warned else ""
    return (
        f"every step that ran passed{with_warnings}; {count} skipped" if count else f"every step passed{with_warnings}"
    )

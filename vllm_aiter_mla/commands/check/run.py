# SPDX-License-Identifier: Apache-2.0
"""A run of ``check``: its steps in order, the record that is kept meanwhile, and the exit status."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_aiter_mla import files
from vllm_aiter_mla.commands import outputs, process
from vllm_aiter_mla.commands.check import idle, show, steps
from vllm_aiter_mla.commands.check.context import Context, WrongOptionError
from vllm_aiter_mla.commands.check.engine import steps as engine_steps
from vllm_aiter_mla.commands.check.record import CheckRun, Step

KEEP_S = 2.0
"""Seconds between two writes of the file, at least, while a step tells what it has found so far."""


@dataclass(slots=True)
class Run:
    """The chosen steps, and how those ended that have run."""

    context: Context
    chosen: tuple[str, ...]  # names of steps
    model: str | None  # as given
    json: Path | None = None  # the file that keeps the record
    ended: list[Step] = field(default_factory=list)
    _so_far: tuple[Step, ...] = ()  # what the step that runs now has found so far; empty if nothing
    _kept_at: float = 0.0  # when the file was last written, by the monotonic clock

    def carry_out(self) -> None:
        """Run the steps. Write the record to the file after each step, and while a step runs.

        Raises:
            WrongOptionError: the model or an option is wrong, so no later step can run.
            SignalError: its last argument says how many steps ended, and which file has their findings.
        """
        self.context.progress.report_partial = self._note
        self._keep(None)
        try:
            for step in run_steps(self.context, self.chosen):
                self.ended.append(step)
                self._so_far = ()
                self._keep(None)
        except WrongOptionError:
            self._keep(outputs.EXIT_USAGE)
            raise
        except process.SignalError as error:
            self._keep(None)
            kept = self.json is not None and self.json != outputs.STDOUT
            where = f"; {self.json} has what was found" if kept else ""
            how_far = f"check: {len(self.ended)} of {len(self.chosen)} steps ended{where}"
            raise process.SignalError(*error.args, how_far) from None

    def record(self, status: int | None) -> CheckRun:
        """Return the record with this exit status, which is None while the run goes on and if it was cut off."""
        on_a_card = self.context.options.on_a_card if steps.ran_what_a_card_can(self.ended) else None
        return CheckRun(self.model, status, (*self.ended, *self._so_far), on_a_card)

    def _note(self, step: Step) -> None:
        self._so_far = (replace(step, name=self.chosen[len(self.ended)]),)
        if time.monotonic() - self._kept_at >= KEEP_S:
            self._keep(None)

    def _keep(self, status: int | None) -> None:
        """Write the file, unless it is a stream: there the whole record could not replace this one later."""
        self._kept_at = time.monotonic()
        if self.json is not None and self.json != outputs.STDOUT and not files.is_device(self.json):
            with suppress(OSError):  # the last write reports a full disk
                files.write(self.json, self.record(status))

    def write(self, status: int, html: Path | None, html_of: Callable[[Sequence[Path]], str] | None) -> None:
        """Write the files of --json and --html; end the command with a line if that fails.

        The exit status is then ``status``, or ``WRONG`` if all was well.
        """
        record, if_it_fails = self.record(status), status or outputs.EXIT_USAGE
        try:
            if self.json is not None:
                outputs.write("check", self.json, files.to_json(record), if_it_fails)
        finally:  # the page too, where the JSON could not be written
            if html is not None and html_of is not None:
                outputs.write("check", html, _page(html, record, html_of, if_it_fails), if_it_fails)


def _page(html: Path, record: CheckRun, html_of: Callable[[Sequence[Path]], str], if_it_fails: int) -> str:
    """Return the page of a record; end the command with the exit status ``if_it_fails`` if there can be none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "check.json"
        try:
            files.write(path, record)
            return html_of([path])
        except (OSError, ValueError) as error:
            outputs.fail(f"check: --html {html}: {str(error).replace(str(path), 'the record')}", if_it_fails)


def run_steps(context: Context, chosen: Sequence[str] = tuple(steps.STEPS)) -> Iterator[Step]:
    """Run the steps in order; yield and then print how each ended. A step that raises has failed.

    Raises:
        WrongOptionError: the model or an option is wrong.
    """
    for number, name in enumerate(chosen, 1):
        began = time.monotonic()
        with show.progress(name, number, len(chosen)) as context.progress.show_activity:
            step = run_step(context, name)
        # The caller keeps the step first: a closed pipe ends the printing.
        yield replace(step, name=name, seconds=round(time.monotonic() - began, 1))
        show.findings(step, name in context.options.only)


def run_step(context: Context, name: str) -> Step:
    """Run one step.

    Raises:
        WrongOptionError: the model or an option is wrong.
        SignalError: a signal asks this process to end.
    """
    entry, options = steps.STEPS[name], context.options
    why = steps.why_without_a_shape(context.plan) if options.source is not None and entry.needs_shape else None
    if why is not None:
        return Step("skipped", why)
    try:
        if entry.needs_idle_cards and options.on_a_card and (why := _why_not_idle(context, name)) is not None:
            return Step("unknown", why)
        return entry.run(context)
    except WrongOptionError:
        raise
    except process.EndedError as error:
        return Step("failed", error.sentence(), error.lines)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in outputs.HOST:
            return Step("skipped", f"{error.name} is not installed here; run this where vLLM serves")
        return Step("failed", f"{type(error).__name__}: {error}")


def _why_not_idle(context: Context, name: str) -> str | None:
    """Return why the cards of a step are not idle: a server or another check is on one. None if they are."""
    needed = engine_steps.cards_of(context.plan) if name == "engine" and context.plan is not None else 1
    return process.call(idle.why_busy, needed, environment=context.options.environment())


def exit_status(ended: Sequence[Step], on_cpu: bool, require_all: bool = False) -> int:
    """Return 1 if a step failed, else 4 if one gains nothing, else 3 if not everything was looked at, else 0.

    Any step that is "unknown" gives 3. With ``require_all``, as where steps are asked for by name, so does one that was
    skipped. Otherwise a step must have run that can run on a card, unless ``on_cpu``.
    """
    states = {step.status for step in ended}
    if "failed" in states:
        return outputs.EXIT_FAILED
    if "no gain" in states:
        return outputs.EXIT_NO_GAIN
    if "unknown" in states or (require_all and "skipped" in states):
        return outputs.EXIT_INCOMPLETE
    return outputs.EXIT_OK if require_all or on_cpu or steps.ran_what_a_card_can(ended) else outputs.EXIT_INCOMPLETE

# SPDX-License-Identifier: Apache-2.0
"""A run of ``check``: its steps in order, the JSON file that is updated meanwhile, and the exit status."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_aiter_mla import files
from vllm_aiter_mla.commands import outputs, process
from vllm_aiter_mla.commands.check import idle, show, steps
from vllm_aiter_mla.commands.check.context import StepContext, WrongOptionError
from vllm_aiter_mla.commands.check.engine import steps as engine_steps
from vllm_aiter_mla.commands.check.record import CheckRun, StepResult, has_run_card_step

MIN_WRITE_INTERVAL_SECONDS = 2.0
"""Shortest time between two updates of the JSON file while a step reports partial findings."""


@dataclass(slots=True)
class CheckRunner:
    """Runs the selected steps, keeps the results of those that ended, and writes the files of --json and --html."""

    context: StepContext
    step_names: tuple[str, ...]  # the selected steps, in order
    model: str | None  # MODEL as typed
    json_path: Path | None = None  # the file of --json
    ended_steps: list[StepResult] = field(default_factory=list)
    _partial_steps: tuple[StepResult, ...] = ()  # the findings so far of the step that runs now; empty without any
    _written_at: float = 0.0  # when the file was last updated, by the monotonic clock

    def run_and_record(self) -> None:
        """Run the steps. Update the JSON file after each step and while a step runs.

        Raises:
            WrongOptionError: the model or an option is wrong, so no later step can run.
            SignalError: a signal ends the run. The last argument counts the steps that ended and names the JSON file.
        """
        self.context.progress.report_partial = self._note_partial
        self._update_file(None)
        try:
            for step in run_steps(self.context, self.step_names):
                self.ended_steps.append(step)
                self._partial_steps = ()
                self._update_file(None)
        except WrongOptionError:
            self._update_file(outputs.EXIT_USAGE)
            raise
        except process.SignalError as error:
            self._update_file(None)
            has_file = self.json_path is not None and self.json_path != outputs.STDOUT
            file_message = f"; the findings so far are in {self.json_path}" if has_file else ""
            progress_message = f"check: {len(self.ended_steps)} of {len(self.step_names)} steps ended{file_message}"
            raise process.SignalError(*error.args, progress_message) from None

    def make_record(self, exit_status: int | None) -> CheckRun:
        """Return the record of the run. ``exit_status`` is None until the run ends, and stays None if it is cut off."""
        ran_on_card = self.context.options.can_use_gpu if has_run_card_step(self.ended_steps) else None
        return CheckRun(self.model, exit_status, (*self.ended_steps, *self._partial_steps), ran_on_card)

    def _note_partial(self, step: StepResult) -> None:
        self._partial_steps = (replace(step, name=self.step_names[len(self.ended_steps)]),)
        if time.monotonic() - self._written_at >= MIN_WRITE_INTERVAL_SECONDS:
            self._update_file(None)

    def _update_file(self, exit_status: int | None) -> None:
        """Update the JSON file. A stream is skipped: a later record could not replace an earlier one there."""
        self._written_at = time.monotonic()
        if self.json_path is not None and self.json_path != outputs.STDOUT and not files.is_stream(self.json_path):
            with suppress(OSError):  # the last write reports a full disk
                files.write_record(self.json_path, self.make_record(exit_status))

    def write_outputs(
        self, exit_status: int, html_path: Path | None, render_page: Callable[[Sequence[Path]], str] | None
    ) -> None:
        """Write the files of --json and --html. If a write fails, end the command with one line on stderr.

        The command then ends with ``exit_status``, or with ``EXIT_USAGE`` if ``exit_status`` is 0.
        """
        check_run, failure_status = self.make_record(exit_status), exit_status or outputs.EXIT_USAGE
        try:
            if self.json_path is not None:
                outputs.write_output("check", self.json_path, files.to_json(check_run), failure_status)
        finally:  # write the page even if the JSON file could not be written
            if html_path is not None and render_page is not None:
                html_text = _render_html(html_path, check_run, render_page, failure_status)
                outputs.write_output("check", html_path, html_text, failure_status)


def _render_html(
    html_path: Path, check_run: CheckRun, render_page: Callable[[Sequence[Path]], str], failure_status: int
) -> str:
    """Return the page of a record. If it cannot be rendered, end the command with ``failure_status``."""
    with tempfile.TemporaryDirectory() as folder:
        record_path = Path(folder) / "check.json"
        try:
            files.write_record(record_path, check_run)
            return render_page([record_path])
        except (OSError, ValueError) as error:
            problem = str(error).replace(str(record_path), "the record")
            outputs.fail(f"check: --html {html_path}: {problem}", failure_status)


def run_steps(context: StepContext, step_names: Sequence[str] = tuple(steps.STEPS)) -> Iterator[StepResult]:
    """Run the steps in order; yield the result of each, then print it. A step that raises has failed.

    Raises:
        WrongOptionError: the model or an option is wrong.
    """
    for number, step_name in enumerate(step_names, 1):
        started_at = time.monotonic()
        with show.show_progress(step_name, number, len(step_names)) as context.progress.show_activity:
            step = run_step(context, step_name)
        # Yield before printing, so that the caller saves the step even if a closed pipe ends the printing.
        yield replace(step, name=step_name, seconds=round(time.monotonic() - started_at, 1))
        show.print_findings(step, step_name in context.options.named_steps)


def run_step(context: StepContext, step_name: str) -> StepResult:
    """Run one step; return how it ended, still without its name and its time.

    Raises:
        WrongOptionError: the model or an option is wrong.
        SignalError: a signal asks this process to end.
    """
    spec, options = steps.STEPS[step_name], context.options
    reason = steps.shape_skip_reason(context.plan) if options.source is not None and spec.needs_shape else None
    if reason is not None:
        return StepResult("skipped", reason)
    try:
        if (
            spec.needs_idle_cards
            and options.can_use_gpu
            and (reason := _step_cards_busy_reason(context, step_name)) is not None
        ):
            return StepResult("unknown", reason)
        return spec.run(context)
    except WrongOptionError:
        raise
    except process.EndedError as error:
        return StepResult("failed", error.sentence(), error.lines)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in outputs.HOST_PACKAGES:
            return StepResult("skipped", f"{error.name} is not installed here; run this where vLLM serves")
        return StepResult("failed", f"{type(error).__name__}: {error}")


def _step_cards_busy_reason(context: StepContext, step_name: str) -> str | None:
    """Return why the cards of a step are busy, for example with a server; None if they are idle."""
    num_cards = engine_steps.num_cards_of(context.plan) if step_name == "engine" and context.plan is not None else 1
    return process.call(idle.busy_cards_reason, num_cards, environment=context.options.server_environment())


def exit_status_of(ended_steps: Sequence[StepResult], uses_cpu: bool, require_all: bool = False) -> int:
    """Return 1 if a step failed, else 4 if a step has no gain, else 3 if the check is incomplete, else 0.

    An "unknown" step makes the check incomplete. With ``require_all``, which --only implies, a skipped step does too.
    Without ``require_all`` and ``uses_cpu``, a check is also incomplete if no step ran on a card.
    """
    statuses = {step.status for step in ended_steps}
    if "failed" in statuses:
        return outputs.EXIT_FAILED
    if "no gain" in statuses:
        return outputs.EXIT_NO_GAIN
    if "unknown" in statuses or (require_all and "skipped" in statuses):
        return outputs.EXIT_INCOMPLETE
    return outputs.EXIT_OK if require_all or uses_cpu or has_run_card_step(ended_steps) else outputs.EXIT_INCOMPLETE

# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla check MODEL``: every check of the fast path for one model, in one run.

Each of the ``steps`` is printed as it ends, then a table and a line.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_aiter_mla import files
from vllm_aiter_mla.commands import outputs, process
from vllm_aiter_mla.commands import plan as plans
from vllm_aiter_mla.commands.check import steps
from vllm_aiter_mla.commands.check.record import CheckRun, Step
from vllm_aiter_mla.commands.check.steps import Context
from vllm_aiter_mla.commands.plan import model as models
from vllm_aiter_mla.commands.report import renderer
from vllm_aiter_mla.commands.verify import Device

COMMAND = plans.COMMAND
NO_GAIN = outputs.NOT_LOOKED + 1
"""Exit status of ``check`` alone, besides those of every command: vLLM's own kernels are the fastest."""


def check(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for `plan`; then the options of `vllm serve`.")],
    arch: Annotated[plans.Arch | None, typer.Option(help="Card to plan for; by default this machine's.")] = None,
    env: plans.Variables = None,
    strict: Annotated[bool, typer.Option("--strict", help="A known issue is a failure.")] = False,
    require_all: Annotated[
        bool, typer.Option("--require-all", help="For a gate: exit status 3 if a step was skipped.")
    ] = False,
    device: Annotated[Device, typer.Option(help="cpu: run on a CPU what a CPU can run.")] = Device.gpu,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Run the engine over MODEL's own weights, not over random ones.")
    ] = False,
    json: outputs.Json = None,
    html: Annotated[
        Path | None, typer.Option(callback=outputs.writable, help="Write the page of `report` to this file.")
    ] = None,
    verbose: plans.Verbose = False,
) -> None:
    """Check everything about one model on this card.

    MODEL comes first, then the options of `vllm serve`. Looks at the machine, plans the model, names known issues,
    verifies the kernels at its sizes and times them. Then vLLM's engine runs with the flag off and with the flag on.
    Tokens are compared, batches with prefill rows, and decode with prefill. The kernels of a step are counted.
    Exit status: 0 if every step that ran passed, 1 if one failed, 2 if an option or the model is wrong, 3 if nothing
    ran on a card and --device cpu was not given, or if a step was skipped with --require-all, 4 if vLLM's own kernels
    are faster on this card: the flag gains nothing.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    ended = list[Step]()
    try:
        if html == outputs.STDOUT:
            raise ValueError("--html -: a file is needed, standard output has the table")
        html_of = None if html is None else renderer()
        plans.check_words(model, context)
        asked = Context(
            models.find(model), tuple(context.args), arch.architecture if arch else "",
            models.environment(env or [], os.environ), device is Device.cpu, strict, verbose, checkpoint,
        )  # fmt: skip
        with outputs.text_apart(json), process.workspace():
            for step in run(asked):
                ended.append(step)
                _keep(json, CheckRun(model, None, tuple(ended)))
    except (LookupError, ValueError) as error:
        outputs.fail(f"check: {error}")
    except models.NotKnownError as error:
        outputs.fail(f"check: {error}", outputs.NOT_LOOKED)
    except process.SignalError as error:
        where = "" if json in (None, outputs.STDOUT) else f", which {json} has"
        raise process.SignalError(
            *error.args, f"check: {len(ended)} of {len(steps.STEPS)} steps ended{where}"
        ) from None
    status = exit_status(ended, asked.on_cpu, require_all)
    with outputs.text_apart(json):
        show(model, ended, status)
    written = CheckRun(model, status, tuple(ended))
    if json is not None:
        outputs.write(json, files.text_of(written))
    if html is not None and html_of is not None:
        with tempfile.TemporaryDirectory() as folder:
            files.write(Path(folder) / "check.json", written)
            outputs.write(html, html_of([Path(folder) / "check.json"]))
    raise typer.Exit(status)


def _keep(json: Path | None, so_far: CheckRun) -> None:
    """Write what there is so far, where a later whole one can replace it."""
    if json is not None and json != outputs.STDOUT and not files.is_device(json):
        with suppress(OSError):  # a full disk ends no run: the last write says it
            files.write(json, so_far)


def run(asked: Context) -> Iterator[Step]:
    """Run every step in order, and print and yield how each ended. A step that raises has failed.

    Raises:
        ValueError: the model or an option is wrong: there is no plan, so no later step can run.
    """
    for name, step in steps.STEPS.items():
        print(f"{name} ...", flush=True)
        try:
            if name in steps.OF_A_SHAPE and (why := steps.without_a_shape(asked.plan)):
                ended = Step("skipped", why)
            else:
                of_its_own = name in steps.IN_A_PROCESS
                function = f"{steps.__name__}:{step.__name__}"
                ended = process.call(function, asked, environment=asked.environment()) if of_its_own else step(asked)
        except process.EndedError as error:
            how, *last = error.args
            ended = Step("failed", f"its process {how}", tuple(last))
        except Exception as error:
            if isinstance(error, (ModuleNotFoundError, models.NotKnownError)) and name == "plan":
                raise  # vLLM could not be asked here: no option is wrong
            if name == "plan":
                raise ValueError(str(error)) from error
            ended = Step("failed", f"{type(error).__name__}: {error}")
        for text in ended.lines:
            print(outputs.folded(f"  {outputs.line(text)}"))
        yield replace(ended, name=name)


def exit_status(ended: Sequence[Step], on_cpu: bool, require_all: bool = False) -> int:
    """Return 1 if a step failed, else 4 if one gains nothing, else 3 if nothing ran on a card as it should, else 0.

    ``require_all``: 3 if any step was skipped.
    """
    states = {step.status for step in ended}
    if "failed" in states:
        return outputs.FINDING
    if "no gain" in states:
        return NO_GAIN
    if require_all and "skipped" in states:
        return outputs.NOT_LOOKED
    return outputs.FINE if on_cpu or _ran_on_the_card(ended) else outputs.NOT_LOOKED


def _ran_on_the_card(ended: Sequence[Step]) -> bool:
    return any(step.status != "skipped" for step in ended if step.name in steps.ON_THE_CARD)


def show(model: str, ended: Sequence[Step], status: int) -> None:
    """Print the table, and what a reader takes away."""
    console = Console(markup=False, highlight=False, width=outputs.WIDTH)
    table = Table("step", "outcome", "finding", title=f"check {model}", title_justify="left", box=box.ASCII)
    for step in ended:
        table.add_row(step.name, step.status, outputs.line(step.detail))
    console.print(table)
    skipped = sum(step.status == "skipped" for step in ended)
    last = f"every step that ran passed; {skipped} skipped" if skipped else "every step passed"
    if status == outputs.FINDING:
        last = "FAILED: do not switch the fast path on before the steps above pass"
    if status == NO_GAIN:
        last = "the flag gains nothing on this card: vLLM's own kernels are the fastest for this model; leave it off"
    if status == outputs.NOT_LOOKED:
        last = "nothing ran on a card: run this where vLLM serves (--device cpu runs what a CPU can run)"
        if _ran_on_the_card(ended):
            last = f"{skipped} skipped, and --require-all asks for every step"
    print(outputs.folded(f"check: {last}"))

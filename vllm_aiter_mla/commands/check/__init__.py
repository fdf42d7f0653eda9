# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla check [MODEL]``: every check of the fast path, or those named by ``--only``, in one run.

``steps`` has the steps, ``context`` what they are asked and hand on, ``show`` what is printed, ``record`` what is
written.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from vllm_aiter_mla import files
from vllm_aiter_mla.commands import options, outputs, process
from vllm_aiter_mla.commands.check import context as asking
from vllm_aiter_mla.commands.check import idle, kernels, show, steps
from vllm_aiter_mla.commands.check.context import Context, Device, Kind, Weights, WrongOptionError
from vllm_aiter_mla.commands.check.record import CheckRun, Step
from vllm_aiter_mla.commands.plan import Arch
from vllm_aiter_mla.commands.plan import model as models
from vllm_aiter_mla.commands.report import renderer

MOST_TOKENS, MOST_HEADS = 65536, 1024  # a larger operand fills a card by itself
OPTIONS_OF = {
    ("kernels",): ("backend", "case", "variant", "data_seed", "repeat", "quick", "small", "emulated", "limit",
                   "long_run", "v"),
    ("timing",): ("tokens", "type", "tune"),
    ("kernels", "timing"): ("heads", "nope", "weights"),
}  # fmt: skip
"""Options that speak of some steps alone, by those steps."""
OF_A_LAYER = ("heads", "nope", "v", "weights", "type")
"""Options that MODEL answers."""


class PassesOn(TyperCommand):
    """A command that leaves every option it does not know to vLLM's own parser.

    Its own options have long names only: a one-letter option would be taken out of every ``-cc.…`` of vLLM's.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse our own options; from ``--`` on nothing is ours, and vLLM gets the ``--`` as well.

        ``-h`` is a word here and no letter: click would find it in vLLM's single-dash words.
        """
        end = args.index("--") if "--" in args else len(args)
        super().parse_args(ctx, ["--help" if word == "-h" else word for word in args[:end]])
        ctx.args += args[end:]
        return list(ctx.args)


COMMAND: dict[str, Any] = {
    "cls": PassesOn,
    "context_settings": {
        "allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"],
    },
}  # fmt: skip


def _step_names() -> list[str]:
    return list(steps.STEPS)


def check(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder or file of a config, a bundled example, or a cached hub name; then the options of `vllm "
            "serve`.",
            autocompletion=lambda: list(models.examples()),
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="STEP,...", help=f"Steps to run: {', '.join(steps.STEPS)}.", autocompletion=_step_names),
    ] = None,
    arch: Annotated[
        Arch | None, typer.Option(help="Card to plan for: this machine's, or gfx942 where there is none.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE: one of vLLM's environment variables; may be repeated.")
    ] = None,
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
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's own log on stderr.")] = False,
    backend: Annotated[
        list[str] | None, typer.Option(help="kernels: back end; may be repeated. Default: all here.")
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="kernels: a case, or a part of its name; may be repeated.")
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="kernels: fp8, bf16, fp8-cache, ...; may be repeated.")
    ] = None,
    data_seed: Annotated[int, typer.Option(help="kernels: seed of the data.")] = 0,
    repeat: Annotated[int, typer.Option(min=1, help="kernels: rounds, each with the next seed.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="kernels: two variants, fewer cases, short long runs. So it is with MODEL.")
    ] = False,
    small: Annotated[
        bool, typer.Option("--small", help="kernels: the quick cases at sizes that an emulator finishes, with digests.")
    ] = False,
    emulated: Annotated[
        bool, typer.Option("--emulated", help="kernels: note in the JSON that the card is an emulator's.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="kernels: last capture size, in tokens: 8 to 8192.")] = None,
    long_run: Annotated[int | None, typer.Option(min=4, help="kernels: replays of a long run.")] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="kernels: print the cases and the oracles, and run nothing.")
    ] = False,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, max=MOST_TOKENS, help="timing: tokens; may be repeated.")
    ] = None,
    kind: Annotated[Kind, typer.Option("--type", help="timing: type of the query and the cache.")] = Kind.both,
    tune: Annotated[
        bool, typer.Option("--tune", help="timing: time the Triton kernel's tiles; starts take the fastest.")
    ] = False,
    heads: Annotated[
        list[int] | None,
        typer.Option(min=1, max=MOST_HEADS, help="Query heads of a rank, without MODEL; timing takes several."),
    ] = None,
    nope: Annotated[int | None, typer.Option(min=1, max=4096, help="Un-rotated width of a query head.")] = None,
    v: Annotated[int | None, typer.Option("--v", min=1, max=4096, help="Width of a value head.")] = None,
    weights: Annotated[Weights | None, typer.Option(help="Format of the absorb weights. Default: several.")] = None,
) -> None:
    """Check one model on this card, or single steps by --only.

    The steps: machine looks at this machine, plan says what would engage (no GPU is needed), issues names known faults,
    kernels replays captured graphs and compares bytes, timing times the kernels. engine runs vLLM with the flag off and
    on and compares tokens; prefill, decode and launches look at what it did. What a named step needs runs too. Without
    MODEL machine, kernels and timing can run, at DeepSeek's sizes; with it at the model's.
    Exit status: 0 if every step that ran passed, 1 if one failed, 2 if an option or the model is wrong, 3 if nothing
    ran on a card and --device cpu was not given, or if a step that was asked for by --only or --require-all could not
    look, 4 if vLLM's own kernels are faster on this card: the flag gains nothing.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if listing:
        kernels.listing(Console(highlight=False))
        return
    try:
        if html == outputs.STDOUT:
            raise WrongOptionError("--html -: a file is needed, standard output has the table")
        html_of = None if html is None else renderer()
        names = tuple(one.strip() for words in only or () for one in words.split(","))
        chosen = steps.chosen(names, model is not None)
        _check_words(model, context)
        _check_options(context, chosen, model)
        steps.check_deployments(context.args, chosen)
        asked = Context(
            models.find(model) if model else None, tuple(context.args), arch.architecture if arch else "",
            models.environment(env or [], os.environ), device is Device.cpu, strict, verbose, checkpoint, names,
            asking.Layer(tuple(heads or ()), nope, v, weights),
            asking.Kernels(
                tuple(backend or ()), tuple(case or ()), tuple(variant or ()), data_seed, repeat, quick, small,
                emulated, limit, long_run,
            ),
            asking.Timing(tuple(tokens or ()), kind, tune),
        )  # fmt: skip
    except (LookupError, ValueError) as error:
        outputs.fail(f"check: {error}")
    found = list[Step]()

    def keep(*running: Step) -> None:
        _keep(json, CheckRun(model, None, (*found, *(replace(step, name=chosen[len(found)]) for step in running))))

    asked.so_far = keep
    try:
        with outputs.text_apart(json), process.workspace():
            keep()
            for step in run(asked, chosen):
                found.append(step)
                keep()
    except WrongOptionError as error:
        _keep(json, CheckRun(model, outputs.WRONG, tuple(found)))
        outputs.fail(f"check: {error}")
    except process.SignalError as error:
        where = "" if json in (None, outputs.STDOUT) else f", which {json} has"
        raise process.SignalError(*error.args, f"check: {len(found)} of {len(chosen)} steps ended{where}") from None
    status = exit_status(found, asked.on_cpu, require_all or bool(names))
    with outputs.text_apart(json):
        show.table(model, found, show.last_line(found, status))
    written = CheckRun(model, status, tuple(found))
    if json is not None:
        outputs.write(json, files.text_of(written))
    if html is not None and html_of is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "check.json"
            try:
                files.write(path, written)
                page = html_of([path])
            except (OSError, ValueError) as error:
                outputs.fail(f"check: --html {html}: {str(error).replace(str(path), 'the record')}")
            outputs.write(html, page)
    raise typer.Exit(status)


def _check_words(model: str | None, context: typer.Context) -> None:
    """Raise WrongOptionError where MODEL is an option, as it is when options come first, where a second one is named,
    where there is none for vLLM's options, or where an option is misspelt.
    """
    arguments = context.args
    if model is None:
        if arguments:
            raise WrongOptionError(f"{arguments[0]}: no such option without MODEL, which comes first")
        return
    if model.startswith("-"):
        raise WrongOptionError(f"{model} in the place of MODEL: MODEL comes first, then the options of `vllm serve`")
    for index, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option == "--model":
            other = value if equals else next(iter(arguments[index + 1 : index + 2]), "")
            raise WrongOptionError(f"--model {other} and MODEL {model}: give the model once, as MODEL")
    options.check(arguments, [name for own in context.command.params for name in own.opts])


def _check_options(context: typer.Context, chosen: Sequence[str], model: str | None) -> None:
    """Raise WrongOptionError for an option of a step that does not run, or of a layer that MODEL has."""
    spelt = {name: own.opts[0] for own in context.command.params for name in (own.name, own.opts[0].lstrip("-"))}
    typed = {
        own.opts[0].lstrip("-").replace("-", "_") for own in context.command.params
        if own.name and getattr(context.get_parameter_source(own.name), "name", "") == "COMMANDLINE"
    }  # fmt: skip
    for of, names in OPTIONS_OF.items():
        for name in names:
            option = spelt.get(name, f"--{name}")
            if name in typed and not set(of) & set(chosen):
                raise WrongOptionError(f"{option}: it is for --only {' or '.join(of)}")
    for name in OF_A_LAYER:
        if name in typed and model is not None:
            raise WrongOptionError(f"--{name}: {model} says it; leave it out, or leave MODEL out")


def _keep(json: Path | None, so_far: CheckRun) -> None:
    """Write what there is so far, where a later whole one can replace it."""
    if json is not None and json != outputs.STDOUT and not files.is_device(json):
        with suppress(OSError):  # a full disk ends no run: the last write says it
            files.write(json, so_far)


def run(asked: Context, chosen: Sequence[str] = tuple(steps.STEPS)) -> Iterator[Step]:
    """Run the steps in order, and print and yield how each ended. A step that raises has failed.

    Raises:
        WrongOptionError: the model or an option is wrong, so no later step can run.
    """
    for number, name in enumerate(chosen, 1):
        began = time.monotonic()
        with show.progress(name, number, len(chosen)) as asked.now:
            ended = _ended(asked, name)
        show.ended(ended, name in asked.only)
        yield replace(ended, name=name, seconds=round(time.monotonic() - began, 1))


def _ended(asked: Context, name: str) -> Step:
    if asked.source is not None and name in steps.OF_A_SHAPE and (why := steps.why_without_a_shape(asked.plan)):
        return Step("skipped", why)
    try:
        if name in steps.OF_IDLE_CARDS and asking.has_gpu() and (why := _why_not_idle(asked, name)):
            return Step("unknown", why)
        return steps.STEPS[name](asked)
    except (WrongOptionError, process.SignalError):
        raise
    except process.EndedError as error:
        how, *last = error.args
        return Step("failed", f"its process {how}", tuple(last))
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in outputs.HOST:
            return Step("skipped", f"{error.name} is not installed here; run this where vLLM serves")
        return Step("failed", f"{type(error).__name__}: {error}")


def _why_not_idle(asked: Context, name: str) -> str:
    """Return why the cards of a step are not idle: a server or another check is on one."""
    needed = steps.cards_of(asked.plan) if name == "engine" and asked.plan is not None else 1
    looks = f"{idle.__name__}:{idle.why_not.__name__}"
    return str(process.call(looks, needed, environment=asked.environment()))


def exit_status(found: Sequence[Step], on_cpu: bool, each: bool = False) -> int:
    """Return 1 if a step failed, else 4 if one gains nothing, else 3 if nothing ran on a card as it should, else 0.

    ``each``: 3 also if one of the steps was skipped, as where it was asked for by name.
    """
    states = {step.status for step in found}
    if "failed" in states:
        return outputs.FINDING
    if "no gain" in states:
        return outputs.NO_GAIN
    if "unknown" in states or (each and "skipped" in states):
        return outputs.NOT_LOOKED
    return outputs.FINE if each or on_cpu or steps.ran_on_the_card(found) else outputs.NOT_LOOKED

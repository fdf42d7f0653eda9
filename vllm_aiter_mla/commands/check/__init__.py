# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla check [MODEL]``: every check of the fast path, or those named by ``--only``, in one run.

``run`` goes through ``steps``. ``context`` is what they are asked and hand on, ``show`` what is printed, ``record``
what is written.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from vllm_aiter_mla.commands import options, outputs, process
from vllm_aiter_mla.commands.check import kernels, show, steps
from vllm_aiter_mla.commands.check.context import (
    Arch,
    CheckOptions,
    Context,
    Device,
    KernelOptions,
    Kind,
    LayerOptions,
    TimingOptions,
    Weights,
    WrongOptionError,
)
from vllm_aiter_mla.commands.check.run import Run, exit_status
from vllm_aiter_mla.commands.check.timing import MOST_TOKENS
from vllm_aiter_mla.commands.plan.model import deployments, environment, examples, find
from vllm_aiter_mla.commands.report import renderer

MOST_HEADS = 1024
STEP_OPTIONS = {
    ("plan",): ("--arch",),
    ("issues",): ("--strict",),
    ("kernels",): ("--backend", "--case", "--variant", "--data-seed", "--repeat", "--quick", "--small", "--emulated",
                   "--limit", "--long-run", "--v", "--list"),
    ("timing",): ("--tokens", "--type", "--tune"),
    ("kernels", "timing"): ("--heads", "--nope", "--weights"),
    ("engine",): ("--checkpoint",),
}  # fmt: skip
"""Options that only some steps take, by those steps."""
LAYER_OPTIONS = ("--heads", "--nope", "--v", "--weights", "--type", "--small")
"""Options that say of a layer what MODEL says of it."""


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
            autocompletion=lambda: list(examples()),
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
        bool, typer.Option("--quick", help="kernels: two variants, fewer cases, short long runs. MODEL implies it.")
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
    weights: Annotated[
        Weights | None,
        typer.Option(help="Format of the absorb weights; by default several, of timing bf16."),
    ] = None,
) -> None:
    """Check one model on this card, or single steps by --only.

    The steps: machine looks at this machine, plan says what would engage (no GPU is needed), issues names known faults,
    kernels replays captured graphs and compares bytes, timing times the kernels. engine runs vLLM with the flag off and
    on and compares tokens; prefill, decode and launches look at what it did. What a named step needs runs too. Without
    MODEL machine, kernels and timing can run, at DeepSeek's sizes; with it at the model's.
    Exit status: 0 if every step that ran passed, 1 if one failed, 2 if an option or the model is wrong, 3 if something
    could not be told, if a step was skipped that --only or --require-all asks for, or if neither is given and nothing
    ran on a card without --device cpu, 4 if vLLM's own kernels are faster on this card: the flag gains nothing.
    """
    # vLLM logs to standard output, where the findings go. Processes of steps inherit it.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        if html == outputs.STDOUT:
            raise WrongOptionError("--html -: a file is needed, standard output has the table")
        html_of = None if html is None else renderer()
        names = tuple(name.strip() for words in only or () for name in words.split(","))
        chosen = steps.chosen(names, model is not None)
        _check_words(model, context, chosen)
        _check_options(context, chosen, model)
        if listing:
            kernels.list_cases(outputs.Stdout(highlight=False))
            return
        given = CheckOptions(
            source=find(model) if model else None,
            arguments=tuple(context.args),
            arch=arch.architecture if arch else "",
            variables=environment(env or [], os.environ),
            on_cpu=device is Device.cpu,
            strict=strict,
            verbose=verbose,
            checkpoint=checkpoint,
            only=names,
            layer=LayerOptions(heads=tuple(heads or ()), nope=nope, v=v, weights=weights),
            kernels=KernelOptions(
                backend=tuple(backend or ()), case=tuple(case or ()), variant=tuple(variant or ()), seed=data_seed,
                repeat=repeat, quick=quick, small=small, emulated=emulated, limit=limit, replays=long_run,
            ),
            timing=TimingOptions(tokens=tuple(tokens or ()), kind=kind, tune=tune),
        )  # fmt: skip
        _check_values(given, chosen)
    except (LookupError, ValueError) as error:
        outputs.fail(f"check: {error}")
    run = Run(Context(given), chosen, model, json)
    try:
        with outputs.text_apart(json), process.workspace():
            run.carry_out()
    except WrongOptionError as error:
        outputs.fail(f"check: {error}")
    status = exit_status(run.ended, given.on_cpu, require_all or bool(names))
    with outputs.text_apart(json):
        show.table(model, run.ended, show.last_line(run.ended, status))
    run.write(status, html, html_of)
    raise typer.Exit(status)


def _check_words(model: str | None, context: typer.Context, chosen: Sequence[str]) -> None:
    """Check what vLLM will get.

    Raises:
        ValueError: MODEL is an option, as it is when options come first; a second one is named; there is none for
            vLLM's options; an option is misspelt; or several deployments are asked for and more than their plans.
    """
    arguments, own = context.args, [name for option in context.command.params for name in option.opts]
    options.check([*([model] if model else []), *arguments], own)
    if model is None:
        if arguments:
            raise WrongOptionError(f"{arguments[0]}: an option of vLLM's needs MODEL, which comes first")
        return
    if model.startswith("-"):
        raise WrongOptionError(f"{model} in the place of MODEL: MODEL comes first, then the options of `vllm serve`")
    for index, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option == "--model":
            other = value if equals else next(iter(arguments[index + 1 : index + 2]), "")
            raise WrongOptionError(f"--model {other} and MODEL {model}: give the model once, as MODEL")
    sizes, _ = deployments(arguments)
    if len(sizes) > 1 and tuple(chosen) != ("plan",):
        raise WrongOptionError(f"-tp {','.join(sizes)}: several sizes work only with --only plan")


def _check_options(context: typer.Context, chosen: Sequence[str], model: str | None) -> None:
    """Raise WrongOptionError for an option of a step that does not run, or of a layer that MODEL has."""
    typed = {
        own.opts[0]: context.params.get(own.name or "") for own in context.command.params
        if getattr(context.get_parameter_source(own.name or ""), "name", "") == "COMMANDLINE"
    }  # fmt: skip
    for takers, names in STEP_OPTIONS.items():
        for name in names:
            if name in typed and not set(takers) & set(chosen):
                raise WrongOptionError(
                    f"{_shown(name, typed[name])}: only the step {' or '.join(takers)} takes this option"
                )
    for name in LAYER_OPTIONS:
        if name in typed and model is not None:
            raise WrongOptionError(f"{_shown(name, typed[name])}: the sizes are those of MODEL {model}; leave one out")


def _check_values(options: CheckOptions, chosen: Sequence[str]) -> None:
    """Check the values of which only the steps ``kernels`` and ``timing`` know what they may be.

    Without torch nobody knows, and these steps are skipped.

    Raises:
        ValueError: one is wrong; names option and value.
    """
    layer, asked = options.layer, options.kernels
    if "kernels" in chosen and len(layer.heads) > 1:
        raise WrongOptionError(f"{_shown('--heads', layer.heads)}: the step kernels takes one number of heads")
    if (layer, asked) == (LayerOptions(), KernelOptions()):
        return  # all of it is our own, and the import takes seconds
    try:
        from vllm_aiter_mla.kernels.formats import MXFP4_GROUP
        from vllm_aiter_mla.verify.cases import LIMITS
        from vllm_aiter_mla.verify.session import select
    except ModuleNotFoundError:
        return
    if layer.weights is Weights.mxfp4 and layer.nope is not None and layer.nope % MXFP4_GROUP:
        raise WrongOptionError(f"--weights mxfp4 --nope {layer.nope}: a multiple of {MXFP4_GROUP} expected")
    if "kernels" in chosen:
        limit, quick = LIMITS[0] if asked.limit is None else asked.limit, asked.quick or asked.small
        one_format = layer.weights is not None or (options.source is not None and not options.on_cpu)
        weight = ("plain",) if one_format else None  # which of them changes no name
        select(asked.backend, asked.case, asked.variant, limit, quick, not options.on_cpu, weight)


def _shown(name: str, value: Any) -> str:
    """Return an option as it was typed."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return name if value is True else " ".join((name, *map(str, values)))

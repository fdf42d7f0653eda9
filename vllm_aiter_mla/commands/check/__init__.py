# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla check [MODEL]``: every check of the fast path, or those named by ``--only``, in one run.

``options`` declares the options of the steps. ``run`` goes through ``steps``. ``context`` is what a step gets,
``show`` what is printed, ``record`` what is written.
"""

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from vllm_aiter_mla.commands import outputs, process, serve_options
from vllm_aiter_mla.commands.cards import Arch
from vllm_aiter_mla.commands.check import show, steps
from vllm_aiter_mla.commands.check.context import CheckOptions, Context, WrongOptionError
from vllm_aiter_mla.commands.check.kernels.printout import list_cases
from vllm_aiter_mla.commands.check.options import (
    Device,
    Group,
    KernelOptions,
    LayerOptions,
    TimingOptions,
    Weights,
    from_typed,
    parameters,
)
from vllm_aiter_mla.commands.check.run import Run, exit_status
from vllm_aiter_mla.commands.plan.model import examples, find_config, plan_variables, split_deployments
from vllm_aiter_mla.commands.report import renderer


class ForwardingCommand(TyperCommand):
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

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section of the help for MODEL, one for the command's options, and one for each ``Group``."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            group = group_of(param)
            title = f"Options of {group}" if group else "Options" if isinstance(param, TyperOption) else "Arguments"
            if (entry := param.get_help_record(ctx)) is not None:
                sections.setdefault(title, []).append(entry)
        for title, entries in sections.items():
            with formatter.section(title):
                formatter.write_dl(entries)


def group_of(param: Any) -> Group | None:
    """Return the group of an option of this command; None for MODEL, and for an option that no step has alone."""
    group = getattr(param, "rich_help_panel", None)
    return group if isinstance(group, Group) else None


COMMAND: dict[str, Any] = {
    "cls": ForwardingCommand,
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
    env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE: one of vLLM's environment variables; may be repeated.")
    ] = None,
    require_all: Annotated[
        bool, typer.Option("--require-all", help="For a gate: exit status 3 if a step was skipped.")
    ] = False,
    device: Annotated[Device, typer.Option(help="cpu: run on a CPU what a CPU can run.")] = Device.gpu,
    json: outputs.Json = None,
    html: Annotated[
        Path | None, typer.Option(callback=outputs.writable, help="Write the page of `report` to this file.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's own log on stderr.")] = False,
    arch: Annotated[
        Arch | None,
        typer.Option(
            rich_help_panel=Group.PLAN, help="Card to plan for: this machine's, or gfx942 where there is none."
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", rich_help_panel=Group.ISSUES, help="A known issue is a failure.")
    ] = False,
    checkpoint: Annotated[
        bool,
        typer.Option(
            "--checkpoint",
            rich_help_panel=Group.ENGINE,
            help="Run the engine over MODEL's own weights, not over random ones.",
        ),
    ] = False,
    listing: Annotated[
        bool,
        typer.Option("--list", rich_help_panel=Group.KERNELS, help="Print the cases and the oracles, and run nothing."),
    ] = False,
    **of_steps: Any,
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
        if model is not None and not model.strip():
            raise WrongOptionError("MODEL is empty")
        if html == outputs.STDOUT:
            raise WrongOptionError("--html -: a file is needed, standard output has the table")
        html_of = None if html is None else renderer()
        names = tuple(name.strip() for words in only or () for name in words.split(","))
        names = names or ("kernels",) * listing
        chosen = steps.chosen(names, model is not None)
        _check_words(model, context, chosen)
        _check_groups(context, chosen, model)
        if listing:
            list_cases(outputs.Stdout(highlight=False))
            return
        check_options = CheckOptions(
            source=None if model is None else find_config(model),
            arguments=tuple(context.args),
            arch=arch.architecture if arch else None,
            variables=plan_variables(env or [], os.environ),
            on_cpu=device is Device.cpu,
            strict=strict,
            verbose=verbose,
            checkpoint=checkpoint,
            only=names,
            layer=from_typed(LayerOptions, of_steps),
            kernels=from_typed(KernelOptions, of_steps),
            timing=from_typed(TimingOptions, of_steps),
        )
        _check_values(check_options, chosen)
    except (LookupError, ValueError) as error:
        outputs.fail(f"check: {error}")
    run = Run(Context(check_options), chosen, model, json)
    try:
        with outputs.text_on_stderr(json), process.workspace():
            run.carry_out()
    except WrongOptionError as error:
        outputs.fail(f"check: {error}")
    require_all = require_all or bool(names)
    status = exit_status(run.ended, check_options.on_cpu, require_all)
    with outputs.text_on_stderr(json):
        show.table(model, run.ended, show.last_line(run.ended, status, require_all))
    run.write(status, html, html_of)
    raise typer.Exit(status)


# Typer reads the options of the steps from the signature.
_signature = inspect.signature(check)
_own = [param for param in _signature.parameters.values() if param.kind is not inspect.Parameter.VAR_KEYWORD]
check.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[*_own, *parameters(KernelOptions, TimingOptions, LayerOptions)]
)


def _check_words(model: str | None, context: typer.Context, chosen: Sequence[str]) -> None:
    """Check what vLLM will get.

    Raises:
        ValueError: MODEL is an option, as it is when options come first; a second one is named; there is none for
            vLLM's options; an option is misspelt; or several deployments are asked for and more than their plans.
    """
    arguments, own = context.args, [name for option in context.command.params for name in option.opts]
    serve_options.check_names([*([model] if model else []), *arguments], own)
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
    sizes, _ = split_deployments(arguments)
    if len(sizes) > 1 and tuple(chosen) != ("plan",):
        raise WrongOptionError(f"-tp {','.join(sizes)}: several sizes work only with --only plan")


def _check_groups(context: typer.Context, chosen: Sequence[str], model: str | None) -> None:
    """Raise WrongOptionError for an option of a step that does not run, or one that says what MODEL says."""
    for param in context.command.params:
        source, group = context.get_parameter_source(param.name or ""), group_of(param)
        if group is None or source is None or source.name != "COMMANDLINE":
            continue
        as_typed = _as_typed(param.opts[0], context.params[param.name or ""])
        if not set(group.steps) & set(chosen):
            raise WrongOptionError(f"{as_typed}: only the step {' or '.join(group.steps)} takes this option")
        if group.is_without_model and model is not None:
            raise WrongOptionError(f"{as_typed}: the sizes are those of MODEL {model}; leave one out")


def _check_values(check_options: CheckOptions, chosen: Sequence[str]) -> None:
    """Check the values of which only the steps ``kernels`` and ``timing`` know what they may be.

    Without torch nobody knows, and these steps are skipped.

    Raises:
        ValueError: one is wrong; names option and value.
    """
    layer, of_kernels = check_options.layer, check_options.kernels
    if "kernels" in chosen and len(layer.heads) > 1:
        raise WrongOptionError(f"{_as_typed('--heads', layer.heads)}: the step kernels takes one number of heads")
    if (layer, of_kernels) == (LayerOptions(), KernelOptions()):
        return  # every value is a default of ours, and the import takes seconds
    try:
        from vllm_aiter_mla.kernels.formats import MXFP4_GROUP
        from vllm_aiter_mla.verify.cases import LIMITS
        from vllm_aiter_mla.verify.session import select
    except ModuleNotFoundError:
        return
    if layer.weights is Weights.mxfp4 and layer.nope is not None and layer.nope % MXFP4_GROUP:
        raise WrongOptionError(f"--weights mxfp4 --nope {layer.nope}: a multiple of {MXFP4_GROUP} expected")
    if "kernels" in chosen:
        limit = LIMITS[0] if of_kernels.limit is None else of_kernels.limit
        one_format = layer.weights is not None or (check_options.source is not None and not check_options.on_cpu)
        select(
            of_kernels.backend, of_kernels.case, of_kernels.variant, limit, of_kernels.quick or of_kernels.small,
            not check_options.on_cpu, ("plain",) if one_format else None,  # which format it is changes no name
        )  # fmt: skip


def _as_typed(name: str, value: Any) -> str:
    """Return an option as it was typed."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return name if value is True else " ".join((name, *map(str, values)))

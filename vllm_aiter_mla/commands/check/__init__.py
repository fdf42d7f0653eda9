# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla check [MODEL]``: run every check of the fast path, or those that ``--only`` names.

``options`` declares the options of the steps. ``run`` runs the ``steps`` in order and passes each a ``context``.
``show`` prints, and ``record`` is the JSON file. ``steps`` says in which folder each step lives.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from vllm_aiter_mla.commands import outputs, process, serve_options
from vllm_aiter_mla.commands.cards import CardName
from vllm_aiter_mla.commands.check import show, steps
from vllm_aiter_mla.commands.check.context import CheckOptions, StepContext, WrongOptionError
from vllm_aiter_mla.commands.check.kernels.printout import print_cases
from vllm_aiter_mla.commands.check.options import (
    Device,
    KernelOptions,
    LayerOptions,
    OptionGroup,
    TimingOptions,
    WeightFormat,
    build_options,
    build_plan_environment,
    option_parameters,
    split_deployments,
)
from vllm_aiter_mla.commands.check.run import CheckRunner, exit_status_of
from vllm_aiter_mla.commands.plan.config_source import CONFIG_NAMES, examples, find_config
from vllm_aiter_mla.commands.report import load_renderer

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
"""Suffixes of the files of weights that vLLM's default load format reads."""


class ForwardingCommand(TyperCommand):
    """A command that passes every option it does not know to vLLM's own parser.

    Its own options have long names only: click would find a one-letter option in each of vLLM's ``-cc.…`` words.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse our own options. vLLM gets ``--`` and everything after it.

        ``-h`` is replaced before click sees it: click would also find the letter in vLLM's single-dash words.
        """
        num_own_args = args.index("--") if "--" in args else len(args)
        super().parse_args(ctx, ["--help" if word == "-h" else word for word in args[:num_own_args]])
        ctx.args += args[num_own_args:]
        return list(ctx.args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write three kinds of sections of the help: MODEL, the command's options, and one for each ``OptionGroup``."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            group = group_of(param)
            title = f"Options of {group}" if group else "Options" if isinstance(param, TyperOption) else "Arguments"
            if (entry := param.get_help_record(ctx)) is not None:
                sections.setdefault(title, []).append(entry)
        for title, entries in sections.items():
            with formatter.section(title):
                formatter.write_dl(entries)


def group_of(param: Any) -> OptionGroup | None:
    """Return the group of an option of this command; None for MODEL and for options that all steps share."""
    group = getattr(param, "rich_help_panel", None)
    return group if isinstance(group, OptionGroup) else None


COMMAND: dict[str, Any] = {
    "cls": ForwardingCommand,
    "context_settings": {
        "allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"],
    },
}  # fmt: skip


def _step_names() -> list[str]:
    return list(steps.STEPS)


def check(
    ctx: typer.Context,
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
    environment: Annotated[
        list[str] | None,
        typer.Option("--env", help="NAME=VALUE: one of vLLM's environment variables; may be repeated."),
    ] = None,
    require_all: Annotated[
        bool, typer.Option("--require-all", help="For a gate: exit status 3 if a step was skipped.")
    ] = False,
    device: Annotated[Device, typer.Option(help="cpu: run on a CPU what a CPU can run.")] = Device.gpu,
    json: outputs.Json = None,
    html: Annotated[
        Path | None, typer.Option(callback=outputs.check_writable, help="Write the page of `report` to this file.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's own log of the plan on stderr.")] = False,
    arch: Annotated[
        CardName | None,
        typer.Option(
            rich_help_panel=OptionGroup.PLAN, help="Card to plan for: this machine's, or gfx942 where there is none."
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", rich_help_panel=OptionGroup.ISSUES, help="A known issue is a failure.")
    ] = False,
    checkpoint: Annotated[
        bool,
        typer.Option(
            "--checkpoint",
            rich_help_panel=OptionGroup.ENGINE,
            help="Run the engine over MODEL's own weights, not over random ones.",
        ),
    ] = False,
    list_cases: Annotated[
        bool,
        typer.Option(
            "--list", rich_help_panel=OptionGroup.KERNELS, help="Print the cases and the oracles, and run nothing."
        ),
    ] = False,
    **step_options: Any,
) -> None:
    """Check one model on this card; --only selects single steps.

    machine checks this machine. plan says which layers would engage and needs no GPU. issues names known faults.
    kernels replays captured graphs and compares bytes. timing times the kernels. engine runs vLLM with the flag off and
    on, and compares tokens. prefill, decode and launches compare what these two engines recorded.

    The steps that a named step needs run too. Without MODEL the steps machine, kernels and timing can run, at
    DeepSeek's sizes. With MODEL they run at the model's sizes.

    Exit status 0: every step that ran passed. 1: a step failed. 2: an option or the model is wrong. 3: a step gave no
    result, or was skipped although --only or --require-all asks for it; or no step ran on a card, and none of --only,
    --require-all and --device cpu is given. 4: vLLM's own kernels are the fastest here, so the flag gains nothing.
    """
    # By default vLLM logs to standard output, which is for the findings. The processes of the steps inherit this.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        if model is not None and not model.strip():
            raise WrongOptionError("MODEL is empty")
        if html == outputs.STDOUT:
            raise WrongOptionError("--html -: name a file, because the table goes to standard output")
        if (reason := outputs.same_file_reason(("--json", json), ("--html", html))) is not None:
            raise WrongOptionError(reason)
        render_page = None if html is None else load_renderer()
        named_steps = tuple(name.strip() for words in only or () for name in words.split(","))
        named_steps = named_steps or ("kernels",) * list_cases
        step_names = steps.select_steps(named_steps, model is not None)
        _check_serve_arguments(model, ctx, step_names)
        _check_step_options(ctx, step_names, model)
        if list_cases:
            _check_list_is_alone(ctx)
            print_cases(outputs.Stdout(highlight=False))
            return
        revision = serve_options.last_typed(("--revision",), ctx.args)
        check_options = CheckOptions(
            source=None if model is None else find_config(model, revision.value or None if revision else None),
            serve_arguments=tuple(ctx.args),
            arch=arch.architecture if arch else None,
            plan_environment=build_plan_environment(environment or [], os.environ, ctx.args),
            uses_cpu=device is Device.cpu,
            is_strict=strict,
            is_verbose=verbose,
            uses_checkpoint=checkpoint,
            named_steps=named_steps,
            layer=build_options(LayerOptions, step_options),
            kernels=build_options(KernelOptions, step_options),
            timing=build_options(TimingOptions, step_options),
        )
        _check_outputs_keep_config(check_options, {"--json": json, "--html": html})
        if check_options.uses_checkpoint and "engine" in step_names:
            _check_for_weights(check_options)
        _check_option_values(check_options, step_names)
    except (LookupError, ValueError) as error:
        outputs.fail(f"check: {error}")
    require_all = require_all or bool(named_steps)
    raise typer.Exit(_run_check(check_options, step_names, model, json, html, render_page, require_all))


def _run_check(
    check_options: CheckOptions, step_names: tuple[str, ...], model: str | None, json_path: Path | None,
    html_path: Path | None, render_page: Callable[[Sequence[Path]], str] | None, require_all: bool,
) -> int:  # fmt: skip
    """Run the steps, print the table, and write the files of --json and --html. Return the exit status."""
    runner = CheckRunner(StepContext(check_options), step_names, model, json_path)
    try:
        with outputs.text_on_stderr(json_path), process.workspace():
            runner.run_and_record()
    except (WrongOptionError, process.NoWorkspaceError) as error:
        outputs.fail(f"check: {error}")
    exit_status = exit_status_of(runner.ended_steps, check_options.uses_cpu, require_all)
    try:
        with outputs.text_on_stderr(json_path):
            show.print_table(model, runner.ended_steps, show.summary_line(runner.ended_steps, exit_status, require_all))
    finally:  # a pipe that has closed, or a full disk behind it, takes nothing from the files
        runner.write_outputs(exit_status, html_path, render_page)
    return exit_status


# Typer reads the options of the steps from the signature.
_signature = inspect.signature(check)
_own_parameters = [param for param in _signature.parameters.values() if param.kind is not inspect.Parameter.VAR_KEYWORD]
check.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[*_own_parameters, *option_parameters(KernelOptions, TimingOptions, LayerOptions)]
)


def _check_serve_arguments(model: str | None, ctx: typer.Context, step_names: Sequence[str]) -> None:
    """Check MODEL and the options that vLLM will get.

    Raises:
        ValueError: MODEL is an option, which happens when options come first. Or two models are named, or vLLM's
            options come without MODEL, or an option is misspelt. Or several deployments are given for more than plans.
    """
    serve_arguments = ctx.args
    own_option_names = [name for option in ctx.command.params for name in option.opts]
    serve_options.check_names([*([model] if model else []), *serve_arguments], own_option_names)
    if model is None:
        if serve_arguments:
            raise WrongOptionError(f"{serve_arguments[0]}: vLLM's options need MODEL, which comes first")
        return
    if model.startswith("-"):
        raise WrongOptionError(f"{model} in the place of MODEL: MODEL comes first, then the options of `vllm serve`")
    for index, argument in enumerate(serve_arguments):
        option, equals, value = argument.partition("=")
        if option == "--model":
            other_model = value if equals else next(iter(serve_arguments[index + 1 : index + 2]), "")
            raise WrongOptionError(f"--model {other_model} and MODEL {model}: give the model once, as MODEL")
    tp_sizes, _ = split_deployments(serve_arguments)
    if len(tp_sizes) > 1 and tuple(step_names) != ("plan",):
        raise WrongOptionError(f"-tp {','.join(tp_sizes)}: several sizes work only with --only plan")


def _check_step_options(ctx: typer.Context, step_names: Sequence[str], model: str | None) -> None:
    """Raise WrongOptionError for an option of a step that does not run, or for a size that MODEL determines."""
    for param in ctx.command.params:
        parameter_source, group = ctx.get_parameter_source(param.name or ""), group_of(param)
        if group is None or parameter_source is None or parameter_source.name != "COMMANDLINE":
            continue
        option_text = _option_text(param.opts[0], ctx.params[param.name or ""])
        if not set(group.steps) & set(step_names):
            raise WrongOptionError(f"{option_text}: only the step {' or '.join(group.steps)} takes this option")
        if group.excludes_model and model is not None:
            raise WrongOptionError(f"{option_text}: the sizes are those of MODEL {model}; leave one out")


def _check_list_is_alone(ctx: typer.Context) -> None:
    """Raise WrongOptionError for an option that --list would ignore."""
    for param in ctx.command.params:
        name, is_option = param.name or "", param.opts[0].startswith("-")
        parameter_source = ctx.get_parameter_source(name)
        if name in ("list_cases", "only") or not is_option or parameter_source is None:
            continue
        if parameter_source.name == "COMMANDLINE":
            raise WrongOptionError(f"{_option_text(param.opts[0], ctx.params[name])}: --list runs nothing")


def _check_outputs_keep_config(check_options: CheckOptions, output_paths: Mapping[str, Path | None]) -> None:
    """Check that no output replaces MODEL's config, or the file of vLLM's --config.

    Args:
        check_options: the options of the check.
        output_paths: by option; None without the option.

    Raises:
        WrongOptionError: an output would replace the config.
    """
    config = None if check_options.source is None else check_options.source.config
    inputs = [config] if isinstance(config, Path) else []
    words = [part for word in check_options.serve_arguments for part in word.split("=", 1)]
    inputs += [Path(path) for option, path in pairwise(words) if option == "--config"]
    for option, path in output_paths.items():
        if path is not None and (reason := outputs.overwritten_input_reason(inputs, path)) is not None:
            raise WrongOptionError(f"{option} {path}: {reason}")


def _check_for_weights(check_options: CheckOptions) -> None:
    """Check that the engine finds weights next to MODEL's config, unless options may say where they come from.

    Raises:
        ValueError: there are none.
    """
    source = check_options.source
    option_names = {word.partition("=")[0].replace("_", "-") for word in check_options.serve_arguments}
    if source is None or option_names & {"--load-format", "--config"}:
        return
    if not isinstance(source.config, Path):
        raise WrongOptionError(f"--checkpoint: {source.name} is a {source.config_location}, which has no weights")
    if source.config.name not in CONFIG_NAMES:
        raise WrongOptionError(f"--checkpoint: {source.name} is one file; name its folder, with {CONFIG_NAMES[0]}")
    folder = source.config.parent
    try:
        has_weights = any(path.suffix in WEIGHT_SUFFIXES for path in folder.iterdir())
    except OSError as error:
        raise WrongOptionError(f"--checkpoint: {folder}: {error.strerror}") from error
    if not has_weights:
        raise WrongOptionError(f"--checkpoint: no weights in {folder}")


def _check_option_values(check_options: CheckOptions, step_names: Sequence[str]) -> None:
    """Check the option values whose limits only the steps ``kernels`` and ``timing`` know.

    Without torch the limits cannot be imported. The values stay unchecked then, because these steps are skipped.

    Raises:
        ValueError: a value is wrong; the message names the option and the value.
    """
    layer_options, kernel_options = check_options.layer, check_options.kernels
    if "kernels" in step_names and len(layer_options.head_counts) > 1:
        raise WrongOptionError(
            f"{_option_text('--heads', layer_options.head_counts)}: the step kernels takes one number of heads"
        )
    if (layer_options, kernel_options) == (LayerOptions(), KernelOptions()):
        return  # the defaults are right, and the import takes seconds
    try:
        from vllm_aiter_mla.kernels.formats import MXFP4_GROUP
        from vllm_aiter_mla.verify.cases import LIMITS
        from vllm_aiter_mla.verify.session import select
    except ModuleNotFoundError:
        return
    is_mxfp4, nope = layer_options.weight_format is WeightFormat.mxfp4, layer_options.nope
    if is_mxfp4 and nope is not None and nope % MXFP4_GROUP:
        raise WrongOptionError(f"--weights mxfp4 --nope {nope}: a multiple of {MXFP4_GROUP} expected")
    if "kernels" in step_names:
        limit = LIMITS[0] if kernel_options.limit is None else kernel_options.limit
        is_quick, is_on_gpu = kernel_options.quick or kernel_options.small, not check_options.uses_cpu
        has_one_format = layer_options.weight_format is not None or (check_options.source is not None and is_on_gpu)
        select(
            kernel_options.backend, kernel_options.case, kernel_options.variant, limit, is_quick, is_on_gpu,
            ("plain",) if has_one_format else None,  # the names of the variants do not depend on which format it is
        )  # fmt: skip


def _option_text(name: str, value: Any) -> str:
    """Return an option with its value, as the user typed it."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return name if value is True else " ".join((name, *map(str, values)))

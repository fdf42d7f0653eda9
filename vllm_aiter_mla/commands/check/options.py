# SPDX-License-Identifier: Apache-2.0
"""The options of the steps of ``check``. Each is a field of a record, and carries its name, its help and its group.

A field has the name of its option, or says more if that name is too short. A switch is True if the user typed it.

``option_parameters`` makes the options of the command line from the records. ``build_options`` makes a record from the
typed values. ``build_plan_environment`` reads --env, and ``split_deployments`` reads ``-tp`` among vLLM's own options.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer

from vllm_aiter_mla.admission import AITER_MLA
from vllm_aiter_mla.commands.check.timing.record import MAX_TIMED_TOKENS
from vllm_aiter_mla.commands.compat.vllm_options import USE_AITER, VARIABLES
from vllm_aiter_mla.commands.plan.record import PlanEnvironment
from vllm_aiter_mla.commands.serve_options import last_typed

MAX_HEADS, MAX_WIDTH = 1024, 4096
MAX_ROUNDS, MAX_SEED = 10**6, 10**12  # torch takes seeds below 2^64, and each round has the next one
TP_OPTIONS = ("-tp", "--tensor-parallel-size")
OptionRecord = TypeVar("OptionRecord")


class Device(StrEnum):
    """The values of --device."""

    gpu = "gpu"
    cpu = "cpu"


class WeightFormat(StrEnum):
    """The values of --weights: formats of the absorb weights."""

    bf16 = "bf16"
    fp8 = "fp8"
    mxfp4 = "mxfp4"

    @property
    def format_name(self) -> str:
        """The format's name in ``kernels.absorb``."""
        return "plain" if self is WeightFormat.bf16 else self.value

    @classmethod
    def of_format_name(cls, format_name: str) -> "WeightFormat":
        """Return the member whose name in ``kernels.absorb`` is ``format_name``."""
        return next(weight_format for weight_format in cls if weight_format.format_name == format_name)

    def absorb_key(self, fp8_dtype: Any) -> tuple[Any, ...]:
        """Return the value of ``AbsorbWeight.key`` for this format; ``fp8_dtype`` is the card's fp8 dtype."""
        return (self.format_name, fp8_dtype) if self is WeightFormat.fp8 else (self.format_name,)


class CacheType(StrEnum):
    """The values of --type: types of the query and the cache."""

    fp8 = "fp8"
    bf16 = "bf16"
    both = "both"


class OptionGroup(StrEnum):
    """Options that the same steps take. The value is the title of their section in the help."""

    steps: tuple[str, ...]
    """The steps that take these options."""
    excludes_model: bool
    """Whether these options say what a model says, so that both cannot be given."""

    def __new__(cls, title: str, steps: tuple[str, ...], excludes_model: bool = False) -> "OptionGroup":
        """Return the member with this title."""
        member = str.__new__(cls, title)
        member._value_ = title
        member.steps, member.excludes_model = steps, excludes_model
        return member

    PLAN = "plan", ("plan",)
    ISSUES = "issues", ("issues",)
    ENGINE = "engine", ("engine",)
    KERNELS = "kernels", ("kernels",)
    KERNELS_WITHOUT_MODEL = "kernels, without MODEL", ("kernels",), True
    TIMING = "timing", ("timing",)
    TIMING_WITHOUT_MODEL = "timing, without MODEL", ("timing",), True
    WITHOUT_MODEL = "kernels and timing, without MODEL", ("kernels", "timing"), True


def step_option(name: str, group: OptionGroup, help_text: str, **limits: Any) -> Any:
    """Return an option of the command line; ``limits`` are ``min`` and ``max``."""
    return typer.Option(name, rich_help_panel=group, help=help_text, **limits)


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """The options of the step ``kernels``. The fields have the names of ``verify.session.Session``."""

    backend: Annotated[
        tuple[str, ...], step_option("--backend", OptionGroup.KERNELS, "Back end; may be repeated. Default: all here.")
    ] = ()
    case: Annotated[
        tuple[str, ...], step_option("--case", OptionGroup.KERNELS, "A case, or a part of its name; may be repeated.")
    ] = ()
    variant: Annotated[
        tuple[str, ...], step_option("--variant", OptionGroup.KERNELS, "fp8, bf16, fp8-cache, ...; may be repeated.")
    ] = ()
    seed: Annotated[int, step_option("--data-seed", OptionGroup.KERNELS, "Seed of the data.", min=0, max=MAX_SEED)] = 0
    repeat: Annotated[
        int, step_option("--repeat", OptionGroup.KERNELS, "Rounds, each with the next seed.", min=1, max=MAX_ROUNDS)
    ] = 1
    quick: Annotated[
        bool, step_option("--quick", OptionGroup.KERNELS, "Two variants, fewer cases, fewer replays. MODEL implies it.")
    ] = False
    emulated: Annotated[
        bool, step_option("--emulated", OptionGroup.KERNELS, "Note in the JSON that the card is an emulator's.")
    ] = False
    limit: Annotated[
        int | None, step_option("--limit", OptionGroup.KERNELS, "Last capture size, in tokens: 8 to 8192.")
    ] = None
    replays: Annotated[int | None, step_option("--long-run", OptionGroup.KERNELS, "Replays of a long run.", min=4)] = (
        None
    )
    small: Annotated[
        bool,
        step_option(
            "--small",
            OptionGroup.KERNELS_WITHOUT_MODEL,
            "The quick cases at sizes that an emulator finishes, with digests.",
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """The options of the step ``timing``."""

    token_counts: Annotated[
        tuple[int, ...],
        step_option("--tokens", OptionGroup.TIMING, "Tokens; may be repeated.", min=1, max=MAX_TIMED_TOKENS),
    ] = ()
    tune: Annotated[
        bool, step_option("--tune", OptionGroup.TIMING, "Time the Triton kernel's tiles; starts take the fastest.")
    ] = False
    cache_type: Annotated[
        CacheType, step_option("--type", OptionGroup.TIMING_WITHOUT_MODEL, "Type of the query and the cache.")
    ] = CacheType.both


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """The sizes of a layer that the user typed. A step uses its default for a size that is None or empty."""

    head_counts: Annotated[
        tuple[int, ...],
        step_option(
            "--heads", OptionGroup.WITHOUT_MODEL, "Query heads of a rank; timing takes several.", min=1, max=MAX_HEADS
        ),
    ] = ()
    nope: Annotated[
        int | None,
        step_option("--nope", OptionGroup.WITHOUT_MODEL, "Un-rotated width of a query head.", min=1, max=MAX_WIDTH),
    ] = None
    weight_format: Annotated[
        WeightFormat | None,
        step_option(
            "--weights", OptionGroup.WITHOUT_MODEL, "Format of the absorb weights; by default several, of timing bf16."
        ),
    ] = None
    v: Annotated[
        int | None,
        step_option("--v", OptionGroup.KERNELS_WITHOUT_MODEL, "Width of a value head.", min=1, max=MAX_WIDTH),
    ] = None


def option_parameters(*record_types: type) -> list[inspect.Parameter]:
    """Return the parameters of a command from which typer makes the options of these records.

    An option whose field is a tuple may be repeated. Typer needs a list for that: to typer, a tuple is one option with
    several values.
    """
    parameters = []
    for option in (option for record_type in record_types for option in fields(record_type)):
        (value_type, typer_option), default = get_args(option.type), option.default
        if isinstance(default, tuple):
            value_type, default = list[get_args(value_type)[0]] | None, None  # type: ignore[misc]
        annotation = Annotated[value_type, typer_option]  # type: ignore[valid-type]
        parameters.append(
            inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    return parameters


def build_options(record_type: type[OptionRecord], typed_values: Mapping[str, Any]) -> OptionRecord:
    """Return a record of the values that typer parsed for the parameters of ``option_parameters``."""
    values = {}
    for option in fields(record_type):  # type: ignore[arg-type]
        is_repeated, value = isinstance(option.default, tuple), typed_values[option.name]
        values[option.name] = tuple(value or ()) if is_repeated else value
    return record_type(**values)


def takes_aiters_attention(arguments: Sequence[str]) -> bool:
    """Return whether options of ``vllm serve`` name AITER's attention, which vLLM then takes without any switch.

    Those in the file of --config count too, where the arguments name no attention.
    """
    names = (_named_attention(read) for read in (partial(_typed_value, arguments), _config_file(arguments).get))
    return next(filter(None, names), "").upper() == AITER_MLA


def _named_attention(read: Callable[[str], Any]) -> str:
    """Return the attention back end that options name, or "". ``read`` returns the value of an option, or None."""
    name = read("attention-backend") or read("attention-config.backend")
    config = read("attention-config")
    if not name and config is not None:
        with suppress(ValueError):  # vLLM reports it
            config = json.loads(config) if isinstance(config, str) else config
            name = config.get("backend") if isinstance(config, dict) else None
    return str(name or "")


def _typed_value(arguments: Sequence[str], name: str) -> str | None:
    shorter = name.replace("attention-config", "-ac", 1) if name.startswith("attention-config") else name
    typed = last_typed((f"--{name}", shorter), arguments)
    return None if typed is None else typed.value


def _config_file(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options in the file of --config by their names without dashes in front; vLLM reports a wrong file."""
    typed, found = last_typed(("--config",), arguments), None
    if typed is not None:
        with suppress(ImportError, OSError, ValueError):
            import yaml  # a dependency of vLLM

            with suppress(yaml.YAMLError):
                found = yaml.safe_load(Path(typed.value).read_text(encoding="utf-8"))
    return {str(name).replace("_", "-"): value for name, value in found.items()} if isinstance(found, dict) else {}


def build_plan_environment(
    entries: Sequence[str], environment: Mapping[str, str], arguments: Sequence[str] = ()
) -> PlanEnvironment:
    """Return the environment of a plan, from the ``entries`` of --env and from the ``environment`` of this process.

    If VLLM_ROCM_USE_AITER is unset, it is 1, because no layer engages without it, unless ``arguments`` of ``vllm
    serve`` name AITER's attention. --env may name any variable: vLLM gets it, even if no plan depends on it.

    Raises:
        ValueError: an entry has no name or no ``=``.
    """
    assumed = {} if takes_aiters_attention(arguments) else {USE_AITER: ("1", "default")}
    plan_environment = assumed | {name: (environment[name], "environment") for name in VARIABLES if name in environment}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise ValueError(f"--env {entry}: NAME=VALUE expected")
        plan_environment[name] = (value, "--env")
    return plan_environment


def split_deployments(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the sizes of tensor parallelism in ``-tp``, and the options of ``vllm serve`` for each.

    ``-tp 1,2,4,8`` has four. Without a list there is one deployment, with the options as given and "" as its size.
    """
    typed = last_typed(TP_OPTIONS, arguments)
    if typed is not None:
        tp_sizes = [size.strip() for size in typed.value.split(",")]
        if len(tp_sizes) > 1 and all(map(str.isdecimal, tp_sizes)):  # vLLM reports an error in other values
            before, after = arguments[: typed.position], arguments[typed.position + typed.num_words :]
            option = arguments[typed.position].partition("=")[0]
            return tp_sizes, [(*before, option, tp_size, *after) for tp_size in tp_sizes]
    return [""], [tuple(arguments)]

# SPDX-License-Identifier: Apache-2.0
"""The options of the steps of ``check``: each is one field of a record, with its name, its help and its group.

``parameters`` makes the options of the command line from the records, and ``from_typed`` makes a record from what was
typed.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, TypeVar, get_args

import typer

from vllm_aiter_mla.commands.check.timing.record import MAX_TIMED_TOKENS

MAX_HEADS, MAX_WIDTH = 1024, 4096
Options = TypeVar("Options")


class Device(StrEnum):
    """Where something runs."""

    gpu = "gpu"
    cpu = "cpu"


class Weights(StrEnum):
    """Formats of the absorb weights."""

    bf16 = "bf16"
    fp8 = "fp8"
    mxfp4 = "mxfp4"

    @property
    def format_name(self) -> str:
        """The format's name in ``kernels.absorb``."""
        return "plain" if self is Weights.bf16 else self.value

    @classmethod
    def of_format(cls, name: str) -> "Weights":
        """Return the member of a format of ``kernels.absorb``."""
        return next(weights for weights in cls if weights.format_name == name)

    def key(self, fp8: Any) -> tuple[Any, ...]:
        """Return the format as ``AbsorbWeight.key`` names it; ``fp8`` is the card's type."""
        return (self.format_name, fp8) if self is Weights.fp8 else (self.format_name,)


class CacheType(StrEnum):
    """Types of the query and the cache."""

    fp8 = "fp8"
    bf16 = "bf16"
    both = "both"


class Group(StrEnum):
    """Options that the same steps take: the help has a section for each group."""

    PLAN = "plan"
    ISSUES = "issues"
    ENGINE = "engine"
    KERNELS = "kernels"
    KERNELS_WITHOUT_MODEL = "kernels, without MODEL"
    TIMING = "timing"
    TIMING_WITHOUT_MODEL = "timing, without MODEL"
    WITHOUT_MODEL = "kernels and timing, without MODEL"

    @property
    def steps(self) -> list[str]:
        """The steps that take these options."""
        return self.value.partition(",")[0].split(" and ")

    @property
    def is_without_model(self) -> bool:
        """Whether these options say what a model says, so that both cannot be given."""
        return self.value.endswith("without MODEL")


def option(name: str, group: Group, text: str, **limits: Any) -> Any:
    """Return an option of the command line, with its group and its help; ``limits`` are ``min`` and ``max``."""
    return typer.Option(name, rich_help_panel=group, help=text, **limits)


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """The options of the step ``kernels``, under the names that ``verify.session.Session`` has for them."""

    backend: Annotated[
        tuple[str, ...], option("--backend", Group.KERNELS, "Back end; may be repeated. Default: all here.")
    ] = ()
    case: Annotated[
        tuple[str, ...], option("--case", Group.KERNELS, "A case, or a part of its name; may be repeated.")
    ] = ()
    variant: Annotated[
        tuple[str, ...], option("--variant", Group.KERNELS, "fp8, bf16, fp8-cache, ...; may be repeated.")
    ] = ()
    seed: Annotated[int, option("--data-seed", Group.KERNELS, "Seed of the data.")] = 0
    repeat: Annotated[int, option("--repeat", Group.KERNELS, "Rounds, each with the next seed.", min=1)] = 1
    quick: Annotated[
        bool, option("--quick", Group.KERNELS, "Two variants, fewer cases, short long runs. MODEL implies it.")
    ] = False
    emulated: Annotated[
        bool, option("--emulated", Group.KERNELS, "Note in the JSON that the card is an emulator's.")
    ] = False
    limit: Annotated[int | None, option("--limit", Group.KERNELS, "Last capture size, in tokens: 8 to 8192.")] = None
    replays: Annotated[int | None, option("--long-run", Group.KERNELS, "Replays of a long run.", min=4)] = None
    small: Annotated[
        bool,
        option(
            "--small", Group.KERNELS_WITHOUT_MODEL, "The quick cases at sizes that an emulator finishes, with digests."
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """The options of the step ``timing``."""

    tokens: Annotated[
        tuple[int, ...], option("--tokens", Group.TIMING, "Tokens; may be repeated.", min=1, max=MAX_TIMED_TOKENS)
    ] = ()
    tune: Annotated[
        bool, option("--tune", Group.TIMING, "Time the Triton kernel's tiles; starts take the fastest.")
    ] = False
    cache_type: Annotated[
        CacheType, option("--type", Group.TIMING_WITHOUT_MODEL, "Type of the query and the cache.")
    ] = CacheType.both


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """The sizes of a layer that were given by hand; None or empty where a step's own default counts."""

    heads: Annotated[
        tuple[int, ...],
        option("--heads", Group.WITHOUT_MODEL, "Query heads of a rank; timing takes several.", min=1, max=MAX_HEADS),
    ] = ()
    nope: Annotated[
        int | None, option("--nope", Group.WITHOUT_MODEL, "Un-rotated width of a query head.", min=1, max=MAX_WIDTH)
    ] = None
    weights: Annotated[
        Weights | None,
        option("--weights", Group.WITHOUT_MODEL, "Format of the absorb weights; by default several, of timing bf16."),
    ] = None
    v: Annotated[
        int | None, option("--v", Group.KERNELS_WITHOUT_MODEL, "Width of a value head.", min=1, max=MAX_WIDTH)
    ] = None


def parameters(*records: type) -> list[inspect.Parameter]:
    """Return the parameters of a command from which typer makes the options of these records.

    A field that is a tuple may be repeated. Typer wants a list for that: it takes a tuple for an option of many words.
    """
    result = []
    for item in (item for record in records for item in fields(record)):
        (kind, typer_option), default = get_args(item.type), item.default
        if isinstance(default, tuple):
            kind, default = list[get_args(kind)[0]] | None, None  # type: ignore[misc]
        annotation = Annotated[kind, typer_option]  # type: ignore[valid-type]
        result.append(
            inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    return result


def from_typed(record: type[Options], typed: Mapping[str, Any]) -> Options:
    """Return a record with what typer gives for the parameters that ``parameters`` makes from its fields."""
    values = {item.name: typed[item.name] for item in fields(record)}  # type: ignore[arg-type]
    repeated = {item.name for item in fields(record) if isinstance(item.default, tuple)}  # type: ignore[arg-type]
    return record(**{name: tuple(value or ()) if name in repeated else value for name, value in values.items()})

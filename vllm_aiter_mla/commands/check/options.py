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

from vllm_aiter_mla.commands.check.timing.record import MOST_TOKENS

MOST_HEADS, MOST_WIDTH = 1024, 4096
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


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """The options of the step ``kernels``, under the names that ``verify.session.Session`` has for them."""

    backend: Annotated[
        tuple[str, ...],
        typer.Option("--backend", rich_help_panel=Group.KERNELS, help="Back end; may be repeated. Default: all here."),
    ] = ()
    case: Annotated[
        tuple[str, ...],
        typer.Option("--case", rich_help_panel=Group.KERNELS, help="A case, or a part of its name; may be repeated."),
    ] = ()
    variant: Annotated[
        tuple[str, ...],
        typer.Option("--variant", rich_help_panel=Group.KERNELS, help="fp8, bf16, fp8-cache, ...; may be repeated."),
    ] = ()
    seed: Annotated[int, typer.Option("--data-seed", rich_help_panel=Group.KERNELS, help="Seed of the data.")] = 0
    repeat: Annotated[
        int, typer.Option("--repeat", rich_help_panel=Group.KERNELS, min=1, help="Rounds, each with the next seed.")
    ] = 1
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            rich_help_panel=Group.KERNELS,
            help="Two variants, fewer cases, short long runs. MODEL implies it.",
        ),
    ] = False
    emulated: Annotated[
        bool,
        typer.Option(
            "--emulated", rich_help_panel=Group.KERNELS, help="Note in the JSON that the card is an emulator's."
        ),
    ] = False
    limit: Annotated[
        int | None,
        typer.Option("--limit", rich_help_panel=Group.KERNELS, help="Last capture size, in tokens: 8 to 8192."),
    ] = None
    replays: Annotated[
        int | None, typer.Option("--long-run", rich_help_panel=Group.KERNELS, min=4, help="Replays of a long run.")
    ] = None
    small: Annotated[
        bool,
        typer.Option(
            "--small",
            rich_help_panel=Group.KERNELS_WITHOUT_MODEL,
            help="The quick cases at sizes that an emulator finishes, with digests.",
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """The options of the step ``timing``."""

    tokens: Annotated[
        tuple[int, ...],
        typer.Option("--tokens", rich_help_panel=Group.TIMING, min=1, max=MOST_TOKENS, help="Tokens; may be repeated."),
    ] = ()
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", rich_help_panel=Group.TIMING, help="Time the Triton kernel's tiles; starts take the fastest."
        ),
    ] = False
    cache_type: Annotated[
        CacheType,
        typer.Option("--type", rich_help_panel=Group.TIMING_WITHOUT_MODEL, help="Type of the query and the cache."),
    ] = CacheType.both


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """The sizes of a layer that were given by hand; None or empty where a step's own default counts."""

    heads: Annotated[
        tuple[int, ...],
        typer.Option(
            "--heads",
            rich_help_panel=Group.WITHOUT_MODEL,
            min=1,
            max=MOST_HEADS,
            help="Query heads of a rank; timing takes several.",
        ),
    ] = ()
    nope: Annotated[
        int | None,
        typer.Option(
            "--nope",
            rich_help_panel=Group.WITHOUT_MODEL,
            min=1,
            max=MOST_WIDTH,
            help="Un-rotated width of a query head.",
        ),
    ] = None
    weights: Annotated[
        Weights | None,
        typer.Option(
            "--weights",
            rich_help_panel=Group.WITHOUT_MODEL,
            help="Format of the absorb weights; by default several, of timing bf16.",
        ),
    ] = None
    v: Annotated[
        int | None,
        typer.Option(
            "--v",
            rich_help_panel=Group.KERNELS_WITHOUT_MODEL,
            min=1,
            max=MOST_WIDTH,
            help="Width of a value head.",
        ),
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

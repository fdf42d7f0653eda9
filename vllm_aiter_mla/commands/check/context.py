# SPDX-License-Identifier: Apache-2.0
"""What a step of ``check`` gets: the options, what earlier steps found, and whom to tell how it goes."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vllm_aiter_mla.commands.check.engine import EngineAnswer, Side
from vllm_aiter_mla.commands.check.record import Step
from vllm_aiter_mla.commands.plan.model import Source
from vllm_aiter_mla.commands.plan.record import Plan

NO_GPU = "no GPU"


class WrongOptionError(ValueError):
    """An option, or the model, is wrong: the message names it, and no later step can run."""


class Device(StrEnum):
    """Where something runs."""

    gpu = "gpu"
    cpu = "cpu"


class Weights(StrEnum):
    """Formats of the absorb weights."""

    bf16 = "bf16"
    fp8 = "fp8"
    mxfp4 = "mxfp4"

    def key(self, fp8: Any) -> tuple[Any, ...]:
        """Return the format as ``AbsorbWeight.key`` names it; ``fp8`` is the card's type."""
        return {"bf16": ("plain",), "fp8": ("fp8", fp8), "mxfp4": ("mxfp4",)}[self.value]


class Arch(StrEnum):
    """Cards a plan can be made for, by architecture or by the name that is sold."""

    gfx942 = "gfx942"
    gfx950 = "gfx950"
    mi300x = "mi300x"
    mi325x = "mi325x"
    mi350p = "mi350p"
    mi350x = "mi350x"
    mi355x = "mi355x"

    @property
    def architecture(self) -> str:
        """gfx942 or gfx950."""
        return SOLD_AS.get(self.value, self.value)


SOLD_AS = {"mi300x": "gfx942", "mi325x": "gfx942", "mi350p": "gfx950", "mi350x": "gfx950", "mi355x": "gfx950"}


class Kind(StrEnum):
    """Types of the query and the cache."""

    fp8 = "fp8"
    bf16 = "bf16"
    both = "both"


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """The sizes of a layer that were given by hand; None or empty where a step's own default counts."""

    heads: tuple[int, ...] = ()  # of a rank
    nope: int | None = None
    v: int | None = None
    weights: Weights | None = None


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """The options of the step ``kernels``, as ``verify.session.Session`` takes them."""

    backend: tuple[str, ...] = ()
    case: tuple[str, ...] = ()
    variant: tuple[str, ...] = ()
    seed: int = 0
    repeat: int = 1
    quick: bool = False
    small: bool = False
    emulated: bool = False
    limit: int | None = None
    replays: int | None = None


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """The options of the step ``timing``."""

    tokens: tuple[int, ...] = ()
    kind: Kind = Kind.both
    tune: bool = False


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What was asked for on the command line."""

    source: Source | None = None  # the model's config; None without a model
    arguments: tuple[str, ...] = ()  # of ``vllm serve``
    arch: str = ""  # card to plan for; "" for this machine's
    variables: Mapping[str, Any] = field(default_factory=dict)  # value and origin of each variable that is set
    on_cpu: bool = False  # run what a CPU can run too
    strict: bool = False  # a known issue is a failure
    verbose: bool = False  # vLLM's log goes to stderr
    checkpoint: bool = False  # load the weights of the folder; otherwise a few layers of random weights
    only: tuple[str, ...] = ()  # steps that were asked for by name; empty for all
    layer: LayerOptions = LayerOptions()
    kernels: KernelOptions = KernelOptions()
    timing: TimingOptions = TimingOptions()

    @property
    def on_a_card(self) -> bool:
        """Whether steps may use a GPU: torch sees one, and nobody asked for a CPU."""
        from vllm_aiter_mla.kernels.device import card

        return not self.on_cpu and card().is_there()

    def environment(self, assumed: bool = True) -> dict[str, str]:
        """Return the server's variables: this process's, and over them --env and what the plan has ``assumed``."""
        given = {name: value for name, (value, origin) in self.variables.items() if assumed or origin != "default"}
        return {**os.environ, **given}


@dataclass(slots=True)
class Progress:
    """Whom a step tells how it goes; by default nobody."""

    doing: Callable[[str], None] = lambda text: None  # what it does now
    so_far: Callable[[Step], None] = lambda step: None  # what it has found so far


@dataclass(slots=True)
class Context:
    """What a step gets. The steps ``plan`` and ``engine`` fill in what they found, for later ones."""

    options: CheckOptions = CheckOptions()
    progress: Progress = field(default_factory=Progress)
    plan: Plan | None = None
    answers: dict[Side, EngineAnswer] = field(default_factory=dict)  # empty where no engine ran

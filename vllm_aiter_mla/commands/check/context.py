# SPDX-License-Identifier: Apache-2.0
"""What a step of ``check`` gets: the options, what earlier steps found, and whom to tell how it goes."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_aiter_mla.commands.check.engine.record import EngineAnswer, Side
from vllm_aiter_mla.commands.check.options import KernelOptions, LayerOptions, TimingOptions
from vllm_aiter_mla.commands.check.record import Step
from vllm_aiter_mla.commands.plan.model import Source, Variables
from vllm_aiter_mla.commands.plan.record import Plan

NO_GPU = "no GPU"


class WrongOptionError(ValueError):
    """An option, or the model, is wrong: the message names it, and no later step can run."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The options of a command line."""

    source: Source | None = None  # the model's config; None without a model
    arguments: tuple[str, ...] = ()  # of ``vllm serve``
    arch: str | None = None  # architecture to plan for; None for this machine's
    variables: Variables = field(default_factory=dict)
    on_cpu: bool = False  # --device cpu: run what a CPU can run too
    strict: bool = False  # a known issue is a failure
    verbose: bool = False  # vLLM's log goes to stderr
    checkpoint: bool = False  # load the weights of the folder; otherwise a few layers of random weights
    only: tuple[str, ...] = ()  # the steps that --only names; empty for all
    layer: LayerOptions = field(default_factory=LayerOptions)
    kernels: KernelOptions = field(default_factory=KernelOptions)
    timing: TimingOptions = field(default_factory=TimingOptions)

    @property
    def on_a_card(self) -> bool:
        """Whether steps may use a GPU: torch sees one, and --device cpu is not given."""
        if self.on_cpu:
            return False
        try:
            from vllm_aiter_mla.kernels.device import card
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                raise
            return False  # a torch that is here and does not load sees no GPU; the step ``machine`` says why
        return card().is_there()

    def environment(self, assumed: bool = True) -> dict[str, str]:
        """Return the server's variables: this process's, and over them --env and what the plan has ``assumed``."""
        over = {name: value for name, (value, origin) in self.variables.items() if assumed or origin != "default"}
        return {**os.environ, **over}


@dataclass(slots=True)
class Progress:
    """Whom a step tells how it goes; by default nobody."""

    show_activity: Callable[[str], None] = lambda text: None  # what the step does now
    report_partial: Callable[[Step], None] = lambda step: None  # what the step has found so far


@dataclass(slots=True)
class Context:
    """What a step gets. The steps ``plan`` and ``engine`` fill in what they found, for later ones."""

    options: CheckOptions = field(default_factory=CheckOptions)
    progress: Progress = field(default_factory=Progress)
    plan: Plan | None = None
    answers: dict[Side, EngineAnswer] = field(default_factory=dict)  # empty where no engine ran

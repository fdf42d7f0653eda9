# SPDX-License-Identifier: Apache-2.0
"""The context of a step of ``check``: the options, the results of earlier steps, and the progress callbacks."""

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.commands.check.engine.record import EngineAnswer, Side
from vllm_aiter_mla.commands.check.options import KernelOptions, LayerOptions, TimingOptions
from vllm_aiter_mla.commands.check.record import StepResult
from vllm_aiter_mla.commands.plan.config_source import ConfigSource
from vllm_aiter_mla.commands.plan.record import Plan, PlanEnvironment, server_environment

NO_GPU = "no GPU"


class WrongOptionError(ValueError):
    """An option or the model is wrong. The message names it, and no later step can run."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The options of a command line."""

    source: ConfigSource | None = None  # the model's config; None without a model
    serve_arguments: tuple[str, ...] = ()  # of ``vllm serve``
    arch: str | None = None  # architecture to plan for; None for this machine's
    plan_environment: PlanEnvironment = field(default_factory=dict)
    uses_cpu: bool = False  # --device cpu: run on a CPU what a CPU can run
    is_strict: bool = False  # --strict: a known issue is a failure
    is_verbose: bool = False  # --verbose: vLLM's log goes to stderr
    uses_checkpoint: bool = False  # --checkpoint: load the model's own weights, and do not draw random ones
    named_steps: tuple[str, ...] = ()  # the steps that --only names; empty for all
    layer: LayerOptions = field(default_factory=LayerOptions)
    kernels: KernelOptions = field(default_factory=KernelOptions)
    timing: TimingOptions = field(default_factory=TimingOptions)

    @property
    def can_use_gpu(self) -> bool:
        """Whether steps can use a GPU: torch sees one, and --device cpu is not given."""
        return self.no_gpu_reason is None

    @property
    def no_gpu_reason(self) -> str | None:
        """Why steps cannot use a GPU; None if they can."""
        if self.uses_cpu:
            return "--device cpu is given"
        try:
            from vllm_aiter_mla.kernels.device import card
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                raise
            return f"torch cannot be used: {outputs.one_line(f'{type(error).__name__}: {error}')}"
        return None if card().is_there() else NO_GPU

    def server_environment(self, with_assumed: bool = True) -> dict[str, str]:
        """Return the server's environment: this process's, overridden by --env.

        ``with_assumed`` adds the variables that the plan assumes where nobody set them.
        """
        return server_environment(
            {name: pair for name, pair in self.plan_environment.items() if with_assumed or pair[1] != "default"}
        )


@dataclass(slots=True)
class ProgressCallbacks:
    """The functions by which a step reports its progress. The defaults do nothing."""

    show_activity: Callable[[str], None] = lambda activity: None  # gets what the step does now
    report_partial: Callable[[StepResult], None] = lambda partial_step: None  # gets the findings so far


@dataclass(slots=True)
class StepContext:
    """The argument of each step. The steps ``plan`` and ``engine`` store their results in it for later steps."""

    options: CheckOptions = field(default_factory=CheckOptions)
    progress: ProgressCallbacks = field(default_factory=ProgressCallbacks)
    plan: Plan | None = None
    answers: dict[Side, EngineAnswer] = field(default_factory=dict)  # empty if no engine ran

# SPDX-License-Identifier: Apache-2.0
"""The table of the steps of ``check``, and the functions of the three steps that need no card.

A step takes a ``StepContext`` and returns a ``StepResult``, which says how it ended. Where each step lives:

- ``machine`` and ``plan`` are functions here, over the folders ``commands.machine`` and ``commands.plan``. Those know
  nothing of ``check``, so they are folders next to it.
- ``issues`` is a function here. The plan has looked them up already, in ``commands.plan.issues``.
- ``kernels`` and ``timing`` are in folders of their own below ``check``.
- ``engine``, ``prefill``, ``decode`` and ``launches`` share the folder ``engine``: the last three compare what the
  engines of the first recorded.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vllm_aiter_mla.admission import AITER_MLA
from vllm_aiter_mla.commands import machine, process
from vllm_aiter_mla.commands.check.context import StepContext, WrongOptionError
from vllm_aiter_mla.commands.check.engine.steps import (
    compare_decode_with_prefill,
    compare_engines,
    compare_launches,
    compare_prefill_rows,
)
from vllm_aiter_mla.commands.check.kernels.step import verify_kernels
from vllm_aiter_mla.commands.check.options import split_deployments, takes_aiters_attention
from vllm_aiter_mla.commands.check.record import StepResult, StepStatus
from vllm_aiter_mla.commands.check.timing.step import time_kernels
from vllm_aiter_mla.commands.plan import planner
from vllm_aiter_mla.commands.plan.issues import no_shape_reason
from vllm_aiter_mla.commands.plan.record import NotKnownError, Plan

NO_PLAN = "there is no plan"


def inspect_machine(context: StepContext) -> StepResult:
    """Check the machine. The step fails if a check finds a problem.

    If --only names the step, a check without a result makes the step "unknown". In a full run the later steps find
    such faults. The checks run in a process of their own: a process that has loaded vLLM takes seconds to end at a
    signal.
    """
    environment = context.options.server_environment(with_assumed=False)
    results = process.call(machine.check_machine, environment, environment=environment)
    if takes_aiters_attention(context.options.serve_arguments):
        results = tuple(
            replace(result, status="ok", detail=f"--attention-backend {AITER_MLA} needs no switch", remedy="")
            if result.detail.startswith("aiter_off")
            else result
            for result in results
        )
    is_named = "machine" in context.options.named_steps
    counts = Counter(result.status for result in results)
    detail = ", ".join(f"{counts[status]} {status}" for status in ("ok", "warning", "problem", "unknown"))
    problem_lines = tuple(
        f"{result.name}: {result.detail} -> {result.remedy}" for result in results if result.status == "problem"
    )
    lines = tuple(machine.result_lines(results)) if is_named else problem_lines
    status: StepStatus = "failed" if problem_lines else "unknown" if is_named and counts["unknown"] else "passed"
    return StepResult(status, detail, lines, results)


def plan_model(context: StepContext) -> StepResult:
    """Plan the model. The step fails unless every MLA layer would engage.

    Several sizes of tensor parallelism, as in ``-tp 1,2,4,8``, give several plans.

    Raises:
        WrongOptionError: the model or an option is wrong.
    """
    options = context.options
    assert options.source is not None, "there is a model"
    tp_sizes, deployments = split_deployments(options.serve_arguments)
    try:
        plans = planner.make_plans(
            options.source, deployments, options.arch, options.plan_environment, options.is_verbose
        )
    except ValueError as error:
        raise WrongOptionError(str(error)) from error
    except NotKnownError as error:
        return StepResult("unknown", str(error))
    if len(plans) > 1:
        engaged_texts = (
            "not known" if plan.outcome == "unknown" else f"{plan.layers.engaged}/{plan.layers.mla}" for plan in plans
        )
        detail = ", ".join(f"-tp {tp_size}: {text}" for tp_size, text in zip(tp_sizes, engaged_texts, strict=True))
        return StepResult(_plan_step_status({plan.outcome for plan in plans}), detail, data=plans)
    context.plan = plan = plans[0]
    detail = f"{plan.layers.engaged}/{plan.layers.mla} MLA layers would engage on {plan.arch}"
    if plan.outcome == "unknown":
        detail = f"not known whether layers would engage on {plan.arch}"
    lines = tuple(str(reason) for reason in plan.reasons)
    return StepResult(_plan_step_status({plan.outcome}), detail, lines, plan)


def _plan_step_status(outcomes: set[str]) -> StepStatus:
    """Return the status of a step whose plans have these outcomes. The worst outcome decides."""
    if "skipped" in outcomes or "some" in outcomes:
        return "failed"
    return "unknown" if "unknown" in outcomes else "passed"


def look_up_issues(context: StepContext) -> StepResult:
    """List the known faults of AITER and vLLM that concern this shape."""
    if (reason := shape_skip_reason(context.plan)) is not None:
        return StepResult("skipped", f"not looked up: {reason}")
    assert context.plan is not None, "there is a shape"
    issues = context.plan.known_issues
    if not issues:
        return StepResult("passed", "none for this card, cache, number of heads, number of drafts and these versions")
    lines = tuple(f"{issue.id}: {issue.effect} ({issue.state}) -> {issue.remedy}: {issue.link}" for issue in issues)
    status: StepStatus = "failed" if context.options.is_strict else "warning"
    return StepResult(status, f"{len(issues)} for this shape", lines, issues)


@dataclass(frozen=True, slots=True)
class StepSpec:
    """The function of a step, and its requirements."""

    run: Callable[[StepContext], StepResult]
    needs: tuple[str, ...] = ("plan",)  # steps that run before this one, if there is a model
    needs_model: bool = True
    needs_shape: bool = False  # the plan must know the shape of a layer
    needs_idle_cards: bool = False  # another process on the cards would distort the result


STEPS: dict[str, StepSpec] = {
    "machine": StepSpec(inspect_machine, needs=(), needs_model=False),
    "plan": StepSpec(plan_model, needs=()),
    "issues": StepSpec(look_up_issues),
    "kernels": StepSpec(verify_kernels, needs_model=False, needs_shape=True),
    "timing": StepSpec(time_kernels, needs_model=False, needs_shape=True, needs_idle_cards=True),
    "engine": StepSpec(compare_engines, needs_shape=True, needs_idle_cards=True),
    "prefill": StepSpec(compare_prefill_rows, ("plan", "engine")),
    "decode": StepSpec(compare_decode_with_prefill, ("plan", "engine")),
    "launches": StepSpec(compare_launches, ("plan", "engine"), needs_shape=True),
}


def select_steps(named_steps: Sequence[str], has_model: bool) -> tuple[str, ...]:
    """Return the names of the steps to run, in order: the named steps, by default all, and the steps they need.

    Raises:
        WrongOptionError: there is no such step, or a named step needs a model and there is none.
    """
    if unknown_names := [name for name in named_steps if name not in STEPS]:
        raise WrongOptionError(f"--only {unknown_names[0]}: no such step; there are {', '.join(STEPS)}")
    selected_names = set(named_steps or STEPS)
    if not has_model and (
        names_needing_model := [name for name in STEPS if name in selected_names and STEPS[name].needs_model]
    ):
        allowed_names = ",".join(name for name, spec in STEPS.items() if not spec.needs_model)
        problem = f"--only {names_needing_model[0]} needs MODEL" if named_steps else "MODEL is missing"
        raise WrongOptionError(f"{problem}; without one there is --only {allowed_names}")
    if has_model:
        selected_names |= {needed_name for name in selected_names for needed_name in STEPS[name].needs}
    return tuple(name for name in STEPS if name in selected_names)


def shape_skip_reason(plan: Plan | None) -> str | None:
    """Return why a step that needs a layer's shape cannot run, or None."""
    return NO_PLAN if plan is None else no_shape_reason(plan)

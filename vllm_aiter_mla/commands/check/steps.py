# SPDX-License-Identifier: Apache-2.0
"""The steps of ``check`` and what each needs; here are those that need no card.

A step takes a ``Context`` and returns how it ended.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_aiter_mla.commands import machine, process
from vllm_aiter_mla.commands.check.context import Context, WrongOptionError
from vllm_aiter_mla.commands.check.engine.steps import (
    compare_decode_with_prefill,
    compare_engines,
    compare_launches,
    compare_prefill_rows,
)
from vllm_aiter_mla.commands.check.kernels.step import verify_kernels
from vllm_aiter_mla.commands.check.record import Status, Step
from vllm_aiter_mla.commands.check.timing.step import time_kernels
from vllm_aiter_mla.commands.plan import model, planner
from vllm_aiter_mla.commands.plan.issues import no_shape_reason
from vllm_aiter_mla.commands.plan.record import NotKnownError, Plan

NO_PLAN = "there is no plan"


def look_at_machine(context: Context) -> Step:
    """Look at the machine. The step fails if a check finds a problem.

    If --only names the step, a check without a result makes it "unknown". In a whole run the later steps find out.
    The checks run in a process of their own: with vLLM loaded this one would take seconds to end at a signal.
    """
    env = context.options.environment(assumed=False)
    checks = process.call(machine.check_machine, env, environment=env)
    by_name = "machine" in context.options.only
    counts = Counter(check.status for check in checks)
    detail = ", ".join(f"{counts[name]} {name}" for name in ("ok", "warning", "problem", "unknown"))
    problems = tuple(f"{check.name}: {check.detail} -> {check.remedy}" for check in checks if check.status == "problem")
    lines = tuple(machine.check_lines(checks)) if by_name else problems
    unknown = by_name and counts["unknown"]
    return Step("failed" if problems else "unknown" if unknown else "passed", detail, lines, checks)


def plan_model(context: Context) -> Step:
    """Plan the model. The step fails unless every MLA layer would engage.

    With several sizes of tensor parallelism, as in ``-tp 1,2,4,8``, each is planned.

    Raises:
        WrongOptionError: the model or an option is wrong.
    """
    options = context.options
    assert options.source is not None, "there is a model"
    sizes, deployments = model.split_deployments(options.arguments)
    try:
        plans = planner.make_plans(options.source, deployments, options.arch, options.variables, options.verbose)
    except ValueError as error:
        raise WrongOptionError(str(error)) from error
    except NotKnownError as error:
        return Step("unknown", str(error))
    if len(plans) > 1:
        answers = (
            "not known" if plan.outcome == "unknown" else f"{plan.layers.engaged}/{plan.layers.mla}" for plan in plans
        )
        detail = ", ".join(f"-tp {size}: {answer}" for size, answer in zip(sizes, answers, strict=True))
        return Step(_status_of_plans({plan.outcome for plan in plans}), detail, data=plans)
    context.plan = plan = plans[0]
    detail = f"{plan.layers.engaged}/{plan.layers.mla} MLA layers would engage on {plan.arch}"
    if plan.outcome == "unknown":
        detail = f"not known whether layers would engage on {plan.arch}"
    lines = tuple(str(reason) for reason in plan.reasons)
    return Step(_status_of_plans({plan.outcome}), detail, lines, plan)


def _status_of_plans(outcomes: set[str]) -> Status:
    """Return the status of the step whose plans have these outcomes: that of the worst."""
    if "skipped" in outcomes or "some" in outcomes:
        return "failed"
    return "unknown" if "unknown" in outcomes else "passed"


def look_up_issues(context: Context) -> Step:
    """Name the known faults of AITER and vLLM that concern this shape."""
    if (why := why_without_a_shape(context.plan)) is not None:
        return Step("skipped", f"not looked up: {why}")
    assert context.plan is not None, "there is a shape"
    issues = context.plan.known_issues
    if not issues:
        return Step("passed", "none for this card, cache, number of heads, number of drafts and these versions")
    lines = tuple(f"{issue.id}: {issue.effect} ({issue.state}) -> {issue.remedy}: {issue.link}" for issue in issues)
    return Step("failed" if context.options.strict else "warning", f"{len(issues)} for this shape", lines, issues)


@dataclass(frozen=True, slots=True)
class StepSpec:
    """A step, and what it needs."""

    run: Callable[[Context], Step]
    needs: tuple[str, ...] = ("plan",)  # steps that run before this one, where there is a model
    needs_model: bool = True
    needs_shape: bool = False  # the plan must know the shape of a layer
    can_run_on_card: bool = False  # on a card the step runs there; ``kernels`` can run on a CPU too
    needs_idle_cards: bool = False  # another process on the cards would spoil the step


STEPS: dict[str, StepSpec] = {
    "machine": StepSpec(look_at_machine, needs=(), needs_model=False),
    "plan": StepSpec(plan_model, needs=()),
    "issues": StepSpec(look_up_issues),
    "kernels": StepSpec(verify_kernels, needs_model=False, needs_shape=True, can_run_on_card=True),
    "timing": StepSpec(time_kernels, needs_model=False, needs_shape=True, can_run_on_card=True, needs_idle_cards=True),
    "engine": StepSpec(compare_engines, needs_shape=True, can_run_on_card=True, needs_idle_cards=True),
    "prefill": StepSpec(compare_prefill_rows, ("plan", "engine")),
    "decode": StepSpec(compare_decode_with_prefill, ("plan", "engine")),
    "launches": StepSpec(compare_launches, ("plan", "engine"), needs_shape=True),
}


def chosen(only: Sequence[str], with_model: bool) -> tuple[str, ...]:
    """Return the steps to run, in order: those asked for by name, all by default, and what they need.

    Raises:
        WrongOptionError: no such step, or one that needs a model where there is none.
    """
    if unknown := [name for name in only if name not in STEPS]:
        raise WrongOptionError(f"--only {unknown[0]}: no such step; there are {', '.join(STEPS)}")
    wanted = set(only or STEPS)
    if not with_model and (without := [name for name in STEPS if name in wanted and STEPS[name].needs_model]):
        able = ",".join(name for name, entry in STEPS.items() if not entry.needs_model)
        problem = f"--only {without[0]} needs MODEL" if only else "MODEL is missing"
        raise WrongOptionError(f"{problem}; without one there is --only {able}")
    if with_model:
        wanted |= {needed for name in wanted for needed in STEPS[name].needs}
    return tuple(name for name in STEPS if name in wanted)


def why_without_a_shape(plan: Plan | None) -> str | None:
    """Return why a step that needs a layer's shape cannot run, or None."""
    return NO_PLAN if plan is None else no_shape_reason(plan)


def ran_what_a_card_can(ended: Sequence[Step]) -> bool:
    """Return whether a step ran that can run on a card: with --device cpu it did not."""
    ran = ("passed", "failed", "warning", "no gain")
    return any(step.status in ran for step in ended if step.name in STEPS and STEPS[step.name].can_run_on_card)

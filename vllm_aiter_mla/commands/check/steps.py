# SPDX-License-Identifier: Apache-2.0
"""The steps of ``check``: each takes what is asked and what earlier steps found, and returns how it ended."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_aiter_mla.admission import REMEDIES
from vllm_aiter_mla.commands import machine as machines
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check import engine as runs
from vllm_aiter_mla.commands.check.context import NO_GPU, Context, WrongOptionError
from vllm_aiter_mla.commands.check.kernels import kernels
from vllm_aiter_mla.commands.check.record import Status, Step
from vllm_aiter_mla.commands.check.timing import timing
from vllm_aiter_mla.commands.plan import formulas
from vllm_aiter_mla.commands.plan import model as models
from vllm_aiter_mla.commands.plan.issues import has_fp8_cache, without_a_shape
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.status.line import status_line
from vllm_aiter_mla.status.record import add_silent

VLLM_FASTER = "vllm_faster"
NO_PLAN = "there is no plan"


def machine(context: Context) -> Step:
    """Look at the machine. A problem fails; what cannot be told from here does not.

    In a process of its own: with vLLM loaded this one would take seconds to end at a signal.
    """
    env = context.environment(assumed=False)
    checks: tuple[machines.Check, ...] = process.call(
        f"{machines.__name__}:{machines.examine.__name__}", env, environment=env
    )
    found = {status: [check for check in checks if check.status == status] for status in ("problem", "unknown")}
    lines = tuple(f"{check.name}: {check.detail} -> {check.remedy}" for check in found["problem"])
    if "machine" in context.only:
        lines = tuple(machines.lines(checks))
    counts = Counter(check.status for check in checks)
    detail = ", ".join(f"{counts[name]} {name}" for name in ("ok", "warning", "problem", "unknown"))
    # Of a whole check the later steps tell what is unknown here.
    unknown = found["unknown"] and "machine" in context.only
    return Step("failed" if found["problem"] else "unknown" if unknown else "passed", detail, lines, checks)


def plan(context: Context) -> Step:
    """Plan the model. It fails if no layer would engage, or not each.

    With several sizes of tensor parallelism, as in ``-tp 1,2,4,8``, each is planned.

    Raises:
        WrongOptionError: the model or an option is wrong.
    """
    assert context.source is not None, "there is a model"
    sizes, deployments = models.deployments(context.arguments)
    try:
        found = models.ask(context.source, deployments, context.arch, context.variables, context.verbose)
    except ValueError as error:
        raise WrongOptionError(str(error)) from error
    except models.NotKnownError as error:
        return Step("unknown", str(error))
    if len(found) > 1:
        outcomes = {made.outcome for made in found}
        detail = ", ".join(
            f"-tp {size}: {made.layers.engaged}/{made.layers.mla}" for size, made in zip(sizes, found, strict=True)
        )
        return Step(_planned(outcomes), detail, data=found)
    context.plan = made = found[0]
    detail = f"{made.layers.engaged}/{made.layers.mla} MLA layers would engage on {made.arch}"
    if made.outcome == "unknown":
        detail = f"not known whether layers would engage on {made.arch}"
    lines = tuple(f"{reason.code}: {reason.message} -> {REMEDIES[reason.code]}" for reason in made.reasons)
    return Step(_planned({made.outcome}), detail, lines, made)


def _planned(outcomes: set[str]) -> Status:
    """Return the status of a step with plans of these outcomes: of the worst."""
    if "skipped" in outcomes or "some" in outcomes:
        return "failed"
    return "unknown" if "unknown" in outcomes else "passed"


def issues(context: Context) -> Step:
    """Say which known faults concern this shape, which are not the plugin's."""
    if why := why_without_a_shape(context.plan):
        return Step("skipped", f"not looked up: {why}")
    assert context.plan is not None, "there is a shape"
    found = context.plan.known_issues
    lines = tuple(f"{one.id}: {one.effect} ({one.state}) -> {one.remedy}: {one.link}" for one in found)
    if not found:
        return Step("passed", "none for this card, cache, number of heads, number of drafts and these versions")
    return Step("failed" if context.strict else "warning", f"{len(found)} for this shape", lines, found)


def cards_of(plan: Plan) -> int:
    """Return how many cards one engine of the plan takes."""
    return math.prod(getattr(plan.options, name) for name in ("tp", "pp", "pcp"))


def too_few_gpus(plan: Plan) -> str:
    """Return why this machine cannot hold one engine of the plan, or ""."""
    from vllm_aiter_mla.kernels.device import card

    needed = cards_of(plan)
    here = card().count()
    return f"one engine needs {needed} GPUs; this machine has {here}" if here < needed else ""


def engine(context: Context) -> Step:
    """Run vLLM's engine with the flag off and on, all other options alike; compare the tokens.

    It fails if the two are further apart than rounding explains, or if a layer did not engage.
    """
    if not context.on_a_card and not context.sandbox:
        return Step("skipped", NO_GPU)
    assert context.plan is not None, "there is a shape"
    assert context.source is not None, "there is a model"
    source, limit = context.source, context.plan.limit
    if not context.sandbox and (short := too_few_gpus(context.plan)):
        return Step("skipped", short)
    layers = None if context.checkpoint else context.plan.layers.total
    # One dense layer and one with experts, where the model has both.
    random_layers = None if layers is None else min(layers, RANDOM_LAYERS)
    variables = context.environment() | dict(context.sandbox)
    arguments = (*context.arguments, *(() if context.checkpoint else SMALL))

    def answer(side: runs.Side) -> Any:
        context.now(f"vLLM's engine, flag {side}")  # each takes a minute or more
        return runs.run(folder, arguments, side, variables, random_layers, limit)

    with source.folder() as folder:
        # A GPU holds one engine at a time. The first to fail is told at once.
        found = {side: answer(side) for side in runs.SIDES} if context.on_a_card else _both(answer)
    context.answers = {side: found[side] for side in reversed(runs.SIDES)}
    judged = judge(context.answers, has_fp8_cache(context.plan))
    if judged.status == "failed" and context.plan.known_issues:
        names = ", ".join(one.id for one in context.plan.known_issues)
        return replace(judged, detail=f"{judged.detail}; known faults outside the plugin may be the cause: {names}")
    return judged


def _both(answer: Callable[[runs.Side], Any]) -> dict[runs.Side, Any]:
    """Return what both sides answer, at the same time; where one fails, the other is ended."""
    with ThreadPoolExecutor(2) as pool:
        sides = {side: pool.submit(answer, side) for side in runs.SIDES}
        try:
            for ended in wait(sides.values(), return_when=FIRST_EXCEPTION).done:
                ended.result()
        except BaseException:  # a signal too
            process.end_calls()
            raise
        return {side: ended.result() for side, ended in sides.items()}


def judge(answers: Mapping[runs.Side, Any], fp8_cache: bool) -> Step:
    """Compare the tokens with the flag off and on, and look at which layers engaged."""
    scenarios, records = {side: answer["scenarios"] for side, answer in answers.items()}, answers["on"]["status"]
    found = {name: runs.figures(requests, scenarios["on"][name]) for name, requests in scenarios["off"].items()}
    lines = [f"{name}: {shown(figures)}" for name, figures in found.items()]
    if left_out := answers["on"].get("left_out"):
        lines.append(f"left out of these engines, which serve nobody: {', '.join(left_out)}")
    lines += map(status_line, records)
    data = {"distances": {name: figures.as_dict() for name, figures in found.items()}}
    # A rank on which vLLM's own kernels were the fastest for every layer has nothing else to do.
    faster = bool(records) and all({code for code, _ in one.skipped.values()} == {VLLM_FASTER} for one in records)
    no_gain = faster and not any(one.engaged for one in records)
    engaged = bool(records) and all(len(one.engaged) == one.total > 0 for one in records)
    silent = add_silent(records).count(None) if records else 0
    noise = runs.decode_against_prefill(answers["off"])
    apart = [name for name, figures in found.items() if not runs.explained(figures, noise if fp8_cache else 0.0)]
    wrong = "" if engaged or no_gain else "not every MLA layer engaged"
    wrong = wrong or (f"{silent} of {silent + len(records)} ranks wrote no status" if silent else "")
    wrong = wrong or (f"off and on are apart in {', '.join(apart)}" if apart else "")
    if wrong:
        return Step("failed", wrong, tuple(lines), data)
    equal, tokens = (sum(getattr(figures, of) for figures in found.values()) for of in ("tokens_equal", "tokens"))
    detail = f"{equal} of {tokens} tokens are equal, flag off and on"
    if no_gain:
        return Step("no gain", f"{detail}; vLLM's own kernels were the fastest for every layer", tuple(lines), data)
    return Step("passed", f"{detail}; every MLA layer engaged", tuple(lines), data)


def shown(found: runs.Figures) -> str:
    """Return one scenario's figures in one line."""
    return (
        f"{found.tokens_equal} of {found.tokens} tokens equal, top-1 {found.top1_agreement:.1%}, "
        f"max |dlogprob| {found.max_abs_dlogprob:.2g}"
    )


def prefill_rows(context: Context) -> Step:
    """Compare steps that are not all decode, in which the flag changes nothing: their bytes, and how long they take.

    It fails if more differs than one rounding of RoPE explains, and warns if they take longer on a card.
    """
    if not context.answers:
        return Step("skipped", "the engine did not run")
    every = {name: runs.prefill_rows(context.answers, name) for name in runs.PREFILLS}
    compared = {name: found for name, found in every.items() if found}
    lines = tuple(f"{name}: {found.shown()}" for name, found in compared.items())
    data = {name: asdict(found) for name, found in compared.items()}
    if apart := [name for name, found in compared.items() if not found.explained]:
        return Step("failed", f"one rounding of RoPE does not explain what differs: {', '.join(apart)}", lines, data)
    slower = [f"{name} ({found.ratio:.3f})" for name, found in compared.items() if found.ratio > runs.SLOWER]
    if slower and context.on_a_card:  # a CPU's times say nothing about a card
        return Step("warning", f"slower with the flag on: {', '.join(slower)}", lines, data)
    equal, prompts = (sum(getattr(found, of) for found in compared.values()) for of in ("equal", "prompts"))
    detail = f"{equal} of {prompts} prompts have the same bytes, flag off and on"
    return Step("passed" if compared else "skipped", detail if compared else "no such step fits", lines, data)


def decode_against_prefill(context: Context) -> Step:
    """Compare each generated token's log-probability with prefill of the same text, on each side.

    A decode kernel that is broken with the flag off too gives equal tokens on both sides; prefill runs another kernel.
    """
    if not context.answers:
        return Step("skipped", "the engine did not run")
    worst = {side: runs.decode_against_prefill(answer) for side, answer in context.answers.items()}
    detail = ", ".join(f"{side}: {value:.2g}" for side, value in worst.items()) + " on average"
    wrong = [side for side, value in worst.items() if not value <= runs.DECODE_AGAINST_PREFILL]
    if not wrong:
        return Step("passed", detail, data=worst)
    whose = "only the fast path differs" if wrong == ["on"] else "vLLM's own decode is wrong here"
    return Step("failed", f"{detail}; {whose}", data=worst)


def launches(context: Context) -> Step:
    """Count the kernels of one decode step on each side. It fails if fewer are saved than planned."""
    counts = {side: answer["launches"] for side, answer in context.answers.items()}
    if not context.on_a_card or not counts:
        return Step("skipped", "the engine did not run" if context.on_a_card else NO_GPU)
    if 0 in counts.values():
        return Step("failed", "torch's profiler saw no kernel", data=counts)
    promised, saved = fewer_launches(context), counts["off"] - counts["on"]
    each = ", ".join(f"{side} {count}" for side, count in counts.items())
    detail = f"{each}: {saved} fewer, planned {promised}"
    return Step("passed" if saved >= promised else "failed", detail, data=counts)


def fewer_launches(context: Context) -> int:
    """Return how many launches the counted step of the first rank saves by plan, where our kernels run in it."""
    from vllm_aiter_mla.kernels.stopwatch import name_at
    from vllm_aiter_mla.kernels.vllm_own import may_take_parts

    planned, records = context.plan, context.answers["on"]["status"]
    assert planned is not None, "there is a plan"
    assert planned.figures is not None, "there is a shape"
    paths = {name: len(path.launches) for name, path in next(iter(planned.figures.by_tokens.values())).items()}
    strongest = min(count for name, count in paths.items() if name.startswith(formulas.VLLM))
    strongest -= may_take_parts(planned.arch, planned.heads_per_rank, has_fp8_cache(planned))  # it has no concat then
    requests = min(len(runs.SCENARIOS["concurrent"]), planned.options.max_num_seqs)
    rows = requests * (1 + (planned.options.num_drafts or 0))
    captures = planned.captures
    graphs = (*captures.full, *captures.inside, *captures.outside)  # full graphs first, as vLLM replays them
    tokens = next((size for size in graphs if size >= rows), rows)
    if tokens > planned.limit:
        return 0  # vLLM's own graph
    first = min(records, key=lambda record: record.rank, default=None)
    run = [] if first is None else [
        name_at(one.kernels, tokens) or "" for one in first.decided for layer in one.layers if layer in first.engaged
    ]  # fmt: skip
    return sum(max(strongest - paths.get(kernel.partition("-")[0], strongest), 0) for kernel in run)


@dataclass(frozen=True, slots=True)
class Entry:
    """A step, and what it needs."""

    run: Callable[[Context], Step]
    needs: tuple[str, ...] = ("plan",)  # steps that run before it, where there is a model
    needs_model: bool = True
    needs_shape: bool = False  # of a layer, from the plan
    is_on_card: bool = False  # it says something about the card
    needs_idle_cards: bool = False  # another process on them would spoil it


STEPS: dict[str, Entry] = {
    "machine": Entry(machine, needs=(), needs_model=False),
    "plan": Entry(plan, needs=()),
    "issues": Entry(issues),
    "kernels": Entry(kernels, needs_model=False, needs_shape=True, is_on_card=True),
    "timing": Entry(timing, needs_model=False, needs_shape=True, is_on_card=True, needs_idle_cards=True),
    "engine": Entry(engine, needs_shape=True, is_on_card=True, needs_idle_cards=True),
    "prefill": Entry(prefill_rows, ("plan", "engine")),
    "decode": Entry(decode_against_prefill, ("plan", "engine")),
    "launches": Entry(launches, ("plan", "engine"), needs_shape=True),
}
RANDOM_LAYERS = 4
SMALL = ("--max-model-len", "512")  # of the engine over random weights


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
        asked = f"--only {without[0]} needs MODEL" if only else "MODEL is missing"
        raise WrongOptionError(f"{asked}; without one there is --only {able}")
    if with_model:
        wanted |= {needed for name in wanted for needed in STEPS[name].needs}
    return tuple(name for name in STEPS if name in wanted)


def why_without_a_shape(plan: Plan | None) -> str:
    """Return why a step that needs a layer's shape cannot run, or ""."""
    return NO_PLAN if plan is None else without_a_shape(plan)


def ran_on_the_card(found: Sequence[Step]) -> bool:
    """Return whether a step ran that says something about the card."""
    return any(step.status != "skipped" for step in found if step.name in STEPS and STEPS[step.name].is_on_card)

# SPDX-License-Identifier: Apache-2.0
"""The steps of ``check``: each takes what is asked and what earlier steps found, and returns how it ended."""

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vllm_aiter_mla import status
from vllm_aiter_mla.admission import OVERFLOW, REMEDIES
from vllm_aiter_mla.commands import doctor, process
from vllm_aiter_mla.commands.check import engine as runs
from vllm_aiter_mla.commands.check.record import Status, Step
from vllm_aiter_mla.commands.plan import formulas
from vllm_aiter_mla.commands.plan import model as models
from vllm_aiter_mla.commands.plan.issues import has_fp8_cache, without_a_shape
from vllm_aiter_mla.commands.plan.record import Plan

VLLM_FASTER = "vllm_faster"
NO_GPU = "no GPU"


@dataclass(slots=True)
class Context:
    """What was asked for, and the plan once it is made."""

    source: models.Source  # the model's config
    arguments: tuple[str, ...] = ()  # of ``vllm serve``
    arch: str = ""  # card to plan for; "" for this machine's
    variables: Mapping[str, Any] = field(default_factory=dict)  # value and origin of each variable that is set
    on_cpu: bool = False  # run what a CPU can run too
    strict: bool = False  # a known issue is a failure
    verbose: bool = False  # vLLM's log goes to stderr
    checkpoint: bool = False  # load the weights of the folder; otherwise a few layers of random weights
    # Variables under which vLLM's engine runs on a CPU; empty outside a checkout
    sandbox: Mapping[str, str] = field(default_factory=dict)
    plan: Plan = field(init=False)  # of the model, once it is made
    # Of the engines by side, as ``engine.run`` returns them
    answers: dict[runs.Side, Any] = field(default_factory=dict)

    def environment(self, assumed: bool = True) -> dict[str, str]:
        """Return the server's variables: this process's, and over them --env and what the plan has ``assumed``."""
        given = {name: value for name, (value, origin) in self.variables.items() if assumed or origin != "default"}
        return {**os.environ, **given}


def machine(context: Context) -> Step:
    """Run doctor's checks. A problem fails; what cannot be told from here does not."""
    checks = doctor.examine(context.environment(assumed=False))
    found = {status: [check for check in checks if check.status == status] for status in ("problem", "unknown")}
    lines = tuple(f"{check.name}: {check.detail} -> {check.remedy}" for check in found["problem"])
    detail = f"{len(found['problem'])} problem, {len(found['unknown'])} unknown of {len(checks)} checks"
    data = [{"name": check.name, "status": check.status, "detail": check.detail} for check in checks]
    return Step("failed" if found["problem"] else "passed", detail, lines, data)


def plan(context: Context) -> Step:
    """Plan the model. It fails if no layer would engage, or if that is not known."""
    found = models.ask(context.source, context.arguments, context.arch, context.variables, context.verbose)
    context.plan = found
    layers, outcome = found.layers, found.outcome
    detail = f"{layers.engaged}/{layers.mla} MLA layers would engage on {found.arch}"
    if outcome == "unknown":
        detail = f"not known whether layers would engage on {found.arch}"
    lines = tuple(f"{reason.code}: {reason.message} -> {REMEDIES[reason.code]}" for reason in found.reasons)
    return Step("passed" if outcome in ("engaged", "some") else "failed", detail, lines, found)


def known_issues(context: Context) -> Step:
    """Say which known faults concern this shape, which are not the plugin's."""
    if why := without_a_shape(context.plan):
        return Step("skipped", f"not looked up: {why}")
    found = context.plan.known_issues
    lines = tuple(f"{one.id}: {one.effect} ({one.state}) -> {one.remedy}: {one.link}" for one in found)
    if not found:
        return Step("passed", "none for this card, cache, number of heads, number of drafts and these versions")
    return Step("failed" if context.strict else "warning", f"{len(found)} for this shape", lines, found)


def kernels(context: Context) -> Step:
    """Verify the kernels at the model's shapes, up to its decode limit; small ones by eager replay on a CPU.

    A kernel that turns an fp8 overflow into NaN fails the step if the plan says that it would serve.
    """
    from vllm_aiter_mla.commands.measure import Weights
    from vllm_aiter_mla.kernels.platform import detect_platform
    from vllm_aiter_mla.verify import NOTHING, cases, session

    made, asked = context.plan, dict[str, Any](device="cpu", again=("--quick", "--device cpu"))
    if not context.on_cpu:
        sizes, (low, high) = made.model.kinds[0], cases.LIMITS
        layer = {name: getattr(sizes, name) for name in ("nope", "rope", "latent", "v")} | {
            "heads": made.heads_per_rank
        }
        limit, weights = min(max(made.limit, low), high), weights_of(made)
        given = {"limit": limit, **{name: layer[name] for name in ("heads", "nope", "v")}, "weights": weights}
        asked = {
            "device": "gpu", "limit": limit, "weight": Weights(weights).key(detect_platform().fp8),
            "geometry": replace(cases.REAL, **layer),
            "again": ("--quick", *(f"--{name} {value}" for name, value in given.items())),
        }  # fmt: skip
    try:
        run = session.Session(quick=True, **asked)
    except session.NotHereError:
        return Step("skipped", NO_GPU)
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for result in run.run():
        counts[result.status] += 1
    lines = tuple(
        f"{result.backend} {result.case}: {result.findings[0].oracle}: {result.findings[0].message}; "
        f"{run.command(result)}"
        for result in run.results
        if result.status == "failed"
    )
    # The cases have fp8 caches whatever the model's is, and on a CPU only the reference runs.
    concerned = has_fp8_cache(made) and not context.on_cpu
    overflowing = {result.backend for result in run.results if result.writes_nan and concerned}
    serving = overflowing & {span.kernel for span in made.kernels or ()}
    lines += tuple(
        f"{name} {OVERFLOW}; " + ("it would serve" if name in serving else "start-up leaves it out")
        for name in sorted(overflowing)
    )
    ran = ", ".join(dict.fromkeys(result.backend for result in run.results)) or "no back end"
    detail = ", ".join(f"{count} {status}" for status, count in counts.items()) + f" ({run.engine.name}; {ran})"
    failed = counts["failed"] or serving
    status: Status = "failed" if failed else "skipped" if run.status == NOTHING else "passed"
    return Step(status, detail, lines, run.record())


TOKENS = (1, 8, 64, 256)


def timing(context: Context) -> Step:
    """Time every kernel and rival on this card, at the model's heads. It fails if nothing of ours was timed."""
    if not has_gpu():
        return Step("skipped", NO_GPU)
    from vllm_aiter_mla.commands import measure

    made = context.plan
    tokens = [*(count for count in TOKENS if count < made.limit), min(made.limit, measure.MOST_TOKENS)]
    kind, weights, sizes = "fp8" if has_fp8_cache(made) else "bf16", weights_of(made), made.model.kinds[0]
    widths = {name: getattr(sizes, name) for name in ("nope", "rope", "latent")}
    record = measure.run(tokens, [made.heads_per_rank], [kind], weights, act=made.model.dtype, **widths)
    lines = tuple(
        f"{row.tokens} tokens: " + ", ".join(f"{name} {us:.2f} us" for name, us in sorted(row.us.items()))
        for row in record.rows
    )
    lines += tuple(f"{name}: {why}" for name, why in record.wrong.items())
    ratios = {row.tokens: row.ratio for row in record.rows if row.ratio is not None}
    if record.wrong or record.stopped or not ratios:
        return Step("failed", record.stopped or "a kernel is wrong, or none of ours was timed", lines, record)
    slower = [tokens for tokens, ratio in ratios.items() if ratio < 1]
    which = f"vLLM or a rival is faster at {slower}" if slower else "one of ours is the fastest at each"
    return Step("passed", f"{len(ratios)} token counts; {which}", lines, record)


def weights_of(plan: Plan) -> str:
    """Return the format of the absorb weights that were planned, by the name that `--weights` has for it."""
    found = str(plan.absorb_weight)
    return {"plain": "bf16"}.get(found, found)


def has_gpu() -> bool:
    """Return whether torch sees a GPU."""
    from vllm_aiter_mla.kernels.device import card

    return card().is_there()


def too_few_gpus(plan: Plan) -> str:
    """Return why this machine cannot hold one engine of the plan, or ""."""
    from vllm_aiter_mla.kernels.device import card

    needed = math.prod(getattr(plan.options, name) for name in ("tp", "pp", "pcp"))
    here = card().count()
    return f"one engine needs {needed} GPUs; this machine has {here}" if here < needed else ""


def engine(context: Context) -> Step:
    """Run vLLM's engine with the flag off and on, all other options alike; compare the tokens.

    It fails if the two are further apart than rounding explains, or if a layer did not engage.
    """
    if not has_gpu() and not context.sandbox:
        return Step("skipped", NO_GPU)
    if not context.sandbox and (short := too_few_gpus(context.plan)):
        return Step("skipped", short)
    layers = None if context.checkpoint else context.plan.layers.total
    # One dense layer and one with experts, where the model has both.
    random_layers = None if layers is None else min(layers, RANDOM_LAYERS)
    variables = context.environment() | dict(context.sandbox)
    arguments = (*context.arguments, *(() if context.checkpoint else SMALL))

    def answer(side: runs.Side) -> Any:
        print(f"  vLLM's engine, flag {side} ...", flush=True)  # each takes a minute or more
        return runs.run(folder, arguments, side, variables, random_layers, context.plan.limit)

    # A GPU holds one engine at a time.
    with context.source.folder() as folder, ThreadPoolExecutor(1 if has_gpu() else 2) as pool:
        on, off = pool.submit(answer, "on"), pool.submit(answer, "off")
        try:
            context.answers = {"off": off.result(), "on": on.result()}
        except (
            BaseException
        ):  # of one side, a signal, Ctrl-C: nobody needs the other, which runs for minutes or starts now
            process.end_calls()
            pool.shutdown(cancel_futures=True)
            raise
    found = judge(context.answers, has_fp8_cache(context.plan))
    if found.status == "failed" and context.plan.known_issues:
        names = ", ".join(one.id for one in context.plan.known_issues)
        return replace(found, detail=f"{found.detail}; known issues beside the plugin may be the cause: {names}")
    return found


def judge(answers: Mapping[runs.Side, Any], fp8_cache: bool) -> Step:
    """Compare the tokens with the flag off and on, and look at which layers engaged."""
    scenarios, records = {side: answer["scenarios"] for side, answer in answers.items()}, answers["on"]["status"]
    found = {name: runs.figures(requests, scenarios["on"][name]) for name, requests in scenarios["off"].items()}
    lines = [f"{name}: {shown(figures)}" for name, figures in found.items()]
    if left_out := answers["on"].get("left_out"):
        lines.append(f"left out of these engines, which serve nobody: {', '.join(left_out)}")
    lines += map(status.line.of, records)
    data = {"distances": {name: figures.as_dict() for name, figures in found.items()}}
    # A rank on which vLLM's own kernels were the fastest for every layer has nothing else to do.
    faster = bool(records) and all({code for code, _ in one.skipped.values()} == {VLLM_FASTER} for one in records)
    no_gain = faster and not any(one.engaged for one in records)
    engaged = bool(records) and all(len(one.engaged) == one.total > 0 for one in records)
    noise = runs.decode_against_prefill(answers["off"])
    apart = [name for name, figures in found.items() if not runs.explained(figures, noise if fp8_cache else 0.0)]
    wrong = "" if engaged or no_gain else "not every MLA layer engaged"
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
    if slower and has_gpu():  # a CPU's times say nothing about a card
        return Step("warning", f"slower with the flag on: {', '.join(slower)}", lines, data)
    equal, prompts = (sum(getattr(found, of) for found in compared.values()) for of in ("equal", "prompts"))
    detail = f"{equal} of {prompts} prompts have the same bytes, flag off and on"
    return Step("passed", detail if compared else "no such step fits", lines, data)


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
    if not has_gpu() or not counts:
        return Step("skipped", "the engine did not run" if has_gpu() else NO_GPU)
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


STEPS: dict[str, Callable[[Context], Step]] = {
    "machine": machine,
    "plan": plan,
    "known issues": known_issues,
    "kernels": kernels,
    "timing": timing,
    "engine": engine,
    "prefill rows": prefill_rows,
    "decode against prefill": decode_against_prefill,
    "launches": launches,
}
RANDOM_LAYERS = 4
SMALL = ("--max-model-len", "512")  # of the engine over random weights
IN_A_PROCESS = ("kernels", "timing")  # of their own; each engine has one anyway
ON_THE_CARD = ("kernels", "timing", "engine")  # steps that say something about the card
OF_A_SHAPE = (*ON_THE_CARD, "launches")  # steps that need a layer's shape

# SPDX-License-Identifier: Apache-2.0
"""The step ``engine`` runs both sides; ``prefill``, ``decode`` and ``launches`` look at what these answered."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import VLLM_FASTER
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.context import NO_GPU, Context
from vllm_aiter_mla.commands.check.engine import distance
from vllm_aiter_mla.commands.check.engine.record import PREFILLS, SIDES, EngineAnswer, Side
from vllm_aiter_mla.commands.check.record import Step
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.decided import kernel_at
from vllm_aiter_mla.kernels import formulas
from vllm_aiter_mla.status import status_files
from vllm_aiter_mla.status.line import status_line
from vllm_aiter_mla.status.record import records_of_all_ranks

if TYPE_CHECKING:
    from vllm_aiter_mla.commands.check.engine.child import EngineOptions

RANDOM_LAYERS = 4
RANDOM_ARGUMENTS = ("--max-model-len", "512")
"""Options of ``vllm serve`` for an engine over random weights."""
DID_NOT_RUN = "the engine did not run"


def compare_engines(context: Context) -> Step:
    """Run vLLM's engine with the flag off and on, all other options alike; compare the tokens.

    It fails if the two are further apart than rounding explains, or if a layer did not engage for which vLLM's own
    kernels were not the fastest.
    """
    if not context.options.on_a_card:
        return Step("skipped", NO_GPU)
    assert context.plan is not None, "there is a shape"
    if (too_few := _why_too_few_gpus(context.plan)) is not None:
        return Step("skipped", too_few)
    with engines(context, context.options.environment()) as run_side:
        # A GPU holds one engine at a time. What is new is the first to fail.
        context.answers = {side: run_side(side) for side in reversed(SIDES)}
    return compare_tokens(context)


@contextmanager
def engines(context: Context, environment: Mapping[str, str]) -> Iterator[Callable[[Side], EngineAnswer]]:
    """Give what runs one side over the model: its checkpoint, or a few layers of random weights."""
    from vllm_aiter_mla.commands.check.engine.child import EngineOptions

    options, plan = context.options, context.plan
    assert plan is not None, "there is a shape"
    assert options.source is not None, "there is a model"
    # One dense layer and one with experts, where the model has both.
    random_layers = None if options.checkpoint else min(plan.layers.total, max(RANDOM_LAYERS, plan.options.pp))
    if random_layers is not None:  # it divides the layers of the whole model
        environment = {name: value for name, value in environment.items() if name != "VLLM_PP_LAYER_PARTITION"}
    arguments = (*options.arguments, *(() if options.checkpoint else RANDOM_ARGUMENTS))
    with options.source.folder() as folder:

        def run_side(side: Side) -> EngineAnswer:
            context.progress.show_activity(f"vLLM's engine, flag {side}")  # each takes a minute or more
            return run_engine(EngineOptions(str(folder), arguments, side, random_layers, plan.limit), environment)

        yield run_side


def run_engine(options: EngineOptions, environment: Mapping[str, str]) -> EngineAnswer:
    """Run one engine in a process of its own, which has these environment variables; return its answer.

    Raises:
        EndedError: the engine's process ended without an answer.
        RuntimeError: a status file cannot be read.
    """
    from vllm_aiter_mla.commands.check.engine import child

    with tempfile.TemporaryDirectory(prefix="aiter-mla-check-") as work:
        # A status file of another server must not be taken for this one's, and no graph of a broken run be kept.
        cache = Path(work)
        _share_model_notes(cache, environment)
        variables = {**environment, "VLLM_CACHE_ROOT": str(cache), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        variables.pop(status_files.RUN_VARIABLE, None)
        try:
            answer = process.call(child.drive_engine, options, environment=variables)
        except process.EndedError as error:
            who = f"vLLM's engine with the flag {options.side}"
            raise process.EndedError(error.how, *error.lines, who=who) from error
        unreadable = list[str]()
        ranks = status_files.read_records(cache / "aiter_mla", "*", unreadable.append)
    if unreadable:
        raise RuntimeError("; ".join(unreadable))
    return replace(answer, ranks=tuple(ranks))


def _share_model_notes(cache: Path, environment: Mapping[str, str]) -> None:
    """Let an engine find vLLM's notes on model classes: without them it spends ten seconds on inspecting one."""
    notes = files.cache_folder(environment).with_name("modelinfos")
    with suppress(OSError):  # a home that takes no file: the engine inspects for itself
        notes.mkdir(parents=True, exist_ok=True)
        (cache / notes.name).symlink_to(notes.resolve(), target_is_directory=True)


def cards_of(plan: Plan) -> int:
    """Return how many cards one engine of the plan takes."""
    return math.prod(getattr(plan.options, size) for size in ("tp", "pp", "pcp"))


def _why_too_few_gpus(plan: Plan) -> str | None:
    """Return why this machine cannot hold one engine of the plan, or None."""
    from vllm_aiter_mla.kernels.device import card

    needed, here = cards_of(plan), card().count()
    return f"one engine needs {needed} GPUs; this machine has {here}" if here < needed else None


def compare_tokens(context: Context) -> Step:
    """Compare the tokens with the flag off and on, and look at which layers engaged."""
    plan = context.plan
    assert plan is not None, "there is a shape"
    off, on = (context.answers[side] for side in SIDES)
    by_scenario = {name: distance.figures(requests, on.generated[name]) for name, requests in off.generated.items()}
    lines = [f"{name}: {_in_words(figures)}" for name, figures in by_scenario.items()]
    if on.left_out:
        lines.append(f"left out of these engines, which serve nobody: {', '.join(on.left_out)}")
    lines += map(status_line, on.ranks)
    data = {"distances": {name: figures.as_dict() for name, figures in by_scenario.items()}}
    if (wrong := _why_not_engaged(on) or _why_apart(by_scenario, off, plan)) is not None:
        if plan.known_issues:
            names = ", ".join(issue.id for issue in plan.known_issues)
            wrong += f"; known faults outside the plugin may be the cause: {names}"
        return Step("failed", wrong, tuple(lines), data)
    equal, tokens = (
        sum(getattr(figures, name) for figures in by_scenario.values()) for name in ("tokens_equal", "tokens")
    )
    detail = f"{equal} of {tokens} tokens are equal, flag off and on"
    if not any(rank.engaged for rank in on.ranks):
        return Step("no gain", f"{detail}; vLLM's own kernels were the fastest for every layer", tuple(lines), data)
    skipped = {layer for rank in on.ranks for layer in rank.skipped}
    but = f" but {len(skipped)}, for which vLLM's own kernels were the fastest" if skipped else ""
    return Step("passed", f"{detail}; every MLA layer engaged{but}", tuple(lines), data)


def _why_apart(by_scenario: Mapping[str, distance.Figures], off: EngineAnswer, plan: Plan) -> str | None:
    """Return in which scenarios the tokens are further apart than rounding explains, or None."""
    noise = distance.decode_against_prefill(off) if plan.has_fp8_cache else 0.0
    apart = [name for name, figures in by_scenario.items() if not distance.is_explained(figures, noise)]
    return f"off and on are apart in {', '.join(apart)}" if apart else None


def _why_not_engaged(on: EngineAnswer) -> str | None:
    """Return why not every layer of every rank runs the fast path or is faster with vLLM's own kernels, or None."""
    explained = [
        len(rank.engaged) + sum(skip.code == VLLM_FASTER for skip in rank.skipped.values()) == rank.total
        for rank in on.ranks
    ]
    if not all(explained) or not any(rank.total for rank in on.ranks):  # a stage of a pipeline may have no layer
        return "not every MLA layer engaged"
    silent = records_of_all_ranks(on.ranks).count(None)
    return f"{silent} of {silent + len(on.ranks)} ranks wrote no status" if silent else None


def _in_words(figures: distance.Figures) -> str:
    """Return one scenario's figures in one line."""
    return (
        f"{figures.tokens_equal} of {figures.tokens} tokens equal, top-1 {figures.top1_agreement:.1%}, "
        f"max |dlogprob| {figures.max_abs_dlogprob:.2g}"
    )


def compare_prefill_rows(context: Context) -> Step:
    """Compare steps that are not all decode, in which the flag changes nothing: their bytes, and how long they take.

    It fails if more differs than one rounding of RoPE explains, and warns if they take longer on a card.
    """
    if not context.answers:
        return Step("skipped", DID_NOT_RUN)
    by_kind = {name: distance.prefill_rows(context.answers, name) for name in PREFILLS}
    compared = {name: rows for name, rows in by_kind.items() if rows is not None}
    if not compared:
        return Step("skipped", "no such step fits")
    lines = tuple(f"{name}: {rows.shown()}" for name, rows in compared.items())
    data = {name: asdict(rows) for name, rows in compared.items()}
    if apart := [name for name, rows in compared.items() if not rows.is_explained]:
        return Step("failed", f"one rounding of RoPE does not explain what differs: {', '.join(apart)}", lines, data)
    slower = [f"{name} ({rows.ratio:.3f})" for name, rows in compared.items() if rows.ratio > distance.SLOWER]
    if slower and context.options.on_a_card:  # a CPU's times say nothing about a card
        return Step("warning", f"slower with the flag on: {', '.join(slower)}", lines, data)
    equal, prompts = (sum(getattr(rows, field) for rows in compared.values()) for field in ("equal", "prompts"))
    return Step("passed", f"{equal} of {prompts} prompts have the same bytes, flag off and on", lines, data)


def compare_decode_with_prefill(context: Context) -> Step:
    """Compare each generated token's log-probability with prefill of the same text, on each side.

    A decode kernel that is broken with the flag off too gives equal tokens on both sides; prefill runs another kernel.
    """
    if not context.answers:
        return Step("skipped", DID_NOT_RUN)
    means = {side: distance.decode_against_prefill(context.answers[side]) for side in SIDES}
    detail = ", ".join(f"{side}: {mean:.2g}" for side, mean in means.items()) + " on average"
    wrong = [side for side, mean in means.items() if not mean <= distance.DECODE_AGAINST_PREFILL]
    if not wrong:
        return Step("passed", detail, data=means)
    whose = "only the fast path differs" if wrong == ["on"] else "vLLM's own decode is wrong here"
    return Step("failed", f"{detail}; {whose}", data=means)


def compare_launches(context: Context) -> Step:
    """Count the kernels of one decode step on each side. It fails if fewer are saved than planned."""
    if not context.options.on_a_card:
        return Step("skipped", NO_GPU)
    if not context.answers:
        return Step("skipped", DID_NOT_RUN)
    counts = {side: context.answers[side].launches for side in SIDES}
    if 0 in counts.values():
        return Step("failed", "torch's profiler saw no kernel", data=counts)
    planned, saved = _planned_savings(context), counts["off"] - counts["on"]
    each = ", ".join(f"{side} {count}" for side, count in counts.items())
    detail = f"{each}: {saved} fewer, planned {planned}"
    return Step("passed" if saved >= planned else "failed", detail, data=counts)


def _planned_savings(context: Context) -> int:
    """Return how many launches the counted step of the first rank saves by plan, where our kernels run in it."""
    plan = context.plan
    assert plan is not None, "there is a plan"
    tokens = _counted_tokens(plan)
    first_rank = min(context.answers["on"].ranks, key=lambda rank: rank.rank, default=None)
    if tokens > plan.limit or first_rank is None:
        return 0  # vLLM's own graph
    launches, of_vllm = _launches_of_a_layer(plan)
    kernels = [
        kernel_at(group.decision.kernels, tokens)
        for group in first_rank.decided for layer in group.layers if layer in first_rank.engaged
    ]  # fmt: skip
    return sum(max(of_vllm - launches.get(kernel.partition("-")[0], of_vllm), 0) for kernel in kernels)


def _counted_tokens(plan: Plan) -> int:
    """Return the tokens of the step whose kernels are counted: a captured size, where one holds its rows."""
    from vllm_aiter_mla.commands.check.engine.child import SCENARIOS

    requests = min(len(SCENARIOS["concurrent"]), plan.options.max_num_seqs)
    rows = requests * (1 + (plan.options.num_drafts or 0))
    captures = plan.captures
    sizes = (*captures.full, *captures.inside, *captures.outside)  # full graphs first, as vLLM replays them
    return next((size for size in sizes if size >= rows), rows)


def _launches_of_a_layer(plan: Plan) -> tuple[dict[str, int], int]:
    """Return the launches of a layer by path, and those of vLLM's own best path."""
    from vllm_aiter_mla.kernels.vllm_own import may_take_parts

    assert plan.figures is not None, "there is a shape"
    launches = {name: len(path.launches) for name, path in next(iter(plan.figures.by_tokens.values())).items()}
    fewest = min(count for name, count in launches.items() if name.startswith(formulas.VLLM))
    # A decode kernel that takes the query in parts needs no concat.
    return launches, fewest - may_take_parts(plan.arch, plan.heads_per_rank, plan.has_fp8_cache)

# SPDX-License-Identifier: Apache-2.0
"""The step ``engine`` runs both sides; ``prefill``, ``decode`` and ``launches`` compare their answers."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import VLLM_FASTER
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.context import StepContext
from vllm_aiter_mla.commands.check.engine import distance
from vllm_aiter_mla.commands.check.engine.record import PREFILL_STEPS, SIDES, EngineAnswer, Side
from vllm_aiter_mla.commands.check.record import StepResult
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.decided import VLLM, kernel_at
from vllm_aiter_mla.kernels import formulas
from vllm_aiter_mla.status import liveness, status_files
from vllm_aiter_mla.status.line import status_line
from vllm_aiter_mla.status.record import records_of_all_ranks

if TYPE_CHECKING:
    from vllm_aiter_mla.commands.check.engine.child import EngineOptions
    from vllm_aiter_mla.status.record import RankRecord

NUM_RANDOM_LAYERS = 4
"""Layers with random weights, unless the model has fewer or its pipeline more stages."""
RANDOM_ARGUMENTS = ("--max-model-len", "512")
"""Options of ``vllm serve`` for an engine over random weights."""
NO_ANSWERS = "the step engine gave no answers"


def compare_engines(context: StepContext) -> StepResult:
    """Run vLLM's engine with the flag off and on, with the same other options; compare the tokens.

    The step fails if the two sides are further apart than rounding explains. It also fails if a layer did not engage
    although vLLM's own kernels were not the fastest for it.
    """
    if (reason := context.options.no_gpu_reason) is not None:
        return StepResult("skipped", reason)
    assert context.plan is not None, "there is a shape"
    if (reason := _too_few_gpus_reason(context.plan)) is not None:
        return StepResult("skipped", reason)
    with engine_runner(context, context.options.server_environment()) as run_side:
        # A GPU holds one engine at a time. The flag is on first, because that side is more likely to fail.
        context.answers = {side: run_side(side) for side in reversed(SIDES)}
    return compare_tokens(context)


@contextmanager
def engine_runner(context: StepContext, environment: Mapping[str, str]) -> Iterator[Callable[[Side], EngineAnswer]]:
    """Yield a function that runs one side over the model's checkpoint, or over a few layers of random weights."""
    from vllm_aiter_mla.commands.check.engine.child import EngineOptions

    options, plan = context.options, context.plan
    assert plan is not None, "there is a shape"
    assert options.source is not None, "there is a model"
    # Enough layers for a dense one and one with experts, if the model has both.
    num_needed_layers = min(plan.layers.total, max(NUM_RANDOM_LAYERS, plan.options.pp))
    num_random_layers = None if options.uses_checkpoint else num_needed_layers
    if num_random_layers is not None:  # that partition counts the layers of the full model
        environment = {name: value for name, value in environment.items() if name != "VLLM_PP_LAYER_PARTITION"}
    serve_arguments = (*options.serve_arguments, *(() if options.uses_checkpoint else RANDOM_ARGUMENTS))
    with options.source.folder() as folder:

        def run_side(side: Side) -> EngineAnswer:
            context.progress.show_activity(f"vLLM's engine, flag {side}")  # each takes a minute or more
            return run_engine(
                EngineOptions(str(folder), serve_arguments, side, num_random_layers, plan.limit), environment
            )

        yield run_side


def run_engine(options: EngineOptions, environment: Mapping[str, str]) -> EngineAnswer:
    """Run one engine in a process of its own with this environment; return its answer.

    Raises:
        EndedError: the engine's process ended without an answer.
        RuntimeError: a status file cannot be read.
    """
    from vllm_aiter_mla.commands.check.engine import child

    with tempfile.TemporaryDirectory(prefix="aiter-mla-check-") as work_folder:
        # A folder of its own: no status file of another server is read here, and no graph of a broken run is reused.
        cache_folder = Path(work_folder)
        _share_model_notes(cache_folder, environment)
        _copy_tuned_tiles(cache_folder / "aiter_mla", environment)
        engine_environment = {
            **environment,
            "VLLM_CACHE_ROOT": str(cache_folder),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        engine_environment.pop(liveness.RUN_VARIABLE, None)
        try:
            answer = process.call(child.drive_engine, options, environment=engine_environment)
        except process.EndedError as error:
            process_label = f"vLLM's engine with the flag {options.side}"
            raise process.EndedError(error.ending, *error.lines, process_label=process_label) from error
        unreadable_reasons = list[str]()
        rank_records = status_files.read_records(cache_folder / "aiter_mla", "*", unreadable_reasons.append)
    if unreadable_reasons:
        raise RuntimeError("; ".join(unreadable_reasons))
    return replace(answer, rank_records=tuple(rank_records))


def _share_model_notes(cache_folder: Path, environment: Mapping[str, str]) -> None:
    """Link vLLM's notes on model classes into the engine's cache. Without them it inspects a class for ten seconds."""
    notes_folder = files.cache_folder(environment).with_name("modelinfos")
    with suppress(OSError):  # the home is not writable: the engine inspects the class
        notes_folder.mkdir(parents=True, exist_ok=True)
        (cache_folder / notes_folder.name).symlink_to(notes_folder.resolve(), target_is_directory=True)


def _copy_tuned_tiles(folder: Path, environment: Mapping[str, str]) -> None:
    """Copy the tuned tiles into the engine's folder, because a server runs them. A link would not be read."""
    with suppress(OSError):  # the folder is not readable: the engine runs the table's tiles, and a server does too
        paths = [*files.cache_folder(environment).glob("tuned-*.json")]
        folder.mkdir(parents=True)
        for path in paths:
            shutil.copyfile(path, folder / path.name)


def num_cards_of(plan: Plan) -> int:
    """Return the number of cards that one engine of the plan needs."""
    return math.prod(getattr(plan.options, name) for name in ("tp", "pp", "pcp"))


def _too_few_gpus_reason(plan: Plan) -> str | None:
    """Return why this machine cannot hold one engine of the plan, or None."""
    from vllm_aiter_mla.kernels.device import card

    num_needed, num_present = num_cards_of(plan), card().count()
    return f"one engine needs {num_needed} GPUs; this machine has {num_present}" if num_present < num_needed else None


def compare_tokens(context: StepContext) -> StepResult:
    """Compare the tokens with the flag off and on, and check which layers engaged."""
    plan = context.plan
    assert plan is not None, "there is a shape"
    off_answer, on_answer = (context.answers[side] for side in SIDES)
    comparisons = {
        scenario: distance.compare_requests(requests, on_answer.generated_tokens[scenario])
        for scenario, requests in off_answer.generated_tokens.items()
    }
    lines = [f"{scenario}: {_comparison_text(comparison)}" for scenario, comparison in comparisons.items()]
    if on_answer.unsupported_options:
        lines.append(f"options that these engines ran without: {', '.join(on_answer.unsupported_options)}")
    lines += map(status_line, on_answer.rank_records)
    data = {"distances": {scenario: comparison.as_dict() for scenario, comparison in comparisons.items()}}
    failure = _not_engaged_reason(on_answer) or _token_difference_reason(comparisons, off_answer, plan)
    if failure is not None:
        if plan.known_issues:
            issue_ids = ", ".join(issue.id for issue in plan.known_issues)
            failure += f"; known faults outside the plugin may be the cause: {issue_ids}"
        return StepResult("failed", failure, tuple(lines), data)
    num_equal = sum(comparison.tokens_equal for comparison in comparisons.values())
    num_tokens = sum(comparison.tokens for comparison in comparisons.values())
    detail = f"{num_equal} of {num_tokens} tokens are equal, flag off and on"
    if (unused_text := _unused_kernels_text(on_answer, plan)) is not None:
        return StepResult("unknown", f"{detail}, but {unused_text}", tuple(lines), data)
    if not any(rank_record.engaged for rank_record in on_answer.rank_records):
        return StepResult(
            "no gain", f"{detail}; vLLM's own kernels were the fastest for every layer", tuple(lines), data
        )
    skipped_layers = {layer for rank_record in on_answer.rank_records for layer in rank_record.skipped}
    exception_text = (
        f" but {len(skipped_layers)}, for which vLLM's own kernels were the fastest" if skipped_layers else ""
    )
    return StepResult("passed", f"{detail}; every MLA layer engaged{exception_text}", tuple(lines), data)


def _unused_kernels_text(on_answer: EngineAnswer, plan: Plan) -> str | None:
    """Return that no decode batch of the scenarios ran a kernel of ours in layers that engaged, or None.

    A layer is engaged if a kernel of ours was chosen for some token count, which none of these batches may have.
    """
    from vllm_aiter_mla.commands.check.engine.child import SCENARIOS

    chosen_spans = [
        group.decision.kernel_spans for rank_record in on_answer.rank_records for group in rank_record.decision_groups
    ]
    most_requests = min(max(map(len, SCENARIOS.values())), plan.options.max_num_seqs)
    counts = {
        count
        for num_requests in range(1, most_requests + 1)
        for count in (num_requests * (1 + plan.options.num_drafts), _num_step_tokens(plan, num_requests))
    }
    unused_spans = {
        span.tokens_text
        for spans in chosen_spans
        if {kernel_at(spans, count) for count in counts if count <= plan.limit} <= {VLLM, ""}
        for span in spans
        if span.kernel != VLLM
    }
    if not unused_spans:
        return None
    text = ", ".join(sorted(unused_spans))
    return f"some layers ran vLLM's own kernels: ours run at {text} tokens, as no batch here has"


def _token_difference_reason(
    comparisons: Mapping[str, distance.TokenComparison], off_answer: EngineAnswer, plan: Plan
) -> str | None:
    """Return in which scenarios the tokens are further apart than rounding explains, or None."""
    fp8_noise = distance.mean_decode_prefill_dlogprob(off_answer) if plan.has_fp8_cache else 0.0
    differing_scenarios = [
        scenario
        for scenario, comparison in comparisons.items()
        if not distance.can_rounding_explain_tokens(comparison, fp8_noise)
    ]
    return f"off and on are apart in {', '.join(differing_scenarios)}" if differing_scenarios else None


def _not_engaged_reason(on_answer: EngineAnswer) -> str | None:
    """Return a reason if a layer neither engaged nor is faster with vLLM's own kernels, or if a rank has no status."""

    def explains_all_layers(rank_record: RankRecord) -> bool:
        num_faster_with_vllm = sum(skip.code == VLLM_FASTER for skip in rank_record.skipped.values())
        return len(rank_record.engaged) + num_faster_with_vllm == rank_record.num_layers

    rank_records = on_answer.rank_records
    has_layers = any(rank_record.num_layers for rank_record in rank_records)  # a stage of a pipeline may have none
    if not has_layers or not all(map(explains_all_layers, rank_records)):
        return "not every MLA layer engaged"
    num_silent = records_of_all_ranks(rank_records).count(None)
    return f"{num_silent} of {num_silent + len(rank_records)} ranks wrote no status" if num_silent else None


def _comparison_text(comparison: distance.TokenComparison) -> str:
    """Return one scenario's figures in one line."""
    return (
        f"{comparison.tokens_equal} of {comparison.tokens} tokens equal, top-1 {comparison.top1_agreement:.1%}, "
        f"max |dlogprob| {comparison.max_abs_dlogprob:.2g}"
    )


def compare_prefill_rows(context: StepContext) -> StepResult:
    """Compare the bytes and the times of steps with prefill rows, which the flag should not change.

    The step fails if the bytes differ by more than one rounding of RoPE. It warns if such steps are slower on a card.
    """
    if not context.answers:
        return StepResult("skipped", NO_ANSWERS)
    comparisons = {
        step_kind: comparison
        for step_kind in PREFILL_STEPS
        if (comparison := distance.compare_prefill(context.answers, step_kind)) is not None
    }
    if not comparisons:
        return StepResult("skipped", "no such step fits")
    lines = tuple(f"{step_kind}: {comparison.summary()}" for step_kind, comparison in comparisons.items())
    data = {step_kind: asdict(comparison) for step_kind, comparison in comparisons.items()}
    differing_kinds = [
        step_kind for step_kind, comparison in comparisons.items() if not comparison.is_explained_by_rounding
    ]
    if differing_kinds:
        detail = f"one rounding of RoPE does not explain the differences: {', '.join(differing_kinds)}"
        return StepResult("failed", detail, lines, data)
    slower_kind_texts = [
        f"{step_kind} ({comparison.ratio:.3f})"
        for step_kind, comparison in comparisons.items()
        if comparison.ratio > distance.MAX_TIME_RATIO
    ]
    if slower_kind_texts and context.options.can_use_gpu:  # a CPU's times say nothing about a card
        return StepResult("warning", f"slower with the flag on: {', '.join(slower_kind_texts)}", lines, data)
    num_equal = sum(comparison.equal for comparison in comparisons.values())
    num_prompts = sum(comparison.prompts for comparison in comparisons.values())
    return StepResult(
        "passed", f"{num_equal} of {num_prompts} prompts have the same bytes, flag off and on", lines, data
    )


def compare_decode_with_prefill(context: StepContext) -> StepResult:
    """Compare each generated token's log-probability with prefill of the same text, on each side.

    A decode kernel that is also broken with the flag off gives equal tokens on both sides. Prefill runs another kernel.
    """
    if not context.answers:
        return StepResult("skipped", NO_ANSWERS)
    mean_by_side = {side: distance.mean_decode_prefill_dlogprob(context.answers[side]) for side in SIDES}
    detail = ", ".join(f"{side}: {mean:.2g}" for side, mean in mean_by_side.items()) + " on average"
    wrong_sides = [side for side, mean in mean_by_side.items() if not mean <= distance.MAX_DECODE_PREFILL_DLOGPROB]
    if not wrong_sides:
        return StepResult("passed", detail, data=mean_by_side)
    cause = "only the fast path differs" if wrong_sides == ["on"] else "vLLM's own decode is wrong here"
    return StepResult("failed", f"{detail}; {cause}", data=mean_by_side)


def compare_launches(context: StepContext) -> StepResult:
    """Count the kernels of one decode step on each side. The step fails if the flag saves fewer than planned."""
    if (reason := context.options.no_gpu_reason) is not None:
        return StepResult("skipped", reason)
    if not context.answers:
        return StepResult("skipped", NO_ANSWERS)
    launches_by_side = {side: context.answers[side].num_launches for side in SIDES}
    if 0 in launches_by_side.values():
        return StepResult("failed", "torch's profiler saw no kernel", data=launches_by_side)
    num_planned, num_saved = _num_planned_savings(context), launches_by_side["off"] - launches_by_side["on"]
    counts_text = ", ".join(f"{side} {num_launches}" for side, num_launches in launches_by_side.items())
    detail = f"{counts_text}: {num_saved} fewer, planned {num_planned}"
    return StepResult("passed" if num_saved >= num_planned else "failed", detail, data=launches_by_side)


def _num_planned_savings(context: StepContext) -> int:
    """Return the launches that the layers of the first rank should save in the profiled step.

    A layer whose kernel in that step is vLLM's own saves none.
    """
    plan = context.plan
    assert plan is not None, "there is a plan"
    num_tokens = _num_profiled_tokens(plan)
    first_rank = min(context.answers["on"].rank_records, key=lambda rank_record: rank_record.rank, default=None)
    if num_tokens > plan.limit or first_rank is None:
        return 0  # vLLM's own graph
    launches_by_path, vllm_launches = _launches_of_a_layer(plan)
    kernels = [
        kernel_at(group.decision.kernel_spans, num_tokens)
        for group in first_rank.decision_groups for layer in group.layers if layer in first_rank.engaged
    ]  # fmt: skip
    return sum(
        max(vllm_launches - launches_by_path.get(kernel.partition("-")[0], vllm_launches), 0) for kernel in kernels
    )


def _num_profiled_tokens(plan: Plan) -> int:
    """Return the tokens of the profiled step."""
    from vllm_aiter_mla.commands.check.engine.child import SCENARIOS

    return _num_step_tokens(plan, min(len(SCENARIOS["concurrent"]), plan.options.max_num_seqs))


def _num_step_tokens(plan: Plan, num_requests: int) -> int:
    """Return the tokens of a decode step: the captured size that holds its rows, or else the number of rows."""
    num_rows = num_requests * (1 + plan.options.num_drafts)
    captures = plan.captures
    sizes = (*captures.full, *captures.within_limit, *captures.above_limit)  # full graphs first, as vLLM replays them
    return next((size for size in sizes if size >= num_rows), num_rows)


def _launches_of_a_layer(plan: Plan) -> tuple[dict[str, int], int]:
    """Return the launches of a layer by path, and the launches of vLLM's best path."""
    from vllm_aiter_mla.kernels.vllm_own import may_take_parts

    assert plan.figures is not None, "there is a shape"
    launches_by_path = {name: len(path.launches) for name, path in next(iter(plan.figures.by_tokens.values())).items()}
    min_vllm_launches = min(count for name, count in launches_by_path.items() if name.startswith(formulas.VLLM))
    # A decode kernel that takes the query in parts needs no concat.
    return launches_by_path, min_vllm_launches - may_take_parts(plan.arch, plan.heads_per_rank, plan.has_fp8_cache)

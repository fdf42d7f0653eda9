# SPDX-License-Identifier: Apache-2.0
"""Time the kernels in a process of its own, keep what it tells, and decide how the step ends."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.context import NO_GPU, Context
from vllm_aiter_mla.commands.check.options import CacheType, Weights
from vllm_aiter_mla.commands.check.record import Step
from vllm_aiter_mla.commands.check.timing.record import MAX_TIMED_TOKENS, TYPES_OF_16_BITS, Measurement

if TYPE_CHECKING:
    from vllm_aiter_mla.commands.check.timing.child import Activity, TimingRequest
    from vllm_aiter_mla.commands.check.timing.record import Row

TOKENS, HEADS = (1, 8, 64, 256, 512), (8, 16, 128)
"""What is timed without a model, unless options say otherwise."""
TOKENS_OF_A_MODEL = (1, 8, 64, 256)
"""Those below a model's decode limit, and the limit itself, are timed for the model."""


def time_kernels(context: Context) -> Step:
    """Time every kernel and rival on this card: of a model its layer, else DeepSeek's at several numbers of heads.

    It fails if a kernel is wrong, or if nothing of ours was timed for the model. What has nothing to be compared with
    is unknown. With ``tune`` the Triton kernel's tiles are timed, and the fastest are kept for its starts.
    """
    if not context.options.on_a_card:
        return Step("skipped", NO_GPU)
    request = _request(context)
    if context.options.timing.tune:
        return _tune(context, request)
    left_out = dict[str, str]()
    while True:
        try:
            return _judge(context, _measure(context, request, left_out))
        except EndedInCheckError as error:
            left_out[error.kernel] = str(error)


class EndedInCheckError(RuntimeError):
    """The process ended in the check of ``kernel``, and is started again without that kernel."""

    def __init__(self, kernel: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kernel = kernel


def _request(context: Context) -> TimingRequest:
    """Return what is timed: the plan's layer where there is a plan."""
    from vllm_aiter_mla.commands.check.timing.child import TimingRequest

    options, layer, plan = context.options.timing, context.options.layer, context.plan
    tokens: tuple[int, ...]
    if plan is None:
        both = (CacheType.fp8, CacheType.bf16)
        kinds = both if options.cache_type is CacheType.both else (options.cache_type,)
        tokens, weights = TOKENS, layer.weights or Weights.bf16
        request = TimingRequest((), layer.heads or HEADS, tuple(kind.value for kind in kinds), weights.value)
        request = request if layer.nope is None else replace(request, nope=layer.nope)
    else:
        sizes, kind = plan.model.kinds[0], "fp8" if plan.has_fp8_cache else TYPES_OF_16_BITS[plan.model.dtype]
        tokens = (*(count for count in TOKENS_OF_A_MODEL if count < plan.limit), min(plan.limit, MAX_TIMED_TOKENS))
        request = TimingRequest(
            (), (plan.heads_per_rank,), (kind,), Weights.of_format(str(plan.absorb_weight)).value, sizes.nope,
            sizes.rope, sizes.latent, plan.model.dtype,
        )  # fmt: skip
    return replace(request, tokens=options.tokens or (() if options.tune else tokens))


def _measure(context: Context, request: TimingRequest, left_out: dict[str, str]) -> Measurement:
    """Return the record of the process, or what the process had told when it ended early.

    Raises:
        EndedInCheckError: the process ended in the check of a kernel.
    """
    from vllm_aiter_mla.commands.check.timing import child

    record = Measurement({}, request.weights, (), dict(left_out), "")
    activity = child.Activity(None, "its start")

    def on_value(told: Measurement | Row | Activity) -> None:
        nonlocal record, activity
        if isinstance(told, Measurement):  # what its rows share
            record = told
        elif isinstance(told, child.Activity):
            activity = told
            context.progress.show_activity(told.text)
        else:
            record = replace(record, rows=(*record.rows, told))
            so_far = replace(record, stopped="cut off")
            context.progress.report_partial(Step("cut off", f"{len(record.rows)} sizes", data=so_far))

    environment = context.options.environment()
    try:
        return process.call(child.time_kernels, request, left_out, environment=environment, on_value=on_value)
    except process.EndedError as error:
        sentence = error.sentence(activity.text)
        if activity.kernel is not None and activity.kernel not in left_out:
            raise EndedInCheckError(activity.kernel, sentence) from error
        return replace(record, stopped=sentence)


def _judge(context: Context, record: Measurement) -> Step:
    """Return how the step ended; see ``time_kernels``. It also fails if a size raised."""
    lines = tuple(
        f"{row.tokens} tokens: " + ", ".join(f"{name} {us:.2f} us" for name, us in sorted(row.us.items()))
        for row in record.rows
    )
    lines += tuple(f"{name}: {why}" for name, why in record.wrong.items())
    ratios = [(row.tokens, row.ratio) for row in record.rows if row.ratio is not None]
    has_ours = any(row.ours for row in record.rows)
    if record.wrong or record.stopped or (context.plan and not has_ours):
        return Step("failed", record.stopped or "a kernel is wrong, or none of ours was timed", lines, record)
    if not ratios:
        missing = "neither vLLM's kernels nor a stand-in" if has_ours else "none of ours"
        return Step("unknown", f"nothing to compare: {missing} was timed", lines, record)
    slower = sorted({tokens for tokens, ratio in ratios if ratio < 1})
    which = f"vLLM or a rival is faster at {slower}" if slower else "one of ours is the fastest at each"
    return Step("passed", f"{len(ratios)} sizes; {which}", lines, record)


def _tune(context: Context, request: TimingRequest) -> Step:
    """Tune the tiles in a process of its own; the lines of the step are those that the process tells."""
    from vllm_aiter_mla.commands.check.timing import tune

    lines = list[str]()

    def on_value(text: str) -> None:
        lines.append(text)
        context.progress.show_activity(text)
        context.progress.report_partial(Step("cut off", "tiles of the Triton kernel", tuple(lines)))

    environment = context.options.environment()
    try:
        record, wrong = process.call(tune.tune, request, environment=environment, on_value=on_value)
    except process.EndedError as error:
        return Step("failed", error.sentence(), (*lines, *error.lines))
    kept = f"tiles are kept for {len(record.chosen)} shapes"
    return Step("failed" if wrong else "passed", wrong or kept, tuple(lines), record)

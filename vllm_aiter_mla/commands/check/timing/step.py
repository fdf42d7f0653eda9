# SPDX-License-Identifier: Apache-2.0
"""Time the kernels in a process of its own, collect the rows, and decide how the step ends."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.context import StepContext
from vllm_aiter_mla.commands.check.options import CacheType, WeightFormat
from vllm_aiter_mla.commands.check.record import StepResult
from vllm_aiter_mla.commands.check.timing.record import MAX_TIMED_TOKENS, TYPES_OF_16_BITS, Measurement, without_rivals

if TYPE_CHECKING:
    from vllm_aiter_mla.commands.check.timing.child import Activity, FailedKernel, TimingRequest
    from vllm_aiter_mla.commands.check.timing.record import TimingRow

DEFAULT_TOKEN_COUNTS, DEFAULT_HEAD_COUNTS = (1, 8, 64, 256, 512), (8, 16, 128)
"""The sizes that are timed without a model, unless options give others."""
MODEL_TOKEN_COUNTS = (1, 8, 64, 256)
"""The sizes that are timed for a model: those of them below its decode limit, and the limit itself."""


def time_kernels(context: StepContext) -> StepResult:
    """Time every kernel and rival on this card, for the model's layer or for DeepSeek's at several numbers of heads.

    The step fails if a kernel is wrong, or if no kernel of ours was timed for the model. It is "unknown" if there is
    nothing to compare with. With ``tune`` the Triton kernel's tiles are timed, and the fastest are saved for starts.
    """
    if (reason := context.options.no_gpu_reason) is not None:
        return StepResult("skipped", reason)
    plan = context.plan
    if plan is not None and plan.model.dtype not in TYPES_OF_16_BITS:
        return StepResult("skipped", f"--dtype {plan.model.dtype}: the kernels take bfloat16 and float16")
    request = _build_request(context)
    if context.options.timing.tune:
        return _run_tuning(context, request)
    ended_checks = dict[str, str]()
    while True:
        try:
            return _judge(context, _measure(context, request, ended_checks))
        except EndedInCheckError as error:
            ended_checks[error.kernel] = str(error)


class EndedInCheckError(RuntimeError):
    """The process ended in the check of ``kernel``. It is started again without that kernel."""

    def __init__(self, kernel: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kernel = kernel


def _build_request(context: StepContext) -> TimingRequest:
    """Return the request for the process: the plan's layer if there is a plan, or else DeepSeek's."""
    from vllm_aiter_mla.commands.check.timing.child import TimingRequest

    options, layer_options, plan = context.options.timing, context.options.layer, context.plan
    token_counts: tuple[int, ...]
    if plan is None:
        both_types = (CacheType.fp8, CacheType.bf16)
        cache_types = both_types if options.cache_type is CacheType.both else (options.cache_type,)
        token_counts, weight_format = DEFAULT_TOKEN_COUNTS, layer_options.weight_format or WeightFormat.bf16
        request = TimingRequest(
            (),
            layer_options.head_counts or DEFAULT_HEAD_COUNTS,
            tuple(cache_type.value for cache_type in cache_types),
            weight_format.value,
        )
        request = request if layer_options.nope is None else replace(request, nope=layer_options.nope)
    else:
        layer_sizes, weight_format = plan.model.kinds[0], WeightFormat.of_format_name(str(plan.absorb_weight))
        cache_type = "fp8" if plan.has_fp8_cache else TYPES_OF_16_BITS[plan.model.dtype]
        counts_below_limit = [count for count in MODEL_TOKEN_COUNTS if count < plan.limit]
        token_counts = (*counts_below_limit, min(plan.limit, MAX_TIMED_TOKENS))
        request = TimingRequest(
            (), (plan.heads_per_rank,), (cache_type,), weight_format.value, layer_sizes.nope, layer_sizes.rope,
            layer_sizes.latent, plan.model.dtype,
        )  # fmt: skip
    return replace(request, token_counts=options.token_counts or (() if options.tune else token_counts))


def _measure(context: StepContext, request: TimingRequest, ended_checks: dict[str, str]) -> Measurement:
    """Return the record of the process, or what the process had sent when it ended early.

    Raises:
        EndedInCheckError: the process ended in the check of a kernel.
    """
    from vllm_aiter_mla.commands.check.timing import child

    record = Measurement({}, request.weights, (), without_rivals(ended_checks), "")
    activity = child.Activity(None, "its start")

    def on_value(value: Measurement | TimingRow | Activity | FailedKernel) -> None:
        nonlocal record, activity
        if isinstance(value, Measurement):  # the facts that all rows share
            record = value
        elif isinstance(value, child.Activity):
            activity = value
            context.progress.show_activity(value.text)
        elif isinstance(value, child.FailedKernel):
            record = replace(record, failed_kernels={**record.failed_kernels, value.kernel: value.text})
        else:
            record = replace(record, rows=(*record.rows, value))
            partial_record = replace(record, stop_reason="cut off")
            context.progress.report_partial(StepResult("cut off", f"{len(record.rows)} sizes", data=partial_record))

    environment = context.options.server_environment()
    try:
        return process.call(child.time_layers, request, ended_checks, environment=environment, on_value=on_value)
    except process.EndedError as error:
        sentence = error.sentence(activity.text)
        if activity.kernel is not None and activity.kernel not in ended_checks:
            raise EndedInCheckError(activity.kernel, sentence) from error
        return replace(record, stop_reason=sentence)


def _judge(context: StepContext, record: Measurement) -> StepResult:
    """Return how the step ended; see ``time_kernels``. It also fails if a size raised."""
    lines = tuple(
        f"{_size_text(row)}: " + ", ".join(f"{name} {median_us:.2f} us" for name, median_us in sorted(row.us.items()))
        for row in record.rows
    )
    lines += tuple(f"{name}: {reason}" for name, reason in record.failed_kernels.items())
    ratios = [(row, row.ratio) for row in record.rows if row.ratio is not None]
    has_ours = any(row.our_times for row in record.rows)
    if record.stop_reason:
        return StepResult("failed", record.stop_reason, lines, record)
    if record.failed_kernels:
        return StepResult("failed", f"wrong, not timed: {', '.join(record.failed_kernels)}", lines, record)
    if context.plan and not has_ours:
        return StepResult("failed", "none of our kernels was timed", lines, record)
    if not ratios:
        missing_kernels = "neither vLLM's kernels nor a stand-in" if has_ours else "none of our kernels"
        return StepResult("unknown", f"nothing to compare: {missing_kernels} was timed", lines, record)
    slower_sizes = [_size_text(row) for row, ratio in ratios if ratio < 1]
    if slower_sizes:
        speed_text = f"slower at {len(slower_sizes)} of {len(ratios)} sizes: {'; '.join(slower_sizes)}"
    else:
        speed_text = f"one of our kernels is the fastest at each of {len(ratios)} sizes"
    return StepResult("passed", speed_text, lines, record)


def _size_text(row: TimingRow) -> str:
    """Return the size of a row, as in "128 heads, bf16, 8 tokens"."""
    return f"{row.heads} heads, {row.cache_type}, {row.tokens} tokens"


def _run_tuning(context: StepContext, request: TimingRequest) -> StepResult:
    """Tune the tiles in a process of its own. The lines of the step are those that the process sends."""
    from vllm_aiter_mla.commands.check.timing import tune

    lines = list[str]()

    def on_value(text: str) -> None:
        lines.append(text)
        context.progress.show_activity(text)
        context.progress.report_partial(StepResult("cut off", "tiles of the Triton kernel", tuple(lines)))

    environment = context.options.server_environment()
    try:
        record, failure = process.call(tune.tune_tiles, request, environment=environment, on_value=on_value)
    except process.EndedError as error:
        return StepResult("failed", error.sentence(), (*lines, *error.lines))
    kept_text = f"tiles are kept for {len(record.chosen)} shapes"
    return StepResult("failed" if failure else "passed", failure or kept_text, tuple(lines), record)

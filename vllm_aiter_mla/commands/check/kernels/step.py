# SPDX-License-Identifier: Apache-2.0
"""Verify each back end in a process of its own, collect the results, and decide how the step ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_aiter_mla.admission import OVERFLOW
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.context import NO_GPU, CheckOptions, StepContext
from vllm_aiter_mla.commands.check.kernels.printout import counts_text
from vllm_aiter_mla.commands.check.options import WeightFormat
from vllm_aiter_mla.commands.check.record import StepResult, StepStatus
from vllm_aiter_mla.commands.check.timing.record import TYPES_OF_16_BITS
from vllm_aiter_mla.verify import FAILED, NOTHING

if TYPE_CHECKING:
    from vllm_aiter_mla.commands.check.kernels.child import KernelsRequest
    from vllm_aiter_mla.commands.plan.record import Plan
    from vllm_aiter_mla.verify.results import Result, Verification


def verify_kernels(context: StepContext) -> StepResult:
    """Verify the kernels at the model's shapes, up to its decode limit; without a model at DeepSeek's shapes.

    A CPU replays small shapes eagerly. A kernel that turns an fp8 overflow into NaN fails the step if it would serve
    according to the plan.
    """
    from vllm_aiter_mla.verify.session import FINDERS, NotHereError, chosen

    request = _build_request(context)
    records: list[Verification] = []
    for backend in chosen(request.options.backend, list(FINDERS), "--backend"):
        try:
            records.append(_run_backend_process(context, request, backend, records))
        except NotHereError as error:
            return StepResult("skipped", NO_GPU if context.plan else str(error))
    return _judge(context, _merge_records(records))


def _build_request(context: StepContext) -> KernelsRequest:
    """Return the request for the processes: the options, overridden by the sizes of the plan if there is one."""
    from vllm_aiter_mla.commands.check.kernels.child import KernelsRequest
    from vllm_aiter_mla.verify.cases import LIMITS

    options, plan, layer_options = context.options, context.plan, context.options.layer
    typed_sizes = {
        "heads": next(iter(layer_options.head_counts), None),
        "nope": layer_options.nope,
        "v": layer_options.v,
    }
    request = KernelsRequest(
        options=replace(options.kernels, quick=options.kernels.quick or plan is not None),
        geometry_sizes={name: size for name, size in typed_sizes.items() if size is not None},
        weight_format=layer_options.weight_format,
        uses_cpu=options.uses_cpu,
        model=options.source.name if options.source else None,
        repeat_arguments=_repeat_arguments(options, typed_sizes),
    )
    if plan is None or options.uses_cpu:
        return request
    limit = request.options.limit or min(max(plan.limit, LIMITS[0]), LIMITS[1])
    return replace(
        request,
        options=replace(request.options, limit=limit),
        geometry_sizes=_layer_sizes(plan),
        weight_format=WeightFormat.of_format_name(str(plan.absorb_weight)),
        # No kernel of ours takes other activations.
        activation_dtype=plan.model.dtype if plan.model.dtype in TYPES_OF_16_BITS else request.activation_dtype,
        has_fp8_cache=plan.has_fp8_cache,
    )


def _repeat_arguments(options: CheckOptions, typed_sizes: Mapping[str, int | None]) -> tuple[str, ...]:
    """Return the arguments with which a command repeats a case on the same data, besides MODEL and the case's names."""
    kernel_options, layer_options = options.kernels, options.layer
    values: dict[str, object] = {
        "quick": kernel_options.quick and not kernel_options.replays,
        "small": kernel_options.small,
        "emulated": kernel_options.emulated,
        "limit": kernel_options.limit,
        "long-run": kernel_options.replays,
        "device": "cpu" if options.uses_cpu else None,
        **typed_sizes,
        "weights": layer_options.weight_format.value if layer_options.weight_format else None,
        "arch": options.arch,
    }
    arguments = [
        argument
        for name, value in values.items()
        if value is not None and value is not False
        for argument in ((f"--{name}",) if value is True else (f"--{name}", str(value)))
    ]
    for name, (value, origin) in options.plan_environment.items():
        arguments += ["--env", f"{name}={value}"] * (origin == "--env")
    return (*arguments, *options.serve_arguments)


def _layer_sizes(plan: Plan) -> dict[str, int]:
    """Return the sizes of the most frequent layer on one rank, as ``Geometry`` names them."""
    from vllm_aiter_mla.verify.cases import REAL

    layer, block_size = plan.model.kinds[0], plan.options.block_size or REAL.block_size
    return {name: getattr(layer, name) for name in ("nope", "rope", "latent", "v")} | {
        "heads": plan.heads_per_rank,
        "block_size": block_size,
        # A request may hold about as many tokens in blocks of any size: it has drafts, and the cache has to fit.
        "blocks": max(REAL.blocks * REAL.block_size // block_size, 1),
    }


def _run_backend_process(
    context: StepContext, request: KernelsRequest, backend: str, earlier_records: Sequence[Verification]
) -> Verification:
    """Return the record of one back end. If its process ends early, the case that ran has failed.

    ``earlier_records``, the records of the back ends before it, go into the partial findings.

    Raises:
        NotHereError: torch sees no GPU.
    """
    from vllm_aiter_mla.commands.check.kernels import child
    from vllm_aiter_mla.verify.results import Verification, joined
    from vllm_aiter_mla.verify.session import NotHereError

    record = Verification(NOTHING, {}, "no engine", None, {}, ())
    running_case: Result | None = None

    def on_value(value: Verification | Result) -> None:
        nonlocal record, running_case
        if isinstance(value, Verification):  # the facts that all results of this process share
            record = value
        elif value.status == child.STARTED:
            running_case = value
            num_done = sum(
                result.rounds for earlier_record in (*earlier_records, record) for result in earlier_record.results
            )
            context.progress.show_activity(f"{backend} {value.variant} {value.case}, {num_done} cases done")
        else:
            running_case, record = None, replace(record, results=joined((*record.results, value)))
            merged = _merge_records([*earlier_records, record])
            context.progress.report_partial(StepResult("cut off", counts_text(merged.results), data=merged))

    environment = context.options.server_environment()
    try:
        return process.call(
            child.verify_backend,
            request,
            backend,
            environment=environment,
            on_value=on_value,
            expected_errors=(NotHereError,),
        )
    except process.EndedError as error:
        return _add_failure(record, backend, running_case, error)


def _add_failure(
    record: Verification, backend: str, running_case: Result | None, error: process.EndedError
) -> Verification:
    """Return the record of a process that ended early. The case that ran has failed.

    The finding says that no later case of the back end ran.
    """
    from vllm_aiter_mla.verify.results import Finding, Result

    started_result = running_case or Result("start", "none", backend, record.engine)
    message = f"{error.sentence(started_result.case)}; no later case of {backend} ran"
    failed_result = replace(started_result, status="failed", findings=[Finding("runs", message, "its process")])
    return replace(record, status=FAILED, results=(*record.results, failed_result))


def _merge_records(records: Sequence[Verification]) -> Verification:
    """Return one record of all back ends."""
    from vllm_aiter_mla.verify.results import status_of

    results = tuple(result for record in records for result in record.results)
    first_record = next((record for record in records if record.machine), records[0])
    sizes = next((record.sizes for record in records if record.sizes), None)
    missing_backends = {name: reason for record in records for name, reason in record.missing.items()}
    return replace(first_record, status=status_of(results), sizes=sizes, missing=missing_backends, results=results)


def _judge(context: StepContext, record: Verification) -> StepResult:
    """Return how the step ended. It passes if a kernel was compared, and each back end that was named."""
    options, plan = context.options, context.plan
    failed_results = [result for result in record.results if result.status == "failed"]
    lines = [
        f"{result.backend} {result.case}: {result.findings[0].oracle}: {result.findings[0].message}"
        + f"; {result.command}" * bool(result.command)
        for result in failed_results
    ]
    serving_backends = set[str]()
    if plan is not None and plan.has_fp8_cache and not options.uses_cpu:
        # The cases have fp8 caches even if the model's cache is bf16, and on a CPU only the reference runs.
        overflowing_backends = {result.backend for result in record.results if result.writes_nan}
        serving_backends = overflowing_backends & {span.kernel for span in plan.kernels or ()}
        left_out_backends = sorted(overflowing_backends - serving_backends)
        lines += [f"{name} {OVERFLOW}; start-up leaves it out" for name in left_out_backends]
    named_backends = options.kernels.backend
    compared_backends = {result.backend for result in record.results if result.status == "passed"}
    if named_backends:
        has_compared = compared_backends.issuperset(named_backends)
    else:  # the reference is compared with itself
        has_compared = bool(compared_backends if options.uses_cpu else compared_backends - {"reference"})
    missing_backends = {
        name: reason for name, reason in record.missing.items() if name in named_backends or not has_compared
    }
    idle_backends = [name for name in named_backends if name not in compared_backends | missing_backends.keys()]
    if failed_results or serving_backends:
        status: StepStatus = "failed"
    else:
        status = "passed" if has_compared and not missing_backends else "skipped"
    backends_text = ", ".join(dict.fromkeys(result.backend for result in record.results)) or "no back end"
    detail = f"{counts_text(record.results)} ({record.engine}; {backends_text})"
    detail += "".join(f"; back end {name}: {reason}" for name, reason in missing_backends.items())
    detail += "".join(f"; back end {name} took no case" for name in idle_backends if not failed_results)
    # The record, which is printed in place of the lines if the step was named, does not hold this reason.
    detail += "".join(f"; {name} {OVERFLOW}, and it would serve" for name in sorted(serving_backends))
    return StepResult(status, detail, tuple(lines), record)

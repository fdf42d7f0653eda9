# SPDX-License-Identifier: Apache-2.0
"""Verify each back end in a process of its own, keep what they tell, and decide how the step ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_aiter_mla.admission import OVERFLOW
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.context import NO_GPU, CheckOptions, Context
from vllm_aiter_mla.commands.check.kernels.printout import counts_in_words
from vllm_aiter_mla.commands.check.options import Weights
from vllm_aiter_mla.commands.check.record import Status, Step
from vllm_aiter_mla.verify import FAILED, NOTHING, PASSED

if TYPE_CHECKING:
    from vllm_aiter_mla.commands.check.kernels.child import KernelsRequest
    from vllm_aiter_mla.commands.plan.record import Plan
    from vllm_aiter_mla.verify.results import Result, Verification


def verify_kernels(context: Context) -> Step:
    """Verify the kernels at the model's shapes, up to its decode limit; without a model at DeepSeek's.

    On a CPU by eager replay of small shapes. A kernel that turns an fp8 overflow into NaN fails the step if the plan
    says that it would serve.
    """
    from vllm_aiter_mla.verify.session import FINDERS, NotHereError, chosen

    request = _request(context)
    records: list[Verification] = []
    for backend in chosen(request.options.backend, list(FINDERS), "--backend"):
        try:
            records.append(_verify_back_end(context, request, backend, records))
        except NotHereError as error:
            return Step("skipped", NO_GPU if context.plan else str(error))
    return _judge(context, _merge_records(records))


def _request(context: Context) -> KernelsRequest:
    """Return what the processes verify: the options, and over them the sizes of the plan where there is one."""
    from vllm_aiter_mla.commands.check.kernels.child import KernelsRequest
    from vllm_aiter_mla.verify.cases import LIMITS

    options, plan, layer = context.options, context.plan, context.options.layer
    by_hand = {"heads": next(iter(layer.heads), None), "nope": layer.nope, "v": layer.v}
    request = KernelsRequest(
        options=replace(options.kernels, quick=options.kernels.quick or plan is not None),
        sizes={name: size for name, size in by_hand.items() if size is not None},
        weights=layer.weights,
        on_cpu=options.on_cpu,
        model=options.source.name if options.source else None,
        repeat_words=_words_to_repeat(options, by_hand),
    )
    if plan is None or options.on_cpu:
        return request
    limit = request.options.limit or min(max(plan.limit, LIMITS[0]), LIMITS[1])
    return replace(
        request,
        options=replace(request.options, limit=limit),
        sizes=_sizes(plan),
        weights=Weights.of_format(str(plan.absorb_weight)),
    )


def _words_to_repeat(options: CheckOptions, by_hand: Mapping[str, int | None]) -> tuple[str, ...]:
    """Return the words that a command needs besides MODEL and the names of a case to repeat it with the same data."""
    kernels, layer = options.kernels, options.layer
    values: dict[str, object] = {
        "quick": kernels.quick and not kernels.replays, "small": kernels.small, "emulated": kernels.emulated,
        "limit": kernels.limit, "long-run": kernels.replays, "device": "cpu" if options.on_cpu else None, **by_hand,
        "weights": layer.weights.value if layer.weights else None, "arch": options.arch,
    }  # fmt: skip
    words = [
        word
        for name, value in values.items()
        if value is not None and value is not False
        for word in ((f"--{name}",) if value is True else (f"--{name}", str(value)))
    ]
    for name, (value, origin) in options.variables.items():
        words += ["--env", f"{name}={value}"] * (origin == "--env")
    return (*words, *options.arguments)


def _sizes(plan: Plan) -> dict[str, int]:
    """Return the sizes of the most frequent layer on one rank, as ``Geometry`` names them."""
    layer = plan.model.kinds[0]
    return {name: getattr(layer, name) for name in ("nope", "rope", "latent", "v")} | {"heads": plan.heads_per_rank}


def _verify_back_end(
    context: Context, request: KernelsRequest, backend: str, before: Sequence[Verification]
) -> Verification:
    """Return the record of one back end. If its process ends early, the case that ran has failed.

    ``before`` are the records of the back ends before it, for what is shown meanwhile.

    Raises:
        NotHereError: torch sees no GPU.
    """
    from vllm_aiter_mla.commands.check.kernels import child
    from vllm_aiter_mla.verify.results import Verification, joined
    from vllm_aiter_mla.verify.session import NotHereError

    record = Verification(NOTHING, {}, "no engine", None, {}, ())
    running: Result | None = None

    def on_value(told: Verification | Result) -> None:
        nonlocal record, running
        if isinstance(told, Verification):  # what all results of this process share
            record = told
        elif told.status == child.STARTED:
            running = told
            done = sum(result.rounds for part in (*before, record) for result in part.results)
            context.progress.show_activity(f"{backend} {told.variant} {told.case}, {done} cases done")
        else:
            running, record = None, replace(record, results=joined((*record.results, told)))
            merged = _merge_records([*before, record])
            context.progress.report_partial(Step("cut off", counts_in_words(merged.results), data=merged))

    environment = context.options.environment()
    try:
        return process.call(
            child.verify_back_end, request, backend, environment=environment, on_value=on_value, raises=(NotHereError,)
        )
    except process.EndedError as error:
        return _with_failure(record, backend, running, error)


def _with_failure(
    record: Verification, backend: str, running: Result | None, error: process.EndedError
) -> Verification:
    """Return the record of a process that ended before it could answer: the case that ran has failed.

    The finding says that the rest of the back end's cases are missing.
    """
    from vllm_aiter_mla.verify.results import Finding, Result

    case = running or Result("start", "none", backend, record.engine)
    message = f"{error.sentence(case.case)}; no later case of {backend} ran"
    failed = replace(case, status="failed", findings=[Finding("runs", message, "its process")])
    return replace(record, status=FAILED, results=(*record.results, failed))


def _merge_records(parts: Sequence[Verification]) -> Verification:
    """Return one record of all back ends."""
    from vllm_aiter_mla.verify.results import status_of

    results = tuple(result for part in parts for result in part.results)
    first = next((part for part in parts if part.machine), parts[0])
    sizes = next((part.sizes for part in parts if part.sizes), None)
    missing = {name: why for part in parts for name, why in part.missing.items()}
    return replace(first, status=status_of(results), sizes=sizes, missing=missing, results=results)


def _judge(context: Context, record: Verification) -> Step:
    """Return how the step ended: it passes if a kernel was compared, and each back end that was named was there."""
    options, plan = context.options, context.plan
    failed = [result for result in record.results if result.status == "failed"]
    lines = [
        f"{result.backend} {result.case}: {result.findings[0].oracle}: {result.findings[0].message}"
        + f"; {result.command}" * bool(result.command)
        for result in failed
    ]
    serving = set[str]()
    if plan is not None and plan.has_fp8_cache and not options.on_cpu:
        # The cases have fp8 caches whatever the model's is, and on a CPU only the reference runs.
        overflowing = {result.backend for result in record.results if result.writes_nan}
        serving = overflowing & {span.kernel for span in plan.kernels or ()}
        lines += [
            f"{name} {OVERFLOW}; " + ("it would serve" if name in serving else "start-up leaves it out")
            for name in sorted(overflowing)
        ]
    by_name = options.kernels.backend
    has_compared = record.status == PASSED
    if not options.on_cpu and "reference" not in by_name:  # the reference is compared with itself
        has_compared = has_compared and any(result.backend != "reference" for result in record.results)
    missing = {name: why for name, why in record.missing.items() if name in by_name or not has_compared}
    status: Status = "failed" if failed or serving else "passed" if has_compared and not missing else "skipped"
    ran = ", ".join(dict.fromkeys(result.backend for result in record.results)) or "no back end"
    detail = f"{counts_in_words(record.results)} ({record.engine}; {ran})"
    detail += "".join(f"; back end {name}: {why}" for name, why in missing.items())
    return Step(status, detail, tuple(lines), record)

# SPDX-License-Identifier: Apache-2.0
"""The step ``kernels``: capture graphs here, replay them as serving does, compare with the reference.

Each back end runs in a process of its own, which tells its results as they come: AITER's checks end one by an abort.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_aiter_mla.admission import OVERFLOW
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.context import NO_GPU, CheckOptions, Context, Weights
from vllm_aiter_mla.commands.check.record import Status, Step
from vllm_aiter_mla.commands.plan.issues import has_fp8_cache
from vllm_aiter_mla.verify import FAILED, NOTHING, PASSED

if TYPE_CHECKING:
    from vllm_aiter_mla.commands.plan.record import Plan
    from vllm_aiter_mla.verify.results import Result, Verification
    from vllm_aiter_mla.verify.session import NotHereError

STARTED = "started"
"""The status of a result that is told before its case runs."""
_MARKS = {"passed": "[green]ok[/]", "failed": "[red]FAILED[/]", "skipped": "[yellow]skipped[/]"}


def verify_kernels(context: Context) -> Step:
    """Verify the kernels at the model's shapes, up to its decode limit; without a model at DeepSeek's.

    On a CPU by eager replay of small shapes. A kernel that turns an fp8 overflow into NaN fails the step if the plan
    says that it would serve.
    """
    from vllm_aiter_mla.verify.session import FINDERS, NotHereError, chosen

    asked = _asked(context)
    records: list[Verification] = []
    for backend in chosen(context.options.kernels.backend, list(FINDERS), "--backend"):
        record = _in_a_process(context, asked, backend, records)
        if isinstance(record, NotHereError):
            return Step("skipped", NO_GPU if context.plan else str(record))
        records.append(record)
    return _judged(context, _merged(records))


def _in_a_process(
    context: Context, asked: Mapping[str, Any], backend: str, before: Sequence[Verification]
) -> Verification | NotHereError:
    """Return what ``run`` returns, or the record of a process that ended before; ``before`` are the others' records."""
    from vllm_aiter_mla.verify.results import Verification, joined

    record = Verification(NOTHING, {}, "no engine", None, {}, ())
    running: Result | None = None

    def heard(told: Verification | Result) -> None:
        nonlocal record, running
        if isinstance(told, Verification):  # what all results of this process share
            record = told
        elif told.status == STARTED:
            running = told
            done = sum(result.rounds for part in (*before, record) for result in part.results)
            context.progress.doing(f"{backend} {told.variant} {told.case}, {done} cases done")
        else:
            running, record = None, replace(record, results=joined((*record.results, told)))
            merged = _merged([*before, record])
            context.progress.so_far(Step("cut off", _counts_in_words(merged.results), data=merged))

    environment = context.options.environment()
    try:
        answer = process.call(f"{__name__}:run", asked, backend, environment=environment, heard=heard)
        return cast("Verification | NotHereError", answer)
    except process.EndedError as error:
        return _with_failure(record, backend, running, error)


def run(asked: Mapping[str, Any], backend: str) -> Verification | NotHereError:
    """Run one back end in this process; return the record, or that the device is not here.

    Before the first case its record without results is told, before each case a result that is ``STARTED``, and after
    it the result.

    Args:
        asked: ``sizes``, fields of a ``Geometry``; ``weights``, a value of ``Weights`` or None; what else ``Session``
            takes, by name.
        backend: its name.
    """
    from vllm_aiter_mla.kernels.platform import detect_platform
    from vllm_aiter_mla.verify import session
    from vllm_aiter_mla.verify.cases import REAL, TINY
    from vllm_aiter_mla.verify.results import Result

    given = dict(asked)
    sizes, weights = given.pop("sizes"), given.pop("weights")
    try:
        made = session.Session(
            (backend,),
            geometry=replace(TINY if given["small"] else REAL, **sizes) if sizes else None,
            weight=Weights(weights).key(detect_platform().fp8) if weights else None,
            **given,
        )
    except session.NotHereError as error:
        return error
    process.tell(made.record())
    for item in made.items:
        started = Result(item.case.name, item.variant.name, item.backend, made.engine.name, item.seed, STARTED)
        process.tell(replace(started, command=made.command(started)))
        process.tell(made.run_one(item))
    return made.record()


def _asked(context: Context) -> dict[str, Any]:
    """Return what ``run`` takes: what was asked for, and the sizes of the plan where there is one."""
    from vllm_aiter_mla.verify.cases import LIMITS

    options, plan = context.options, context.plan
    asked, layer = asdict(options.kernels), options.layer
    del asked["backend"]
    by_hand = {"heads": next(iter(layer.heads), None), "nope": layer.nope, "v": layer.v}
    asked["sizes"] = {name: size for name, size in by_hand.items() if size is not None}
    asked["weights"] = layer.weights.value if layer.weights else None
    asked["device"] = "cpu" if options.on_cpu else "gpu"
    asked["model"] = options.source.name if options.source else ""
    asked["again"] = _again(options, by_hand)
    asked["quick"] = asked["quick"] or plan is not None
    if plan is not None and not options.on_cpu:
        asked["sizes"], asked["weights"] = _sizes(plan), weights_of(plan)
        asked["limit"] = asked["limit"] or min(max(plan.limit, LIMITS[0]), LIMITS[1])
    return asked


def _again(options: CheckOptions, by_hand: Mapping[str, int | None]) -> tuple[str, ...]:
    """Return the words that a command needs besides MODEL and the names of a case to repeat it with the same data."""
    kernels, layer = options.kernels, options.layer
    typed: dict[str, object] = {
        "quick": kernels.quick and not kernels.replays, "small": kernels.small, "emulated": kernels.emulated,
        "limit": kernels.limit, "long-run": kernels.replays, "device": "cpu" if options.on_cpu else None, **by_hand,
        "weights": layer.weights.value if layer.weights else None, "arch": options.arch or None,
    }  # fmt: skip
    words = [
        word
        for name, value in typed.items()
        if value is not None and value is not False
        for word in ((f"--{name}",) if value is True else (f"--{name}", str(value)))
    ]
    for name, (value, origin) in options.variables.items():
        words += ["--env", f"{name}={value}"] * (origin == "--env")
    return (*words, *options.arguments)


def _sizes(plan: Plan) -> dict[str, Any]:
    """Return the sizes of the most frequent layer on one rank, as ``Geometry`` names them."""
    layer = plan.model.kinds[0]
    return {name: getattr(layer, name) for name in ("nope", "rope", "latent", "v")} | {"heads": plan.heads_per_rank}


def weights_of(plan: Plan) -> str:
    """Return the format of the absorb weights that were planned, by the name that `--weights` has for it."""
    name = str(plan.absorb_weight)
    return {"plain": "bf16"}.get(name, name)


def _with_failure(
    record: Verification, backend: str, running: Result | None, error: process.EndedError
) -> Verification:
    """Return the record of a process that ended before it could answer: the case that ran has failed.

    The finding says that the rest of the back end's cases are missing.
    """
    from vllm_aiter_mla.verify.results import Finding, Result

    case = running or Result("start", "none", backend, record.engine)
    message = f"{error.said(case.case)}; no later case of {backend} ran"
    failed = replace(case, status="failed", findings=[Finding("runs", message, "its process")])
    return replace(record, status=FAILED, results=(*record.results, failed))


def _merged(parts: Sequence[Verification]) -> Verification:
    """Return one record of all back ends."""
    from vllm_aiter_mla.verify.results import status_of

    results = tuple(result for part in parts for result in part.results)
    first = next((part for part in parts if part.machine), parts[0])
    sizes = next((part.sizes for part in parts if part.sizes), None)
    missing = {name: why for part in parts for name, why in part.missing.items()}
    return replace(first, status=status_of(results), sizes=sizes, missing=missing, results=results)


def _count(results: Sequence[Result]) -> Counter[str]:
    """Return how many cases ended in each status, each round of one counted."""
    counts = Counter[str]()
    for result in results:
        counts[result.status] += result.rounds
    return counts


def _counts_in_words(results: Sequence[Result]) -> str:
    counts = _count(results)
    return ", ".join(f"{counts[status]} {status}" for status in _MARKS)


def _judged(context: Context, record: Verification) -> Step:
    """Return how the step ended: it passes if a kernel was compared, and each back end that was named was there."""
    options, plan = context.options, context.plan
    failed = [result for result in record.results if result.status == "failed"]
    lines = tuple(
        f"{result.backend} {result.case}: {result.findings[0].oracle}: {result.findings[0].message}"
        + f"; {result.command}" * bool(result.command)
        for result in failed
    )
    serving = set[str]()
    if plan is not None and has_fp8_cache(plan) and not options.on_cpu:
        # The cases have fp8 caches whatever the model's is, and on a CPU only the reference runs.
        overflowing = {result.backend for result in record.results if result.writes_nan}
        serving = overflowing & {span.kernel for span in plan.kernels or ()}
        lines += tuple(
            f"{name} {OVERFLOW}; " + ("it would serve" if name in serving else "start-up leaves it out")
            for name in sorted(overflowing)
        )
    by_name = options.kernels.backend
    missing = {name: why for name, why in record.missing.items() if name in by_name}
    able = record.status == PASSED and not missing
    if not options.on_cpu and "reference" not in by_name:  # which is compared with itself
        able = able and any(result.backend != "reference" for result in record.results)
    status: Status = "failed" if failed or serving else "passed" if able else "skipped"
    ran = ", ".join(dict.fromkeys(result.backend for result in record.results)) or "no back end"
    detail = f"{_counts_in_words(record.results)} ({record.engine}; {ran})"
    detail += "".join(f"; back end {name}: {why}" for name, why in missing.items())
    return Step(status, detail, lines, record)


def list_cases(console: Console) -> None:
    """Print the cases and the oracles."""
    from vllm_aiter_mla.verify import cases, oracles

    console.print("cases:")
    for case in cases.cases(cases.LIMITS[0]):
        console.print(f"  {case.name}: {case.serving}", soft_wrap=True)
    console.print("oracles:")
    for name, meaning in oracles.ORACLES.items():
        console.print(f"  {name}: {meaning}", soft_wrap=True)


def show(record: Verification, console: Console) -> None:
    """Print a table for each back end, and each failure with the command that repeats it."""
    if record.machine:
        console.print("machine: " + escape(", ".join(f"{name} {value}" for name, value in record.machine.items())))
    if "eager" in record.engine:
        console.print(
            "[bold]graph capture: not available on this machine[/]: torch sees no GPU. What follows is eager replay: "
            "recorded ATen calls, repeated on the same tensors with the same Python values. It says nothing about a "
            "driver, a kernel on a GPU or time."
        )
    for name, reason in record.missing.items():
        console.print(f"back end {name}: not available: {escape(reason)}")
    for backend in dict.fromkeys(result.backend for result in record.results):
        console.print(_table(backend, [result for result in record.results if result.backend == backend]))
    for line in _outcome(record):
        console.print(line, soft_wrap=True)


def _table(backend: str, results: list[Result]) -> Table:
    """Return a row per case, with its variants, and what was done."""
    table = Table(title=f"{backend}: {results[0].engine}", title_justify="left", padding=(0, 1), pad_edge=False)
    for name in ("case", "variants", "graphs", "replays", "checks", "seconds"):
        table.add_column(name, justify="left" if name in ("case", "variants") else "right", no_wrap=True)
    for case in dict.fromkeys(result.case for result in results):
        of_case = [result for result in results if result.case == case]
        counts = _count(of_case)
        marks = ", ".join(f"{counts[status]} {mark}" for status, mark in _MARKS.items() if counts[status])
        sums = (str(sum(getattr(result, name) for result in of_case)) for name in ("captures", "replays", "checks"))
        table.add_row(case, marks, *sums, f"{sum(result.seconds for result in of_case):.2f}")
    return table


def _outcome(record: Verification) -> Iterator[str]:
    """Yield each failure, the reasons of skipped cases, the launches of a step, the oracles, and the sums."""
    from vllm_aiter_mla.verify.oracles import ORACLES

    for result in (result for result in record.results if result.status == "failed"):
        often = f", first of {result.rounds} rounds that failed" * (result.rounds > 1)
        yield f"\n[red bold]FAILED[/] {result.backend} {result.case} ({result.variant}, seed {result.seed}{often})"
        for finding in result.findings[:6]:
            yield f"  {finding.oracle}: {escape(finding.message)}"
            yield f"    must hold: {ORACLES[finding.oracle]}"
            yield f"    at {escape(finding.step)}"
        if result.command:
            yield f"  reproduce: {escape(result.command)}"
    yield from dict.fromkeys(f"{r.backend} {r.case}: {escape(r.reason)}" for r in record.results if r.reason)
    for result in record.results:
        if result.case == "kernel-status" and result.launches:
            size, text = next(iter(result.launches.items()))
            yield f"launches of {result.backend} {result.variant}, T={size}: {escape(text)}"
    yield f"oracles: {', '.join(ORACLES)}"
    replays, seconds = (sum(getattr(result, name) for result in record.results) for name in ("replays", "seconds"))
    yield f"{record.engine}: {_counts_in_words(record.results)}; {replays} replays; {seconds:.1f} s"

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
from vllm_aiter_mla.commands.check.context import NO_GPU, Context, Weights, WrongOptionError
from vllm_aiter_mla.commands.check.record import Status, Step
from vllm_aiter_mla.commands.plan.issues import has_fp8_cache
from vllm_aiter_mla.verify import FAILED, NOTHING, PASSED

if TYPE_CHECKING:
    from vllm_aiter_mla.commands.plan.record import Plan
    from vllm_aiter_mla.verify.results import Result, Verification

STARTED = "started"
"""The status of a result that is told before its case runs."""
_MARKS = {"passed": "[green]ok[/]", "failed": "[red]FAILED[/]", "skipped": "[yellow]skipped[/]"}


def kernels(context: Context) -> Step:
    """Verify the kernels at the model's shapes, up to its decode limit; without a model at DeepSeek's.

    On a CPU by eager replay of small shapes. A kernel that turns an fp8 overflow into NaN fails the step if the plan
    says that it would serve.

    Raises:
        WrongOptionError: a case, variant, back end or size does not exist.
    """
    from vllm_aiter_mla.verify.session import FINDERS, NotHereError, chosen

    try:
        backends = chosen(context.kernels.backend, list(FINDERS), "--backend")
    except ValueError as error:
        raise WrongOptionError(str(error)) from error
    options, parts = _options(context), list[Any]()
    for name in backends:
        found = _in_a_process(context, options, name, parts)
        if isinstance(found, NotHereError):
            return Step("skipped", NO_GPU if context.plan else str(found))
        if isinstance(found, Exception):
            raise WrongOptionError(str(found))
        parts.append(found)
    return _judged(context, _merged(parts))


def _in_a_process(
    context: Context, options: Mapping[str, Any], backend: str, before: Sequence[Verification]
) -> Verification | Exception:
    """Return what ``run`` returns, or the record of a process that ended before; ``before`` are the others' records."""
    from vllm_aiter_mla.verify.results import Verification, joined

    told, running = [Verification(NOTHING, {}, "no engine", None, {}, ())], list[Any]()

    def heard(value: Verification | Result) -> None:
        if isinstance(value, Verification):  # what all results of this process share
            told[0] = value
        elif value.status == STARTED:
            running[:] = [value]
            done = sum(result.rounds for part in (*before, *told) for result in part.results)
            context.now(f"{backend} {value.variant} {value.case}, {done} cases done")
        else:
            running.clear()
            told[0] = replace(told[0], results=joined((*told[0].results, value)))
            found = _merged([*before, *told])
            context.so_far(Step("cut off", _counted(found.results), data=found))

    try:
        found = process.call(f"{__name__}:run", options, backend, environment=context.environment(), heard=heard)
        return cast("Verification | Exception", found)
    except process.EndedError as error:
        return _with_failure(told[0], backend, running, error)


def run(options: Mapping[str, Any], backend: str) -> Any:
    """Run one back end in this process; return the record.

    Before the first case its record without results is told, before each case a result that is ``STARTED``, and after
    it the result. A ``NotHereError`` or ``ValueError`` of the session is returned.
    """
    from vllm_aiter_mla.kernels.platform import detect_platform
    from vllm_aiter_mla.verify import session
    from vllm_aiter_mla.verify.cases import REAL, TINY
    from vllm_aiter_mla.verify.results import Result

    given = dict(options)
    sizes, weights = given.pop("sizes"), given.pop("weights")
    try:
        made = session.Session(
            (backend,),
            geometry=replace(TINY if given["small"] else REAL, **sizes) if sizes else None,
            weight=Weights(weights).key(detect_platform().fp8) if weights else None,
            **given,
        )
    except (ValueError, session.NotHereError) as error:
        return error
    process.tell(made.record())
    for item in made.items:
        started = Result(item.case.name, item.variant.name, item.backend, made.engine.name, item.seed, STARTED)
        process.tell(replace(started, command=made.command(started)))
        process.tell(made.run_one(item))
    return made.record()


def _options(context: Context) -> dict[str, Any]:
    """Return what ``run`` takes: as asked, and from the plan where there is one."""
    from vllm_aiter_mla.verify.cases import LIMITS

    asked, layer, plan = asdict(context.kernels), context.layer, context.plan
    del asked["backend"]
    if len(layer.heads) > 1:
        raise WrongOptionError(f"--heads {layer.heads[1]}: the step kernels takes one number of heads")
    given = {"heads": next(iter(layer.heads), None), "nope": layer.nope, "v": layer.v}
    sizes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    weights = layer.weights.value if layer.weights else None
    asked["quick"] = asked["quick"] or plan is not None
    if plan is not None and not context.on_cpu:
        sizes, weights = _sizes(plan), weights_of(plan)
        asked["limit"] = asked["limit"] or min(max(plan.limit, LIMITS[0]), LIMITS[1])
    again = _as_typed({
        "quick": asked["quick"] and not asked["replays"], "small": asked["small"], "emulated": asked["emulated"],
        "limit": asked["limit"], "long-run": asked["replays"], "device": "cpu" if context.on_cpu else None,
        **{name: sizes[name] for name in given if name in sizes}, "weights": weights,
    })  # fmt: skip
    device = "cpu" if context.on_cpu else "gpu"
    return asked | {"sizes": sizes, "weights": weights, "device": device, "again": again}


def _sizes(plan: Plan) -> dict[str, Any]:
    """Return the sizes of the most frequent layer on one rank, as ``Geometry`` names them."""
    found = plan.model.kinds[0]
    return {name: getattr(found, name) for name in ("nope", "rope", "latent", "v")} | {"heads": plan.heads_per_rank}


def weights_of(plan: Plan) -> str:
    """Return the format of the absorb weights that were planned, by the name that `--weights` has for it."""
    found = str(plan.absorb_weight)
    return {"plain": "bf16"}.get(found, found)


def _as_typed(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return options as they are typed, without the switches that are off and the options that are not given."""
    given = ((name, value) for name, value in options.items() if value is not None and value is not False)
    return tuple(f"--{name}" if value is True else f"--{name} {value}" for name, value in given)


def _with_failure(
    record: Verification, backend: str, running: Sequence[Result], error: process.EndedError
) -> Verification:
    """Return the record of a process that ended before it could answer: the case that ran has failed."""
    from vllm_aiter_mla.verify.results import Finding, Result

    case = running[0] if running else Result("start", "none", backend, record.engine)
    failed = replace(case, status="failed", findings=[Finding("runs", error.said(case.case), "its process")])
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


def _counted(results: Sequence[Result]) -> str:
    counts = _count(results)
    return ", ".join(f"{counts[status]} {status}" for status in _MARKS)


def _judged(context: Context, found: Verification) -> Step:
    failed = [result for result in found.results if result.status == "failed"]
    lines = tuple(
        f"{result.backend} {result.case}: {result.findings[0].oracle}: {result.findings[0].message}"
        + f"; {result.command}" * bool(result.command)
        for result in failed
    )
    serving = set[str]()
    if context.plan is not None and has_fp8_cache(context.plan) and not context.on_cpu:
        # The cases have fp8 caches whatever the model's is, and on a CPU only the reference runs.
        overflowing = {result.backend for result in found.results if result.writes_nan}
        serving = overflowing & {span.kernel for span in context.plan.kernels or ()}
        lines += tuple(
            f"{name} {OVERFLOW}; " + ("it would serve" if name in serving else "start-up leaves it out")
            for name in sorted(overflowing)
        )
    ran = ", ".join(dict.fromkeys(result.backend for result in found.results)) or "no back end"
    asked = {name: why for name, why in found.missing.items() if name in context.kernels.backend}
    able = found.status == PASSED and not asked
    if not context.on_cpu and "reference" not in context.kernels.backend:  # which is compared with itself
        able = able and any(result.backend != "reference" for result in found.results)
    status: Status = "failed" if failed or serving else "passed" if able else "skipped"
    detail = f"{_counted(found.results)} ({found.engine}; {ran})"
    detail += "".join(f"; back end {name}: {why}" for name, why in asked.items())
    return Step(status, detail, lines, found)


def listing(console: Console) -> None:
    """Print the cases and the oracles."""
    from vllm_aiter_mla.verify import cases, oracles

    console.print("cases:")
    for case in cases.cases(cases.LIMITS[0]):
        console.print(f"  {case.name}: {case.serving}", soft_wrap=True)
    console.print("oracles:")
    for name, meaning in oracles.ORACLES.items():
        console.print(f"  {name}: {meaning}", soft_wrap=True)


def show(found: Verification, console: Console) -> None:
    """Print a table for each back end, and each failure with the command that repeats it."""
    if found.machine:
        console.print("machine: " + escape(", ".join(f"{name} {value}" for name, value in found.machine.items())))
    if "eager" in found.engine:
        console.print(
            "[bold]graph capture: not available on this machine[/]: torch sees no GPU. What follows is eager replay: "
            "recorded ATen calls, repeated on the same tensors with the same Python values. It says nothing about a "
            "driver, a kernel on a GPU or time."
        )
    for name, reason in found.missing.items():
        console.print(f"back end {name}: not available: {escape(reason)}")
    for backend in dict.fromkeys(result.backend for result in found.results):
        console.print(_table(backend, [result for result in found.results if result.backend == backend]))
    for line in _outcome(found):
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


def _outcome(found: Verification) -> Iterator[str]:
    """Yield each failure, the reasons of skipped cases, the launches of a step, the oracles, and the sums."""
    from vllm_aiter_mla.verify.oracles import ORACLES

    for result in (result for result in found.results if result.status == "failed"):
        often = f", first of {result.rounds} rounds that failed" * (result.rounds > 1)
        yield f"\n[red bold]FAILED[/] {result.backend} {result.case} ({result.variant}, seed {result.seed}{often})"
        for finding in result.findings[:6]:
            yield f"  {finding.oracle}: {escape(finding.message)}"
            yield f"    must hold: {ORACLES[finding.oracle]}"
            yield f"    at {escape(finding.step)}"
        if result.command:
            yield f"  reproduce: {result.command}"
    yield from dict.fromkeys(f"{r.backend} {r.case}: {escape(r.reason)}" for r in found.results if r.reason)
    for result in found.results:
        if result.case == "kernel-status" and result.launches:
            size, text = next(iter(result.launches.items()))
            yield f"launches of {result.backend} {result.variant}, T={size}: {escape(text)}"
    yield f"oracles: {', '.join(ORACLES)}"
    replays, seconds = (sum(getattr(result, name) for result in found.results) for name in ("replays", "seconds"))
    yield f"{found.engine}: {_counted(found.results)}; {replays} replays; {seconds:.1f} s"

# SPDX-License-Identifier: Apache-2.0
"""What a page shows of each kind of file: a worker's status, and a check with the records in its steps."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import OVERFLOW, REMEDIES
from vllm_aiter_mla.commands.check.record import CheckRun, Step
from vllm_aiter_mla.commands.check.timing import Measurement
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.commands.report import charts
from vllm_aiter_mla.commands.report.blocks import NO_CARD, NOTHING_RAN, Glance, Page
from vllm_aiter_mla.status import line
from vllm_aiter_mla.status.record import RankStatus
from vllm_aiter_mla.verify.results import Verification


def _status(
    page: Page, name: str, layers: str, kernels: Iterable[str], cache: str, limit: int | None,
    skipped: Iterable[tuple[str, Sequence[str]]], planned: bool,
) -> None:  # fmt: skip
    """Add a row to the table of layers; ``skipped`` names each layer with code and reason."""
    reasons = defaultdict(list)
    for layer, (code, text) in skipped:
        reasons[f"{code}: {text}"].append(layer)
    cells = [f"{why} ({len(layers)}): {', '.join(layers)}" for why, layers in reasons.items()]
    heads = ("input", "would engage" if planned else "MLA layers", "kernel", "KV cache", "decode limit", "skipped")
    shown = f"1..{limit}" if limit else None
    row = (name, layers, ", ".join(sorted(kernels)) or None, cache, shown, cells or "none")
    page.add("Plan" if planned else "Status", "Layers", heads, [row], planned=planned)


def _ranges(
    page: Page, name: str, ranges: Sequence[Sequence[int]], limit: int | None, sizes: Sequence[int], note: str = "",
    planned: bool = False,
) -> None:  # fmt: skip
    rows = []
    for first, last in ranges:
        inside = ", ".join(str(size) for size in sizes if first <= size <= last)
        own = "rewritten" if limit is not None and last <= limit else "vLLM's own"
        rows.append((f"{first}-{last}", own, inside or None))
    heads, title = ("range, tokens", "graph", "capture sizes"), ", ".join(row[0] for row in rows)
    title += f"; decode limit {limit}" if limit else "; flag off"
    draw = partial(charts.token_axis, ranges, limit, sizes, planned=planned)
    title = f"Planned: {title}" if planned else title
    page.add("Compile ranges", title, heads, rows, draw, [f"{name}. {note}"], planned=planned)


def status_file(page: Page, name: str, data: RankStatus) -> Glance:
    """Add a worker's status, its compiled ranges, and the kernels that it timed."""
    rank, limit = f"{name}, rank {data.rank}", data.decode_limit or None
    layers, kernels = f"{len(data.engaged)}/{data.total}", set(data.engaged.values())
    _status(page, rank, layers, kernels, data.kv_cache_dtype, limit, data.skipped.items(), planned=False)
    ranges = sorted([int(part) for part in key.split("-")] for key in data.compiled)
    if ranges:
        _ranges(page, rank, ranges, limit, data.capture_sizes)
    else:
        page.add("Compile ranges", rank, notes=["This status names no compile range: a warm start, or no graph."])
    for shape in data.measured:
        names = sorted({kernel for figures in shape.us.values() for kernel in figures})
        rows = [(t, *map(by.get, names), shape.runs(t)) for t, by in sorted(shape.us.items())]
        where = ", ".join(f"{kernel} {first}..{last}" for first, last, kernel in shape.chosen)
        heads = ("tokens", *(kernel + charts.MICROSECONDS for kernel in names), "runs")
        title, note = f"Timed at start-up, {shape.shape}: {where}", f"{rank}: {len(shape.layers)} layers"
        page.add("Status", title, heads, rows, partial(charts.lines, "us a layer", heads, rows), [note])
    word = "skipped" if not data.engaged else "engaged" if len(data.engaged) == data.total else "partly"
    reasons = dict.fromkeys(f"{code}: {text}" for code, text in data.skipped.values())
    on = "a CPU, for tests" if data.card == "cpu" else data.card or "not told: the engine was skipped as a whole"
    return Glance(word, f"server of {data.model_name or 'a model'}", on, line.of(data), tuple(reasons), run=data.run)


def _label(data: Plan) -> str:
    return f"{data.model.name} on {data.arch}, TP {data.options.tp}, {data.options.kv_cache_dtype} cache"


def plan(page: Page, name: str, data: Plan) -> None:
    """Add a plan: nothing in it was run."""
    captures, cache = data.captures, data.options.kv_cache_dtype
    label = f"{name}: {_label(data)}"
    kernels = {span.kernel for span in data.kernels or () if span.kernel}
    skipped = [(f"{one.scope} {one.code}", (one.code, one.message)) for one in data.reasons]
    shown = f"{data.layers.engaged}/{data.layers.mla}"
    _status(page, label, shown, kernels, cache, data.limit, skipped, planned=True)
    sizes = (*captures.inside, *captures.outside)
    _ranges(page, label, data.compile_ranges.ranges, data.limit, sizes, captures.note, planned=True)
    rows = [
        (tokens, path, len(one.launches), one.launches_per_step, f"{one.bytes:,}")
        for tokens, paths in (data.figures.by_tokens if data.figures else {}).items()
        for path, one in paths.items()
    ]
    heads = ("tokens", "path", "launches per layer", "launches per step", "bytes per layer")
    parts = {path: {"launches": float(count)} for _, path, count, *_ in rows}
    draw = partial(charts.bars, "launches per layer", parts, planned=True)
    page.add("Launches", f"Launches by formula, {label}", heads, rows, draw, planned=True)
    issues = [(label, one.id, one.effect, one.state, one.remedy, one.link) for one in data.known_issues]
    if issues:
        columns = ("input", "issue", "effect", "state", "remedy", "link")
        page.add("Plan", "Known issues beside the plugin", columns, issues, planned=True)


def timing(page: Page, name: str, data: Measurement) -> None:
    """Add one chart and table per number of heads and type: time over tokens, one line per kernel."""
    alarms = [f"stopped at {data.stopped}"] if data.stopped else []
    alarms += [f"wrong, not timed: {kernel}: {why}" for kernel, why in data.wrong.items()]
    note = f"Medians of replayed graphs, {data.weights} weights. Ratio: the fastest rival's time over ours."
    page.add("Timing", name, notes=[note], alarms=alarms)
    for (heads, kind), group in groupby(data.rows, lambda row: (row.heads, row.kind)):
        found = list(group)
        kernels = list(dict.fromkeys(kernel for row in found for kernel in row.us))
        columns = ("tokens", *(kernel + charts.MICROSECONDS for kernel in kernels), "ratio")
        rows = [(row.tokens, *map(row.us.get, kernels), row.ratio) for row in found]
        slower = [str(row.tokens) for row in found if row.ratio is not None and row.ratio < 1]
        alarms = [f"Our fastest kernel is slower than a rival at {', '.join(slower)} tokens."] if slower else []
        notes = [f"{kernel}: not timed: {why}" for row in found for kernel, why in row.untimed.items()]
        notes += [f"{kernel} does not count as ours: it {OVERFLOW}" for row in found for kernel in row.left_out]
        draw = partial(charts.lines, "us a call", columns, rows)
        page.add("Timing", f"{name}: {heads} heads, {kind}", columns, rows, draw, notes, alarms)


def kernels(page: Page, name: str, data: Verification) -> None:
    """Add results by back end, failures with the command that repeats them, and counted launches."""
    results, on_cpu = data.results, "eager" in data.engine
    counts = {backend: dict.fromkeys(charts.STATES, 0) for backend in dict.fromkeys(one.backend for one in results)}
    notes = ["No graph was captured on this machine."] if on_cpu else []
    notes += [f"{backend}: not measured: {why}" for backend, why in data.missing.items()]
    alarms = []
    for one in results:
        counts[one.backend][one.status] += 1
        if one.status == "skipped":
            notes.append(f"skipped: {one.reason}")
        if one.status == "failed":
            said = "; ".join(f"{found.oracle} at {found.step}: {found.message}" for found in one.findings)
            alarms.append(f"{one.case} ({one.variant}, {one.backend}) failed: {said}. {one.command}".strip())
    rows = [(backend, *count.values()) for backend, count in counts.items()]
    draw = partial(charts.bars, "results", counts)
    page.add("Kernels", f"{name}, {data.engine}", ("back end", *charts.STATES), rows, draw, notes, alarms)
    fields = ("backend", "case", "variant", "status", "replays", "checks")
    page.add("Kernels", f"All results, {name}", fields, [[getattr(one, field) for field in fields] for one in results])
    title = f"PyTorch ops of a replayed step, no GPU, {name}" if on_cpu else f"Launches in captured graphs, {name}"
    counted = [(one.backend, one.variant, *found) for one in results for found in one.launches.items()]
    page.add("Launches", title, ("backend", "variant", "tokens", "counted"), counted)


def _card(machine: Mapping[str, str]) -> str:
    card = machine.get("card", "")
    return NO_CARD if not card or card.startswith("none") else f"{card} {machine.get('arch', '')}".strip()


VERSIONS = {"torch": "torch", "runtime": "for", "triton": "Triton", "python": "Python"}
"""Versions of ``stopwatch.machine`` on the first screen, with the words before them."""


def _others(machine: Mapping[str, str]) -> dict[str, str]:
    return {shown: machine[name] for name, shown in VERSIONS.items() if machine.get(name)}


def _is_plan(step: Step) -> bool:
    """Return whether a step only promises: a plan that passed, also of another cache, never looks like what ran."""
    return step.name.partition(",")[0] == "plan" and step.status == "passed"


RECORDS: dict[str, tuple[str, type[Any], Callable[[Page, str, Any], None]]] = {
    "plan": ("plan", Plan, plan),
    "kernels": ("kernels", Verification, kernels),
    "timing": ("timing", Measurement, timing),
}
"""Schema, record and reader by step."""


def check(page: Page, name: str, data: CheckRun) -> Glance:
    """Add the steps of a check, and what its plan, its kernels and its timings found."""
    rows = [
        (step.name, NOTHING_RAN if _is_plan(step) else step.status, step.detail, list(step.lines))
        for step in data.steps
    ]
    alarms = [f"{step.name} FAILED: {step.detail}" for step in data.steps if step.status == "failed"]
    if data.exit is None:
        alarms.append(f"The run was cut off after the step {data.steps[-1].name}." if data.steps else "No step ended.")
    notes = [f"{step.name}: no gain: {step.detail}" for step in data.steps if step.status == "no gain"]
    columns = ("step", "outcome", "finding", "more")
    page.add("Check", f"{name}, {_what(data)}: the steps", columns, rows, notes=notes, alarms=alarms)
    records = [*_records(data)]
    for reader, record in records:
        reader(page, name, record)
        machine = [(name, *one) for one in getattr(record, "machine", {}).items()]
        page.add("Versions", "Versions", ("input", "what", "version"), machine)
    found = {step.name: step.data for step in data.steps}
    compared: Any = (found.get("engine") or {}).get("distances") or {}
    heads: tuple[str, ...] = ("scenario", "tokens", "equal", "compared", "agreed", "max |dlogprob|", "mean", "top-1")
    if compared:
        tokens = [(scenario, *figures.values()) for scenario, figures in compared.items()]
        page.add("Check", f"Flag off and on, token by token, {name}", heads, tokens)
    prefill: Any = found.get("prefill") or {}
    heads = ("step", "prompts", "equal bytes", "off, repeated", "max |dlogprob|", "off ms", "on ms")
    if prefill:
        rows = [(what, *figures.values()) for what, figures in prefill.items()]
        page.add("Check", f"Steps with prefill rows, flag off and on, {name}", heads, rows)
    counts: Any = found.get("launches") or {}
    if counts:
        page.add("Launches", f"Kernels of one decode step, {name}", ("side", "kernels"), counts.items())
    return _of_check(data, found.get("machine"), [record for _, record in records])


def _what(data: CheckRun) -> str:
    return data.model or "no model"


def _records(data: CheckRun) -> Iterator[tuple[Callable[[Page, str, Any], None], Any]]:
    """Yield each record in the steps with its reader; tiles that were tuned are not shown."""
    for step in data.steps:
        schema, cls, reader = RECORDS.get(step.name.partition(",")[0], ("", object, lambda *_: None))
        for one in step.data if isinstance(step.data, list) else [step.data]:
            if schema and files.stamp_in(one)[0] == schema:
                yield reader, files.part(cls, Path(step.name), one)


MEANING = {
    None: ("cut off", "the run was cut off: nothing is shown"),
    0: ("passed", "every step that ran passed"),
    1: ("failed", "do not switch the fast path on before the failed steps pass"),
    2: ("failed", "an option or the model was wrong, and the rest did not run"),
    3: ("skipped", "something could not be told, nothing ran on a card, or a step that was asked for did not run"),
    4: ("no gain", "vLLM's own kernels are the fastest for this model on this card: leave the flag off"),
}
"""Outcome and meaning of each exit status of ``check``."""
PROMISES = ("machine", "plan", "issues")
"""Steps that run nothing of the fast path."""


def _of_check(data: CheckRun, machine: Any, records: Sequence[Any]) -> Glance:
    """Return the glance of a check. Card and versions are those of its records, or of the step ``machine``."""
    word, means = MEANING.get(data.exit, ("failed", f"exit status {data.exit}"))
    plans = [one for one in records if isinstance(one, Plan)]
    ran = [step.name for step in data.steps if step.status in ("passed", "warning") and not _is_plan(step)]
    failed = [step.name for step in data.steps if step.status == "failed"]
    means += f": {', '.join(failed)}" if failed else f": {', '.join(ran)}" if word == "passed" else ""
    here = {one["name"]: one["detail"] for one in machine or () if one["status"] in ("ok", "warning")}
    used: dict[str, str] = next((one.machine for one in records if getattr(one, "machine", None)), {})
    card = _card(used) if used else here.get("gpu", NO_CARD)
    if plans and all(step.name in PROMISES for step in data.steps):
        word, card, means = NOTHING_RAN, f"none: planned for {plans[0].arch}", _promise(plans)
    if any(getattr(one, "emulated", False) for one in records):
        card, means = f"emulated: {card}", f"{means}; an emulator says nothing of time, nor of a card's faults"
    if any(isinstance(one, Verification) and "eager" in one.engine for one in records):
        means += "; no graph was captured"
    open_ = [f"{step.name}: {step.detail}" for step in data.steps if step.status in ("skipped", "unknown")]
    open_ += [f"{one.code}: {one.message} -> {REMEDIES.get(one.code, '')}" for made in plans for one in made.reasons]
    open_ += [f"{kernel}: {why}" for one in records for kernel, why in getattr(one, "missing", {}).items()]
    named = {shown: here[name] for name, shown in (("torch", "torch"), ("rocm", "ROCm")) if name in here}
    what = " and ".join(map(_label, plans)) or _what(data)
    return Glance(word, f"check of {what}", card, means, list(dict.fromkeys(open_)), named | _others(used))


def _promise(plans: Sequence[Plan]) -> str:
    """Return what plans alone mean."""
    if any(one.outcome == "unknown" for one in plans):
        return "nothing was run, and vLLM could not say whether layers would engage"
    layers = ", ".join(f"{one.layers.engaged}/{one.layers.mla} at TP {one.options.tp}" for one in plans)
    return f"nothing was run: by vLLM's own config these MLA layers would engage: {layers}"


READERS: dict[str, tuple[type[Any], Callable[[Page, str, Any], Glance]]] = {
    "check": (CheckRun, check),
    "status": (RankStatus, status_file),
}
"""Record and reader by the schema that a file's stamp names."""

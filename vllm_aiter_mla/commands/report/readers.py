# SPDX-License-Identifier: Apache-2.0
"""What a page shows of each kind of file: a worker's status, a check with the records in its steps, two servers."""

import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import OVERFLOW, REMEDIES
from vllm_aiter_mla.commands.check.record import CheckRun, Step
from vllm_aiter_mla.commands.check.timing import Measurement
from vllm_aiter_mla.commands.plan.formulas import Launch
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.commands.report import charts
from vllm_aiter_mla.commands.report.blocks import NO_CARD, NOTHING_RAN, ON_CPU, Glance, Page
from vllm_aiter_mla.commands.report.serving import LENGTHS, METRICS, OFF, ON, SIDES, Estimate, Serving
from vllm_aiter_mla.status.line import status_line
from vllm_aiter_mla.status.record import RankStatus
from vllm_aiter_mla.status.status_files import front_end_lives
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
    title = f"Planned: {title}" if planned else title
    page.add("Compile ranges", title, heads, rows, notes=[f"{name}. {note}"], planned=planned)


def _spans(
    page: Page, section: str, about: str, note: str, spans: Sequence[tuple[int, int, str]], planned: bool
) -> None:
    """Add which kernel runs at how many tokens; what it runs on in several ways counts once."""
    joined = [[*group] for _, group in groupby(spans, lambda span: span[2])]
    spans = [(group[0][0], group[-1][1], group[0][2]) for group in joined]
    title = f"{about}: " + ", ".join(f"{kernel} {first}..{last}" for first, last, kernel in spans)
    strip = {"": [(first, last + 1, kernel) for first, last, kernel in spans]}
    draw = partial(charts.strips, "tokens in the step", strip, planned=planned, log=True)
    rows = [(f"{first}..{last}", kernel) for first, last, kernel in spans]
    page.add(section, title, ("tokens", "kernel"), rows, draw, [note], planned=planned)


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
    for made in data.decided:
        if made.kernels:
            _spans(
                page, "Status", "Which kernel runs", f"{rank}: {len(made.layers)} layers", made.kernels, planned=False
            )
    for shape in data.measured:
        names = sorted({kernel for figures in shape.us.values() for kernel in figures})
        rows = [(t, *map(by.get, names), shape.chosen_at(t)) for t, by in sorted(shape.us.items())]
        where = ", ".join(f"{kernel} {first}..{last}" for first, last, kernel in shape.chosen)
        heads = ("tokens", *(f"{kernel}, us" for kernel in names), "runs")
        title, note = f"Timed at start-up, {shape.shape}: {where}", f"{rank}: {len(shape.layers)} layers"
        page.add("Status", title, heads, rows, _over_tokens("us a layer", names, rows), [note])
    word, means = _lives(page.folder, data)
    reasons = dict.fromkeys(f"{code}: {text}" for code, text in data.skipped.values())
    on = "a CPU, for tests" if data.card == "cpu" else data.card or "not told: the engine was skipped as a whole"
    return Glance(word, f"server of {data.model_name or 'a model'}", on, means, tuple(reasons), run=data.run)


def _lives(folder: Path, data: RankStatus) -> tuple[str, str]:
    """Return the word for a status and what it means: only a server that lives can be engaged."""
    lives = front_end_lives(folder, data.run) if data.evidence.host == socket.gethostname() else None
    if not lives:
        said = "whether its server lives cannot be told here" if lives is None else "its server has ended"
        return "unknown" if lives is None else "ended", f"{said}; it had: {status_line(data)}"
    word = "skipped" if not data.engaged else "engaged" if len(data.engaged) == data.total else "partly"
    return "engaged on a CPU" if word == "engaged" and data.card == "cpu" else word, status_line(data)


def _over_tokens(unit: str, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> charts.Chart:
    """Return a chart of the columns ``names`` over the first one, tokens."""
    series = {name: [(row[number], 0.0) for row in rows] for number, name in enumerate(names, 1)}
    return partial(charts.lines, "tokens in the step", unit, [row[0] for row in rows], series)


def _label(data: Plan) -> str:
    return f"{data.model.name} on {data.arch}, TP {data.options.tp}, {data.options.kv_cache_dtype} cache"


def _nearness(tokens: int) -> int:
    """Return how far a step is from the one whose layer is drawn."""
    return abs(tokens - 64)


def _end_to_end(launches: Sequence[Launch]) -> list[tuple[float, float, str]]:
    """Return the parts of a strip: launch after launch, in MB moved."""
    ends = [*accumulate((launch.read + launch.written for launch in launches), initial=0)]
    return [(at / 1e6, end / 1e6, of.name) for (at, end), of in zip(pairwise(ends), launches, strict=True)]


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
    if data.kernels:
        runs = [(span.first, span.last, span.kernel or "vllm") for span in data.kernels]
        _spans(
            page,
            "Plan",
            f"Which kernel could run, {label}",
            "The first start on a card times them.",
            runs,
            planned=True,
        )
    by_tokens = data.figures.by_tokens if data.figures else {}
    rows = [
        (tokens, path, len(one.launches), one.launches_per_step, f"{one.bytes:,}")
        for tokens, paths in by_tokens.items()
        for path, one in paths.items()
    ]
    heads = ("tokens", "path", "launches per layer", "launches per step", "bytes per layer")
    page.add("Launches", f"Launches by formula, {label}", heads, rows, planned=True)
    for tokens in sorted(by_tokens, key=_nearness)[:1]:
        strip = {path: _end_to_end(cost.launches) for path, cost in by_tokens[tokens].items()}
        moved = [
            (path, launch.name, f"{launch.read + launch.written:,}")
            for path, cost in by_tokens[tokens].items()
            for launch in cost.launches
        ]
        title = f"One layer at {tokens} tokens by formula, {label}"
        draw = partial(charts.strips, "MB moved, launch after launch", strip, planned=True)
        page.add("Launches", title, ("path", "launch", "bytes"), moved, draw, planned=True)
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
        columns = ("tokens", *(f"{kernel}, us" for kernel in kernels), "ratio")
        rows = [(row.tokens, *map(row.us.get, kernels), row.ratio) for row in found]
        slower = [str(row.tokens) for row in found if row.ratio is not None and row.ratio < 1]
        alarms = [f"Our fastest kernel is slower than a rival at {', '.join(slower)} tokens."] if slower else []
        notes = [f"{kernel}: not timed: {why}" for row in found for kernel, why in row.untimed.items()]
        notes += [f"{kernel} does not count as ours: it {OVERFLOW}" for row in found for kernel in row.left_out]
        draw = _over_tokens("us a call", kernels, rows)
        page.add("Timing", f"{name}: {heads} heads, {kind}", columns, rows, draw, notes, alarms)
        one = min(found, key=lambda row: _nearness(row.tokens))
        strip = {kernel: [(0.0, us, kernel)] for kernel, us in one.us.items()}
        title = f"{name}: one layer at {one.tokens} tokens as timed, {heads} heads, {kind}"
        draw = partial(charts.strips, "us", strip)
        page.add("Launches", title, ("kernel", "us"), list(one.us.items()), draw)


STATES = ("passed", "failed", "skipped")


def _word(value: Any, on_a_card: bool | None) -> Any:
    """Return the word for an outcome: what passed on a CPU never looks like what passed on a card."""
    return ON_CPU if value == "passed" and on_a_card is False else value


def kernels(page: Page, name: str, data: Verification) -> None:
    """Add results by back end, failures with the command that repeats them, and counted launches."""
    results, on_cpu = data.results, "eager" in data.engine
    counts = {backend: dict.fromkeys(STATES, 0) for backend in dict.fromkeys(one.backend for one in results)}
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
    page.add("Kernels", f"{name}, {data.engine}", ("back end", *STATES), rows, notes=notes, alarms=alarms)
    fields = ("backend", "case", "variant", "status", "replays", "checks")
    cells = [[_word(getattr(one, field), not on_cpu) for field in fields] for one in results]
    page.add("Kernels", f"All results, {name}", fields, cells)
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
        (
            step.name,
            NOTHING_RAN if _is_plan(step) else _word(step.status, data.on_a_card),
            step.detail,
            list(step.lines),
        )
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
    if word == "passed" and data.on_a_card is False:
        word, means = ON_CPU, "every step that ran passed, on this CPU, which shows nothing of a card"
    ran = [step.name for step in data.steps if step.status in ("passed", "warning") and not _is_plan(step)]
    failed = [step.name for step in data.steps if step.status == "failed"]
    means += f": {', '.join(failed)}" if failed else f": {', '.join(ran)}" if word in ("passed", ON_CPU) else ""
    here = {one["name"]: one["detail"] for one in machine or () if one["status"] in ("ok", "warning")}
    used: dict[str, str] = next((one.machine for one in records if getattr(one, "machine", None)), {})
    card = _card(used) if used else here.get("gpu", NO_CARD)
    promises = data.exit is not None and all(step.name in PROMISES for step in data.steps)
    if plans and promises and set(failed) <= {"plan"}:
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


def serving(page: Page, name: str, data: Serving) -> Glance:
    """Add a served model with the flag off and on: times and rates with their errors, or shares of right answers."""
    alarms = [f"{', '.join(f'{what} {value:g}' for what, value in row.point.items())}: invalid: {row.invalid}"
              for row in data.rows if row.invalid]  # fmt: skip
    valid, said = [row for row in data.rows if not row.invalid], list[str]()
    columns = [(metric, side) for metric in METRICS for side in SIDES]
    heads = (*LENGTHS, "requests/s", *(f"{metric}, flag {side}" for metric, side in columns))
    cells = [
        (*(f"{row.point[one]:g}" for one in (*LENGTHS, "rate")), *(row.estimates[m][s].show(2) for m, s in columns))
        for row in valid
    ]
    notes = ["Times in ms, throughput in tokens/s; mean and standard error.", f"Flag on: {data.status}"]
    page.add("Serving", f"{name}: {data.tool}, {data.model}", heads, cells, notes=notes, alarms=alarms)
    for lengths, group in groupby(valid, lambda row: "/".join(f"{row.point[one]:g}" for one in LENGTHS)):
        rows = [*group]
        rates = [f"{row.point['rate']:g}" for row in rows]
        for metric, unit in (("tpot", "ms per output token"), ("throughput", "output tokens per second")):
            pairs = {side: [row.estimates[metric][side] for row in rows] for side in SIDES}
            series = {f"flag {side}": [(one.mean, one.stderr) for one in found] for side, found in pairs.items()}
            draw = partial(charts.lines, "requests per second", unit, rates, series)
            page.add("Serving", f"{name}: {unit}, lengths {lengths}", chart=draw)
        ratios = [row.estimates["tpot"][OFF].mean / row.estimates["tpot"][ON].mean for row in rows]
        said.append(f"TPOT off / on {min(ratios):.3f} to {max(ratios):.3f} over {len(rows)} rates, lengths {lengths}")
    for run, figures in (data.answers or {}).get(OFF, {}).items():
        both = [(one, [data.answers[side][run]["figures"][one] for side in SIDES]) for one in figures["figures"]]
        shares = [(run, one, *(Estimate(**of).show(4) for of in values)) for one, values in both]
        page.add("Serving", f"{name}: shares of right answers, run {int(run) + 1}", ("run", "filter", *SIDES), shares)
        said.append(f"shares of right answers, run {int(run) + 1}")
    page.add("Versions", "Versions", ("input", "what", "version"), [(name, *one) for one in data.about.items()])
    card = data.about.get("card", "")
    on, means = "a CPU, for tests" if card == "CPU" else card or "not told", "; ".join(said) or "nothing was compared"
    return Glance("failed" if alarms or not said else "compared", f"{data.tool} of {data.model}", on, means, alarms)


READERS: dict[str, tuple[type[Any], Callable[[Page, str, Any], Glance]]] = {
    "check": (CheckRun, check),
    "status": (RankStatus, status_file),
    "serving": (Serving, serving),
}
"""Record and reader by the schema that a file's stamp names."""

# SPDX-License-Identifier: Apache-2.0
"""From files to blocks: each file adds titled tables, charts and lines to the sections of one page.

The template escapes every value but the SVG of ``charts``: names and messages in the files may hold anything.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from vllm_aiter_mla import __version__, files
from vllm_aiter_mla.commands.check.record import CheckRun
from vllm_aiter_mla.commands.measure import Measurement
from vllm_aiter_mla.commands.outputs import printable
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.commands.report import charts
from vllm_aiter_mla.status.record import RankStatus
from vllm_aiter_mla.verify.results import Verification

# Section, and where its content comes from.
SECTIONS = {
    "Check": "check --json",
    "Status": "a status file or plan --json",
    "Compile ranges": "a status file or plan --json",
    "Launches": "verify --json on a GPU, or plan --json for formulas",
    "Timing": "measure --json",
    "Verify": "verify --json",
    "Versions": "any file",
}


class Page:
    """The blocks by section and title."""

    def __init__(self) -> None:
        self.sections: dict[str, dict[str, dict[str, Any]]] = {section: {} for section in SECTIONS}

    def add(
        self,
        section: str,
        title: str,
        heads: Sequence[str] = (),
        rows: Iterable[Sequence[Any]] = (),
        chart: Callable[[str], str] = lambda title: "",
        notes: Iterable[str] = (),
        alarms: Iterable[str] = (),
    ) -> None:
        """Add a block, or new rows and lines to the block of that title: the ranks of an engine say the same.

        ``rows`` have one cell per head of the table; a list in a cell is folded. ``chart`` draws SVG for a title.
        ``notes`` are lines above the table, ``alarms`` say what went wrong.
        """
        blocks = self.sections[section]
        if title not in blocks:
            blocks[title] = {"heads": heads, "chart": Markup(chart(title)), "rows": [], "notes": [], "alarms": []}
        block = blocks[title]
        block["rows"] += [row for row in map(tuple, rows) if row not in block["rows"]]
        block["notes"] += [note for note in dict.fromkeys(notes) if note not in block["notes"]]
        block["alarms"] += alarms


def html_of(paths: Sequence[Path]) -> str:
    """Return the page for these files and folders.

    Raises:
        OSError: names a file that cannot be read.
        ValueError: names a file that is no JSON, of no known kind, or with other fields than are written here.
    """
    page = Page()
    for path, name, schema, data in _files(paths):
        if schema not in READERS:
            raise ValueError(f"{path}: not recognised ({schema}); expected JSON of {', '.join(READERS)}")
        cls, reader = READERS[schema]
        record = files.parse(cls, path, data)
        try:
            reader(page, name, record)
        except Exception as error:  # whatever another hand wrote
            raise ValueError(f"{path}: not what this version writes: {type(error).__name__}: {error}") from error
        stamp = {what: value for what, value in asdict(record.evidence).items() if not what.startswith("schema")}
        rows = [(name, *one) for one in (stamp | getattr(record, "machine", {})).items()]
        page.add("Versions", "Versions", ("input", "what", "version"), rows)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_shown)
    template = environment.from_string(Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8"))
    return template.render(sections=page.sections, sources=SECTIONS, plugin=__version__) + "\n"


def _shown(value: Any) -> Any:
    """Return what a value of the page is printed as."""
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else value


def _files(paths: Sequence[Path]) -> Iterator[tuple[Path, str, str, Any]]:
    """Yield each file, its name for the reader (never a full path), its kind as its stamp names it, and its content.

    Of a folder, records that the page does not show are left out: a worker keeps others next to its status.
    """
    for path in paths:
        if not path.is_dir():
            yield path, printable(path.name), *_read(path)
            continue
        found = [(one, printable(f"{path.name}/{one.stem}"), *_read(one)) for one in sorted(path.glob("*.json"))]
        shown = [one for one in found if one[2] in READERS]
        if not shown:
            raise ValueError(f"{path}: no JSON file in this folder that can be shown")
        yield from shown


def _read(path: Path) -> tuple[str, Any]:
    """Return a file's kind, as its stamp names it, and its content."""
    data = _clean(files.load(path))
    return files.stamp_in(data)[0], data


def _clean(value: Any) -> Any:
    """Return the value with control characters in its strings and keys written out."""
    if isinstance(value, dict):
        return {printable(key): _clean(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_clean(one) for one in value]
    return printable(value) if isinstance(value, str) else value


def _status(
    page: Page, name: str, layers: str, kernels: Iterable[str], cache: str, limit: int | None,
    skipped: Iterable[tuple[str, Sequence[str]]], basis: str,
) -> None:  # fmt: skip
    """Add a row to the table of layers; ``skipped`` names each layer with code and reason."""
    reasons = defaultdict(list)
    for layer, (code, text) in skipped:
        reasons[f"{code}: {text}"].append(layer)
    cells = [f"{why} ({len(layers)}): {', '.join(layers)}" for why, layers in reasons.items()]
    heads = ("run", "MLA layers", "kernel", "KV cache", "decode limit", "skipped", "basis")
    shown = f"1..{limit}" if limit else None
    page.add("Status", "Layers", heads, [(name, layers, ", ".join(sorted(kernels)) or None, cache, shown,
                                          cells or "none", basis)])  # fmt: skip


def _ranges(
    page: Page, name: str, ranges: Sequence[Sequence[int]], limit: int | None, sizes: Sequence[int], note: str = ""
) -> None:
    rows = []
    for first, last in ranges:
        inside = ", ".join(str(size) for size in sizes if first <= size <= last)
        own = "rewritten" if limit is not None and last <= limit else "vLLM's own"
        rows.append((f"{first}-{last}", own, inside or None))
    heads, title = ("range, tokens", "graph", "capture sizes"), ", ".join(row[0] for row in rows)
    title += f"; decode limit {limit}" if limit else "; flag off"
    draw = partial(charts.token_axis, ranges, limit, sizes)
    page.add("Compile ranges", title, heads, rows, draw, [f"{name}. {note}"])


def status_file(page: Page, name: str, data: RankStatus) -> None:
    """Add a worker's status, its compiled ranges, and the kernels that it timed."""
    rank, limit = f"{name}, rank {data.rank}", data.decode_limit or None
    layers, kernels = f"{len(data.engaged)}/{data.total}", set(data.engaged.values())
    _status(page, rank, layers, kernels, data.kv_cache_dtype, limit, data.skipped.items(), "counted at run time")
    ranges = sorted([int(part) for part in key.split("-")] for key in data.compiled)
    if ranges:
        _ranges(page, rank, ranges, limit, data.capture_sizes)
    for shape in data.measured:
        names = sorted({kernel for figures in shape.us.values() for kernel in figures})
        rows = [(t, *map(by.get, names), shape.runs(t)) for t, by in sorted(shape.us.items())]
        where = ", ".join(f"{kernel} {first}..{last}" for first, last, kernel in shape.chosen)
        heads = ("tokens", *(kernel + charts.MICROSECONDS for kernel in names), "runs")
        title, note = f"Timed at start-up, {shape.shape}: {where}", f"{rank}: {len(shape.layers)} layers"
        page.add("Status", title, heads, rows, partial(charts.lines, "us a layer", heads, rows), [note])


def plan(page: Page, name: str, data: Plan) -> None:
    """Add a plan: nothing in it was run."""
    model, captures = data.model.name, data.captures
    kernels = {span.kernel for span in data.kernels or () if span.kernel}
    skipped = [(f"{one.scope} {one.code}", (one.code, one.message)) for one in data.reasons]
    shown = f"{data.layers.engaged}/{data.layers.mla}"
    cache = data.options.kv_cache_dtype
    _status(page, model, shown, kernels, cache, data.limit, skipped, "plan: nothing was run")
    sizes = (*captures.inside, *captures.outside)
    _ranges(page, model, data.compile_ranges.ranges, data.limit, sizes, captures.note)
    rows = [
        (tokens, path, len(one.launches), one.launches_per_step, f"{one.bytes:,}")
        for tokens, paths in (data.figures.by_tokens if data.figures else {}).items()
        for path, one in paths.items()
    ]
    heads = ("tokens", "path", "launches per layer", "launches per step", "bytes per layer")
    parts = {path: {"launches": float(count)} for _, path, count, *_ in rows}
    draw = partial(charts.bars, "launches per layer", parts)
    page.add("Launches", f"Launches by formula, {model}", heads, rows, draw)


def measure(page: Page, name: str, data: Measurement) -> None:
    """Add one chart and table per number of heads and type: time over tokens, one line per kernel."""
    alarms = [f"stopped at {data.stopped}"] if data.stopped else []
    alarms += [f"wrong, not timed: {kernel} at {why}" for kernel, why in data.wrong.items()]
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
        draw = partial(charts.lines, "us a call", columns, rows)
        page.add("Timing", f"{name}: {heads} heads, {kind}", columns, rows, draw, notes, alarms)


def verify(page: Page, name: str, data: Verification) -> None:
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
            alarms.append(f"{one.case} ({one.variant}, {one.backend}) failed: {said}. {one.command}")
    rows = [(backend, *count.values()) for backend, count in counts.items()]
    draw = partial(charts.bars, "results", counts)
    page.add("Verify", f"{name}, {data.engine}", ("back end", *charts.STATES), rows, draw, notes, alarms)
    fields = ("backend", "case", "variant", "status", "replays", "checks")
    page.add("Verify", f"All results, {name}", fields, [[getattr(one, field) for field in fields] for one in results])
    title = f"PyTorch ops of a replayed step, no GPU, {name}" if on_cpu else f"Launches in captured graphs, {name}"
    counted = [(one.backend, one.variant, *found) for one in results for found in one.launches.items()]
    page.add("Launches", title, ("backend", "variant", "tokens", "counted"), counted)


def check(page: Page, name: str, data: CheckRun) -> None:
    """Add the steps of a check, and what its plan, its kernels and its timings found."""
    rows = [(step.name, step.status, step.detail, list(step.lines)) for step in data.steps]
    alarms = [f"{step.name} FAILED: {step.detail}" for step in data.steps if step.status == "failed"]
    if data.exit is None:
        alarms.append(f"The run was cut off after the step {data.steps[-1].name}." if data.steps else "No step ended.")
    notes = [f"{step.name}: no gain: {step.detail}" for step in data.steps if step.status == "no gain"]
    page.add(
        "Check", f"{data.model}: the steps", ("step", "outcome", "finding", "more"), rows, notes=notes, alarms=alarms
    )
    found = {step.name: step.data for step in data.steps}
    for what, schema in (("plan", "plan"), ("kernels", "verify"), ("timing", "measure")):
        if found.get(what):
            cls, reader = READERS[schema]
            reader(page, name, files.part(cls, Path(what), found[what]))
    compared: Any = found.get("engine") or {"distances": {}}
    pairs = compared["distances"].items()
    tokens = [(pair, what, *one.values()) for pair, by in pairs for what, one in by.items()]
    heads = ("sides", "scenario", "tokens", "equal", "compared", "agreed", "max |dlogprob|", "mean", "top-1")
    if tokens:
        page.add("Check", "Plugin, control and today, token by token", heads, tokens)
    counts: Any = found.get("launches") or {}
    if counts:
        page.add("Launches", "Kernels of one decode step", ("side", "kernels"), counts.items())


READERS: dict[str, tuple[type[Any], Callable[[Page, str, Any], None]]] = {
    "check": (CheckRun, check),
    "status": (RankStatus, status_file),
    "plan": (Plan, plan),
    "measure": (Measurement, measure),
    "verify": (Verification, verify),
}
"""Record and reader by the schema that a file's stamp names."""

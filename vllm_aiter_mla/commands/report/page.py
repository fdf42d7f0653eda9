# SPDX-License-Identifier: Apache-2.0
"""From files to blocks: each file adds titled tables, charts and lines to the sections of one page, and a glance.

The template escapes every value but the SVG of ``charts``: names and messages in the files may hold anything.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from vllm_aiter_mla import __version__, files
from vllm_aiter_mla.admission import OVERFLOW, REMEDIES
from vllm_aiter_mla.commands.check.record import CheckRun, Step
from vllm_aiter_mla.commands.check.timing import Measurement
from vllm_aiter_mla.commands.outputs import printable
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.commands.report import charts
from vllm_aiter_mla.status import line
from vllm_aiter_mla.status.record import RankStatus
from vllm_aiter_mla.verify.results import Verification

# Section, and where its content comes from.
SECTIONS = {
    "Check": "check --json",
    "Plan": "check --json with a model",
    "Status": "a status file",
    "Compile ranges": "a status file, or check --json with a model",
    "Launches": "check --json on a GPU, or with a model for formulas",
    "Timing": "check --json on a GPU",
    "Verify": "check --json",
    "Versions": "any file",
}

NOTHING_RAN = "planned"
NO_CARD = "none: nothing here ran on a GPU"


@dataclass(frozen=True)
class Glance:
    """What the first screen says of one input."""

    word: str  # the outcome, one of ``charts.OUTCOMES``
    what: str  # what was done, to which model
    card: str
    means: str
    skipped: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # besides those of the stamp
    run: str = ""  # the server, whose ranks share a glance


class Page:
    """The glances, and the blocks by section and title."""

    def __init__(self) -> None:
        self.input = ""  # the name of the one that is being read; no two have the same
        self.glances: dict[tuple[str, str, str], dict[str, list[str]]] = {}
        self.sections: dict[str, dict[str, dict[str, Any]]] = {section: {} for section in SECTIONS}

    def begin(self, glance: Glance, evidence: files.Stamp) -> None:
        """Add a glance to the first screen; the ranks of a server share one, with what each says."""
        versions = {"vLLM": evidence.vllm, "AITER": evidence.aiter, **glance.versions, "plugin": evidence.plugin}
        facts = {
            "Input": self.input,
            "Card": glance.card,
            "When": f"{evidence.time.replace('T', ' ').replace('+00:00', ' UTC')} on {evidence.host}",
            "Versions": ", ".join(f"{name} {value or 'not installed'}" for name, value in versions.items()),
            "Skipped": "; ".join(glance.skipped) or "nothing",
            "Means": glance.means,
        }
        said = self.glances.setdefault((glance.word, glance.what, glance.run or self.input), defaultdict(list))
        for name, fact in facts.items():
            said[name] += [fact] * (fact not in said[name])

    def add(
        self,
        section: str,
        title: str,
        heads: Sequence[str] = (),
        rows: Iterable[Sequence[Any]] = (),
        chart: Callable[[str], str] = lambda title: "",
        notes: Iterable[str] = (),
        alarms: Iterable[str] = (),
        planned: bool = False,
    ) -> None:
        """Add a block, or new lines to the block of that title and table: the ranks of an engine say the same.

        A table whose first column is the input takes the rows of all inputs. Another input's table gets its name.
        ``rows`` have one cell per head of the table; a list in a cell is folded. ``chart`` draws SVG for a title.
        ``notes`` are lines above the table, ``alarms`` say what went wrong. A ``planned`` block is marked as such.
        """
        blocks, rows, heads = self.sections[section], [*map(tuple, rows)], tuple(heads)
        of_all = heads[:1] == ("input",)
        while not of_all and title in blocks and (blocks[title]["heads"], blocks[title]["rows"]) != (heads, rows):
            title += f" ({self.input})"
        if new := title not in blocks:
            empty: dict[str, Any] = {"rows": [], "notes": [], "alarms": []}
            blocks[title] = {"heads": heads, "chart": Markup(chart(title)), "planned": planned, **empty}
        block = blocks[title]
        block["rows"] += rows if new or of_all else []
        block["notes"] += [note for note in dict.fromkeys(notes) if note not in block["notes"]]
        block["alarms"] += alarms


def html_of(paths: Sequence[Path]) -> str:
    """Return the page for these files and folders.

    Raises:
        OSError: names a file that cannot be read.
        ValueError: names a file that is no JSON, of no known kind, or with other fields than are written here.
    """
    page, names = Page(), Counter[str]()
    for path, name, schema, data in _files(paths):
        if schema not in READERS:
            raise ValueError(f"{path}: not recognised ({schema}); expected JSON of {', '.join(READERS)}")
        cls, reader = READERS[schema]
        record = files.parse(cls, path, data)
        names[name] += 1
        page.input = name = name if names[name] == 1 else f"{name} ({names[name]})"
        try:
            page.begin(reader(page, name, record), record.evidence)
        except Exception as error:  # whatever another hand wrote
            raise ValueError(f"{path}: not what this version writes: {type(error).__name__}: {error}") from error
        stamp = {what: value for what, value in asdict(record.evidence).items() if not what.startswith("schema")}
        rows = [(name, *one) for one in (stamp | getattr(record, "machine", {})).items()]
        page.add("Versions", "Versions", ("input", "what", "version"), rows)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_shown)
    template = environment.from_string(Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8"))
    return (
        template.render(
            glances=page.glances, outcomes=charts.OUTCOMES, sections=page.sections, sources=SECTIONS, plugin=__version__
        )
        + "\n"
    )


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


def plan(page: Page, name: str, data: Plan) -> Glance:
    """Add a plan: nothing in it was run."""
    captures, cache = data.captures, data.options.kv_cache_dtype
    model = f"{data.model.name} on {data.arch}, TP {data.options.tp}, {cache} cache"
    label = f"{name}: {model}"
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
    means = f"nothing was run: by vLLM's own config {shown} MLA layers would engage on {data.arch}"
    if data.outcome == "unknown":
        means = "nothing was run, and vLLM could not say whether layers would engage"
    reasons = [f"{one.code}: {one.message} -> {REMEDIES.get(one.code, '')}" for one in data.reasons]
    return Glance(NOTHING_RAN, f"plan of {model}", f"none: planned for {data.arch}", means, reasons)


def measure(page: Page, name: str, data: Measurement) -> Glance:
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
        notes += [f"{kernel} does not count as ours: it {OVERFLOW}" for row in found for kernel in row.left_out]
        draw = partial(charts.lines, "us a call", columns, rows)
        page.add("Timing", f"{name}: {heads} heads, {kind}", columns, rows, draw, notes, alarms)
    ratios = [row.ratio for row in data.rows if row.ratio is not None]
    faster = sum(ratio > 1 for ratio in ratios)
    wrong = [*(f"{kernel} was wrong" for kernel in data.wrong), *([f"stopped at {data.stopped}"] * bool(data.stopped))]
    word = "failed" if wrong or not ratios else "timed"
    means = "; ".join([*wrong, f"one of ours is the fastest at {faster} of {len(ratios)} sizes"])
    untimed = dict.fromkeys(kernel for row in data.rows for kernel in row.untimed)
    return Glance(word, "measure", _card(data.machine), means, tuple(untimed), _others(data.machine))


def verify(page: Page, name: str, data: Verification) -> Glance:
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
    passed = sum(one.status == "passed" for one in results)
    means = f"{passed} of {len(results)} cases passed, of {', '.join(counts) or 'no back end'}"
    means += "; no graph was captured" if on_cpu else ""
    word = "failed" if data.status == 1 else "passed" if passed else "skipped"
    left = [f"{backend}: {why}" for backend, why in data.missing.items()]
    on, seen = (
        ("emulated: ", "; an emulator says nothing of time, nor of a card's faults") if data.emulated else ("", "")
    )
    return Glance(word, "verify", on + _card(data.machine), means + seen, left, _others(data.machine))


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
    page.add("Check", f"{name}, {data.model or 'no model'}: the steps", columns, rows, notes=notes, alarms=alarms)
    found = {step.name: step.data for step in data.steps}
    for what, schema in (("plan", "plan"), ("kernels", "verify"), ("timing", "measure")):
        for one in found[what] if isinstance(found.get(what), list) else filter(None, [found.get(what)]):
            if files.stamp_in(one)[0] == schema:  # tiles that were tuned are not shown
                cls, reader = READERS[schema]
                reader(page, name, files.part(cls, Path(what), one))
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
    return _of_check(data, found)


MEANING = {
    None: ("cut off", "the run was cut off: nothing is shown"),
    0: ("passed", "every step that ran passed"),
    1: ("failed", "do not switch the fast path on before the failed steps pass"),
    3: ("skipped", "nothing ran on a card, or a step that was asked for did not run"),
    4: ("no gain", "vLLM's own kernels are the fastest for this model on this card: leave the flag off"),
}
"""Outcome and meaning of each exit status of ``check``."""


def _of_check(data: CheckRun, found: Mapping[str, Any]) -> Glance:
    """Return the glance of a check; what it found on the machine tells card and versions."""
    word, means = MEANING.get(data.exit, ("failed", f"exit status {data.exit}"))
    checks: Any = found.get("machine") or []
    here = {one["name"]: one["detail"] for one in checks if one["status"] in ("ok", "warning")}
    ran = [step.name for step in data.steps if step.status in ("passed", "warning") and not _is_plan(step)]
    failed = [step.name for step in data.steps if step.status == "failed"]
    means += f": {', '.join(failed)}" if failed else f": {', '.join(ran)}" if word == "passed" else ""
    skipped = [f"{step.name}: {step.detail}" for step in data.steps if step.status == "skipped"]
    versions = {shown: here[name] for name, shown in (("torch", "torch"), ("rocm", "ROCm")) if name in here}
    return Glance(word, f"check of {data.model or 'this machine'}", here.get("gpu", NO_CARD), means, skipped, versions)


READERS: dict[str, tuple[type[Any], Callable[[Page, str, Any], Glance]]] = {
    "check": (CheckRun, check),
    "status": (RankStatus, status_file),
    "plan": (Plan, plan),
    "measure": (Measurement, measure),
    "verify": (Verification, verify),
}
"""Record and reader by the schema that a file's stamp names."""

# SPDX-License-Identifier: Apache-2.0
"""What a worker's status says of its engine's layers, and what a plan promises: the same tables for both."""

import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.commands.plan.record import Cost, Plan
from vllm_aiter_mla.commands.report import charts
from vllm_aiter_mla.commands.report.blocks import PLAN, Glance, Page
from vllm_aiter_mla.decided import Span, kernel_at, merge_spans
from vllm_aiter_mla.kernels.formulas import Launch
from vllm_aiter_mla.status.line import status_line
from vllm_aiter_mla.status.record import RankStatus
from vllm_aiter_mla.status.status_files import is_serving

DRAWN = 64
"""Tokens of the step whose layer is drawn; the nearest planned one, if that is none."""


def status(page: Page, record: RankStatus) -> Glance:
    """Add what a worker's layers run on, by how many tokens, and what it timed."""
    name = f"{page.input.name}, rank {record.rank}"
    by_range = sorted((int(tokens.partition("-")[0]), tokens, counts) for tokens, counts in record.compiled.items())
    rewritten = [tokens for _, tokens, counts in by_range if counts["matched"]]
    _add_layers(page, "Status", (
        name, f"{len(record.engaged)}/{record.total}", _joined(sorted({*record.engaged.values()})),
        record.kv_cache_dtype, record.decode_limit or None, _joined(rewritten), _joined(record.capture_sizes),
    ), record.skipped.items())  # fmt: skip
    for group in record.decided:
        if spans := group.decision.kernels:
            _add_spans(page, "Status", "Which kernel runs", f"{name}: {len(group.layers)} layers", spans)
    for shape in record.measured:
        names = sorted({kernel for figures in shape.us.values() for kernel in figures})
        by_tokens = sorted(shape.us.items())
        rows = [(tokens, *map(us.get, names), kernel_at(shape.chosen, tokens)) for tokens, us in by_tokens]
        heads, chart = ("tokens", *(f"{kernel}, us" for kernel in names), "runs"), charts.over_tokens(names, rows)
        notes = [f"{name}: {len(shape.layers)} layers"]
        page.add("Status", f"Timed at start-up, {shape.shape}, per layer", heads, rows, chart, notes)
    word, means = _outcome(page.input.folder, record, max(record.ranks - page.input.ranks, 0))
    reasons = dict.fromkeys(skip.reason for skip in record.skipped.values())
    not_told = "not told" if record.engaged else "not told: the engine was skipped as a whole"
    card = "a CPU, for tests" if record.card == "cpu" else record.card or not_told
    return Glance(word, f"server of {record.model_name or 'a model'}", card, means, tuple(reasons), run=record.run)


def _outcome(folder: Path, record: RankStatus, silent: int) -> tuple[str, str]:
    """Return the word for a status, and what it means. Only an engine that lives and is whole can be engaged.

    ``silent`` ranks of its engine are not among the inputs.
    """
    lives = is_serving(folder, [record]) if record.evidence.host == socket.gethostname() else None
    if lives is None:
        return "unknown", f"whether its server lives cannot be told here; it had: {status_line(record)}"
    if not lives:
        return "ended", f"its engine or front end has ended; it had: {status_line(record)}"
    if silent:
        without = f"{silent} of {record.ranks} ranks have no status file here"
        return "unknown", f"{without}; this one has: {status_line(record)}"
    if not record.engaged:
        return "skipped", status_line(record)
    if record.skipped or len(record.engaged) < record.total:
        return "partly", status_line(record)
    if not record.card:
        return "unknown", f"its card is not told; it has: {status_line(record)}"
    return "engaged on a CPU" if record.card == "cpu" else "engaged", status_line(record)


def plan(page: Page, record: Plan) -> None:
    """Add a plan: nothing in it was run."""
    captures, label = record.captures, f"{page.input.name}: {label_of(record)}"
    kernels = dict.fromkeys(span.kernel for span in record.kernels or ())
    skipped = [(f"{skip.level} {skip.code}", skip) for skip in record.reasons]
    ranges = record.compile_ranges.ranges[: record.compile_ranges.inside]
    _add_layers(page, PLAN, (
        label, "not known" if record.outcome == "unknown" else f"{record.layers.engaged}/{record.layers.mla}",
        _joined(kernels), record.options.kv_cache_dtype, record.limit,
        _joined(f"{first}-{last}" for first, last in ranges),
        _joined((*captures.inside, *captures.outside)) or captures.note,
    ), skipped)  # fmt: skip
    if record.kernels:
        note = "The first start on a card times them."
        _add_spans(page, PLAN, f"Which kernel could run, {label}", note, record.kernels)
    if record.figures:
        _add_layer(page, label, record.figures.by_tokens)
    fields = ("id", "effect", "state", "remedy", "link")
    issues = [(label, *(getattr(issue, field) for field in fields)) for issue in record.known_issues]
    if issues:
        page.add(PLAN, "Known issues beside the plugin", ("input", *fields), issues)


def label_of(record: Plan) -> str:
    """Return what a plan is of, in words."""
    return f"{record.model.name} on {record.arch}, TP {record.options.tp}, {record.options.kv_cache_dtype} cache"


def _add_layer(page: Page, label: str, by_tokens: Mapping[int, Mapping[str, Cost]]) -> None:
    """Draw one layer of each path, launch after launch."""
    tokens = min(by_tokens, key=lambda planned: abs(planned - DRAWN))
    paths = {path: cost.launches for path, cost in by_tokens[tokens].items()}
    rows = [(path, each.name, f"{each.read + each.written:,}") for path, run in paths.items() for each in run]
    strips = {path: _end_to_end(run) for path, run in paths.items()}
    draw = partial(charts.strips, "MB moved, launch after launch", strips, planned=True)
    page.add(PLAN, f"One layer at {tokens} tokens by formula, {label}", ("path", "launch", "bytes"), rows, draw)


def _end_to_end(launches: Sequence[Launch]) -> list[tuple[float, float, str]]:
    """Return the parts of a strip: launch after launch, in MB moved."""
    ends = [*accumulate((launch.read + launch.written for launch in launches), initial=0)]
    return [(at / 1e6, end / 1e6, of.name) for (at, end), of in zip(pairwise(ends), launches, strict=True)]


def _add_layers(page: Page, section: str, cells: Sequence[object], skipped: Iterable[tuple[str, Skip]]) -> None:
    """Add a row to the table of layers; ``skipped`` says why each layer is."""
    layers_by_reason = defaultdict(list)
    for layer, skip in skipped:
        layers_by_reason[skip.reason].append(layer)
    reasons = [f"{why} ({len(layers)}): {_joined(layers)}" for why, layers in layers_by_reason.items()]
    heads = ("input", "would engage" if section == PLAN else "engaged", "kernels", "KV cache", "decode limit",
             "rewritten ranges", "captured sizes", "skipped")  # fmt: skip
    page.add(section, "MLA layers", heads, [(*cells, reasons or "none")])


def _joined(values: Iterable[object]) -> str | None:
    return ", ".join(map(str, values)) or None


def _add_spans(page: Page, section: str, about: str, note: str, spans: Sequence[Span]) -> None:
    """Add which kernel runs at how many tokens; variants of one kernel count as one."""
    spans = merge_spans(spans)
    title = f"{about}: " + ", ".join(f"{span.kernel} {span.tokens}" for span in spans)
    strip = {"": [(span.first, span.last + 1, span.kernel) for span in spans]}
    draw = partial(charts.strips, "tokens in the step", strip, planned=section == PLAN, log=True)
    rows = [(span.tokens, span.kernel) for span in spans]
    page.add(section, title, ("tokens", "kernel"), rows, draw, [note])

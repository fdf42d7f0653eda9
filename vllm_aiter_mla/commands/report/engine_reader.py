# SPDX-License-Identifier: Apache-2.0
"""Add a worker's status or a plan to a page. Both have the same tables of layers and kernels."""

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

DRAWN_STEP_TOKENS = 64
"""Tokens of the step whose layer is drawn. If it is not planned, the nearest planned step is drawn."""


def add_status(page: Page, record: RankStatus) -> Glance:
    """Add the kernels of a worker's layers by number of tokens, and its timings."""
    name = f"{page.current_input.name}, rank {record.rank}"
    by_range = sorted((int(tokens.partition("-")[0]), tokens, counts) for tokens, counts in record.compiled.items())
    rewritten = [tokens for _, tokens, counts in by_range if counts["matched"]]
    _add_layers(page, "Status", (
        name, f"{len(record.engaged)}/{record.num_layers}", _join(sorted({*record.engaged.values()})),
        record.kv_cache_dtype, record.decode_limit or None, _join(rewritten), _join(record.capture_sizes),
    ), record.skipped.items())  # fmt: skip
    for group in record.decision_groups:
        if spans := group.decision.kernel_spans:
            _add_spans(page, "Status", "Which kernel runs", f"{name}: {len(group.layers)} layers", spans)
    for shape in record.shape_timings:
        names = sorted({kernel for figures in shape.us.values() for kernel in figures})
        by_tokens = sorted(shape.us.items())
        rows = [
            (tokens, *map(us_by_kernel.get, names), kernel_at(shape.chosen, tokens))
            for tokens, us_by_kernel in by_tokens
        ]
        columns, draw = (
            ("tokens", *(f"{kernel}, us" for kernel in names), "runs"),
            charts.chart_over_tokens(names, rows),
        )
        notes = [f"{name}: {len(shape.layers)} layers"]
        page.add_block("Status", f"Timed at start-up, {shape.shape}, per layer", columns, rows, draw, notes)
    outcome, meaning = _status_outcome(
        page.current_input.folder, record, max(record.ranks - page.current_input.num_ranks, 0)
    )
    reasons = dict.fromkeys(skip.reason for skip in record.skipped.values())
    unknown_card = "not told" if record.engaged else "not told: the engine was skipped as a whole"
    card = "a CPU, for tests" if record.card == "cpu" else record.card or unknown_card
    return Glance(outcome, f"server of {record.model_name or 'a model'}", card, meaning, tuple(reasons), run=record.run)


def _status_outcome(folder: Path, record: RankStatus, num_silent: int) -> tuple[str, str]:
    """Return the outcome of a status and its meaning. Only a live engine with all its ranks can be "engaged".

    ``num_silent`` ranks of the engine are not among the inputs.
    """
    is_alive = is_serving(folder, [record]) if record.evidence.host == socket.gethostname() else None
    if is_alive is None:
        return "unknown", f"whether its server lives cannot be told here; it had: {status_line(record)}"
    if not is_alive:
        return "ended", f"its engine or front end has ended; it had: {status_line(record)}"
    if num_silent:
        silent_text = f"{num_silent} of {record.ranks} ranks have no status file here"
        return "unknown", f"{silent_text}; this one has: {status_line(record)}"
    if not record.ranks:
        return "unknown", f"how many ranks its engine has is unknown; this one has: {status_line(record)}"
    if not record.engaged:
        return "skipped", status_line(record)
    if record.skipped or len(record.engaged) < record.num_layers:
        return "partly", status_line(record)
    if not record.card:
        return "unknown", f"its card is not told; it has: {status_line(record)}"
    return "engaged on a CPU" if record.card == "cpu" else "engaged", status_line(record)


def add_plan(page: Page, record: Plan) -> None:
    """Add a plan. Nothing in it was run."""
    captures, label = record.captures, f"{page.current_input.name}: {plan_label(record)}"
    kernels = dict.fromkeys(span.kernel for span in record.kernels or ())
    skipped = [(f"{skip.level} {skip.code}", skip) for skip in record.reasons]
    ranges = record.compile_ranges.ranges[: record.compile_ranges.inside]
    _add_layers(page, PLAN, (
        label, "not known" if record.outcome == "unknown" else f"{record.layers.engaged}/{record.layers.mla}",
        _join(kernels), record.options.kv_cache_dtype, record.limit,
        _join(f"{first}-{last}" for first, last in ranges),
        _join((*captures.inside, *captures.outside)) or captures.note,
    ), skipped)  # fmt: skip
    if record.kernels:
        note = "The first start on a card times them."
        _add_spans(page, PLAN, f"Which kernel could run, {label}", note, record.kernels)
    if record.figures:
        _add_layer(page, label, record.figures.by_tokens)
    fields = ("id", "effect", "state", "remedy", "link")
    issues = [(label, *(getattr(issue, field) for field in fields)) for issue in record.known_issues]
    if issues:
        page.add_block(PLAN, "Known issues outside the plugin", ("input", *fields), issues)


def plan_label(record: Plan) -> str:
    """Return the model, the card and the main options of a plan, in words."""
    return f"{record.model.name} on {record.arch}, TP {record.options.tp}, {record.options.kv_cache_dtype} cache"


def _add_layer(page: Page, label: str, by_tokens: Mapping[int, Mapping[str, Cost]]) -> None:
    """Add one layer of each path, launch after launch, as a chart and a table."""
    tokens = min(by_tokens, key=lambda planned_tokens: abs(planned_tokens - DRAWN_STEP_TOKENS))
    launches_by_path = {path: cost.launches for path, cost in by_tokens[tokens].items()}
    rows = [
        (path, launch.name, f"{launch.read + launch.written:,}")
        for path, launches in launches_by_path.items()
        for launch in launches
    ]
    strips = {path: _end_to_end(launches) for path, launches in launches_by_path.items()}
    draw = partial(charts.draw_strips, "MB moved, launch after launch", strips, is_planned=True)
    page.add_block(PLAN, f"One layer at {tokens} tokens by formula, {label}", ("path", "launch", "bytes"), rows, draw)


def _end_to_end(launches: Sequence[Launch]) -> list[tuple[float, float, str]]:
    """Return the parts of a strip: one per launch, as long as the MB that it moves."""
    offsets = [*accumulate((each.read + each.written for each in launches), initial=0)]
    return [
        (start / 1e6, end / 1e6, launch.name) for (start, end), launch in zip(pairwise(offsets), launches, strict=True)
    ]


def _add_layers(page: Page, section: str, cells: Sequence[object], skipped_layers: Iterable[tuple[str, Skip]]) -> None:
    """Add a row to the table of layers; ``skipped_layers`` has each skipped layer with its reason."""
    layers_by_reason = defaultdict(list)
    for layer, skip in skipped_layers:
        layers_by_reason[skip.reason].append(layer)
    reasons = [f"{reason} ({len(layers)}): {_join(layers)}" for reason, layers in layers_by_reason.items()]
    columns = ("input", "would engage" if section == PLAN else "engaged", "kernels", "KV cache", "decode limit",
             "rewritten ranges", "captured sizes", "skipped")  # fmt: skip
    page.add_block(section, "MLA layers", columns, [(*cells, reasons or "none")])


def _join(values: Iterable[object]) -> str | None:
    return ", ".join(map(str, values)) or None


def _add_spans(page: Page, section: str, title_start: str, note: str, spans: Sequence[Span]) -> None:
    """Add a block that shows which kernel runs at which number of tokens. Variants of a kernel count as one kernel."""
    spans = merge_spans(spans)
    title = f"{title_start}: " + ", ".join(f"{span.kernel} {span.tokens_text}" for span in spans)
    strip = {"": [(span.first, span.last + 1, span.kernel) for span in spans]}
    draw = partial(charts.draw_strips, "tokens in the step", strip, is_planned=section == PLAN, is_log_scale=True)
    rows = [(span.tokens_text, span.kernel) for span in spans]
    page.add_block(section, title, ("tokens", "kernel"), rows, draw, [note])

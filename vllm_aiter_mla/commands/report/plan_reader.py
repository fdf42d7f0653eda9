# SPDX-License-Identifier: Apache-2.0
"""Add a plan to a page."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise

from vllm_aiter_mla.commands.plan.record import Cost, Plan
from vllm_aiter_mla.commands.report import charts
from vllm_aiter_mla.commands.report.blocks import PLAN, Page, PageInput
from vllm_aiter_mla.commands.report.tables import add_layers, add_spans, join_values
from vllm_aiter_mla.kernels.formulas import Launch

DRAWN_STEP_TOKENS = 64
"""Tokens of the step whose layer is drawn. If it is not planned, the nearest planned step is drawn."""


def add_plan(page: Page, page_input: PageInput, record: Plan) -> None:
    """Add a plan. Nothing in it was run."""
    captures, label = record.captures, f"{page_input.name}: {plan_label(record)}"
    kernels = dict.fromkeys(span.kernel for span in record.kernels or ())
    skipped = [(f"{skip.level} {skip.code}", skip) for skip in record.reasons]
    ranges = record.compile_ranges.ranges[: record.compile_ranges.num_within_limit]
    add_layers(page, page_input, PLAN, (
        label, "not known" if record.outcome == "unknown" else f"{record.layers.engaged}/{record.layers.mla}",
        join_values(kernels), record.options.kv_cache_dtype, record.limit,
        join_values(f"{first}-{last}" for first, last in ranges),
        join_values((*captures.within_limit, *captures.above_limit)) or captures.note,
    ), skipped)  # fmt: skip
    if record.kernels:
        note = "The first start on a card times them."
        add_spans(page, page_input, PLAN, f"Which kernel could run, {label}", note, record.kernels)
    if record.figures:
        _add_layer(page, page_input, label, record.figures.by_tokens)
    fields = ("id", "effect", "state", "remedy", "link")
    issues = [(label, *(getattr(issue, field) for field in fields)) for issue in record.known_issues]
    if issues:
        page.add_block(page_input, PLAN, "Known issues outside the plugin", ("input", *fields), issues)


def plan_label(record: Plan) -> str:
    """Return the model, the card and the main options of a plan, in words."""
    return f"{record.model.name} on {record.arch}, TP {record.options.tp}, {record.options.kv_cache_dtype} cache"


def _add_layer(page: Page, page_input: PageInput, label: str, by_tokens: Mapping[int, Mapping[str, Cost]]) -> None:
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
    page.add_block(
        page_input, PLAN, f"One layer at {tokens} tokens by formula, {label}", ("path", "launch", "bytes"), rows, draw
    )


def _end_to_end(launches: Sequence[Launch]) -> list[tuple[float, float, str]]:
    """Return the parts of a strip: one per launch, as long as the MB that it moves."""
    offsets = [*accumulate((launch.read + launch.written for launch in launches), initial=0)]
    return [
        (start / 1e6, end / 1e6, launch.name) for (start, end), launch in zip(pairwise(offsets), launches, strict=True)
    ]

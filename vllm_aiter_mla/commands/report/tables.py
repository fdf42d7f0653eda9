# SPDX-License-Identifier: Apache-2.0
"""Tables that a worker's status and a plan share: its layers, and the kernels by number of tokens."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.commands.report import charts
from vllm_aiter_mla.commands.report.blocks import PLAN, Page, PageInput
from vllm_aiter_mla.decided import Span, merge_spans


def add_layers(
    page: Page, page_input: PageInput, section: str, cells: Sequence[object], skipped_layers: Iterable[tuple[str, Skip]]
) -> None:
    """Add a row to the table of layers; ``skipped_layers`` has each skipped layer with its reason."""
    layers_by_reason = defaultdict(list)
    for layer, skip in skipped_layers:
        layers_by_reason[skip.reason].append(layer)
    reasons = [f"{reason} ({len(layers)}): {join_values(layers)}" for reason, layers in layers_by_reason.items()]
    engaged_title = "would engage" if section == PLAN else "engaged"
    size_titles = ("decode limit", "rewritten ranges", "captured sizes")
    columns = ("input", engaged_title, "kernels", "KV cache", *size_titles, "skipped")
    page.add_block(page_input, section, "MLA layers", columns, [(*cells, reasons or "none")])


def join_values(values: Iterable[object]) -> str | None:
    """Return the values separated by commas, or None if there are none."""
    return ", ".join(map(str, values)) or None


def add_spans(
    page: Page, page_input: PageInput, section: str, title_start: str, note: str, spans: Sequence[Span]
) -> None:
    """Add a block that shows which kernel runs at which number of tokens. Variants of a kernel count as one kernel."""
    spans = merge_spans(spans)
    title = f"{title_start}: " + ", ".join(f"{span.kernel} {span.tokens_text}" for span in spans)
    strip = {"": [(span.first, span.last + 1, span.kernel) for span in spans]}
    draw = partial(charts.draw_strips, "tokens in the step", strip, is_planned=section == PLAN, is_log_scale=True)
    rows = [(span.tokens_text, span.kernel) for span in spans]
    page.add_block(page_input, section, title, ("tokens", "kernel"), rows, draw, [note])

# SPDX-License-Identifier: Apache-2.0
"""Add a worker's status to a page."""

import socket

from vllm_aiter_mla.commands.report import charts
from vllm_aiter_mla.commands.report.blocks import InputSummary, Page, PageInput
from vllm_aiter_mla.commands.report.tables import add_layers, add_spans, join_values
from vllm_aiter_mla.decided import kernel_at
from vllm_aiter_mla.status.line import status_line
from vllm_aiter_mla.status.liveness import ServerLocks
from vllm_aiter_mla.status.record import RankRecord, merge_ranks, records_of_all_ranks


def add_status(page: Page, page_input: PageInput, record: RankRecord) -> InputSummary:
    """Add the kernels of a worker's layers by number of tokens, and its timings."""
    name = f"{page_input.name}, rank {record.rank}"
    by_range = sorted((int(tokens.partition("-")[0]), tokens, counts) for tokens, counts in record.pass_counts.items())
    rewritten = [tokens for _, tokens, counts in by_range if counts["matched"]]
    add_layers(page, page_input, "Status", (
        name, f"{len(record.engaged)}/{record.num_layers}", join_values(sorted({*record.engaged.values()})),
        record.kv_cache_dtype, record.decode_limit or None, join_values(rewritten), join_values(record.capture_sizes),
    ), record.skipped.items())  # fmt: skip
    for group in record.decision_groups:
        if spans := group.decision.kernel_spans:
            add_spans(page, page_input, "Status", "Which kernel runs", f"{name}: {len(group.layers)} layers", spans)
    for shape in record.shape_timings:
        names = sorted({kernel for figures in shape.medians_us.values() for kernel in figures})
        by_tokens = sorted(shape.medians_us.items())
        rows = [
            (tokens, *map(us_by_kernel.get, names), kernel_at(shape.chosen_spans, tokens))
            for tokens, us_by_kernel in by_tokens
        ]
        columns = ("tokens", *(f"{kernel}, us" for kernel in names), "runs")
        draw = charts.chart_over_tokens(names, rows)
        notes = [f"{name}: {len(shape.layers)} layers"]
        page.add_block(page_input, "Status", f"Timed at start-up, {shape.shape}, per layer", columns, rows, draw, notes)
    outcome, meaning = _status_outcome(page_input, record)
    reasons = dict.fromkeys(skip.reason for skip in record.skipped.values())
    unknown_card = "unknown" if record.engaged else "unknown: the engine was skipped as a whole"
    card = "a CPU, for tests" if record.card == "cpu" else record.card or unknown_card
    return InputSummary(
        outcome, f"server of {record.model_name or 'a model'}", card, meaning, tuple(reasons), run=record.run
    )


def _status_outcome(page_input: PageInput, record: RankRecord) -> tuple[str, str]:
    """Return the outcome of a status's engine and what this rank means.

    Only a live engine can be "engaged". All its ranks are among the inputs, and each one engages all its layers.
    """
    merged = merge_ranks(records_of_all_ranks(page_input.ranks))
    is_local = record.evidence.host == socket.gethostname()
    is_alive = ServerLocks(page_input.folder, [record]).is_serving([record]) if is_local else None
    if is_alive is None:
        return "unknown", f"cannot tell here whether its server is running; it had: {status_line(record)}"
    if not is_alive:
        return "ended", f"its engine or front end has ended; it had: {status_line(record)}"
    if merged.num_silent:
        silent_text = f"{merged.num_silent} of {merged.num_ranks} ranks have no status file here"
        return "unknown", f"{silent_text}; this one has: {status_line(record)}"
    if not merged.is_num_ranks_known:
        return "unknown", f"how many ranks its engine has is unknown; this one has: {status_line(record)}"
    if not merged.engaged:
        return "skipped", status_line(record)
    misses_layers = any(len(rank.engaged) < rank.num_layers for rank in page_input.ranks)
    if merged.skipped or misses_layers or not merged.ranks_agree:
        return "partly", status_line(record)
    if not merged.first_record.card:
        return "unknown", f"its card is unknown; it has: {status_line(record)}"
    return "engaged on a CPU" if merged.first_record.card == "cpu" else "engaged", status_line(record)

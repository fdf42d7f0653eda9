# SPDX-License-Identifier: Apache-2.0
"""Add two servers, flag off and on, to a page: times over the request rates, or shares of right answers."""

from functools import partial
from itertools import groupby

from vllm_aiter_mla.commands.check.engine.record import SIDES
from vllm_aiter_mla.commands.report import charts
from vllm_aiter_mla.commands.report.blocks import InputSummary, Page, PageInput
from vllm_aiter_mla.commands.report.serving_record import LENGTHS, METRICS, OFF, ON, Estimate, Serving

SHOWN_ELSEWHERE = {"card", "vllm", "aiter", "plugin", "time"}
"""Entries of ``Serving.about`` that the first screen takes from the stamp, or shows as the card."""


def add_serving(page: Page, page_input: PageInput, record: Serving) -> InputSummary:
    """Add a served model with the flag off and on: times and rates with their errors, or shares of right answers."""
    alarms = [
        f"{', '.join(f'{name} {value:g}' for name, value in row.point.items())}: invalid: {row.invalid}"
        for row in record.rows
        if row.invalid
    ]
    results = [*_add_times(page, page_input, record, alarms), *_add_answers(page, page_input, record)]
    card, meaning = record.about.get("card", ""), "; ".join(results) or "nothing was compared"
    versions = {name: value for name, value in record.about.items() if name not in SHOWN_ELSEWHERE}
    outcome = "failed" if alarms or not results else "compared"
    card_name = "a CPU, for tests" if card == "CPU" else card or "unknown"
    return InputSummary(outcome, f"{record.tool} of {record.model}", card_name, meaning, alarms, versions)


def _add_times(page: Page, page_input: PageInput, record: Serving, alarms: list[str]) -> list[str]:
    """Add the table of times, and two charts for each combination of lengths; return the results in words."""
    valid_rows, results = [row for row in record.rows if not row.invalid], list[str]()
    value_columns = [(metric, side) for metric in METRICS for side in SIDES]
    columns = (*LENGTHS, "requests/s", *(f"{metric}, flag {side}" for metric, side in value_columns))
    cells = [
        (
            *(f"{row.point[name]:g}" for name in (*LENGTHS, "rate")),
            *(row.estimates[metric][side].show(2) for metric, side in value_columns),
        )
        for row in valid_rows
    ]
    name, notes = page_input.name, ["Times in ms, throughput in tokens/s; mean and standard error."]
    notes.append(f"Flag on: {record.status}")
    page.add_block(
        page_input, "Serving", f"{name}: {record.tool}, {record.model}", columns, cells, notes=notes, alarms=alarms
    )
    for lengths, group in groupby(valid_rows, lambda row: "/".join(f"{row.point[name]:g}" for name in LENGTHS)):
        rows = [*group]
        rates = [f"{row.point['rate']:g}" for row in rows]
        for metric, unit in (("tpot", "ms per output token"), ("throughput", "output tokens per second")):
            by_side = {side: [row.estimates[metric][side] for row in rows] for side in SIDES}
            series = {
                f"flag {side}": [(estimate.mean, estimate.stderr) for estimate in by_side[side]] for side in SIDES
            }
            draw = partial(charts.draw_lines, "requests per second", unit, rates, series)
            page.add_block(page_input, "Serving", f"{name}: {unit}, lengths {lengths}", chart=draw)
        ratios = [row.estimates["tpot"][OFF].mean / row.estimates["tpot"][ON].mean for row in rows]
        results.append(
            f"TPOT off / on {min(ratios):.3f} to {max(ratios):.3f} over {len(rows)} rates, lengths {lengths}"
        )
    return results


def _add_answers(page: Page, page_input: PageInput, record: Serving) -> list[str]:
    """Add the shares of right answers by run; return the title of each run."""
    results = []
    for run, off_answers in (record.answers or {}).get(OFF, {}).items():
        sides = {OFF: off_answers["figures"], ON: record.answers[ON][run]["figures"]}
        shares = [(run, name, *(Estimate(**sides[side][name]).show(4) for side in SIDES)) for name in sides[OFF]]
        title = f"shares of right answers, run {int(run) + 1}"
        page.add_block(page_input, "Serving", f"{page_input.name}: {title}", ("run", "filter", *SIDES), shares)
        results.append(title)
    return results

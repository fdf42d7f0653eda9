# SPDX-License-Identifier: Apache-2.0
"""What a page shows of two servers, flag off and on: times over the rates, or shares of right answers."""

from functools import partial
from itertools import groupby

from vllm_aiter_mla.commands.report import charts
from vllm_aiter_mla.commands.report.blocks import Glance, Page
from vllm_aiter_mla.commands.report.serving_record import LENGTHS, METRICS, OFF, ON, SIDES, Estimate, Serving

ELSEWHERE = {"card", "vllm", "aiter", "plugin", "time"}
"""Entries of ``Serving.about`` that the first screen has from the stamp, or as the card."""


def serving(page: Page, record: Serving) -> Glance:
    """Add a served model with the flag off and on: times and rates with their errors, or shares of right answers."""
    alarms = [
        f"{', '.join(f'{what} {value:g}' for what, value in row.point.items())}: invalid: {row.invalid}"
        for row in record.rows
        if row.invalid
    ]
    results = [*_add_times(page, record, alarms), *_add_answers(page, record)]
    card, means = record.about.get("card", ""), "; ".join(results) or "nothing was compared"
    versions = {what: value for what, value in record.about.items() if what not in ELSEWHERE}
    word = "failed" if alarms or not results else "compared"
    on = "a CPU, for tests" if card == "CPU" else card or "not told"
    return Glance(word, f"{record.tool} of {record.model}", on, means, alarms, versions)


def _add_times(page: Page, record: Serving, alarms: list[str]) -> list[str]:
    """Add the table of times and two charts per lengths; return what came out, in words."""
    valid, results = [row for row in record.rows if not row.invalid], list[str]()
    columns = [(metric, side) for metric in METRICS for side in SIDES]
    heads = (*LENGTHS, "requests/s", *(f"{metric}, flag {side}" for metric, side in columns))
    cells = [
        (*(f"{row.point[name]:g}" for name in (*LENGTHS, "rate")), *(row.estimates[m][s].show(2) for m, s in columns))
        for row in valid
    ]
    name, notes = page.input.name, ["Times in ms, throughput in tokens/s; mean and standard error."]
    notes.append(f"Flag on: {record.status}")
    page.add("Serving", f"{name}: {record.tool}, {record.model}", heads, cells, notes=notes, alarms=alarms)
    for lengths, group in groupby(valid, lambda row: "/".join(f"{row.point[name]:g}" for name in LENGTHS)):
        rows = [*group]
        rates = [f"{row.point['rate']:g}" for row in rows]
        for metric, unit in (("tpot", "ms per output token"), ("throughput", "output tokens per second")):
            by_side = {side: [row.estimates[metric][side] for row in rows] for side in SIDES}
            series = {f"flag {side}": [(each.mean, each.stderr) for each in by_side[side]] for side in SIDES}
            draw = partial(charts.lines, "requests per second", unit, rates, series)
            page.add("Serving", f"{name}: {unit}, lengths {lengths}", chart=draw)
        ratios = [row.estimates["tpot"][OFF].mean / row.estimates["tpot"][ON].mean for row in rows]
        results.append(
            f"TPOT off / on {min(ratios):.3f} to {max(ratios):.3f} over {len(rows)} rates, lengths {lengths}"
        )
    return results


def _add_answers(page: Page, record: Serving) -> list[str]:
    """Add the shares of right answers by run; return which runs there are, in words."""
    results = []
    for run, off in (record.answers or {}).get(OFF, {}).items():
        sides = {OFF: off["figures"], ON: record.answers[ON][run]["figures"]}
        shares = [(run, name, *(Estimate(**sides[side][name]).show(4) for side in SIDES)) for name in sides[OFF]]
        title = f"shares of right answers, run {int(run) + 1}"
        page.add("Serving", f"{page.input.name}: {title}", ("run", "filter", *SIDES), shares)
        results.append(title)
    return results

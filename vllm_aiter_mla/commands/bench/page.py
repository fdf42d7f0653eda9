"""A run as text and as one self-contained page with a chart."""

from __future__ import annotations

from vllm_aiter_mla.commands.bench import paths as who
from vllm_aiter_mla.commands.bench.run import Report, Row, bounds, caps
from vllm_aiter_mla.commands.report import charts
from vllm_aiter_mla.commands.report.render import fill

NAMES = (who.OURS, who.UNFUSED, who.VLLM, who.TORCH, who.AITER)
UNKNOWN = "-"
NO_CAPS = "caps: none called for by the points measured"


def text(report: Report) -> str:
    """The table, the paths that could not run, the bounds and the caps that the figures call for."""
    lines = [head(report), ""]
    columns = [f"{'T':>4} {'N':>4} {'type':<7}"] + [f"{name + ' us':>14}" for name in NAMES]
    lines.append(" ".join([*columns, f"{'ratio':>6}", f"{'GB/s':>6}", f"{'% copy':>6}", "launches"]))
    lines += [_line(row, report.copy_gbps) for row in report.rows]
    missing = {f"{name}: not measured: {why}": None for row in report.rows for name, why in row.missing.items()}
    lines += ["", *missing]
    if report.stopped:
        lines.append(f"STOPPED at {report.stopped}")
    for row in report.rows:
        lines += [
            f"WRONG, not timed: {name} at T={row.point.tokens} N={row.point.heads}: {why}"
            for name, why in row.wrong.items()
        ]
    lines += ["", *_bound_lines(report), ""]
    found = caps(report)
    lines.append("caps for tiles.CAPS, so that the back end is not chosen where it was slower:" if found else NO_CAPS)
    lines += [f"  {cap}," for cap in found]
    return "\n".join(lines)


def head(report: Report) -> str:
    """Card, versions and the copy measured in the same run."""
    return f"{', '.join(report.machine.values())}; copy {report.copy_gbps:.0f} GB/s; medians of {report.rounds} replays"


def _line(row: Row, copy: float) -> str:
    point = row.point
    percent = None if row.gbps is None else 100 * row.gbps / copy
    cells = [f"{point.tokens:>4} {point.heads:>4} {point.label:<7}"]
    cells += [_cell(row.timings[n].median_us if n in row.timings else None, "14.2f") for n in NAMES]
    cells += [_cell(row.ratio, "6.2f"), _cell(row.gbps, "6.0f"), _cell(percent, "6.0f")]
    cells.append("/".join(str(row.timings[n].launches) if n in row.timings else UNKNOWN for n in NAMES))
    slower = row.ratio is not None and row.ratio < 1
    return " ".join(cells) + ("  slower than the unfused sequence" if slower else "")


def _cell(value: float | None, form: str) -> str:
    return f"{UNKNOWN:>{form.partition('.')[0]}}" if value is None else f"{value:>{form}}"


def _bound_lines(report: Report) -> list[str]:
    lines = []
    for bound in bounds(report):
        outcome = "not measured" if bound.holds is None else "holds" if bound.holds else "BROKEN"
        figure = "" if bound.measured is None else f" (lowest {bound.measured:.2f})"
        lines.append(f"bound: {bound.text}: {outcome}{figure}")
    return lines


def page(report: Report) -> str:
    """The same as HTML: one chart per number of heads and type, microseconds against tokens, then the text.

    Raises:
        NoTemplateEngineError: jinja2 is missing.
    """
    drawn = []
    for number, (heads, label) in enumerate(sorted({(r.point.heads, r.point.label) for r in report.rows})):
        rows = [row for row in report.rows if (row.point.heads, row.point.label) == (heads, label)]
        caption = f"N = {heads}, {label}"
        drawn.append((caption, chart(rows, f"c{number}", caption)))
    values = {"title": "Decode preparation, us per call", "about": head(report), "charts": drawn, "text": text(report)}
    return fill("figures.html.j2", values)


def chart(rows: list[Row], ident: str, caption: str) -> charts.Chart:
    """One line per path, tokens evenly spaced, microseconds from zero."""
    rows = sorted(rows, key=lambda row: row.point.tokens)
    series = {name: [row.timings[name].median_us if name in row.timings else None for row in rows] for name in NAMES}
    return charts.lines(ident, f"Microseconds against tokens, {caption}", [row.point.tokens for row in rows], series)

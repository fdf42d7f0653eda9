"""A run as text and as one self-contained page with a chart."""

from __future__ import annotations

import html

from vllm_aiter_mla.commands.bench import paths as who
from vllm_aiter_mla.commands.bench.run import Report, Row, bounds, caps

NAMES = (who.OURS, who.UNFUSED, who.STOCK, who.TORCH, who.AITER)
# Okabe and Ito: told apart by colour-blind readers.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
UNKNOWN = "-"


def text(report: Report) -> str:
    """The table, the paths that could not run, the bounds and the caps that the figures call for."""
    lines = [head(report), ""]
    columns = [f"{'T':>4} {'N':>4} {'type':<5}"] + [f"{name + ' us':>14}" for name in NAMES]
    lines.append(" ".join([*columns, f"{'ratio':>6}", f"{'GB/s':>6}", f"{'% copy':>6}", "launches"]))
    lines += [_line(row, report.copy_gbps) for row in report.rows]
    if report.rows:
        lines += ["", *[f"{name}: not measured: {why}" for name, why in report.rows[0].missing.items()]]
    for row in report.rows:
        lines += [
            f"WRONG, not timed: {name} at T={row.point.tokens} N={row.point.heads}: {why}"
            for name, why in row.wrong.items()
        ]
    lines += ["", *_bound_lines(report), "", *_cap_lines(report)]
    return "\n".join(lines)


def head(report: Report) -> str:
    """Card, versions and the copy measured in the same run."""
    return f"{', '.join(report.machine.values())}; copy {report.copy_gbps:.0f} GB/s; medians of {report.rounds} replays"


def _line(row: Row, copy: float) -> str:
    point = row.point
    cells = [f"{point.tokens:>4} {point.heads:>4} {'fp8' if point.quantised else 'bf16':<5}"]
    cells += [f"{row.timings[n].median_us:>14.2f}" if n in row.timings else f"{UNKNOWN:>14}" for n in NAMES]
    cells.append(f"{row.ratio:>6.2f}" if row.ratio is not None else f"{UNKNOWN:>6}")
    cells.append(f"{row.gbps:>6.0f}" if row.gbps is not None else f"{UNKNOWN:>6}")
    cells.append(f"{100 * row.gbps / copy:>6.0f}" if row.gbps is not None else f"{UNKNOWN:>6}")
    cells.append("/".join(str(row.timings[n].launches) if n in row.timings else UNKNOWN for n in NAMES))
    slower = row.ratio is not None and row.ratio < 1
    return " ".join(cells) + ("  slower than the unfused sequence" if slower else "")


def _bound_lines(report: Report) -> list[str]:
    lines = []
    for bound in bounds(report):
        verdict = "not measured" if bound.holds is None else "holds" if bound.holds else "BROKEN"
        figure = "" if bound.measured is None else f" (lowest {bound.measured:.2f})"
        lines.append(f"bound: {bound.text}: {verdict}{figure}")
    return lines


def _cap_lines(report: Report) -> list[str]:
    found = caps(report)
    if not found:
        return ["caps: none called for by the points measured"]
    return [
        "caps for tiles.CAPS, so that the back end steps aside where it was slower:",
        *[f"  {cap}," for cap in found],
    ]


def page(report: Report) -> str:
    """The same as HTML: one chart per number of heads and type, microseconds against tokens, then the text."""
    groups = sorted({(row.point.heads, row.point.quantised) for row in report.rows})
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Decode preparation</title>",
        "<style>body{font:14px system-ui,sans-serif;margin:2em}svg text{font:11px system-ui,sans-serif}",
        "figure{display:inline-block;margin:0 1em 1em 0}</style><h1>Decode preparation, us per call</h1>",
        f"<p>{html.escape(head(report))}</p>",
    ]
    for heads, kind in groups:
        rows = [row for row in report.rows if (row.point.heads, row.point.quantised) == (heads, kind)]
        parts.append(f"<figure>{chart(rows)}<figcaption>N = {heads}, {'fp8' if kind else 'bf16'}</figcaption></figure>")
    return "\n".join([*parts, f"<pre>{html.escape(text(report))}</pre></html>", ""])


def chart(rows: list[Row], width: int = 420, height: int = 240) -> str:
    """Inline SVG: one line per path, tokens evenly spaced, microseconds from zero."""
    rows = sorted(rows, key=lambda row: row.point.tokens)
    top = max((t.median_us for row in rows for t in row.timings.values()), default=1.0)
    left, bottom = 46, height - 40
    step = (width - left - 10) / max(len(rows) - 1, 1)
    parts = [f"<svg role='img' aria-label='microseconds against tokens' width='{width}' height='{height}'>"]
    for part in range(5):
        y = bottom - (bottom - 10) * part / 4
        parts.append(f"<line x1='{left}' x2='{width - 10}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>")
        parts.append(f"<text x='{left - 4}' y='{y + 4:.1f}' text-anchor='end'>{top * part / 4:.1f}</text>")
    for index, row in enumerate(rows):
        parts.append(
            f"<text x='{left + step * index:.1f}' y='{bottom + 14}' text-anchor='middle'>{row.point.tokens}</text>"
        )
    for place, (name, colour) in enumerate(zip(NAMES, LINE_COLOURS, strict=True)):
        dots = [
            (left + step * index, bottom - (bottom - 10) * row.timings[name].median_us / top)
            for index, row in enumerate(rows)
            if name in row.timings
        ]
        if dots:
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
            parts.append(f"<polyline points='{joined}' fill='none' stroke='{colour}' stroke-width='2'/>")
            parts.append(f"<text x='{left + 75 * place}' y='{height - 8}' fill='{colour}'>{name}</text>")
    return "".join([*parts, "</svg>"])

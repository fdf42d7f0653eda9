"""Charts as plain records of marks; ``parts.j2`` writes them as SVG. Colours are CSS classes, so themes apply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Width of one character of the charts' font, in pixels.
CHARACTER = 6.7


@dataclass(slots=True)
class Chart:
    """What is drawn, in pixels, and its text alternative.

    Attributes:
        ident: prefix of its element ids, one per page and never from a file.
        width, height: of the drawing.
        title: what it is.
        description: its figures in words.
        marks: elements in drawing order: tag, attributes, text, and the tip shown on hovering.
    """

    ident: str
    width: float
    height: float
    title: str
    description: str
    marks: list[dict[str, Any]] = field(default_factory=list)

    def rect(self, css: str, box: tuple[float, float, float, float], tip: str, round_by: int = 2) -> None:
        """A box at (x, y, width, height)."""
        self._mark("rect", css, dict(zip(("x", "y", "width", "height"), box, strict=True), rx=round_by), tip=tip)

    def line(self, css: str, *ends: tuple[float, float]) -> None:
        """A line through these points."""
        self._mark("polyline", css, {"points": " ".join(f"{x:.1f},{y:.1f}" for x, y in ends)})

    def text(self, at: tuple[float, float], text: str, anchor: str = "middle", css: str = "") -> None:
        """A line of text; ``anchor`` is "start", "middle" or "end"."""
        self._mark("text", css, {"x": at[0], "y": at[1], "text-anchor": anchor}, text)

    def _mark(self, tag: str, css: str, attributes: Mapping[str, Any], text: str = "", tip: str = "") -> None:
        rounded = {name: round(v, 1) if isinstance(v, float) else v for name, v in attributes.items()}
        self.marks.append({"tag": tag, "css": css, "attributes": rounded, "text": text, "tip": tip})


def bars(ident: str, title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]]) -> Chart:
    """Horizontal bars, each with a line of text above it.

    Args:
        ident, title: see ``Chart``.
        rows: per bar its text, and its parts: CSS class, figure, and the tip.
    """
    width, step = 340.0, 46.0
    most = max((sum(value for _, value, _ in parts) for _, parts in rows), default=0) or 1
    chart = Chart(ident, width, step * len(rows) + 6, title, "; ".join(text for text, _ in rows) + ".")
    for index, (text, parts) in enumerate(rows):
        y, x = step * index, 2.0
        chart.text((2, y + 14), text, "start")
        for css, value, tip in parts:
            wide = (width - 4) * value / most
            chart.rect(css, (x, y + 20, max(wide - 1, 2), 18), tip)
            x += wide
    return chart


def token_axis(ident: str, title: str, ranges: Sequence[Sequence[int]], limit: int | None, sizes: list[int]) -> Chart:
    """Compile ranges as bars on a logarithmic axis of tokens per step, capture sizes as ticks under them.

    Args:
        ident, title: see ``Chart``.
        ranges: [start, end] in tokens.
        limit: L of the decode limit, or None where the fast path is off.
        sizes: captured sizes in tokens; empty where none is known.
    """
    left, right = 6.0, 374.0
    top = math.log2(max([end for _, end in ranges] + sizes + [2]) + 1)

    def at(tokens: float) -> float:
        return left + (right - left) * math.log2(max(tokens, 1)) / top

    words = "; ".join(f"{a} to {b} tokens{_where(b, limit)}" for a, b in ranges)
    listed = ", ".join(map(str, sizes)) or "not recorded"
    chart = Chart(ident, 380, 118, title, f"{words}. Capture sizes: {listed}.")
    for start, end in ranges:
        x, wide = at(start), max(at(end + 1) - at(start) - 2, 4)
        css = "range inside" if limit is not None and end <= limit else "range"
        chart.rect(css, (x, 30, wide, 30), f"{start} to {end} tokens", 4)
        name = f"{start}-{end}"
        if wide > len(name) * CHARACTER + 6:  # a narrow one is in the table under the chart
            chart.text((x + wide / 2, 49), name, css="onbar")
    if limit is not None:
        x = at(limit + 1) - 1
        chart.line("limit", (x, 18), (x, 84))
        chart.text((min(max(x, 30), 350), 14), f"L = {limit}", css="strong")
    for size in sizes:
        chart.line("tick", (at(size), 64), (at(size), 76))
    chart.line("axis", (left, 86), (right, 86))
    for power in range(0, int(top) + 1, 1 if top < 9 else 2):
        x = at(1 << power)
        chart.text((x, 100), str(1 << power), "start" if not power else "end" if x > right - 20 else "middle", "note")
    chart.text((right, 115), "tokens per step (logarithmic)", "end", "note")
    return chart


def _where(end: int, limit: int | None) -> str:
    if limit is None:
        return ""
    return " inside the decode limit" if end <= limit else " above it, unmodified vLLM"


def ratio_bars(ident: str, title: str, points: Sequence[tuple[int, float | None]], top: float) -> Chart:
    """One bar per T, with a line at 1: above it the one launch is faster. None is a gap that says "n/m"."""
    step, left, base, high = 31.0, 30.0, 142.0, 126.0
    width = left + step * len(points) + 8
    words = "; ".join(f"T {t}: {'not measured' if r is None else format(r, '.2f')}" for t, r in points)
    chart = Chart(ident, width, 176, title, f"Ratio by tokens. {words}.")
    for value in _steps(top):
        y = base - high * value / top
        chart.line("grid", (left, y), (width - 6, y))
        chart.text((left - 4, y + 4), f"{value:g}", "end", "note")
    for index, (tokens, ratio) in enumerate(points):
        x = left + step * index + 3
        tall = 1.0 if ratio is None else max(high * ratio / top, 1)
        if ratio is not None:
            css = "bar" if ratio >= 1 else "bar slow"
            chart.rect(css, (x, base - tall, 25, tall), f"T = {tokens}: {ratio:.2f}")
        chart.text((x + 12.5, base - tall - 4), "n/m" if ratio is None else f"{ratio:.1f}", css="note")
        chart.text((x + 12.5, base + 14), str(tokens), css="note")
    chart.line("limit", (left, base - high / top), (width - 6, base - high / top))
    chart.text((width - 6, 172), "T, tokens per step", "end", "note")
    return chart


def _steps(top: float) -> list[float]:
    step = next((s for s in (0.5, 1, 2, 5, 10, 20, 50) if top / s <= 6), top)
    return [step * number for number in range(int(top / step) + 1)]


def lines(ident: str, title: str, across: Sequence[int], series: Mapping[str, Sequence[float | None]]) -> Chart:
    """One line per name, points evenly spaced, figures from zero, with the names under it; at most five names.

    Args:
        ident, title: see ``Chart``.
        across: what stands under each point.
        series: figures by name, one per point; None is left out.
    """
    width, left, right, bottom, high = 420.0, 46.0, 16.0, 200.0, 190.0
    top = max((v for values in series.values() for v in values if v is not None), default=0.0) or 1.0
    step = (width - left - right) / max(len(across) - 1, 1)
    shown = {name: [(n, v) for n, v in enumerate(values) if v is not None] for name, values in series.items()}
    words = "; ".join(f"{name}: {', '.join(f'{v:.2f}' for _, v in dots)}" for name, dots in shown.items() if dots)
    chart = Chart(ident, width, 240, title, f"At {', '.join(map(str, across))}: {words}.")
    for part in range(5):
        y = bottom - high * part / 4
        chart.line("grid", (left, y), (width - right, y))
        chart.text((left - 4, y + 4), f"{top * part / 4:.1f}", "end", "note")
    for n, value in enumerate(across):
        chart.text((left + step * n, bottom + 14), str(value), css="note")
    for place, (name, dots) in enumerate(shown.items()):
        if dots:
            chart.line(f"series s{place}", *((left + step * n, bottom - high * value / top) for n, value in dots))
            chart.text((left + 75 * place, 232), name, "start", f"series s{place}")
    return chart

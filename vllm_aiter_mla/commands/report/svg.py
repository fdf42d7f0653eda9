"""Inline SVG: a layer's graph, ranges on a token axis, bars. Colours are CSS classes of the page, so themes apply.

Each chart has a title, a description and ``role="img"``; the template puts a table with the same figures under it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from vllm_aiter_mla.commands.report.layers import Layer
from vllm_aiter_mla.commands.report.layout import CHARACTER, HEIGHT, Drawing, place


def _open(ident: str, width: float, height: float, title: str, description: str, css: str = "") -> str:
    return (
        f'<svg class="chart {css}" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{escape(title)}" aria-describedby="{ident}-d" xmlns="http://www.w3.org/2000/svg">'
        f'<title id="{ident}-t">{escape(title)}</title><desc id="{ident}-d">{escape(description)}</desc>'
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", css: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(text)}</text>'


def layer_graph(layer: Layer, ident: str, title: str) -> str:
    """A layer from its GEMMs down to its attention; boxes that the other graph lacks are marked by more than colour."""
    drawing = place(layer.boxes)
    described = "; ".join(
        f"{box.label}{' ' + box.note if box.note else ''}{' (differs)' if box.changed else ''}"
        for box in layer.boxes.values()
    )
    parts = [
        _open(ident, drawing.width, drawing.height, title, f"Operations from inputs to attention: {described}."),
        f'<defs><marker id="{ident}-a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto"><path d="M0 0L8 4L0 8z" class="tip"/></marker></defs>',
    ]
    parts += [f'<path class="edge" marker-end="url(#{ident}-a)" d="{_path(drawing, edge)}"/>' for edge in drawing.edges]
    for key, box in layer.boxes.items():
        spot = drawing.spots[key]
        css = "changed" if box.changed else "gemm" if box.label == "GEMM" else "same"
        parts.append(
            f'<g class="box {css}"><title>{escape(key)}: {escape(box.label)}</title><rect '
            f'x="{spot.x - spot.width / 2:.1f}" y="{spot.y - HEIGHT / 2:.1f}" width="{spot.width:.1f}" '
            f'height="{HEIGHT:.0f}" rx="6"/>'
        )
        parts.append(_text(spot.x, spot.y + (-2 if box.note else 4), box.label))
        if box.note:
            parts.append(_text(spot.x, spot.y + 12, box.note, css="note"))
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def _path(drawing: Drawing, names: list[str]) -> str:
    spots = [drawing.spots[name] for name in names]
    x, y = spots[0].x, spots[0].y + HEIGHT / 2
    parts = [f"M{x:.1f} {y:.1f}"]
    for spot in spots[1:]:
        end = spot.y - HEIGHT / 2
        middle = (y + end) / 2
        parts.append(f"C{x:.1f} {middle:.1f} {spot.x:.1f} {middle:.1f} {spot.x:.1f} {end:.1f}")
        x, y = spot.x, spot.y + HEIGHT / 2
        if spot is not spots[-1]:
            parts.append(f"L{x:.1f} {y:.1f}")
    return "".join(parts)


def token_axis(
    ranges: Sequence[tuple[int, int]], limit: int | None, sizes: Sequence[int], ident: str, title: str
) -> str:
    """Compile ranges as bars on a logarithmic axis of tokens per step, capture sizes as ticks under them.

    Args:
        ranges: [start, end] in tokens.
        limit: L of the decode bucket, or None where the fast path is off.
        sizes: captured sizes in tokens; empty where none is known.
        ident: prefix of the element ids.
        title: text alternative.
    """
    width, left, right = 380.0, 6.0, 374.0
    top = math.log2(max([end for _, end in ranges] + list(sizes) + [2]) + 1)

    def at(tokens: float) -> float:
        return left + (right - left) * math.log2(max(tokens, 1)) / top

    words = "; ".join(f"{a} to {b} tokens{_inside(b, limit)}" for a, b in ranges)
    parts = [_open(ident, width, 118, title, f"{words}. Capture sizes: {_sizes_text(sizes)}.")]
    for start, end in ranges:
        inside = limit is not None and end <= limit
        x, wide = at(start), max(at(end + 1) - at(start) - 2, 4)
        parts.append(
            f'<g class="range {"inside" if inside else "outside"}"><title>{start} to {end} tokens</title>'
            f'<rect x="{x:.1f}" y="30" width="{wide:.1f}" height="30" rx="4"/></g>'
        )
        name = f"{start}-{end}"
        if wide > len(name) * CHARACTER + 6:  # a narrow one is in the table under the chart
            parts.append(_text(x + wide / 2, 49, name, css="onbar"))
    if limit is not None:
        x = at(limit + 1) - 1
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="18" y2="84" class="limit"/>')
        parts.append(_text(min(max(x, 30), 350), 14, f"L = {limit}", css="strong"))
    for size in sizes:
        parts.append(f'<line x1="{at(size):.1f}" x2="{at(size):.1f}" y1="64" y2="76" class="tick"/>')
    parts.append(f'<line x1="{left}" x2="{right}" y1="86" y2="86" class="axis"/>')
    for power in range(0, int(top) + 1):
        x = at(1 << power)
        if power % 2 == 0 or top < 9:
            anchor = "start" if power == 0 else "end" if x > right - 20 else "middle"
            parts.append(_text(x, 100, str(1 << power), anchor, "note"))
    parts.append(_text(right, 115, "tokens per step (logarithmic)", "end", "note"))
    return "".join([*parts, "</svg>"])


def _inside(end: int, limit: int | None) -> str:
    if limit is None:
        return ""
    return " inside the decode bucket" if end <= limit else " above it, stock"


def _sizes_text(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if sizes else "not recorded"


def ratio_bars(points: Sequence[tuple[int, float | None]], top: float, ident: str, title: str) -> str:
    """One bar per T, with a line at 1: above it the one launch is faster. None is a gap that says "n/m"."""
    step, left, base, high = 31.0, 30.0, 142.0, 126.0
    width = left + step * len(points) + 8
    words = "; ".join(f"T {t}: {'not measured' if r is None else format(r, '.2f')}" for t, r in points)
    parts = [_open(ident, width, 176, title, f"Ratio by tokens. {words}.")]
    for value in _steps(top):
        y = base - high * value / top
        parts.append(f'<line x1="{left}" x2="{width - 6:.0f}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(left - 4, y + 4, f"{value:g}", "end", "note"))
    for index, (tokens, ratio) in enumerate(points):
        x = left + step * index + 3
        if ratio is None:
            parts.append(_text(x + 12, base - 5, "n/m", css="note"))
        else:
            tall = max(high * ratio / top, 1)
            css = "bar" if ratio >= 1 else "bar slow"
            parts.append(
                f'<g class="{css}"><title>T = {tokens}: {ratio:.2f}</title><rect x="{x:.1f}" y="{base - tall:.1f}" '
                f'width="25" height="{tall:.1f}" rx="2"/></g>'
            )
            parts.append(_text(x + 12.5, base - tall - 4, f"{ratio:.1f}", css="note"))
        parts.append(_text(x + 12.5, base + 14, str(tokens), css="note"))
    y = base - high / top
    parts.append(f'<line x1="{left}" x2="{width - 6:.0f}" y1="{y:.1f}" y2="{y:.1f}" class="limit"/>')
    parts.append(_text(width - 6, 172, "T, tokens per step", "end", "note"))
    return "".join([*parts, "</svg>"])


def _steps(top: float) -> list[float]:
    step = next((s for s in (0.5, 1, 2, 5, 10, 20, 50) if top / s <= 6), top)
    return [step * number for number in range(int(top / step) + 1)]


def stacked(rows: Sequence[tuple[str, dict[str, int]]], ident: str, title: str) -> str:
    """One horizontal bar per name, split into counts by state ("passed", "failed", "skipped")."""
    # Names stand above their bars: a column for them would leave no room on a phone.
    width, step = 340.0, 46.0
    most = max((sum(counts.values()) for _, counts in rows), default=0) or 1
    words = "; ".join(f"{name}: {', '.join(f'{n} {s}' for s, n in counts.items() if n)}" for name, counts in rows)
    parts = [_open(ident, width, step * len(rows) + 6, title, f"{words}.")]
    for index, (name, counts) in enumerate(rows):
        y = step * index
        said = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "nothing run"
        parts.append(_text(2, y + 14, f"{name}: {said}", "start"))
        x = 2.0
        for state, count in counts.items():
            if count:
                wide = (width - 4) * count / most
                parts.append(
                    f'<g class="state {state}"><title>{escape(name)}: {count} {state}</title><rect x="{x:.1f}" '
                    f'y="{y + 20:.1f}" width="{max(wide - 1, 2):.1f}" height="18" rx="2"/></g>'
                )
                x += wide
    return "".join([*parts, "</svg>"])


def op_bars(rows: Sequence[tuple[str, float]], unit: str, ident: str, title: str) -> str:
    """One horizontal bar per name with its figure."""
    width, step = 340.0, 46.0
    most = max((value for _, value in rows), default=0) or 1
    words = "; ".join(f"{name}: {value:g} {unit}" for name, value in rows)
    parts = [_open(ident, width, step * len(rows) + 6, title, f"{words}.")]
    for index, (name, value) in enumerate(rows):
        y = step * index
        parts.append(_text(2, y + 14, f"{name}: {value:g}", "start"))
        parts.append(
            f'<g class="{"bar" if index else "range outside"}"><title>{escape(name)}: {value:g} {escape(unit)}</title>'
            f'<rect x="2" y="{y + 20:.1f}" width="{(width - 4) * value / most:.1f}" height="18" rx="2"/></g>'
        )
    return "".join([*parts, "</svg>"])

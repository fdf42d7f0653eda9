"""Charts as inline SVG, drawn by matplotlib. Text and axes take the page's text colour, so dark themes apply."""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Replaced by the page's text colour in the SVG.
INK = "#010203"
GREY, BLUE, GREEN, RED = "#8a929b", "#2b7fc4", "#2a9d6f", "#d0504a"
SERIES = (BLUE, "#d9822b", GREEN, "#9467bd", "#c45a9a")
STATES = {"passed": GREEN, "failed": RED, "skipped": GREY}
COLOURED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLE: Any = dict.fromkeys(COLOURED, INK) | {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a dollar sign in a name starts no formula
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "font.size": 9,
}


def lines(
    title: str, unit: str, across: Sequence[object], series: Mapping[str, Sequence[float | None]], level: float = 0
) -> str:
    """Draw one line per name over evenly spaced points, from zero.

    Args:
        title: the chart's text alternative.
        unit: of the figures.
        across: label of each point.
        series: one figure per point; None leaves a gap.
        level: height of a dashed line; 0 draws none.
    """
    with rc_context(STYLE):
        figure, axes = _figure(2.4)
        for number, (name, values) in enumerate(series.items()):
            figures = [float("nan") if value is None else value for value in values]
            axes.plot(figures, "o-", markersize=3, color=SERIES[number % len(SERIES)], label=name)
        if level:
            axes.axhline(level, color=GREY, linestyle="--")
        axes.set_xticks(range(len(across)), [str(one) for one in across])
        axes.set(xlabel="tokens in the step", ylabel=unit, ylim=(0, None))
        figure.legend(loc="outside upper center", ncols=3)
        return _svg(figure, title)


def bars(title: str, unit: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """Draw one horizontal bar per name from its parts, end to end; ``STATES`` has the colours of some parts."""
    with rc_context(STYLE):
        figure, axes = _figure(0.7 + 0.42 * len(rows))
        for row, (name, parts) in enumerate(rows.items()):
            start = 0.0
            for part, value in parts.items():
                axes.barh(row, value, left=start, height=0.45, color=STATES.get(part, BLUE))
                start += value
            axes.text(start, row, " " + ", ".join(f"{value:g} {part}" for part, value in parts.items()), va="center")
            axes.text(0, row - 0.25, name, va="bottom")
        axes.set(xlabel=unit, yticks=(), ylim=(len(rows) - 0.6, -0.7))
        axes.margins(x=0.25)
        return _svg(figure, title)


def token_axis(title: str, ranges: Sequence[Sequence[int]], limit: int | None, sizes: Sequence[int]) -> str:
    """Draw compile ranges on a logarithmic axis of tokens, with capture sizes as ticks below.

    Args:
        title: the chart's text alternative.
        ranges: [first, last] tokens.
        limit: the decode limit L; None where the fast path is off.
        sizes: captured sizes; may be empty.
    """
    with rc_context(STYLE):
        figure, axes = _figure(1.3)
        for first, last in ranges:
            inside = limit is not None and last <= limit
            axes.barh(0, last + 1 - first, left=first, height=0.7, color=GREEN if inside else GREY, edgecolor=INK)
        if limit is not None:
            axes.axvline(limit + 1, color=RED, linestyle="--")
            axes.text(limit + 1, 0.62, f"L = {limit}", ha="center")
        axes.plot(sizes, [-0.6] * len(sizes), "|", color=INK)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="tokens in the step", yticks=(), ylim=(-0.8, 0.6))
        axes.margins(x=0)
        return _svg(figure, title)


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.6, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Figure, title: str) -> str:
    """Return the figure as an ``<svg>`` element with a text alternative."""
    file = io.StringIO()
    with rc_context({"svg.hashsalt": title}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about characters that the measuring font lacks
        figure.savefig(file, format="svg", metadata={"Date": None})
    drawn = file.getvalue().partition("<svg")[2].replace(INK, "currentColor")
    # Every chart names its groups alike; only hashed names are referred to.
    drawn = re.sub(r' id="[a-z]+[\w.]*_\d+"|<metadata>.*?</metadata>', "", drawn, flags=re.DOTALL)
    return f'<svg class="chart" role="img" aria-label="{html.escape(title)}"{drawn}'

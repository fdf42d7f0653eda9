# SPDX-License-Identifier: Apache-2.0
"""Charts as inline SVG, drawn by matplotlib. Text and axes take the page's text colour, so dark themes apply."""

import html
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Replaced by the page's text colour in the SVG.
INK = "#010203"
GREY, BLUE, GREEN = "#8a929b", "#2b7fc4", "#2a9d6f"
SERIES = (BLUE, "#d9822b", GREEN, "#9467bd", "#c45a9a", "#6b8e23", "#8c6d5a", "#3aa6a6")
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
Chart = Callable[[str], str]
"""Draws for a title."""


def over_tokens(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Chart:
    """Return a chart of the columns ``names`` of a table, in microseconds, over its first column, tokens."""
    series = {name: [(row[column], 0.0) for row in rows] for column, name in enumerate(names, 1)}
    return partial(lines, "tokens in the step", "us", [row[0] for row in rows], series)


def lines(
    x: str, y: str, ticks: Sequence[object], series: Mapping[str, Sequence[tuple[float | None, float]]], title: str
) -> str:
    """Draw by series a value and its standard error at each tick, from zero; None leaves a gap."""

    def draw(axes: Axes) -> None:
        for (name, values), colour in zip(series.items(), cycle(SERIES), strict=False):
            middle = [float("nan") if value is None else value for value, _ in values]
            errors = [error for _, error in values]
            shown = errors if any(errors) else None
            axes.errorbar(range(len(ticks)), middle, shown, fmt="o-", markersize=3, capsize=3, color=colour, label=name)
        axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
        axes.set(xlabel=x, ylabel=y, ylim=(0, None))
        axes.figure.legend(loc="outside upper center", ncols=3)

    return _svg(title, 2.4, draw)


def strips(
    unit: str, rows: Mapping[str, Sequence[tuple[float, float, str]]], title: str, planned: bool = False,
    log: bool = False,
) -> str:  # fmt: skip
    """Draw one strip per name: parts from start to end, each with a word that has one colour.

    What is only ``planned`` is pale and hatched.
    """
    words = list(dict.fromkeys(word for parts in rows.values() for *_, word in parts if word != "vllm"))
    colours = dict(zip(words, cycle(SERIES), strict=False)) | {"vllm": GREY}

    def draw(axes: Axes) -> None:
        look: dict[str, Any] = {"alpha": 0.4, "hatch": "//"} if planned else {}
        drawn = dict[str, Any]()
        for row, (name, parts) in enumerate(rows.items()):
            for start, end, word in parts:
                bar = axes.barh(row, end - start, left=start, height=0.4, color=colours[word], edgecolor=INK, **look)
                drawn.setdefault(word, bar)
            axes.text(parts[0][0], row - 0.25, name, va="bottom")
        axes.set(xlabel=unit, yticks=(), ylim=(len(rows) - 0.6, -0.8))
        if drawn.keys() - rows.keys():  # a word that is the name of a strip needs no legend
            axes.figure.legend(
                drawn.values(), drawn, loc="outside upper left", ncols=1 + 2 * (max(map(len, drawn)) < 14)
            )
        if log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")

    return _svg(title, 0.6 + 0.45 * len(rows) + 0.17 * len(words), draw)


def _svg(title: str, height: float, draw: Callable[[Axes], None]) -> str:
    """Return what ``draw`` draws as an ``<svg>`` element with a text alternative."""
    file = io.StringIO()
    with rc_context(STYLE | {"svg.hashsalt": title}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about characters that the measuring font lacks
        figure = Figure(figsize=(4.6, height), layout="constrained")
        draw(figure.subplots())
        figure.savefig(file, format="svg", metadata={"Date": None})
    drawn = file.getvalue().partition("<svg")[2].replace(INK, "currentColor")
    # Every chart names its groups alike; only hashed names are referred to.
    drawn = re.sub(r' id="[A-Za-z]+[\w.]*_\d+"|<metadata>.*?</metadata>', "", drawn, flags=re.DOTALL)
    return f'<svg class="chart" role="img" aria-label="{html.escape(title)}"{drawn}'

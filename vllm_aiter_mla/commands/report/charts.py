# SPDX-License-Identifier: Apache-2.0
"""Charts as inline SVG, drawn by matplotlib. Text and axes take the page's text colour, so dark themes apply."""

import html
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Replaced by the page's text colour in the SVG.
INK = "#010203"
GREY, BLUE, GREEN, RED = "#8a929b", "#2b7fc4", "#2a9d6f", "#d0504a"
SERIES = (BLUE, "#d9822b", GREEN, "#9467bd", "#c45a9a")
STATES = {"passed": GREEN, "failed": RED, "skipped": GREY}
OUTCOMES = {
    "passed": "good", "ok": "good", "engaged": "good", "timed": "good", "failed": "bad", "problem": "bad",
    "cut off": "bad", "warning": "mind", "partly": "mind", "no gain": "mind", "skipped": "none", "unknown": "none",
    "planned": "none",
}  # fmt: skip
"""The colour of each word that is an outcome, as a class of the page's style: a word stands beside every colour."""
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
PLANNED: tuple[dict[str, Any], dict[str, Any]] = ({}, {"alpha": 0.4, "hatch": "//"})
MICROSECONDS = ", us"
"""End of the heads of the columns that ``lines`` draws."""


def lines(unit: str, heads: Sequence[str], rows: Sequence[Sequence[Any]], title: str) -> str:
    """Draw the columns of microseconds over the first one, from zero; None leaves a gap."""

    def draw(axes: Axes) -> None:
        columns = [number for number, head in enumerate(heads) if head.endswith(MICROSECONDS)]
        for number, colour in zip(columns, cycle(SERIES), strict=False):
            values = [float("nan") if row[number] is None else row[number] for row in rows]
            name = heads[number].removesuffix(MICROSECONDS)
            axes.plot(values, "o-", markersize=3, color=colour, label=name)
        axes.set_xticks(range(len(rows)), [str(row[0]) for row in rows])
        axes.set(xlabel="tokens in the step", ylabel=unit, ylim=(0, None))
        axes.figure.legend(loc="outside upper center", ncols=3)

    return _svg(title, 2.4, draw)


def bars(unit: str, rows: Mapping[str, Mapping[str, float]], title: str, planned: bool = False) -> str:
    """Draw one horizontal bar per name from its parts, end to end; ``STATES`` has the colours of some parts.

    What is only ``planned`` is pale and hatched.
    """

    def draw(axes: Axes) -> None:
        for row, (name, parts) in enumerate(rows.items()):
            start = 0.0
            for part, value in parts.items():
                axes.barh(row, value, left=start, height=0.45, color=STATES.get(part, BLUE), **PLANNED[planned])
                start += value
            axes.text(start, row, " " + ", ".join(f"{value:g} {part}" for part, value in parts.items()), va="center")
            axes.text(0, row - 0.25, f" {name}", va="bottom")
        axes.set(xlabel=unit, yticks=(), ylim=(len(rows) - 0.6, -0.7))
        axes.margins(x=0.25)

    return _svg(title, 0.7 + 0.42 * len(rows), draw)


def token_axis(
    ranges: Sequence[Sequence[int]], limit: int | None, sizes: Sequence[int], title: str, planned: bool = False
) -> str:
    """Draw compile ranges, [first, last] tokens, on a logarithmic axis, with capture sizes as ticks below.

    ``limit`` is the decode limit, None where the fast path is off. What is only ``planned`` is pale and hatched.
    """

    def draw(axes: Axes) -> None:
        for first, last in ranges:
            inside = limit is not None and last <= limit
            colour = GREEN if inside else GREY
            axes.barh(0, last + 1 - first, left=first, height=0.7, color=colour, edgecolor=INK, **PLANNED[planned])
        if limit is not None:
            axes.axvline(limit + 1, color=RED, linestyle="--")
            axes.annotate(
                f"limit {limit}", (limit + 1, 1), (0, 4), ("data", "axes fraction"), "offset points", ha="center"
            )
        axes.plot(sizes, [-0.6] * len(sizes), "|", color=INK)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="tokens in the step", yticks=(), ylim=(-0.8, 0.6))
        axes.margins(x=0)

    return _svg(title, 1.3, draw)


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
    drawn = re.sub(r' id="[a-z]+[\w.]*_\d+"|<metadata>.*?</metadata>', "", drawn, flags=re.DOTALL)
    return f'<svg class="chart" role="img" aria-label="{html.escape(title)}"{drawn}'

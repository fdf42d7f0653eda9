# SPDX-License-Identifier: Apache-2.0
"""Charts as inline SVG, drawn by matplotlib. Text and axes have the page's text colour, so that dark themes work."""

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

from vllm_aiter_mla.decided import VLLM

# A colour that is replaced by the page's text colour in the SVG.
INK = "#010203"
GREY, BLUE, GREEN = "#8a929b", "#2b7fc4", "#2a9d6f"
SERIES = (BLUE, "#d9822b", GREEN, "#9467bd", "#c45a9a", "#6b8e23", "#8c6d5a", "#3aa6a6")
INK_COLOURED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLE: Any = dict.fromkeys(INK_COLOURED, INK) | {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a dollar sign in a name starts no formula
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "font.size": 9,
}
DrawChart = Callable[[str], str]
"""Returns the SVG of a chart with this title."""


def chart_over_tokens(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> DrawChart:
    """Return a chart of the columns ``names`` of a table, in microseconds, over its first column, tokens."""
    series = {name: [(row[column], 0.0) for row in rows] for column, name in enumerate(names, 1)}
    return partial(draw_lines, "tokens in the step", "us", [row[0] for row in rows], series)


def draw_lines(
    x_label: str,
    y_label: str,
    tick_labels: Sequence[object],
    series: Mapping[str, Sequence[tuple[float | None, float]]],
    title: str,
) -> str:
    """Draw a line for each series: a value and its standard error at each tick, from zero. None leaves a gap."""

    def draw(axes: Axes) -> None:
        for (name, values), colour in zip(series.items(), cycle(SERIES), strict=False):
            means = [float("nan") if value is None else value for value, _ in values]
            standard_errors = [error for _, error in values]
            shown_errors = standard_errors if any(standard_errors) else None
            axes.errorbar(
                range(len(tick_labels)),
                means,
                shown_errors,
                fmt="o-",
                markersize=3,
                capsize=3,
                color=colour,
                label=name,
            )
        axes.set_xticks(range(len(tick_labels)), [str(tick) for tick in tick_labels])
        axes.set(xlabel=x_label, ylabel=y_label, ylim=(0, None))
        axes.figure.legend(loc="outside upper center", ncols=3)

    return _render_svg(title, 2.4, draw)


def draw_strips(
    x_label: str, strips: Mapping[str, Sequence[tuple[float, float, str]]], title: str, is_planned: bool = False,
    is_log_scale: bool = False,
) -> str:  # fmt: skip
    """Draw one strip per name. Its parts go from start to end, and each label has one colour.

    If ``is_planned``, the strips are pale and hatched.
    """
    labels = list(dict.fromkeys(label for parts in strips.values() for *_, label in parts if label != VLLM))
    colours = dict(zip(labels, cycle(SERIES), strict=False)) | {VLLM: GREY}

    def draw(axes: Axes) -> None:
        bar_style: dict[str, Any] = {"alpha": 0.4, "hatch": "//"} if is_planned else {}
        bars_by_label = dict[str, Any]()
        for row, (name, parts) in enumerate(strips.items()):
            for start, end, label in parts:
                bar = axes.barh(
                    row, end - start, left=start, height=0.4, color=colours[label], edgecolor=INK, **bar_style
                )
                bars_by_label.setdefault(label, bar)
            axes.text(parts[0][0], row - 0.25, name, va="bottom")
        axes.set(xlabel=x_label, yticks=(), ylim=(len(strips) - 0.6, -0.8))
        if bars_by_label.keys() - strips.keys():  # a label that is the name of a strip needs no legend
            axes.figure.legend(
                bars_by_label.values(),
                bars_by_label,
                loc="outside upper left",
                ncols=1 + 2 * (max(map(len, bars_by_label)) < 14),
            )
        if is_log_scale:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")

    return _render_svg(title, 0.6 + 0.45 * len(strips) + 0.17 * len(labels), draw)


def _render_svg(title: str, height: float, draw: Callable[[Axes], None]) -> str:
    """Return the drawing of ``draw`` as an ``<svg>`` element with a text alternative."""
    buffer = io.StringIO()
    with rc_context(STYLE | {"svg.hashsalt": title}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about characters that the measuring font lacks
        figure = Figure(figsize=(4.6, height), layout="constrained")
        draw(figure.subplots())
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg_body = buffer.getvalue().partition("<svg")[2].replace(INK, "currentColor")
    # All charts use the same ids for their groups. Drop them, because only hashed ids are referred to.
    svg_body = re.sub(r' id="[A-Za-z]+[\w.]*_\d+"|<metadata>.*?</metadata>', "", svg_body, flags=re.DOTALL)
    return f'<svg class="chart" role="img" aria-label="{html.escape(title)}"{svg_body}'

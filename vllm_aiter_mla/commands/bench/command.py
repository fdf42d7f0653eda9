"""``vllm-aiter-mla bench``: time the one launch against its rivals on this machine's GPU."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_aiter_mla.commands.bench.run import Report

# A larger operand fills a card by itself.
MOST_TOKENS, MOST_HEADS = 65536, 1024


class Kind(str, Enum):
    """Types of the query and the cache."""

    fp8 = "fp8"
    bf16 = "bf16"
    both = "both"


class Weights(str, Enum):
    """Types of the absorb weights."""

    bf16 = "bf16"
    fp8 = "fp8"


def bench(
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", "-t", min=1, max=MOST_TOKENS, help="Tokens; may be repeated.")
    ] = None,
    heads: Annotated[
        list[int] | None, typer.Option("--heads", "-n", min=1, max=MOST_HEADS, help="Heads; may be repeated.")
    ] = None,
    kind: Annotated[Kind, typer.Option("--type", help="Type of the query and the cache.")] = Kind.both,
    rounds: Annotated[int, typer.Option(min=1, max=100000, help="Replays per path and point.")] = 50,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file; `report` draws it.")] = None,
    weights: Annotated[Weights, typer.Option(help="Type of the absorb weights.")] = Weights.bf16,
) -> None:
    """Time the one Triton launch against unfused sequences, plain PyTorch and AITER. Needs a GPU.

    Every path is captured in a graph and replayed over operands that do not fit in the cache. The table shows median
    microseconds per call, the ratio to the strongest rival, and launches. Exit status: 0; 1 if a path was wrong or the
    run stopped early; 2 without a GPU or with a wrong option.
    """
    from vllm_aiter_mla import files
    from vllm_aiter_mla.commands import outputs
    from vllm_aiter_mla.commands.bench import points, run

    quantised = {Kind.fp8: (True,), Kind.bf16: (False,), Kind.both: (True, False)}[kind]
    try:
        outputs.check({"--json": json})
        grid = points.grid(tokens or points.TOKENS, heads or points.HEADS, quantised, weights is Weights.fp8)
        report = run.run(grid, rounds, lambda done: print(done, file=sys.stderr))
    except (outputs.OutputError, run.NoGpuError) as error:
        print(f"bench: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if json is not None:
        files.write(json, report.as_dict() | files.stamp("bench", 2))
    show(report)
    raise typer.Exit(1 if report.stopped or any(row.wrong for row in report.rows) else 0)


def show(report: Report) -> None:
    """Print the table, and the paths that could not run or were wrong."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(_table(report))
    for line in dict.fromkeys(
        f"{name}: not measured: {why}" for row in report.rows for name, why in row.missing.items()
    ):
        console.print(line)
    for row in report.rows:
        for name, why in row.wrong.items():
            console.print(f"WRONG, not timed: {name} at T={row.point.tokens} N={row.point.heads}: {why}")
    if report.stopped:
        console.print(f"STOPPED at {report.stopped}")


def _table(report: Report) -> Table:
    from rich.table import Table

    from vllm_aiter_mla.commands.bench.run import OURS, PATHS

    title = f"{', '.join(report.machine.values())}; medians of {report.rounds} replays"
    table = Table("T", "N", "type", *(f"{name}, us" for name in PATHS), "ratio", "launches", title=title)
    for row in report.rows:
        us = [f"{row.timings[name].median_us:.2f}" if name in row.timings else "-" for name in PATHS]
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f} to {row.rival}{' (slower)' if row.ratio < 1 else ''}"
        named = [name for name in (OURS, row.rival) if name in row.timings]
        launches = ", ".join(f"{name} {row.timings[name].launches}" for name in named)
        table.add_row(str(row.point.tokens), str(row.point.heads), row.point.label, *us, ratio, launches)
    return table

"""``vllm-aiter-mla bench``: time the one launch against the unfused sequence on this machine's GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

KINDS = {"fp8": (True,), "bf16": (False,), "both": (True, False)}
WEIGHTS = ("bf16", "fp8")
DEFAULT_ROUNDS = 50
# Past these an operand alone fills a card.
MOST = {"--tokens": 65536, "--heads": 1024, "--rounds": 100000}


def bench(
    tokens: Annotated[list[int] | None, typer.Option("--tokens", "-t", help="T to measure; may be repeated.")] = None,
    heads: Annotated[list[int] | None, typer.Option("--heads", "-n", help="N to measure; may be repeated.")] = None,
    kind: Annotated[str, typer.Option("--type", help="fp8, bf16 or both.")] = "both",
    rounds: Annotated[int, typer.Option(help="Replays per path and point; the median counts.")] = DEFAULT_ROUNDS,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a chart to this file.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 when a bound is broken.")] = False,
    weights: Annotated[str, typer.Option(help="Absorb weights: bf16 or fp8.")] = WEIGHTS[0],
) -> None:
    """Time the one Triton launch against the unfused sequence, plain PyTorch and AITER. Needs a GPU; exits 2 without.

    Every path is captured in a graph and replayed over operands that do not fit in the cache; the table gives
    microseconds, the ratio to the best unfused sequence, GB/s beside a copy measured in the same run, and launches.
    """
    raise typer.Exit(main(tokens, heads, kind, rounds, json, html, check, weights))


def main(
    tokens: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    kind: str = "both",
    rounds: int = DEFAULT_ROUNDS,
    json_path: Path | None = None,
    html_path: Path | None = None,
    check: bool = False,
    weights: str = WEIGHTS[0],
) -> int:
    """Run the benchmark and print it; the arguments are those of ``bench``.

    Returns:
        Exit status: 0; 1 where a path was wrong, or ``check`` is set and a bound is broken; 2 without a GPU, with a
        wrong option, or where a page is asked for and jinja2 is missing.
    """
    from vllm_aiter_mla import files
    from vllm_aiter_mla.commands import outputs
    from vllm_aiter_mla.commands.bench import page, points, run
    from vllm_aiter_mla.commands.report.render import NoTemplateEngineError, environment

    tokens, heads = (points.TOKENS if tokens is None else tokens), (points.HEADS if heads is None else heads)
    try:
        check_options(tokens, heads, kind, rounds, weights)
        outputs.check({"--json": json_path, "--html": html_path})
        if html_path is not None:
            environment()
        grid = points.grid(tokens, heads, KINDS[kind], weights == "fp8")
        report = run.run(grid, rounds, lambda done: print(done, file=sys.stderr))
    except (ValueError, NoTemplateEngineError, run.NoGpuError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(page.text(report))
    if json_path is not None:
        files.write(json_path, report.as_dict() | files.stamp("bench", 1))
    if html_path is not None:
        files.write_text(html_path, page.page(report))
    wrong = any(row.wrong for row in report.rows)
    broken = any(bound.holds is False for bound in run.bounds(report))
    return 1 if wrong or report.stopped or (check and broken) else 0


def check_options(tokens: Sequence[int], heads: Sequence[int], kind: str, rounds: int, weights: str) -> None:
    """Raise ValueError with option and value where one is out of range."""
    for option, given, known in (("--type", kind, KINDS), ("--weights", weights, WEIGHTS)):
        if given not in known:
            raise ValueError(f"{option} {given}: {', '.join(known)} expected")
    for option, values in (("--tokens", tokens), ("--heads", heads), ("--rounds", (rounds,))):
        if not values:
            raise ValueError(f"{option}: at least one value expected")
        for value in values:
            if not 1 <= value <= MOST[option]:
                raise ValueError(f"{option} {value}: between 1 and {MOST[option]} expected")

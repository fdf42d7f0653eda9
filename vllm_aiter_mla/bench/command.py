"""What both command lines share: from options to a printed run, its files and its exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm_aiter_mla.bench.points import HEADS, TOKENS, grid
from vllm_aiter_mla.cli import outputs
from vllm_aiter_mla.commands.report.render import NoTemplateEngineError, environment

KINDS = {"fp8": (True,), "bf16": (False,), "both": (True, False)}
DEFAULT_ROUNDS = 50
# Past these an operand alone fills a card.
MOST = {"--tokens": 65536, "--heads": 1024, "--rounds": 100000}


def main(
    tokens: tuple[int, ...] = TOKENS,
    heads: tuple[int, ...] = HEADS,
    kind: str = "both",
    rounds: int = DEFAULT_ROUNDS,
    json_path: Path | None = None,
    html_path: Path | None = None,
    check: bool = False,
) -> int:
    """Run the benchmark and print it.

    Args:
        tokens: the T to measure; heads: the N.
        heads: see ``tokens``.
        kind: "fp8", "bf16" or "both".
        rounds: replays per path and point.
        json_path: where to write the figures, or None.
        html_path: where to write the page with the chart, or None.
        check: whether a broken bound is a failure.

    Returns:
        Exit status: 0; 1 where a path was wrong, or ``check`` is set and a bound is broken; 2 without a GPU, with a
        wrong option, or where a page is asked for and jinja2 is missing.
    """
    from vllm_aiter_mla.bench import page, run

    try:
        check_options(tokens, heads, kind, rounds)
        outputs.check({"--json": json_path, "--html": html_path})
        if html_path is not None:
            environment()
    except (ValueError, NoTemplateEngineError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    try:
        report = run.run(grid(tokens, heads, KINDS[kind]), rounds, lambda done: print(done, file=sys.stderr))
    except run.NoGpuError as error:
        print(error, file=sys.stderr)
        return 2
    print(page.text(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    if html_path is not None:
        html_path.write_text(page.page(report))
    wrong = any(row.wrong for row in report.rows)
    broken = any(bound.holds is False for bound in run.bounds(report))
    return 1 if wrong or (check and broken) else 0


def check_options(tokens: tuple[int, ...], heads: tuple[int, ...], kind: str, rounds: int) -> None:
    """Raise ValueError with option and value where one is out of range."""
    if kind not in KINDS:
        raise ValueError(f"--type {kind}: {', '.join(KINDS)} expected")
    for option, values in (("--tokens", tokens), ("--heads", heads), ("--rounds", (rounds,))):
        if not values:
            raise ValueError(f"{option}: at least one value expected")
        for value in values:
            if not 1 <= value <= MOST[option]:
                raise ValueError(f"{option} {value}: between 1 and {MOST[option]} expected")

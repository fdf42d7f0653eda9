"""What both command lines share: from options to a printed run, its files and its exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm_aiter_mla.bench.points import HEADS, TOKENS, grid

KINDS = {"fp8": (True,), "bf16": (False,), "both": (True, False)}
DEFAULT_ROUNDS = 50


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
        Exit status: 0; 1 where a path was wrong, or ``check`` is set and a bound is broken; 2 without a GPU or with a
        wrong option.
    """
    from vllm_aiter_mla.bench import page, run

    if kind not in KINDS or rounds < 1 or not tokens or not heads or min(*tokens, *heads, rounds) < 1:
        print("bench: tokens, heads and rounds from 1 on and a type of fp8, bf16 or both expected", file=sys.stderr)
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

"""What `serve_bench.py` sends through `vllm bench serve`, and the table of what came back."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.common import UsageError, table
from tools.serving import figures
from tools.serving.sides import OFF, ON
from tools.serving.sweep import Results

METRICS = ("ttft", "tpot")
SEEDS_PER_RUN = 1000


@dataclass(frozen=True, slots=True)
class Point:
    """A row of the table: tokens of input, shared prefix and output, and requests per second.

    The prefix comes on top of the input, as `vllm bench serve` has it.
    """

    input: int
    prefix: int
    output: int
    rate: float


@dataclass(frozen=True, slots=True)
class Row:
    """One point's figures in milliseconds over all runs, or why there are none.

    Attributes:
        estimates: by metric, with the flag off and on.
        invalid: what went wrong in the first bad measurement, else None.
    """

    point: Point
    estimates: dict[str, tuple[figures.Estimate, figures.Estimate]]
    invalid: str | None = None


def lengths(text: str) -> tuple[int, int, int]:
    """INPUT/PREFIX/OUTPUT in tokens.

    Raises:
        UsageError: anything else; TPOT needs two tokens of output at least.
    """
    try:
        given = [int(part) for part in text.split("/")]
        if len(given) != 3 or given[0] < 1 or given[1] < 0 or given[2] < 2:
            raise ValueError
    except ValueError:
        raise UsageError(f"--lengths {text}: INPUT/PREFIX/OUTPUT in tokens, at least 1/0/2") from None
    return given[0], given[1], given[2]


def fixed(given: argparse.Namespace, tokenizer: str) -> list[str]:
    """`vllm bench serve`'s options that all points share."""
    return [
        *("--backend", "openai", "--endpoint", "/v1/completions", "--tokenizer", tokenizer),
        *("--dataset-name", "random", "--num-prompts", str(given.prompts), "--num-warmups", str(given.warmups)),
        *("--ignore-eos", "--temperature", "0", "--disable-tqdm", "--metric-percentiles", "50,99"),
    ]


def seed(base: int, run: int, point: int) -> int:
    """The seed of one measurement: the same on both sides, another for every run and point.

    Points need their own: the same prompts a second time would come out of the server's prefix cache.
    """
    return base + SEEDS_PER_RUN * run + point


def asked(given: argparse.Namespace) -> list[dict[str, Any]]:
    """`vllm bench serve`'s options of every run and point, for the sweep."""
    return [
        {
            "run": run,
            "point": number,
            "random-input-len": point.input,
            "random-prefix-len": point.prefix,
            "random-output-len": point.output,
            "request-rate": point.rate,
            "seed": seed(given.seed, run, number),
        }
        for run in range(given.runs)
        for number, point in enumerate(given.points)
    ]


def invalid(result: dict[str, Any], point: Point, prompts: int) -> str | None:
    """Why a measurement does not count, or None."""
    if result.get("failed") or result.get("completed") != prompts:
        return f"{result.get('failed', '?')} of {prompts} requests failed, {result.get('completed')} completed"
    tokens = result.get("total_output_tokens", 0)
    if tokens != prompts * point.output:
        return f"{tokens} output tokens instead of {prompts * point.output}"
    missing = [metric for metric in METRICS if not result.get(f"mean_{metric}_ms", 0) > 0]
    return f"no {' and no '.join(missing)}" if missing else None


def rows(results: Results, points: Sequence[Point], prompts: int) -> list[Row]:
    """A row per point; one bad measurement on either side makes its row invalid."""
    return [_row(results, number, point, prompts) for number, point in enumerate(points)]


def _row(results: Results, number: int, point: Point, prompts: int) -> Row:
    for side in (OFF, ON):
        for run, measured in sorted(results[side].items()):
            why = invalid(measured[number], point, prompts)
            if why:
                return Row(point, {}, f"{side}, run {run + 1}: {why}")
    estimates = {}
    for metric in METRICS:
        off, on = ([run[number][f"mean_{metric}_ms"] for run in results[side].values()] for side in (OFF, ON))
        estimates[metric] = (figures.estimate(off), figures.estimate(on))
    return Row(point, estimates)


def tables(found: Sequence[Row], judged: bool = True) -> list[str]:
    """Markdown: the columns of vLLM's PR #35879 with ratios, standard errors and status lines.

    Args:
        judged: say which side is faster where they can be told apart; else no row says anything.
    """
    head = ["input-len", "prefix-len", "output-len", "rr"]
    for metric in METRICS:
        head += [f"off_{metric} ms", f"on_{metric} ms", f"{metric} off/on", f"{metric}: status line"]
    return table(head, [_cells(row, judged) for row in found])


def _cells(row: Row, judged: bool) -> list[Any]:
    point = row.point
    out = [point.input, point.prefix, point.output, f"{point.rate:g}"]
    if row.invalid:
        return [*out, f"**invalid**: {row.invalid}"]
    for off, on in row.estimates.values():
        out += [_shown(off, 2), _shown(on, 2), _shown(figures.ratio(off, on), 3)]
        out.append(figures.outcome(off, on) if judged else "not judged (small model)")
    return out


def _shown(one: figures.Estimate, digits: int) -> str:
    return f"{one.mean:.{digits}f} ± {one.stderr:.{digits}f}"

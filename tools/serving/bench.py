"""The client of `serve_bench.py`: points, the benchmark's arguments, its results, and the table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import figures
from serving.arms import OFF, ON
from serving.errors import UsageError
from serving.schedule import Visit, seed
from serving.server import Running
from serving.session import client, read_result

LAUNCH = (sys.executable, "-m", "serving.client")
METRICS = ("ttft", "tpot")
NOT_JUDGED = "not judged (small model)"
WARM_UP_SEED = 999_983
"""Prompts of the warm-up are those of no run, or they would lie in the prefix cache."""


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
        estimates: by metric, the off-arm's and the on-arm's.
        invalid: what went wrong in the first bad measurement, else None.
    """

    point: Point
    estimates: dict[str, tuple[figures.Estimate, figures.Estimate]]
    invalid: str | None = None


# By arm, then run, then point: what `vllm bench serve --save-result` wrote.
Results = dict[str, dict[int, list[dict[str, Any]]]]


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


def points(all_lengths: Sequence[tuple[int, int, int]], rates: Sequence[float]) -> list[Point]:
    """Every length at every rate, in the order given."""
    return [Point(*one, rate) for one in all_lengths for rate in rates]


@dataclass(frozen=True, slots=True)
class Load:
    """What each point sends.

    Attributes:
        prompts: requests per point.
        warmups: requests per length before a visit's first point.
        seed: of the first run.
        tokenizer: name or folder, for making prompts of a given length.
    """

    prompts: int
    warmups: int
    seed: int
    tokenizer: str


def arguments(server: str, served: str, load: Load, point: Point, number: int, prompts: int) -> list[str]:
    """`vllm bench serve`'s arguments for one measurement but for where the result goes."""
    rate = "inf" if point.rate == float("inf") else f"{point.rate:g}"
    return [
        *("--backend", "openai", "--base-url", server, "--endpoint", "/v1/completions"),
        *("--model", served, "--tokenizer", load.tokenizer),
        *("--dataset-name", "random", "--random-input-len", str(point.input)),
        *("--random-prefix-len", str(point.prefix), "--random-output-len", str(point.output)),
        *("--num-prompts", str(prompts), "--request-rate", rate, "--seed", str(number)),
        *("--ignore-eos", "--temperature", "0", "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"),
    ]


def plan(server: str, served: str, load: Load, all_points: Sequence[Point], visit: Visit, folder: Path) -> list:
    """Argument lists of a visit: a warm-up per length, then each run's points."""
    shapes = {(point.input, point.prefix, point.output): point for point in all_points}
    warm = [Point(point.input, point.prefix, point.output, float("inf")) for point in shapes.values()]
    out = [arguments(server, served, load, point, WARM_UP_SEED, load.warmups) for point in warm if load.warmups]
    for run in visit.runs:
        for number, point in enumerate(all_points):
            asked = arguments(server, served, load, point, seed(load.seed, run, number), load.prompts)
            name = _file(folder, visit.arm, run, number)
            out.append([*asked, "--save-result", "--result-dir", str(name.parent), "--result-filename", name.name])
    return out


def measure(server: Running, load: Load, all_points: Sequence[Point], visit: Visit, folder: Path, wait: float) -> dict:
    """Run a visit's benchmarks in a process of their own and read what they saved: by run, then by point.

    Raises:
        ServingError: the client failed or left a result out.
    """
    listed = plan(server.url, server.served, load, all_points, visit, folder)
    stem = f"client-{visit.arm}-{visit.runs[0] + 1}"
    (folder / f"{stem}.json").write_text(json.dumps(listed, indent=1))
    client([*LAUNCH, str(folder / f"{stem}.json")], folder / f"{stem}.log", wait)
    return {
        run: [read_result(_file(folder, visit.arm, run, number)) for number in range(len(all_points))]
        for run in visit.runs
    }


def invalid(result: dict[str, Any], point: Point, prompts: int) -> str | None:
    """Why a measurement does not count, or None."""
    if result.get("failed") or result.get("completed") != prompts:
        return f"{result.get('failed', '?')} of {prompts} requests failed, {result.get('completed')} completed"
    tokens = result.get("total_output_tokens", 0)
    if tokens != prompts * point.output:
        return f"{tokens} output tokens instead of {prompts * point.output}"
    missing = [metric for metric in METRICS if not result.get(f"mean_{metric}_ms", 0) > 0]
    return f"no {' and no '.join(missing)}" if missing else None


def rows(results: Results, all_points: Sequence[Point], prompts: int) -> list[Row]:
    """A row per point; one bad measurement of either arm makes its row invalid."""
    return [_row(results, number, point, prompts) for number, point in enumerate(all_points)]


def _row(results: Results, number: int, point: Point, prompts: int) -> Row:
    for arm in (OFF, ON):
        for run, measured in sorted(results[arm].items()):
            why = invalid(measured[number], point, prompts)
            if why:
                return Row(point, {}, f"{arm}, run {run + 1}: {why}")
    estimates = {}
    for metric in METRICS:
        off, on = ([run[number][f"mean_{metric}_ms"] for _, run in sorted(results[arm].items())] for arm in (OFF, ON))
        estimates[metric] = (figures.estimate(off), figures.estimate(on))
    return Row(point, estimates)


def table(found: Sequence[Row], judged: bool = True) -> list[str]:
    """Markdown: the columns of vLLM's PR #35879 with ratios, standard errors and verdicts.

    Args:
        judged: say which arm is faster where they can be told apart; else no row says anything.
    """
    head = ["input-len", "prefix-len", "output-len", "rr"]
    for metric in METRICS:
        head += [f"off_{metric} ms", f"on_{metric} ms", f"{metric} off/on", f"{metric}: verdict"]
    cells = [head, ["--:"] * len(head), *(_cells(row, len(head), judged) for row in found)]
    return ["| " + " | ".join(line) + " |" for line in cells]


def _cells(row: Row, width: int, judged: bool) -> list[str]:
    point = row.point
    out = [str(point.input), str(point.prefix), str(point.output), f"{point.rate:g}"]
    if row.invalid:
        return [*out, f"**invalid**: {row.invalid}", *[""] * (width - len(out) - 1)]
    for metric in METRICS:
        off, on = row.estimates[metric]
        quotient = figures.ratio(off, on)
        out += [f"{one.mean:.2f} ± {one.stderr:.2f}" for one in (off, on)]
        said = figures.verdict(off, on) if judged else NOT_JUDGED
        out += [f"{quotient.mean:.3f} ± {quotient.stderr:.3f}", said]
    return out


def _file(folder: Path, arm: str, run: int, number: int) -> Path:
    return folder / f"bench-{arm}-{run + 1}-{number + 1}.json"

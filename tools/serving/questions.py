"""What `accuracy.py` asks through lm-eval, and the tables of what was answered."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.common import RunError, UsageError, table
from tools.serving import figures
from tools.serving.sides import OFF, ON
from tools.serving.sweep import Results

TASK, LOCAL_TASK = "gsm8k", "gsm8k_local"
ALL_QUESTIONS = 1319
FILTERS = ("strict-match", "flexible-extract")
# lm-eval's own default, so that run 1 asks what a plain lm-eval run asks.
FEWSHOT_SEED = 1234

# By side and run: what `asking.record` wrote.
Answers = dict[str, dict[int, dict[str, Any]]]


def require_lm_eval() -> Path:
    """lm-eval's own file of the task; ``UsageError`` names the extra to install."""
    spec = importlib.util.find_spec("lm_eval")
    missing = [name for name in ("lm_eval", "aiohttp", "tenacity") if importlib.util.find_spec(name) is None]
    if missing or spec is None or spec.origin is None:
        raise UsageError(f"{', '.join(missing)} missing: pip install '.[accuracy]' (lm-eval[api])")
    return Path(spec.origin).parent / "tasks" / TASK / f"{TASK}.yaml"


def read_questions(option: str, path: Path) -> list[dict[str, str]]:
    """Questions of a JSON-lines file with ``question`` and ``answer`` ending in ``#### n``.

    Raises:
        UsageError: naming option, file and line.
    """
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{option} {path}: {error}") from error
    for number, row in enumerate(rows, 1):
        fine = isinstance(row, dict) and isinstance(row.get("question"), str) and "#### " in str(row.get("answer"))
        if not fine:
            raise UsageError(f"{option} {path}: entry {number} has no question, or no answer with `#### n`")
    return [{"question": row["question"], "answer": str(row["answer"])} for row in rows]


def local_task(folder: Path, standard: Path, asked: Sequence[dict], examples: Sequence[dict]) -> None:
    """Write lm-eval's task over local files into ``folder``: prompt, filters and metric are the standard task's."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"train": folder / "examples.jsonl", "test": folder / "questions.jsonl"}
    for path, rows in zip(files.values(), (examples, asked), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "include": str(standard),
        "task": LOCAL_TASK,
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(path) for split, path in files.items()}},
    }
    # JSON is YAML.
    (folder / f"{LOCAL_TASK}.yaml").write_text(json.dumps(task, indent=1))


def fixed(given: argparse.Namespace, work: Path) -> list[str]:
    """``asking``'s options that all runs share; local questions are written under ``work``."""
    standard = require_lm_eval()
    asked: dict[str, Any] = {name: getattr(given, name) for name in ("fewshot", "limit", "concurrency")}
    asked |= {name: getattr(given, name) for name in ("max_gen_toks", "request_timeout")}
    asked |= {"task": TASK, "include_path": None}
    if given.asked_rows is not None:
        local_task(work / "task", standard, given.asked_rows, given.example_rows)
        asked |= {"task": LOCAL_TASK, "include_path": str(work / "task")}
    return ["--asked", json.dumps(asked)]


def asked(given: argparse.Namespace) -> list[dict[str, Any]]:
    """``asking``'s options of every run, for the sweep: each draws other examples, the same on both sides."""
    return [{"run": run, "point": 0, "seed": FEWSHOT_SEED + given.seed + run} for run in range(given.runs)]


def answers_of(results: Results) -> Answers:
    """The answers of every run.

    Raises:
        RunError: the sides were not asked the same prompts in some run.
    """
    answers = {
        side: {run: {key: points[0][key] for key in ("figures", "answers")} for run, points in runs.items()}
        for side, runs in results.items()
    }
    for run, off in answers[OFF].items():
        prompts = [{q: one["prompt"] for q, one in side["answers"].items()} for side in (off, answers[ON][run])]
        if prompts[0] != prompts[1] or not prompts[0]:
            raise RunError(f"run {run + 1}: the sides were not asked the same questions")
    return answers


def tables(answers: Answers) -> list[str]:
    """Markdown: figures of every run, then the paired difference over all runs."""
    head = ["run", "filter", "off", "on", "off only", "on only", "McNemar p", "texts differ"]
    each = table(head, [_run_cells(answers, run, name) for run in sorted(answers[OFF]) for name in FILTERS])
    head = ["filter", "off, mean of runs", "on, mean of runs", "on - off, paired", "outcome"]
    over = table(head, [_mean_cells(answers, name) for name in FILTERS], "---")
    return [*each, "", *over, "", _texts(answers)]


def _run_cells(answers: Answers, run: int, name: str) -> list[Any]:
    off, on = answers[OFF][run], answers[ON][run]
    right = [_right(side, name) for side in (off, on)]
    alone = [sum(a[q] and not b[q] for q in a) for a, b in (right, right[::-1])]
    shown = [f"{side['figures'][name]['value']:.4f} ± {side['figures'][name]['stderr']:.4f}" for side in (off, on)]
    return [run + 1, name, *shown, *alone, f"{figures.mcnemar(*alone):.3g}", differing_texts(off, on)]


def _mean_cells(answers: Answers, name: str) -> list[str]:
    runs = sorted(answers[OFF])
    means = [sum(answers[side][run]["figures"][name]["value"] for run in runs) / len(runs) for side in (OFF, ON)]
    difference = figures.mean_difference(*([_right(answers[side][run], name) for run in runs] for side in (OFF, ON)))
    change = f"{difference.mean:+.4f} ± {difference.stderr:.4f}"
    return [name, *(f"{mean:.4f}" for mean in means), change, figures.accuracy_outcome(difference)]


def _texts(answers: Answers) -> str:
    runs = answers[OFF].keys()
    differ = sum(differing_texts(answers[OFF][run], answers[ON][run]) for run in runs)
    text = f"Texts: {differ} of {len(runs) * asked_in(answers)} answers differ between the sides."
    if not any(any(_right(answers[side][run], name).values()) for side in answers for run in runs for name in FILTERS):
        text += " **Neither side answered any question rightly: this says nothing about accuracy.**"
    return text


def differing_texts(off: dict[str, Any], on: dict[str, Any]) -> int:
    """Questions to which the sides gave different text."""
    return sum(off["answers"][number]["text"] != one["text"] for number, one in on["answers"].items())


def asked_in(answers: Answers) -> int:
    """Questions of one run."""
    return len(answers[OFF][min(answers[OFF])]["answers"])


def _right(side: dict[str, Any], name: str) -> dict[str, bool]:
    return {number: one["right"][name] for number, one in side["answers"].items()}

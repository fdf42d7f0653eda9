"""The client of `accuracy.py`: the task, lm-eval's process, and the tables."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import figures
from serving.arms import OFF, ON
from serving.errors import ServingError, UsageError
from serving.schedule import Visit
from serving.server import Running
from serving.session import client, read_result

LAUNCH = (sys.executable, "-m", "serving.asking")
TASK, LOCAL_TASK = "gsm8k", "gsm8k_local"
ALL_QUESTIONS = 1319
FILTERS = ("strict-match", "flexible-extract")
# lm-eval's own default, so that run 1 asks what a plain lm-eval run asks.
FEWSHOT_SEED = 1234

# By arm and run: what `asking.record` wrote.
Answers = dict[str, dict[int, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked.

    Attributes:
        task: lm-eval's name.
        include_path: folder of the task's YAML, None for lm-eval's own.
        fewshot: examples before each question.
        limit: ask only so many, None for all.
        concurrency: requests at a time.
        max_gen_toks: tokens an answer may have.
        request_timeout: seconds an answer may take.
        seed: added to lm-eval's few-shot seed; each run takes the next.
    """

    task: str
    include_path: str | None
    fewshot: int
    limit: int | None
    concurrency: int
    max_gen_toks: int
    request_timeout: int
    seed: int


def require_lm_eval() -> Path:
    """lm-eval's folder of the task; ``UsageError`` names the extra to install."""
    spec = importlib.util.find_spec("lm_eval")
    missing = [name for name in ("lm_eval", "aiohttp", "tenacity") if importlib.util.find_spec(name) is None]
    if missing or spec is None or spec.origin is None:
        raise UsageError(f"{', '.join(missing)} missing: pip install 'vllm-aiter-mla[accuracy]' (lm-eval[api])")
    return Path(spec.origin).parent / "tasks" / TASK / f"{TASK}.yaml"


def read_questions(option: str, path: Path) -> list[dict[str, str]]:
    """Questions of a JSON-lines file with ``question`` and ``answer`` ending in ``#### n``.

    Raises:
        UsageError: naming option, file and line.
    """
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        rows = [json.loads(line) for line in lines]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{option} {path}: {error}") from error
    for number, row in enumerate(rows, 1):
        fine = isinstance(row, dict) and isinstance(row.get("question"), str) and "#### " in str(row.get("answer"))
        if not fine:
            raise UsageError(f"{option} {path}: entry {number} has no question, or no answer with `#### n`")
    return [{"question": row["question"], "answer": row["answer"]} for row in rows]


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


def plan(server: str, served: str, asked: Asked, visit: Visit, folder: Path) -> dict[str, Any]:
    """What ``asking`` reads."""
    runs = [{"seed": FEWSHOT_SEED + asked.seed + run, "out": str(_file(folder, visit.arm, run))} for run in visit.runs]
    values = {name: getattr(asked, name) for name in Asked.__slots__ if name != "seed"}
    return {"url": server, "model": served, **values, "runs": runs}


def ask(server: Running, asked: Asked, visit: Visit, folder: Path, wait: float) -> dict[int, dict[str, Any]]:
    """Ask a visit's runs in a process of their own and read the answers.

    Raises:
        ServingError: the client failed or left a result out.
    """
    stem = f"client-{visit.arm}-{visit.runs[0] + 1}"
    (folder / f"{stem}.json").write_text(json.dumps(plan(server.url, server.served, asked, visit, folder), indent=1))
    # Local questions need no hub, and without one each look-up would wait for its time limit.
    extra = {"HF_DATASETS_CACHE": str(folder / "datasets"), "HF_HUB_OFFLINE": "1"} if asked.include_path else {}
    client([*LAUNCH, str(folder / f"{stem}.json")], folder / f"{stem}.log", wait, extra)
    return {run: read_result(_file(folder, visit.arm, run)) for run in visit.runs}


def check(answers: Answers) -> None:
    """Raise ServingError unless both arms were asked the same prompts in every run."""
    for run, off in answers[OFF].items():
        prompts = [
            {number: one["prompt"] for number, one in side["answers"].items()} for side in (off, answers[ON][run])
        ]
        if prompts[0] != prompts[1] or not prompts[0]:
            raise ServingError(f"run {run + 1}: the arms were not asked the same questions")


def tables(answers: Answers) -> list[str]:
    """Markdown: figures of every run, then the paired difference over all runs."""
    head = ["run", "filter", "off", "on", "off only", "on only", "McNemar p", "texts differ"]
    cells = [head, ["--:"] * len(head)]
    for run in sorted(answers[OFF]):
        cells += [_run_cells(answers, run, name) for name in FILTERS]
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return [*lines, "", *_summary(answers)]


def _run_cells(answers: Answers, run: int, name: str) -> list[str]:
    off, on = answers[OFF][run], answers[ON][run]
    pair = figures.paired(_right(off, name), _right(on, name))
    shown = [f"{side['figures'][name]['value']:.4f} ± {side['figures'][name]['stderr']:.4f}" for side in (off, on)]
    counts = [str(pair.off_only), str(pair.on_only), f"{pair.p_value:.3g}", str(differing_texts(off, on))]
    return [str(run + 1), name, *shown, *counts]


def _summary(answers: Answers) -> list[str]:
    out = ["| filter | off, mean of runs | on, mean of runs | on - off, paired | verdict |", "| --- " * 5 + "|"]
    for name in FILTERS:
        sides = [[_right(answers[arm][run], name) for run in sorted(answers[arm])] for arm in (OFF, ON)]
        means = [sum(answers[arm][run]["figures"][name]["value"] for run in answers[arm]) for arm in (OFF, ON)]
        difference = figures.mean_difference(*sides)
        shown = " | ".join(f"{mean / len(sides[0]):.4f}" for mean in means)
        change = f"{difference.mean:+.4f} ± {difference.stderr:.4f}"
        out.append(f"| {name} | {shown} | {change} | {figures.accuracy_verdict(difference)} |")
    return [*out, "", _texts(answers)]


def _texts(answers: Answers) -> str:
    runs = answers[OFF].keys()
    differ = sum(differing_texts(answers[OFF][run], answers[ON][run]) for run in runs)
    text = f"Texts: {differ} of {len(runs) * asked_in(answers)} answers differ between the arms."
    if not any(any(_right(answers[arm][run], name).values()) for arm in answers for run in runs for name in FILTERS):
        text += " **Neither arm answered any question rightly: this says nothing about accuracy.**"
    return text


def differing_texts(off: dict[str, Any], on: dict[str, Any]) -> int:
    """Questions to which the arms gave different text."""
    return sum(off["answers"][number]["text"] != one["text"] for number, one in on["answers"].items())


def asked_in(answers: Answers) -> int:
    """Questions of one run."""
    return len(answers[OFF][min(answers[OFF])]["answers"])


def _right(side: dict[str, Any], name: str) -> dict[int, bool]:
    return {int(number): one["right"][name] for number, one in side["answers"].items()}


def _file(folder: Path, arm: str, run: int) -> Path:
    return folder / f"answers-{arm}-{run + 1}.json"

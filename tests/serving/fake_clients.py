"""Stands in for `serving.client` and `serving.asking`: writes the results that FAKE_BENCH or FAKE_ASK asks for."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

HOW = os.environ.get("FAKE_" + sys.argv[1].upper(), "")
FILTERS = ("flexible-extract", "strict-match")
# Milliseconds by arm and run: means 10.0 and 8.0, standard errors 0.1 and 0.2.
TPOT = {"off": [9.8268, 10.0, 10.1732], "on": [7.6536, 8.0, 8.3464]}
TTFT = {"off": [90.0, 100.0, 110.0], "on": [89.0, 99.0, 112.0]}


def bench(spec: list[list[str]]) -> None:
    for argv in spec:
        given = {name: value for name, value in pairwise(argv) if name.startswith("--")}
        call(bench=given)
        if "--save-result" not in argv:
            continue
        name = given["--result-filename"]
        arm, run = name.split("-")[1], int(name.split("-")[2]) - 1
        prompts = int(given["--num-prompts"])
        failed = 3 if HOW == "failed" and (arm, run) == ("on", 1) else 0
        result: dict[str, Any] = {
            "completed": prompts - failed,
            "failed": failed,
            "total_output_tokens": prompts * int(given["--random-output-len"]) - (HOW == "short"),
            "mean_ttft_ms": TTFT[arm][run],
            "mean_tpot_ms": 0.0 if HOW == "no-tpot" else TPOT[arm][run],
        }
        Path(given["--result-dir"], name).write_text(json.dumps(result))


def ask(spec: dict[str, Any]) -> None:
    for run in spec["runs"]:
        arm = Path(run["out"]).name.split("-")[1]
        call(ask=arm, seed=run["seed"], **{name: spec[name] for name in ("task", "limit", "concurrency")})
        answers = {str(number): answer(arm, number, run["seed"]) for number in range(10)}
        shares = {name: sum(one["right"][name] for one in answers.values()) / 10 for name in FILTERS}
        figures = {name: {"value": share, "stderr": 0.1} for name, share in shares.items()}
        Path(run["out"]).write_text(json.dumps({"figures": figures, "answers": answers}))


def answer(arm: str, number: int, seed: int) -> dict[str, Any]:
    right = number < 5 or (HOW == "better" and arm == "on")
    prompt = f"{seed} {number} {arm if HOW == 'other-prompts' else ''}"
    return {
        "prompt": prompt,
        "text": f"{right} {number}",
        "right": dict.fromkeys(("flexible-extract", "strict-match"), right),
    }


def call(**what: object) -> None:
    with open(os.environ["FAKE_CALLS"], "a") as calls:
        calls.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    if HOW == "crashes":
        sys.exit("ConnectionResetError: the client is gone")
    {"bench": bench, "ask": ask}[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))

"""Stands in for `vllm bench serve` and lm-eval: writes the results that FAKE_BENCH or FAKE_ASK asks for."""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

HOW = os.environ.get("FAKE_" + sys.argv[1].upper(), "")
FILTERS = ("flexible-extract", "strict-match")
# Milliseconds by side and run: means 10.0 and 8.0, standard errors 0.1 and 0.2.
TPOT = {"off": [9.8268, 10.0, 10.1732], "on": [7.6536, 8.0, 8.3464]}
TTFT = {"off": [90.0, 100.0, 110.0], "on": [89.0, 99.0, 112.0]}


def bench(given: dict[str, str], side: str, run: int) -> dict[str, Any]:
    prompts = int(given["--num-prompts"])
    failed = 3 if HOW == "failed" and (side, run) == ("on", 1) else 0
    return {
        "completed": prompts - failed,
        "failed": failed,
        "total_output_tokens": prompts * int(given["--random-output-len"]) - (HOW == "short"),
        "mean_ttft_ms": TTFT[side][run],
        "mean_tpot_ms": 0.0 if HOW == "no-tpot" else TPOT[side][run],
    }


def ask(given: dict[str, str], side: str, run: int) -> dict[str, Any]:
    answers = {str(number): answer(side, number, given["--seed"]) for number in range(10)}
    shares = {name: sum(one["right"][name] for one in answers.values()) / 10 for name in FILTERS}
    return {"figures": {name: {"value": share, "stderr": 0.1} for name, share in shares.items()}, "answers": answers}


def answer(side: str, number: int, seed: str) -> dict[str, Any]:
    right = number < 5 or (HOW == "better" and side == "on")
    prompt = f"{seed} {number} {side if HOW == 'other-prompts' else ''}"
    return {"prompt": prompt, "text": f"{right} {number}", "right": dict.fromkeys(FILTERS, right)}


def main() -> None:
    given = {name: value for name, value in pairwise(sys.argv) if name.startswith("--")}
    # The sweep's name of the folder tells side and run.
    side, run = re.search(r"side(on|off).*run(\d)-point", given["--result-dir"]).groups()
    with open(os.environ["FAKE_CALLS"], "a") as calls:
        calls.write(json.dumps({sys.argv[1]: given, "side": side, "run": int(run)}) + "\n")
    if HOW == "crashes":
        sys.exit("ConnectionResetError: the client is gone")
    result = {"bench": bench, "ask": ask}[sys.argv[1]](given, side, int(run))
    Path(given["--result-dir"], given["--result-filename"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

"""How the tests call both commands."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import accuracy
import serve_bench

HERE = Path(__file__).parent
QUESTIONS = HERE / "questions.jsonl"


def bench_run(fakes: SimpleNamespace, *more: str) -> int:
    return serve_bench.main(["MODEL", "--rates", "1,50", "--out", str(fakes.out), "--work", str(fakes.work), *more])


def accuracy_run(fakes: SimpleNamespace, *more: str) -> int:
    given = ["MODEL", "--questions", str(QUESTIONS), "--out", str(fakes.out), "--work", str(fakes.work)]
    return accuracy.main([*given, *more])


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state == "Z"

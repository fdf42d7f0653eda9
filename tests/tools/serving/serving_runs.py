"""How the tests call both commands."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

from tools import accuracy, serve_bench

HERE = Path(__file__).parent
QUESTIONS = HERE / "questions.jsonl"


def bench_run(fakes: SimpleNamespace, *more: str) -> int:
    """One start per side and one point, unless ``more`` says otherwise."""
    given = ["MODEL", "--rates", "50", "--servers", "per-side", "--out", str(fakes.out), "--work", str(fakes.work)]
    return serve_bench.main([*given, *more])


def accuracy_run(fakes: SimpleNamespace, *more: str) -> int:
    given = ["MODEL", "--questions", str(QUESTIONS), "--out", str(fakes.out)]
    given += ["--work", str(fakes.work), "--servers", "per-side"]
    return accuracy.main([*given, *more])


def soon_gone(pid: int) -> bool:
    """Whether the process ends within a minute: a signal takes its time to arrive."""
    deadline = time.monotonic() + 60
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return gone(pid)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state == "Z"

"""Fakes for server, benchmark and lm-eval: real processes that speak as the real ones do, in milliseconds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
TOOLS = HERE.parents[1] / "tools"
sys.path.insert(0, str(TOOLS))

from serving import bench, page, questions, server  # noqa: E402

Tool = Callable[..., int]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The tools with fakes in place of vLLM and lm-eval; ``set`` tells the fakes how to behave.

    Every fake appends what it was started with to ``calls``: "server off", "bench SEED RATE", ...
    """
    python = sys.executable
    monkeypatch.setattr(server, "LAUNCH", (python, str(HERE / "fake_server.py")))
    monkeypatch.setattr(bench, "LAUNCH", (python, str(HERE / "fake_clients.py"), "bench"))
    monkeypatch.setattr(questions, "LAUNCH", (python, str(HERE / "fake_clients.py"), "ask"))
    monkeypatch.setattr(page, "machine", lambda: {"python": "3", "torch": "2", "vllm": "0", "card": "fake card"})
    monkeypatch.setattr(server, "POLL_S", 0.02)
    monkeypatch.setattr(server, "STOP_S", 2.0)
    calls = tmp_path / "calls"
    monkeypatch.setenv("FAKE_CALLS", str(calls))

    def behave(**how: str) -> None:
        for name, value in how.items():
            monkeypatch.setenv(f"FAKE_{name.upper()}", value)

    return SimpleNamespace(
        set=behave,
        calls=lambda: [json.loads(line) for line in calls.read_text().splitlines()] if calls.is_file() else [],
        out=tmp_path / "out.md",
        work=tmp_path / "work",
    )

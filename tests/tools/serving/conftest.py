"""Fakes for server, benchmark and lm-eval: processes that speak as the real ones do. vLLM's sweep is the real one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.serving import page, sweep

HERE = Path(__file__).parent
Tool = Callable[..., int]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The tools with fakes in place of vLLM's server and clients; ``set`` tells the fakes how to behave.

    Every fake appends what it was started with to ``calls``: {"server": "off", ...}, {"bench": {...}}, ...
    """
    sweep_server = pytest.importorskip("vllm.benchmarks.sweep.server")
    # The sweep looks once a second whether a server is there.
    quick = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(seconds / 50))
    monkeypatch.setattr(sweep_server, "time", quick)
    python = sys.executable
    monkeypatch.setattr(sweep, "SERVER", (python, str(HERE / "fake_server.py"), "--model"))
    monkeypatch.setattr(sweep, "BENCH", (python, str(HERE / "fake_clients.py"), "bench"))
    monkeypatch.setattr(sweep, "ASK", (python, str(HERE / "fake_clients.py"), "ask"))
    monkeypatch.setattr(page, "machine", lambda: {"python": "3", "torch": "2", "vllm": "0", "card": "fake card"})
    calls = tmp_path / "calls"
    monkeypatch.setenv("FAKE_CALLS", str(calls))

    def behave(**how: str) -> None:
        for name, value in how.items():
            monkeypatch.setenv(f"FAKE_{name.upper()}", value)

    def called(kind: str = "") -> list[dict]:
        lines = calls.read_text().splitlines() if calls.is_file() else []
        return [call for call in map(json.loads, lines) if kind in call or not kind]

    return SimpleNamespace(set=behave, calls=called, out=tmp_path / "out.md", work=tmp_path / "work")

"""Claims about what a command says of itself while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from vllm_aiter_mla.commands import progress


class Timer:
    """In the place of ``threading.Timer``: it elapses when the test calls its function."""

    last: ClassVar[Timer]

    def __init__(self, interval: float, function: Callable[[], None]) -> None:
        self.interval, self.function, self.ended = interval, function, False
        Timer.last = self

    def start(self) -> None:
        assert self.interval == 2.0

    def cancel(self) -> None:
        self.ended = True


def test_a_quick_command_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown("plan", patience=60) as at:
        at("importing vLLM")
    assert capsys.readouterr().err == ""


def test_a_slow_command_says_where_it_is_and_what_comes_next(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress.threading, "Timer", Timer)
    with progress.shown("plan", patience=2.0) as at:
        at("importing vLLM")
        assert capsys.readouterr().err == ""
        Timer.last.function()
        assert capsys.readouterr().err == "plan: importing vLLM ...\n"
        at("building the model")
    assert capsys.readouterr().err == "plan: building the model ...\n"
    assert Timer.last.ended

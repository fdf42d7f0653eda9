"""Claims about what a command says of itself while it runs."""

from __future__ import annotations

import time

import pytest

from vllm_aiter_mla.commands import progress


def test_a_quick_command_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown("plan", patience=60) as at:
        at("importing vLLM")
    assert capsys.readouterr().err == ""


def test_a_slow_command_says_where_it_is_and_what_comes_next(capsys: pytest.CaptureFixture[str]) -> None:
    said = ""
    with progress.shown("plan", patience=0.01) as at:
        at("importing vLLM")
        while not said:
            time.sleep(0.01)
            said = capsys.readouterr().err
        at("building the model")
    assert said == "plan: importing vLLM ...\n"
    assert capsys.readouterr().err == "plan: building the model ...\n"

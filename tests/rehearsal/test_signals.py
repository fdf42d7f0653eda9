"""A signal in the middle of ``check``: its engines and workers end with it, and its temporary files go."""

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.rehearsal import faults
from tests.rehearsal.day import COMMAND, FLAG, TIMEOUT_S, Day
from tests.sandbox.rehearsal_card import Scenario
from tests.support.signals import heard
from tests.support.waiting import happened
from vllm_aiter_mla import files
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.engine.child import drive_engine
from vllm_aiter_mla.commands.check.kernels.child import verify_backend
from vllm_aiter_mla.commands.check.record import CheckRun
from vllm_aiter_mla.commands.check.timing.child import time_layers
from vllm_aiter_mla.commands.plan.planner import make_plans_in_child

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow, pytest.mark.wide]
MARK = "REHEARSED_SIGNAL"
RUNS = {
    "plan": (make_plans_in_child, 3, faults.plans_take_minutes),
    "kernels": (verify_backend, 3, faults.aiter_compiles_for_minutes),
    "timing": (time_layers, 3, faults.aiter_compiles_for_minutes),
    "engine": (drive_engine, 6, faults.aiter_compiles_for_minutes),
}
"""What a step calls in a process of its own, how many processes there are then, and what lets none of them end by
itself: the command, the process and what waits for the command's end; of an engine also two ranks and what counts their
resources."""


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


def calls(function: str, processes: list[int]) -> bool:
    """Return whether one of the processes was called for a function."""
    with suppress(OSError):
        return any(function.encode() in Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0") for one in processes)
    return False


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGKILL"])
@pytest.mark.parametrize("step", RUNS)
def test_signals_in_a_step_of_check_leave_no_process_and_no_folder(
    made: Callable[..., Day], tmp_path_factory: pytest.TempPathFactory, step: str, name: str
) -> None:
    function, fewest, fault = RUNS[step]
    day = made(Scenario(fault=faults.name_of(fault)))
    # The path of a socket of vLLM's in it has at most 107 characters.
    temporary, log, number = tmp_path_factory.mktemp("t"), day.folder / "said", getattr(signal, name)
    mark = f"{MARK}={day.folder}"
    typed = ["check", str(day.model), "--only", step, "-tp", "2", "--max-num-seqs", "4", FLAG, "--json", "check.json"]
    environment = day.environment | {MARK: str(day.folder), "TMPDIR": str(temporary)}
    with log.open("wb") as out:
        check = subprocess.Popen(
            [str(COMMAND), *typed], env=environment, cwd=day.folder, stdout=out, stderr=subprocess.STDOUT,
            preexec_fn=heard,
        )  # fmt: skip
    try:
        runs = partial(happened, seconds=TIMEOUT_S)
        assert runs(lambda: calls(process.import_path_of(function), marked(mark)) or check.poll() is not None), (
            log.read_text()
        )
        assert runs(lambda: len(marked(mark)) >= fewest or check.poll() is not None), log.read_text()
        assert check.poll() is None, log.read_text()
        check.send_signal(number)
        gone = happened(lambda: not marked(mark) and not list(temporary.glob("aiter-mla-*")))
        assert gone, (marked(mark), list(temporary.iterdir()), log.read_text())
    finally:
        for one in marked(mark):
            os.kill(one, signal.SIGKILL)
    assert check.wait() == (-number if name == "SIGKILL" else 128 + number)
    if name != "SIGKILL":
        assert f"ended by {name}" in log.read_text().splitlines()[-1]
    if step != "plan":
        assert "plan" in [one.name for one in files.read_record(CheckRun, day.folder / "check.json").steps]

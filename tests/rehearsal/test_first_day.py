"""The first day on a rehearsal card: what an operator types, as real processes, and what the operator sees.

It says nothing about a real card. Triton has no driver here, so its kernel fails its self-check and is left out.
"""

import re
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.rehearsal.day import FLAG, Day
from tests.sandbox.rehearsal_card import Scenario

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow]


@pytest.fixture(scope="module")
def inductor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled C++ kernels, found again by their source."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture
def day(tmp_path: Path, inductor: Path) -> Day:
    """A healthy MI300X on which AITER's kernel takes 8 us and vLLM's own sequence 10."""
    return Day(tmp_path, inductor=inductor)


def test_doctor_finds_no_problem_and_plan_engages_every_layer(day: Day) -> None:
    doctor, plan = day.run("doctor"), day.run("plan", str(day.model), "--max-num-seqs", "4", FLAG)
    assert doctor.returncode == 0, doctor.stdout
    assert "0 problem, 0 unknown" in doctor.stdout
    assert plan.returncode == 0, plan.stdout
    assert "2/2 MLA layers would engage" in plan.stdout
    assert "gfx942" in plan.stdout
    assert "Traceback" not in doctor.stdout + plan.stdout


def engaged(lines: list[str]) -> str:
    """Return the one status line of a log."""
    (found,) = [line for line in lines if "MLA layers engaged" in line]
    return found


def test_a_server_times_its_kernels_says_so_everywhere_and_a_warm_restart_keeps_the_figures(day: Day) -> None:
    with day.server(FLAG) as first:
        answer = first.ask("abcd")
        said = engaged(first.lines())
        assert said.startswith("2/2 MLA layers engaged (aiter 1..4; 8.0 us a layer at 4 tokens against vLLM's own 10.0")
        status = day.run("status")
        assert (status.returncode, said in status.stdout) == (0, True), status.stdout
        assert first.gauge() == {"engaged": 2, "skipped": 0}
    assert sum(line.startswith("kernels timed on this card") for line in first.lines()) == 1
    ended = day.run("status")
    assert (ended.returncode, "has ended" in ended.stdout) == (1, True), ended.stdout

    with day.server(FLAG) as second:
        assert second.ask("abcd") == answer
        again = engaged(second.lines())
    assert re.sub(r" on \d{4}-\d\d-\d\d", "", again) == said
    assert f"measured here on {datetime.now(timezone.utc):%Y-%m-}" in again
    assert not [line for line in second.lines() if line.startswith("kernels timed on this card")]
    assert "Traceback" not in status.stdout + ended.stdout


def test_a_server_on_which_vllm_is_faster_says_so_and_serves_vllms_own_kernels(tmp_path: Path, inductor: Path) -> None:
    slow = Scenario(us={"vllm": [(1, 5.0)], "aiter": [(1, 8.0)], "triton": [(1, 8.0)]})
    day = Day(tmp_path, slow, inductor)
    with day.server(FLAG, "--enforce-eager") as server:
        assert server.ask("abcd")
        (line,) = [line for line in server.lines() if line.startswith("0/2: ")]
        assert line.startswith("0/2: vllm_faster: ")
        assert server.gauge() == {"engaged": 0, "skipped": 2}
        status = day.run("status")
    assert (status.returncode, line in status.stdout) == (1, True), status.stdout
    assert "Traceback" not in status.stdout

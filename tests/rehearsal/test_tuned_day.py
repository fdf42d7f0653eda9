"""From ``check --only timing --tune`` to a server that serves the tuned tile, on a rehearsal card."""

from dataclasses import replace

import pytest

from tests.rehearsal import faults
from tests.rehearsal.day import FLAG
from tests.sandbox.rehearsal_card import Scenario

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow, pytest.mark.wide]
EAGER = (FLAG, "--enforce-eager")
CARD = Scenario(
    us={"vllm": [(1, 10.0)], "aiter": [(1, 8.0)], "triton": [(1, 9.0)], f"triton {faults.TILE}": [(1, 5.0)]}
)


def test_tune_once_and_the_next_start_serves_the_tuned_tile_unless_it_fails_its_check(made):
    day = made(CARD)
    with day.server(*EAGER) as before:
        assert "(aiter 1..4; 8.0 us a layer" in before.line("MLA layers engaged")
    tuned = day.run("check", "--only", "timing", "--tune", "--heads", "16", "--tokens", "1", "--tokens", "4")
    assert (tuned.returncode, "Traceback" in tuned.stdout) == (0, False), tuned.stdout
    assert f"1..4 tokens  {faults.TILE}: 5.0" in tuned.stdout

    with day.server(*EAGER) as after:
        assert len(after.burst(["a", "bc", "def"])) == 3
        said = after.line("MLA layers engaged")
        assert "(triton 1..4; 5.0 us a layer" in said
        assert f"; tuned tiles {faults.TILE} 1..4" in said
        status = day.run("status")
        assert (status.returncode, said in status.stdout) == (0, True), status.stdout

    day.scenario = replace(CARD, fault=faults.name_of(faults.a_tile_is_wrong))
    with day.server(*EAGER) as later:
        assert later.ask("abcd")
        assert later.line("are left out")
        said = later.line("MLA layers engaged")
        assert ("(aiter 1..4; 8.0 us a layer" in said, "tuned" in said) == (True, False)

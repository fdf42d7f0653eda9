"""The first day on a rehearsal card: what an operator types, as real processes, and what the operator sees.

It says nothing about a real card.
"""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.rehearsal.day import FLAG
from tests.sandbox.rehearsal_card import Scenario
from vllm_aiter_mla import files
from vllm_aiter_mla.commands.check.record import CheckRun

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow]
FEW = ("--max-num-seqs", "4", FLAG)
CHECKED = ("machine", "plan", "issues", "kernels", "timing", "engine", "prefill", "decode", "launches")


def states_of(path: Path) -> dict[str, str]:
    """Return how each step of a check ended; a slower step is chance here, as a CPU's clock took its time."""
    found = {step.name: step.status for step in files.read_record(CheckRun, path).steps}
    return found | {"prefill": found["prefill"].replace("warning", "passed")}


def test_the_machine_has_no_problem_and_the_plan_engages_every_layer(day):
    machine, plan = day.run("check", "--only", "machine"), day.run("check", str(day.model), "--only", "plan", *FEW)
    assert machine.returncode == 0, machine.stdout
    assert "0 problem, 0 unknown" in machine.stdout
    assert plan.returncode == 0, plan.stdout
    assert "2/2 MLA layers would engage" in plan.stdout
    assert "gfx942" in plan.stdout
    assert "Traceback" not in machine.stdout + plan.stdout


@pytest.mark.wide  # five minutes; `make demo` runs check on a CPU, and tests/check its steps
@pytest.mark.parametrize("ranks", [1, 2])
def test_check_runs_every_step_over_an_fp8_cache(day, ranks):
    """And ``report`` draws it."""
    options = ("-tp", str(ranks), "--kv-cache-dtype", "fp8")
    check = day.run("check", str(day.model), *options, *FEW, "--json", "check.json")
    assert (check.returncode, "Traceback" in check.stdout) == (0, False), check.stdout
    assert states_of(day.folder / "check.json") == dict.fromkeys(CHECKED, "passed"), check.stdout
    unfolded = " ".join(check.stdout.split())
    assert unfolded.count("2/2 MLA layers engaged (triton 1..4; 5.0 us a layer at 4 tokens") == ranks
    report = day.run("report", "check.json", "-o", "page.html")
    assert (report.returncode, "<svg" in (day.folder / "page.html").read_text()) == (0, True), report.stdout


@pytest.mark.wide
def test_kernels_and_timing_pass_without_a_model_and_report_draws_their_file(day):
    few = ("--quick", "--limit", "8", "--tokens", "1", "--tokens", "8", "--heads", "16")
    check = day.run("check", "--only", "kernels,timing", *few, "--json", "check.json")
    assert (check.returncode, "Traceback" in check.stdout) == (0, False), check.stdout
    kernels, timing = (step.data for step in files.read_record(CheckRun, day.folder / "check.json").steps)
    assert {result["backend"] for result in kernels["results"]} == {"reference", "triton", "aiter", "aiter-opt"}
    assert [row["ratio"] for row in timing["rows"]] == [pytest.approx(2.0, rel=0.05)] * 4
    assert day.run("check", str(day.model), "--only", "plan", *FEW, "--json", "plan.json").returncode == 0
    report = day.run("report", ".", "-o", "page.html")
    assert (report.returncode, "Traceback" in report.stdout) == (0, False), report.stdout


PROMPTS = [chr(97 + i) * (1 + i) for i in range(8)]


def test_a_server_times_its_kernels_and_says_so_everywhere(day):
    with day.server(FLAG) as server:
        server.burst(PROMPTS)
        said = server.line("MLA layers engaged")
        assert said.startswith(
            "2/2 MLA layers engaged (triton 1..4; 5.0 us a layer at 4 tokens against vLLM's own 10.0"
        )
        status = day.run("status")
        assert (status.returncode, said in status.stdout) == (0, True), status.stdout
        why = day.run("status", "--layer", "layers.1")
        assert re.search(r"layers\.1\S*, rank 0\n +1\.\.4 tokens +triton\n +not aiter ", why.stdout), why.stdout
        assert server.gauge() == {"engaged": 2, "skipped": 0}
    assert server.lines()[-1] == said
    server.line("on: decode limit")
    server.line("kernels timed on this card")
    ended = day.run("status")
    assert (ended.returncode, "has ended" in ended.stdout) == (1, True), ended.stdout
    assert "Traceback" not in status.stdout + ended.stdout


@pytest.mark.wide
def test_a_warm_restart_of_a_server_keeps_the_figures(day):
    with day.server(FLAG) as first:
        answers, said = first.burst(PROMPTS), first.line("MLA layers engaged")
    with day.server(FLAG) as second:
        assert second.burst(PROMPTS) == answers
        again = second.line("MLA layers engaged")
    assert re.sub(r" on \d{4}-\d\d-\d\d", "", again) == said
    assert f"measured here on {datetime.now(UTC):%Y-%m-}" in again
    assert not [line for line in second.lines() if line.startswith("kernels timed on this card")]


@pytest.mark.wide
def test_two_ranks_time_together_and_speak_with_one_line(day):
    with day.server(FLAG, "-tp", "2") as server:
        assert len(server.burst(["a", "bc", "def"])) == 3
        said = server.line("MLA layers engaged")
        assert "triton 1..4; 5.0 us" in said
        status = day.run("status")
        assert (status.returncode, said in status.stdout) == (0, True), status.stdout
        assert server.gauge() == {"engaged": 2, "skipped": 0}


VLLM_WINS = Scenario(us={"vllm": [(1, 5.0)], "aiter": [(1, 8.0)], "triton": [(1, 8.0)]})


@pytest.mark.wide
def test_a_server_on_which_vllm_is_faster_says_so_and_serves_vllms_own_kernels(made):
    day = made(VLLM_WINS)
    with day.server(FLAG, "--enforce-eager") as server:
        assert server.ask("abcd")
        line = server.line("0/2: ")
        assert line.startswith("0/2: vllm_faster: ")
        assert server.gauge() == {"engaged": 0, "skipped": 2}
        status = day.run("status")
    assert (status.returncode, line in status.stdout) == (1, True), status.stdout
    assert "Traceback" not in status.stdout


@pytest.mark.wide
def test_check_where_vllm_is_faster_says_that_the_flag_gains_nothing(made):
    day = made(VLLM_WINS)
    check = day.run("check", str(day.model), *FEW, "--json", "check.json")
    assert (check.returncode, "Traceback" in check.stdout) == (4, False), check.stdout
    assert "the flag gains nothing on this card" in check.stdout
    assert states_of(day.folder / "check.json") == dict.fromkeys(CHECKED, "passed") | {"engine": "no gain"}


@pytest.mark.wide
def test_strict_mode_ends_a_start_on_which_vllm_is_faster(made):
    server = made(VLLM_WINS).server_that_ends(FLAG, "--enforce-eager", "--additional-config.aiter_mla.strict=true")
    assert "vllm_faster" in server.log.read_text()


@pytest.mark.wide
def test_a_kernel_that_is_faster_at_some_token_counts_only_runs_there(made):
    mixed = Scenario(us={"vllm": [(1, 7.0)], "aiter": [(1, 9.0)], "triton": [(1, 9.0), (4, 5.0)]})
    with made(mixed).server(FLAG) as server:
        assert server.ask("abcd")
        said = server.line("MLA layers engaged")
    assert "vllm 1.." in said, said
    assert "triton" in said, said


@pytest.mark.wide
def test_a_budget_that_ends_before_the_first_figure_leaves_vllms_own_kernels(made):
    """A launch takes two seconds, and a start has three for all of them."""
    slow = {"vllm": [(1, 2e6)], "aiter": [(1, 1.8e6)], "triton": [(1, 1.5e6)]}
    with made(Scenario(us=slow)).server(FLAG, "--enforce-eager") as server:
        assert server.ask("abcd")
        assert server.line("0/2: ").startswith("0/2: not_timed: ")


@pytest.mark.wide
def test_a_slower_rank_chooses_what_the_other_chooses(made):
    with made(Scenario(rank_us={1: 3.0})).server(FLAG, "-tp", "2", "--enforce-eager") as server:
        assert server.ask("abcd")
        assert "triton 1..4; 15.0 us" in server.line("MLA layers engaged")

"""What breaks on a rehearsal card: the server serves vLLM's own kernels or the next of ours, and says so once."""

import json
import os
import re

import pytest

from tests.engine import engine_mutations
from tests.rehearsal import faults
from tests.rehearsal.day import FLAG
from tests.sandbox import plugin
from tests.sandbox.rehearsal_card import Scenario
from tests.sandbox.simulated_aiter.trees import CODE
from tests.support.waiting import happened

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow, pytest.mark.wide]
EAGER = (FLAG, "--enforce-eager")


def broken(fault, **how):
    return Scenario(fault=faults.name_of(fault), **how)


AITER_FIRST = {"vllm": [(1, 10.0)], "aiter": [(1, 8.0)], "triton": [(1, 9.0)]}


@pytest.mark.parametrize("version", ["", "0.1.19", "0.1.7", "broken", "pypi"])
def test_without_a_usable_aiter_machine_says_why_and_the_server_serves(made, version):
    # vLLM then takes another attention than AITER's; here it is the sandbox's.
    day = made(Scenario(us=AITER_FIRST), aiter=version, variables={"SIMULATED_AITER_ATTENTION": ""})
    machine = day.run("check", "--only", "machine")
    assert (machine.returncode, "Traceback" in machine.stdout) == (1, False), machine.stdout
    with day.server(*EAGER) as server:
        assert server.ask("abcd")
        said = [line for line in server.lines() if "engaged" in line or line.startswith("0/2")]
        assert len(said) == 1, server.lines()
        assert "aiter" not in said[0].partition("(")[2].partition(";")[0]


def test_an_aiter_without_code_for_this_card_is_a_problem_that_machine_names(made):
    day = made()
    (day.aiter / "aiter" / "jit" / "module_cache.so").write_text(CODE.replace("gfx942", "gfx950"))
    machine = day.run("check", "--only", "machine")
    unfolded = re.sub(r"\n +", " ", machine.stdout)
    (problem,) = [line for line in unfolded.splitlines() if line.split()[:1] == ["problem"]]
    assert (machine.returncode, "module_cache" in problem, "gfx942" in problem) == (1, True, True), machine.stdout
    assert "Traceback" not in machine.stdout


@pytest.mark.parametrize(
    ("fault", "family", "serves"),
    [(faults.aiter_aborts, "AITER", "(triton 1..4"), (faults.triton_aborts, "Triton", "(aiter 1..4")],
    ids=["aborted_in_aiter", "aborted_in_triton"],
)
def test_a_start_after_one_that_aborted_in_a_kernel_leaves_it_out_and_serves(made, fault, family, serves):
    day = made(broken(fault, us=AITER_FIRST))
    first = day.server_that_ends(*EAGER)
    assert faults.PLANTED in first.log.read_text()
    assert first.lines()[-1].startswith(f"{family}'s kernels are called now")
    with day.server(*EAGER) as second:
        assert second.ask("abcd")
        assert "aborted_before" in second.line(f"{family} is left out")
        assert serves in (said := second.line("MLA layers engaged"))
        assert "left out: aborted_before" in said
        assert second.lines()[-1] == said


def test_a_start_that_somebody_ends_while_aiter_compiles_is_not_taken_for_an_abort(made):
    day = made(broken(faults.aiter_compiles_for_minutes))

    def markers():
        return [*(day.cache / "aiter_mla").glob("first-call-*")]

    with day.server_at(faults.PLANTED, *EAGER) as (server, end):
        assert markers(), "it would be ended outside of a first call"
        end()
        assert happened(lambda: not markers()), server.log.read_text()[-3000:]


def test_check_whose_aiter_aborts_fails_that_step_and_keeps_the_others(made):
    day = made(broken(faults.aiter_aborts))
    check = day.run("check", str(day.model), "--max-num-seqs", "4", FLAG, "--json", "check.json")
    assert (check.returncode, "Traceback" in check.stdout) == (1, False), check.stdout
    steps = {step["name"]: step for step in json.loads((day.folder / "check.json").read_text())["steps"]}
    assert {steps[name]["status"] for name in ("machine", "plan", "issues")} == {"passed"}
    assert {steps[name]["status"] for name in ("kernels", "timing", "engine")} == {"failed"}
    results = steps["kernels"]["data"]["results"]
    failed = {result["backend"] for result in results if result["status"] == "failed"}
    passed = {result["backend"] for result in results if result["status"] == "passed"}
    assert ("triton" in passed, failed) == (True, {"aiter", "aiter-opt"})
    assert faults.PLANTED in " ".join(steps["kernels"]["lines"])
    assert ("SIGABRT" in steps["timing"]["data"]["failed_kernels"]["aiter"], bool(steps["timing"]["data"]["rows"])) == (
        True,
        True,
    )


def test_check_over_an_fp8_cache_notices_one_wrong_row_of_a_decode_step(made):
    bug = engine_mutations.the_last_decode_row_reads_another_head
    day = made(variables={plugin.MUTATION: f"{bug.__module__}:{bug.__name__}"})
    line = ("--max-num-seqs", "4", "--kv-cache-dtype", "fp8", FLAG, "--json", "check.json")
    check = day.run("check", str(day.model), *line)
    steps = {step["name"]: step for step in json.loads((day.folder / "check.json").read_text())["steps"]}
    said = "off and on are apart in" in steps["engine"]["detail"]
    assert (check.returncode, said) == (1, True), check.stdout


def test_a_triton_kernel_that_does_not_compile_is_left_out(made):
    with made(broken(faults.triton_does_not_compile)).server(*EAGER) as server:
        assert server.ask("abcd")
        assert faults.PLANTED in server.line("triton: ")
        assert "(aiter 1..4; 8.0 us" in server.line("MLA layers engaged")


def test_a_kernel_that_is_wrong_on_one_rank_runs_on_no_rank(made):
    with made(broken(faults.aiter_is_wrong_on_rank_1, us=AITER_FIRST)).server(*EAGER, "-tp", "2") as server:
        assert server.ask("abcd")
        assert "self-check FAILED: q nope" in server.line("aiter: ")
        assert "(triton 1..4" in server.line("MLA layers engaged")


def test_a_kernel_that_raises_while_serving_is_replaced_by_vllms_own(made):
    day = made(broken(faults.aiter_raises_when_told, us=AITER_FIRST))
    with day.server(*EAGER) as server:
        before = server.burst(["abcd", "efgh"])
        (day.folder / faults.TOLD).touch()
        assert len(server.burst(["abcd", "efgh"])) == len(before)
        assert faults.PLANTED in server.line(faults.PLANTED)
        assert server.gauge()["engaged"] < 2


def test_timing_that_runs_out_of_memory_does_not_end_the_start(made):
    with made(broken(faults.timing_has_no_memory)).server(*EAGER) as server:
        assert server.ask("abcd")
        assert faults.PLANTED in server.line("the kernels could not be timed")
        assert server.line("0/2: ").startswith("0/2: not_timed: ")
        assert server.gauge() == {"engaged": 0, "skipped": 2}


@pytest.mark.parametrize("kind", ["a file in its place", "nothing can be written", "full"])
def test_where_no_file_can_be_written_vllms_own_kernels_serve_and_the_line_says_why(made, kind):
    """A kernel that ended the process in its first call would end every start: no marker would tell the next."""
    day = made(broken(faults.the_disk_is_full) if kind == "full" else None)
    day.cache.mkdir()
    if kind == "a file in its place":
        (day.cache / "aiter_mla").touch()
    elif kind == "nothing can be written":
        (day.cache / "aiter_mla").symlink_to("/proc/self/fdinfo")
    with day.server(*EAGER) as server:
        assert server.ask("abcd")
        assert "not_marked" in server.line("AITER is left out")
        assert server.line("0/2: ").startswith("0/2: kernel_unavailable: ")
        assert kind != "full" or faults.PLANTED in server.log.read_text()


def test_a_status_folder_with_junk_hurts_neither_server_nor_status(day):
    folder = day.cache / "aiter_mla"
    folder.mkdir(parents=True)
    stamp = {"schema": "vllm-aiter-mla/status", "schema_version": 1, "plugin": "0.0.1", "vllm": None, "aiter": None,
             "time": "2026-01-01T00:00:00+00:00", "host": "elsewhere"}  # fmt: skip
    (folder / "status-old-0-0.json").write_text(json.dumps({"evidence": stamp, "run": "old"}))
    (folder / "status-junk-0-0.json").write_text("{")
    (folder / "status-list-0-0.json").write_text("[]")
    (folder / "status-of-another-program.json").write_text('{"run": ["x"]}')
    os.mkfifo(folder / "status-pipe-0-0.json")
    with day.server(*EAGER) as server:
        assert server.ask("abcd")
        assert server.gauge() == {"engaged": 2, "skipped": 0}
        status = day.run("status")
        assert server.line("MLA layers engaged") in status.stdout
        assert "Traceback" not in status.stdout


def test_a_rank_that_cannot_load_ends_the_server_and_nobody_waits(made):
    server = made(broken(faults.rank_1_cannot_load)).server_that_ends(*EAGER, "-tp", "2")
    assert faults.PLANTED in server.log.read_text()

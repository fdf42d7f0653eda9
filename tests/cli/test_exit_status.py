"""One table of exit statuses for all commands; each row is a command line as typed, and what the machine is like."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.support import in_process, plans
from tests.support.planted import raising
from tests.support.progress import without_progress
from tests.support.statuses import record_of
from vllm_aiter_mla import __version__, admission
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.commands import machine, outputs
from vllm_aiter_mla.commands.cards import ARCHITECTURES, CardName, product_names
from vllm_aiter_mla.commands.check import show
from vllm_aiter_mla.commands.check.run import CheckRunner
from vllm_aiter_mla.commands.main import COMMANDS, app
from vllm_aiter_mla.commands.plan import planner, simulated_card
from vllm_aiter_mla.commands.report import page
from vllm_aiter_mla.kernels import device
from vllm_aiter_mla.status import liveness, status_files

KERNELS = ("--only", "kernels", "--device", "cpu")
ONE_CASE = (*KERNELS, "--quick", "--backend", "reference", "--case", "fresh-data", "--variant", "bf16")
PLAN = ("deepseek-r1", "--only", "plan")


def machine_finds(status):
    def plant(monkeypatch, folder):
        monkeypatch.setattr(machine, "run_checks", lambda *_: (machine.CheckResult(status, "made up", name="made-up"),))
        in_process.install(monkeypatch)

    return plant


def plan_says(outcome):
    def plant(monkeypatch, folder):
        monkeypatch.setattr(planner, "make_plans", lambda *_: (replace(plans.made_up(), outcome=outcome),))

    return plant


def a_server(engaged):
    def plant(monkeypatch, folder):
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder))
        monkeypatch.setenv(liveness.RUN_VARIABLE, "7-a")
        liveness.ensure_run_lock(folder / "aiter_mla")
        record = replace(record_of(["layer"], 16, "auto", 0), run="7-a", engaged={"layer": "triton"}, skipped={})
        left = replace(record, engaged={}, skipped={"layer": Skip("dcp", "made up")})
        status_files.write_status(folder / "aiter_mla", record if engaged else left)

    return plant


def no_server(monkeypatch, folder):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder))


def a_folder_that_leads_to_itself(monkeypatch, folder):
    """Any error of a file system but "no such folder", as of a network's that has gone away."""
    (folder / "cache").symlink_to(folder / "cache")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder / "cache"))


def no_card(monkeypatch, folder):
    monkeypatch.setattr(device, "installed", SimpleNamespace(is_there=lambda: False))


def nothing(monkeypatch, folder):
    """The machine as it is."""


WRONG_FILE = ("--json", "no/such/folder/x.json")
MACHINE = ("--only", "machine")
TABLE = [
    ("check", MACHINE, machine_finds("ok"), outputs.EXIT_OK),
    ("check", MACHINE, machine_finds("problem"), outputs.EXIT_FAILED),
    ("check", (*MACHINE, *WRONG_FILE), machine_finds("ok"), outputs.EXIT_USAGE),
    ("check", MACHINE, machine_finds("unknown"), outputs.EXIT_INCOMPLETE),
    ("check", PLAN, plan_says("engaged"), outputs.EXIT_OK),
    ("check", PLAN, plan_says("skipped"), outputs.EXIT_FAILED),
    ("check", ("no-such-model",), nothing, outputs.EXIT_USAGE),
    ("check", (*PLAN, *WRONG_FILE), plan_says("engaged"), outputs.EXIT_USAGE),
    ("check", PLAN, plan_says("unknown"), outputs.EXIT_INCOMPLETE),
    ("check", ("deepseek-r1", *WRONG_FILE), nothing, outputs.EXIT_USAGE),
    *(
        ("check", wrong, nothing, outputs.EXIT_USAGE)
        for wrong in (
            ("--only", "x?"),
            ("--only", "engine"),
            (*MACHINE, "--limit=8"),
            ("deepseek-r1", "--heads=8"),
            ("deepseek-r1", "-tp=1,2"),
            ("--only", "timing", "--kv-cache-dtype=fp8"),
        )
    ),
    ("check", ONE_CASE, nothing, outputs.EXIT_OK),
    *(
        ("check", (*KERNELS, *wrong), nothing, outputs.EXIT_USAGE)
        for wrong in (
            ("--limit", "8193"),
            ("--limit", "7"),
            ("--case", "x?"),
            ("--backend", "x?"),
            ("--variant", "x?"),
            ("--data-seed", str(2**64)),
            ("--repeat", str(10**9)),
        )
    ),
    ("check", ("--only", "kernels"), no_card, outputs.EXIT_INCOMPLETE),
    ("check", ("--only", "timing", "--tokens", "0"), nothing, outputs.EXIT_USAGE),
    ("check", ("--only", "timing"), no_card, outputs.EXIT_INCOMPLETE),
    ("status", (), a_server(engaged=True), outputs.EXIT_OK),
    ("status", (), a_server(engaged=False), outputs.EXIT_FAILED),
    ("status", WRONG_FILE, no_server, outputs.EXIT_USAGE),
    ("status", (), no_server, outputs.EXIT_INCOMPLETE),
    ("status", (), a_folder_that_leads_to_itself, outputs.EXIT_INCOMPLETE),
    ("report", ("no-such-file.json",), nothing, outputs.EXIT_USAGE),
    # There is no x.json either: the output is checked before anything is drawn.
    *(("report", ("x.json", "--out", out), nothing, outputs.EXIT_USAGE) for out in (".", "no/page.html")),
]


@pytest.mark.parametrize(("command", "typed", "plant", "expected"), TABLE)
def test_an_exit_status_means_the_same_for_every_command(monkeypatch, tmp_path, command, typed, plant, expected):
    monkeypatch.chdir(tmp_path)
    plant(monkeypatch, tmp_path)
    done = CliRunner().invoke(app, [command, *typed])
    assert done.exit_code == expected, done.output
    assert isinstance(done.exception, (SystemExit, type(None))), done.exception
    if expected == outputs.EXIT_USAGE and not done.stderr.startswith("Usage:"):  # that is typer's own
        assert done.stdout.strip() == ""
        (said,) = without_progress(done.stderr)
        assert said.startswith(f"{command}: ")
        assert typed[-1].partition("=")[0] in said


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("engaged", outputs.EXIT_OK), ("some", outputs.EXIT_FAILED), ("skipped", outputs.EXIT_FAILED),
        ("unknown", outputs.EXIT_INCOMPLETE),
    ],
)  # fmt: skip
def test_the_outcome_of_a_plan_is_in_the_json_and_the_exit_status_is_its(monkeypatch, tmp_path, outcome, expected):
    plan_says(outcome)(monkeypatch, tmp_path)
    done = CliRunner().invoke(app, ["check", *PLAN, "--json", "-"])
    found = json.loads(done.stdout)
    (step,) = found["steps"]
    assert (done.exit_code, found["exit"], step["data"]["outcome"]) == (expected, expected, outcome)


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (("deepseek-r1", "--limit", '{"tokens": 8}'), "'--limit'"),
        ((*KERNELS, "--limit", "--json", "x.json"), "'--limit'"),
        ((*PLAN, "--limit", "8"), "--limit 8: "),
        ((*PLAN, "--tokens", "1", "--port", "1"), "--tokens 1: "),
        (("--only", "timing", "--tokens", "1", "--port=1"), "--port=1 "),
        (("deepseek-r1", "--heads", "8", "--heads", "16"), "--heads 8 16: "),
        (("deepseek-r1", "--only", "kernels", "--small"), "--small: "),
        (("--heads", "8", "--heads", "16", "--only", "timing,kernels"), "--heads 8 16: "),
        (("--only", "machine,kernels", "--backend", "triton", "--backend", "x?"), "--backend x?: "),
        (("--only", "machine,kernels", "--case", "x?"), "--case x?: "),
        (("--only", "machine,kernels", "--variant", "x?"), "--variant x?: "),
        (("deepseek-r1", "--variant", "fp8-weight"), "--variant fp8-weight: "),
        (("--only", "machine,kernels", "--limit", "8193"), "--limit 8193: "),
        (("--only", "timing", "--weights", "mxfp4", "--nope", "48"), "--nope 48: "),
        (("deepseek-r1", "--model", "other"), "--model other "),
        (("deepseek-r1", "--checkpoint"), "--checkpoint: deepseek-r1 "),
    ],
)
def test_an_option_in_the_wrong_place_or_with_a_wrong_value_is_named_and_nothing_runs(monkeypatch, typed, named):
    monkeypatch.setattr(CheckRunner, "run_and_record", raising(RuntimeError("it ran")))
    done = CliRunner().invoke(app, ["check", *typed])
    assert (done.exit_code, done.stdout) == (outputs.EXIT_USAGE, ""), done.output
    assert named in done.stderr.splitlines()[-1]


def folder_gone(monkeypatch, folder):
    """The folder of the files goes while the steps run."""
    run = machine.run_checks
    monkeypatch.setattr(machine, "run_checks", lambda *asked: shutil.rmtree(folder) or run(*asked))


def record_too_large(monkeypatch, folder):
    monkeypatch.setattr(page, "MAX_INPUT_BYTES", 10)


@pytest.mark.parametrize(
    ("harm", "option"), [(folder_gone, "--json"), (folder_gone, "--html"), (record_too_large, "--html")]
)
@pytest.mark.parametrize(
    ("status", "expected"),
    [("ok", outputs.EXIT_USAGE), ("problem", outputs.EXIT_FAILED), ("unknown", outputs.EXIT_INCOMPLETE)],
)
def test_a_file_that_cannot_be_written_at_the_end_hides_nothing_that_was_found(
    monkeypatch, tmp_path, harm, option, status, expected
):
    (tmp_path / "out").mkdir()
    machine_finds(status)(monkeypatch, tmp_path)
    harm(monkeypatch, tmp_path / "out")
    done = CliRunner().invoke(app, ["check", *MACHINE, option, str(tmp_path / "out" / "x")])
    assert done.exit_code == expected, done.output
    assert str(tmp_path / "out" / "x") in done.stderr.splitlines()[-1]


def test_a_page_is_written_also_where_the_json_cannot_be(monkeypatch, tmp_path):
    (tmp_path / "out").mkdir()
    machine_finds("problem")(monkeypatch, tmp_path)
    folder_gone(monkeypatch, tmp_path / "out")
    asked = ["check", *MACHINE, "--json", str(tmp_path / "out" / "x"), "--html", str(tmp_path / "page.html")]
    assert CliRunner().invoke(app, asked).exit_code == outputs.EXIT_FAILED
    assert "made up" in (tmp_path / "page.html").read_text()


def test_exit_status_every_command_is_in_the_table():
    assert {row[0] for row in TABLE} == set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "typed", "plant"),
    [
        ("check", MACHINE, machine_finds("ok")),
        ("check", PLAN, plan_says("engaged")),
        ("check", ONE_CASE, nothing),
        ("status", (), a_server(engaged=True)),
    ],
)
def test_json_to_standard_output_is_all_there_and_the_text_goes_to_standard_error(
    monkeypatch, tmp_path, command, typed, plant
):
    plant(monkeypatch, tmp_path)
    done = CliRunner().invoke(app, [command, *typed, "--json", "-"])
    assert json.loads(done.stdout)["evidence"]["schema"].startswith("vllm-aiter-mla/")
    assert done.stderr.strip()
    path = tmp_path / "out.json"
    again = CliRunner().invoke(app, [command, *typed, "--json", str(path)])
    assert json.loads(path.read_text()).keys() == json.loads(done.stdout).keys()
    assert again.stdout.strip()


def test_a_page_goes_to_standard_output_and_nothing_else(monkeypatch, tmp_path):
    a_server(engaged=True)(monkeypatch, tmp_path)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "aiter_mla"), "-o", "-"])
    assert done.stdout.startswith("<!doctype html>")
    assert not (tmp_path / "-").exists()
    assert "report written" in done.stderr


def test_the_package_is_the_command():
    done = subprocess.run([sys.executable, "-m", "vllm_aiter_mla", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"vllm-aiter-mla {__version__}\n")


def test_a_card_may_be_called_by_the_name_that_is_sold():
    assert {one.value: one.architecture for one in CardName} == {
        **dict.fromkeys(("gfx942", "mi300x", "mi325x"), "gfx942"),
        **dict.fromkeys(("gfx950", "mi350p", "mi350x", "mi355x"), "gfx950"),
    }
    assert {*ARCHITECTURES} == admission.CARDS == simulated_card.CARDS.keys()
    assert product_names("gfx942") == "MI300X, MI325X"


def in_a_shell(line, **options):
    options = {"stderr": subprocess.PIPE, "text": True, "env": os.environ | options.pop("env", {})} | options
    return subprocess.run([sys.executable, "-m", "vllm_aiter_mla", *line], **options)


@pytest.mark.slow
@pytest.mark.parametrize("line", [["--version"], ["check", "--help"], ["check", "--only", "machine"]], ids=" ".join)
def test_output_that_ends_on_a_full_disk_is_one_line_and_nobody_has_looked(line):
    with open("/dev/full", "w") as full:
        done = in_a_shell(line, stdout=full)
    said = without_progress(done.stderr)
    assert (done.returncode, len(said)) == (outputs.EXIT_INCOMPLETE, 1)
    assert os.strerror(errno.ENOSPC) in said[0]


def test_a_page_that_standard_output_does_not_take_is_no_wrong_input(monkeypatch, tmp_path):
    a_server(engaged=True)(monkeypatch, tmp_path)
    with open("/dev/full", "w") as full:
        done = in_a_shell(["report", str(tmp_path / "aiter_mla"), "-o", "-"], stdout=full)
    assert (done.returncode, os.strerror(errno.ENOSPC) in done.stderr) == (outputs.EXIT_INCOMPLETE, True)


def test_the_files_of_a_run_are_written_although_its_output_has_ended(monkeypatch, tmp_path):
    """As behind ``| head -3``."""
    machine_finds("ok")(monkeypatch, tmp_path)
    monkeypatch.setattr(show, "print_table", raising(BrokenPipeError(errno.EPIPE, "planted")))
    as_json, page = tmp_path / "check.json", tmp_path / "check.html"
    CliRunner().invoke(app, ["check", *MACHINE, "--json", str(as_json), "--html", str(page)])
    assert json.loads(as_json.read_text())["exit"] == 0
    assert page.read_text().startswith("<!doctype html>")


def test_output_that_was_closed_before_the_start_is_one_line_and_nobody_has_looked():
    done = in_a_shell(["status"], preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr.count("\n")) == (outputs.EXIT_INCOMPLETE, 1), done.stderr


def test_output_that_ends_in_a_closed_pipe_is_one_line_and_nobody_has_looked():
    reads, writes = os.pipe()
    os.close(reads)
    done = in_a_shell(["check", "--help"], stdout=writes)
    assert (done.returncode, done.stderr.count("\n")) == (outputs.EXIT_INCOMPLETE, 1)
    assert done.stderr.startswith("check: ")


AS_NOBODY = """
import os, sys
from vllm_aiter_mla.commands.main import main
if os.geteuid() == 0:
    os.setuid(65534)
main()
"""


def test_without_a_folder_for_temporary_files_check_says_what_to_set(monkeypatch):
    """As in a pod whose root is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    done = CliRunner().invoke(app, ["check", *MACHINE])
    assert (done.exit_code, done.stderr.count("\n"), "TMPDIR" in done.stderr) == (outputs.EXIT_USAGE, 1, True)


def test_status_of_a_folder_that_this_user_may_not_read_says_so(tmp_path):
    """The folder that pytest made is its user's alone, as every home of root's is."""
    (tmp_path / "aiter_mla").mkdir(mode=0)
    line, variables = [sys.executable, "-c", AS_NOBODY, "status"], os.environ | {"VLLM_CACHE_ROOT": str(tmp_path)}
    done = subprocess.run(line, env=variables, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (outputs.EXIT_INCOMPLETE, 1)
    assert "permission denied" in done.stderr

"""The command line, its files and exit statuses, and the pytest plugin."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from tests.report.pages import rows_of
from tests.support import in_process
from tests.support.planted import raising
from tests.support.waiting import happened
from tests.verify.faults import stale
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check import show
from vllm_aiter_mla.commands.check.kernels import child, step
from vllm_aiter_mla.commands.check.options import KernelOptions
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.commands.report import page as page_module
from vllm_aiter_mla.verify import results, runner, session

ROOT = Path(__file__).resolve().parents[2]
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")


ONE = ("--backend", "reference", "--case", "fresh-data", "--variant", "fp8")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The step's back ends run in this process, where faults are planted; ``in_a_shell`` runs the real ones."""
    in_process.install(monkeypatch)


def kernels(*arguments):
    return CliRunner().invoke(app, ["check", "--only", "kernels", *arguments], env={"COLUMNS": "200"})


def cli(*arguments):
    return kernels("--device", "cpu", *arguments)


def record(path):
    """The record of the step, as JSON has it."""
    (step,) = json.loads(path.read_text())["steps"]
    return step["data"]


@on_cpu
def test_without_a_gpu_or_the_back_end_that_was_asked_for_it_exits_3_and_says_so(monkeypatch):
    for options in (["--quick"], ["--device", "gpu"]):
        done = kernels(*options)
        assert (done.exit_code, "--device cpu" in done.stdout) == (3, True), done.output
    monkeypatch.setattr(session, "engine_here", lambda device: session.EagerEngine())
    monkeypatch.setitem(session.FINDERS, "aiter", lambda: "no such card")
    done = kernels("--backend", "aiter")
    assert (done.exit_code, "no such card" in done.stdout) == (3, True), done.output


def test_a_width_that_a_format_does_not_have_is_a_wrong_option_and_no_failure():
    done = cli(*ONE, "--weights", "mxfp4", "--nope", "48")
    assert (done.exit_code, "--nope 48" in done.stderr.splitlines()[-1]) == (2, True)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (["--heads", "8"], (8, 128, 64, 512, 128)),
        (["--heads", "5", "--nope", "64", "--v", "32", "--weights", "mxfp4"], (5, 64, 64, 512, 32)),
    ],
)
def test_the_options_give_the_sizes_and_the_command_that_repeats_has_them(tmp_path, options, sizes):
    path = tmp_path / "out.json"
    done = cli(*ONE, *options, "--limit", "8", "--json", str(path))
    assert done.exit_code == 0, done.output
    made = record(path)
    assert tuple(made["sizes"][name] for name in ("heads", "nope", "rope", "latent", "v")) == sizes
    assert " ".join(options) in made["results"][0]["command"]


def test_a_model_gives_the_padded_heads_and_the_activation_dtype(monkeypatch):
    """Kimi-K2 on 8 ranks: AITER's decode kernels take a multiple of 16 heads."""
    monkeypatch.setattr(child, "padded_heads", lambda heads, has_fp8_cache: 2 * heads if has_fp8_cache else 0)
    options = KernelOptions(case=("fresh-data",), limit=8, quick=True)
    sizes = {"heads": 2, "nope": 32, "rope": 16, "latent": 32, "v": 16, "block_size": 1, "blocks": 24}
    for has_fp8_cache, padded in ((True, 4), (False, 0)):
        request = child.KernelsRequest(options, sizes, None, True, "k2", (), "float16", has_fp8_cache)
        found = child.verify_backend(request, "reference")
        assert (found.sizes["out_heads"], found.sizes["block_size"]) == (padded, 1)
        assert {one.variant: one.status for one in found.results} == {"fp8": "passed", "bf16": "passed"}


@on_cpu
def test_a_model_is_not_verified_without_a_gpu():
    request = child.KernelsRequest(KernelOptions(), {"heads": 8}, None, False, "k2", (), "float16", True)
    with pytest.raises(session.NotHereError, match="sees no GPU"):
        child.verify_backend(request, "aiter")


def test_small_runs_the_quick_cases_at_deepseeks_widths_and_two_runs_give_the_same_digests(tmp_path):
    found = []
    for seed, flags in ((0, ()), (0, ("--emulated",)), (1, ())):
        path = tmp_path / f"{len(found)}.json"
        line = ("--backend", "reference", "--case", "fresh-data", "--case", "full-graph-decode", "--small")
        done = cli(*line, *flags, "--data-seed", str(seed), "--json", str(path))
        assert done.exit_code == 0, done.output
        found.append(record(path))
    first, again, other = ([result["digests"] for result in one["results"]] for one in found)
    assert (first == again, first == other) == (True, False)
    assert {name.partition(" ")[0] for digests in first for name in digests} == {"query", "cache", "final"}
    assert {len(digest) for digests in first for digest in digests.values()} == {64}
    assert [one["emulated"] for one in found] == [False, True, False]
    assert [found[0]["sizes"][name] for name in ("heads", "nope", "rope", "latent")] == [2, 128, 64, 512]
    assert {"--small", "--emulated"} < set(shlex.split(found[1]["results"][0]["command"]))


def test_rounds_that_end_alike_are_one_result_so_that_report_reads_however_many(monkeypatch, tmp_path):
    """Two hundred rounds of a full run would fill 20 MB, which no reader takes."""
    monkeypatch.setattr(page_module, "MAX_INPUT_BYTES", 4096)
    path, page = tmp_path / "out.json", tmp_path / "page.html"
    done = cli(*ONE, "--small", "--repeat", "12", "--json", str(path), "--html", str(page))
    assert (done.exit_code, "12 passed, 0 failed" in done.stdout) == (0, True), done.output
    (result,) = record(path)["results"]
    assert (result["seed"], result["rounds"]) == (0, 12)
    assert CliRunner().invoke(app, ["report", str(path), "-o", str(page)]).exit_code == 0
    assert ["reference", "12", "0", "0"] in rows_of(page.read_text())


def test_rounds_that_failed_are_one_failure_with_the_command_of_the_first(monkeypatch, tmp_path):
    right, run = session.FINDERS["reference"], session.run_case
    rounds = iter([right, stale_scale(monkeypatch), right, stale_scale(monkeypatch)])
    monkeypatch.setattr(session, "run_case", lambda item, backend, engine: run(item, next(rounds)(), engine))
    asked = ("--backend", "reference", "--case", "scales-changed", "--variant", "fp8", "--repeat", "4")
    done = cli(*asked, "--json", str(tmp_path / "out.json"))
    passed, failed = record(tmp_path / "out.json")["results"]
    assert [(one["status"], one["seed"], one["rounds"]) for one in (passed, failed)] == [
        ("passed", 0, 2), ("failed", 1, 2)
    ]  # fmt: skip
    assert "--data-seed 1" in failed["command"]
    for shown in ("2 passed, 2 failed", "first of 2 rounds that failed"):
        assert shown in done.stdout


@pytest.mark.mutation
def test_mutation_a_record_of_each_round_is_caught(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "joined", tuple)
    monkeypatch.setattr(session, "joined", tuple)
    with pytest.raises(AssertionError, match=r"12 passed|2, True"):
        test_rounds_that_end_alike_are_one_result_so_that_report_reads_however_many(monkeypatch, tmp_path)


def test_without_small_no_digest_is_made(tmp_path):
    path = tmp_path / "out.json"
    assert cli(*ONE, "--json", str(path)).exit_code == 0
    assert [result["digests"] for result in record(path)["results"]] == [{}]


@pytest.mark.mutation
def test_mutation_a_cache_that_is_written_otherwise_changes_its_digest(tmp_path, monkeypatch):
    def planted(self, outputs, rows, digest=runner._Run._digest):
        self.buffers.layers[0].storage.view(torch.uint8)[0].add_(1)
        digest(self, outputs, rows)

    digests = []
    for plant in (runner._Run._digest, planted):
        monkeypatch.setattr(runner._Run, "_digest", plant)
        cli(*ONE, "--small", "--json", str(tmp_path / "out.json"))
        digests.append(record(tmp_path / "out.json")["results"][0]["digests"])
    assert digests[0]["cache 0"] != digests[1]["cache 0"]
    assert digests[0]["query 0"] == digests[1]["query 0"]


@pytest.fixture
def faulty(monkeypatch):
    """A back end called "reference" that reads a scale once and never again."""
    monkeypatch.setitem(session.FINDERS, "reference", stale_scale(monkeypatch))


def stale_scale(monkeypatch):
    return lambda: stale("q_scale")(monkeypatch)


def ends(monkeypatch, tmp_path, told):
    """Two back ends over two cases; the process of the first ends after it told so many values."""
    found, path = session.FINDERS["reference"], tmp_path / "out.json"
    monkeypatch.setattr(session, "FINDERS", {"first": found, "second": found})
    in_process.install(monkeypatch, ends={process.import_path_of(child.verify_backend): told})
    done = cli("--quick", "--case", "fresh-data", "--case", "other-slots", "--variant", "bf16", "--json", str(path))
    assert done.exit_code == 1, done.output
    results = record(path)["results"]
    return (
        done,
        {(one["backend"], one["case"]): one for one in results if one["status"] == "passed"},
        [one for one in results if one["status"] == "failed"],
    )


SECOND = {("second", "fresh-data"), ("second", "other-slots")}


# It tells its record, and then of each case that it begins and what it gave.
@pytest.mark.parametrize(
    ("told", "case", "before"),
    [(0, "start", set()), (1, "start", set()), (2, "fresh-data", set()), (4, "other-slots", {("first", "fresh-data")})],
)
def test_a_process_that_ends_fails_in_its_case_and_what_passed_is_kept(monkeypatch, tmp_path, told, case, before):
    done, passed, failed = ends(monkeypatch, tmp_path, told)
    assert set(passed) == before | SECOND
    assert [(one["backend"], one["case"]) for one in failed] == [("first", case)]
    (finding,) = failed[0]["findings"]
    assert finding["message"] == f"{in_process.ENDED.sentence(case)}; no later case of first ran"
    assert f"{in_process.ENDED.ending} in {case}" in done.stdout
    assert (f"--case {case}" in failed[0]["command"]) == (case != "start")


@pytest.mark.mutation
def test_mutation_a_case_that_ended_its_process_and_is_left_out_is_caught(monkeypatch, tmp_path):
    monkeypatch.setattr(step, "_add_failure", lambda record, *_: record)
    with pytest.raises(AssertionError, match="0 == 1"):
        test_a_process_that_ends_fails_in_its_case_and_what_passed_is_kept(
            monkeypatch, tmp_path, 2, "fresh-data", set()
        )


@on_cpu
def test_a_run_without_a_gpu_says_so_exits_0_and_its_json_holds_results_and_commands(tmp_path):
    path = tmp_path / "out.json"
    done = cli(*ONE, "--repeat", "2", "--json", str(path))
    assert done.exit_code == 0, done.output
    for told in ("graph capture: not available on this machine", "eager replay", "fresh-data", "cache-elsewhere",
                 "2 passed, 0 failed"):  # fmt: skip
        assert told in done.output
    found = record(path)
    assert found["status"] == 0
    assert [(result["seed"], result["rounds"]) for result in found["results"]] == [(0, 2)]
    assert all(result["command"].startswith("vllm-aiter-mla check --only kernels") for result in found["results"])
    assert "torch" in found["machine"]


def test_a_failure_exits_1_and_prints_the_command_that_repeats_it(faulty):
    done = cli("--backend", "reference", "--case", "scales", "--case", "fresh-data", "--quick", "--data-seed", "7")
    assert done.exit_code == 1
    (line,) = {line.strip() for line in done.output.splitlines() if "reproduce:" in line and "--variant fp8" in line}
    arguments = shlex.split(line.removeprefix("reproduce: vllm-aiter-mla check --only kernels "))
    assert arguments[:6] == ["--backend", "reference", "--case", "scales-changed", "--variant", "fp8"]
    again = cli(*arguments)
    assert again.exit_code == 1
    assert "1 failed" in again.output


def test_a_back_end_that_breaks_while_it_is_looked_for_is_missing_not_a_crash(monkeypatch):
    monkeypatch.setitem(session.FINDERS, "aiter", raising(OSError("rocminfo: not found")))
    done = cli("--backend", "aiter", "--backend", "reference", "--case", "fresh-data", "--quick")
    assert (done.exit_code, "2 passed, 0 failed" in done.output) == (3, True), "what was asked for is not here"
    assert "rocminfo: not found" in done.output


@pytest.mark.parametrize(("terminal", "told"), [("1", True), ("", False)])
def test_a_terminal_shows_on_stderr_the_case_that_runs_and_a_file_does_not(monkeypatch, terminal, told):
    monkeypatch.setenv("FORCE_COLOR", terminal)
    monkeypatch.setattr(show, "is_stderr_terminal", lambda: bool(terminal))
    run, words = session.run, "reference fp8 fresh-data"

    def runs(*asked):
        assert not told or happened(lambda: words in sys.stderr.buffer.getvalue().decode())
        return run(*asked)

    monkeypatch.setattr(session, "run", runs)
    done = cli(*ONE)
    assert (done.exit_code, words in done.stderr) == (0, told), done.output


@pytest.mark.parametrize(
    ("asked", "names"),
    [("long", ["long-run", "long-run-piecewise"]), ("long-run", ["long-run"]), ("-size", ["every-capture-size"])],
)
def test_a_part_of_a_name_selects_every_case_that_holds_it_and_a_whole_name_one(asked, names):
    found = session.Session(backend=("reference",), case=(asked,), variant=("fp8",))
    assert [item.case.name for item in found.items] == names


@pytest.mark.parametrize("only", [(), ("--only", "kernels")])
def test_list_prints_cases_and_oracles_and_runs_nothing(only):
    done = CliRunner().invoke(app, ["check", *only, "--list"])
    assert done.exit_code == 0
    assert "mixed-batch-piecewise: " in done.output
    assert "no-table-copy: " in done.output


@pytest.mark.parametrize("more", [("--json", "cases.json"), ("--case", "long"), ("--device", "cpu"), ("--strict",)])
def test_list_ignores_no_option(tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["check", "--list", *more])
    assert (done.exit_code, more[0] in done.stderr) == (2, True), done.output
    assert not [*tmp_path.iterdir()]


def plugin(tmp_path, *arguments):
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    options = ["-q", "-p", "no:cacheprovider", "-p", "vllm_aiter_mla.verify.pytest_plugin"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    # Installed metadata may still name the plugin, which would register its options twice.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)


SELECTED = ("--aiter-mla-verify", "--aiter-mla-quick", "-k", "test_own or reference-fresh-data")


@pytest.mark.slow
def test_the_plugin_adds_the_cases_to_a_run_of_another_project(tmp_path):
    """pytest selects among them by name, and writes them to its JUnit XML."""
    path = tmp_path / "out.xml"
    done = plugin(tmp_path, *SELECTED, f"--junit-xml={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert [case.get("name") for case in suite][1:] == ["reference-fresh-data[fp8]", "reference-fresh-data[bf16]"]


@pytest.mark.slow
def test_a_failure_in_pytest_names_the_oracle_and_the_command_that_repeats_it(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "def pytest_configure(config):\n"
        "    from tests.verify.faults import Changed, flips_query\n"
        "    from vllm_aiter_mla.verify import session\n"
        "    session.FINDERS['reference'] = lambda: Changed(flips_query)\n"
    )
    done = plugin(tmp_path, *SELECTED)
    assert done.returncode == 1
    assert "inputs-unchanged: q of layer 0 was changed" in done.stdout
    assert "vllm-aiter-mla check --only kernels --backend reference --case fresh-data --variant fp8" in done.stdout


def test_the_plugin_does_nothing_without_its_option(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import sys\ndef pytest_sessionfinish(session):\n    assert 'torch' not in sys.modules\n"
    )
    done = plugin(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout

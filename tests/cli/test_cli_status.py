"""``vllm-aiter-mla status``: one line for each engine, and an exit status for scripts."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tests.support.bad_files import BAD
from tests.support.decisions import spans
from tests.support.statuses import record_of, skipped_engine
from vllm_aiter_mla import files, locks
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.decided import ShapeTiming
from vllm_aiter_mla.serving.decision import PASSED, Checked, Figures, LayerFacts, Offer, decide
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.status import liveness, status_files
from vllm_aiter_mla.status.record import DecisionGroup, RankRecord

NAMES = ("model.layers.0.attn", "model.layers.1.attn")
TIMED = (ShapeTiming("16 heads", NAMES, spans((1, 64, "triton")), {64: {"triton": 5.0, "vllm": 10.0}}),)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the plugin's files, in which this process is the front end of every server that lives."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    for run in ("7-a", "8-b"):
        monkeypatch.setenv(liveness.RUN_VARIABLE, run)
        liveness.ensure_run_lock(tmp_path / "aiter_mla")
    return tmp_path / "aiter_mla"


def write(folder, run, engine, rank, engaged=NAMES, names=NAMES, ranks=1, ended=False):
    """Write a rank's file; this process holds its lock, or the lock of an engine that has ended is free."""
    skipped = {name: Skip("kernel_shape", "wrong") for name in names if name not in engaged}
    record = replace(record_of(names, 512, "fp8", rank), run=run, dp_index=engine, model_name="r1", shape_timings=TIMED)
    record = replace(record, engine_id="1" if not ended else "0")
    path = folder / f"status-{run}-{record.engine_id}-{engine}-{rank}.json"
    files.write_record(
        path, replace(record, engaged=dict.fromkeys(engaged, "triton"), skipped=skipped, num_ranks=ranks)
    )
    lock = folder / f"lock-{path.stem}"
    if ended:
        lock.touch()
        (folder / f"lock-status-{run}").touch()
    else:
        locks.try_hold(lock)
    return path


def run(*options):
    return CliRunner().invoke(app, ["status", *options])


def test_each_data_parallel_engine_of_a_server_has_its_line(folder):
    for engine in ("0", "1"):
        for rank in (0, 1):
            write(folder, "7-a", engine, rank, ranks=2)
    found = run()
    assert found.exit_code == 0, found.output
    assert [line.split(": ")[1].split(" (")[0] for line in found.output.splitlines()] == [
        "2/2 MLA layers engaged on 2 of 2 ranks"
    ] * 2
    assert "5.0 us a layer at 64 tokens against vLLM's own 10.0" in found.output


def test_layer_prints_what_was_decided_and_why_each_other_kernel_does_not_run(folder):
    offers = {"aiter": Offer(), "triton": Offer(), "vllm": Offer(needs_check=False)}
    figures = Figures({512: {"aiter": [4.0] * 4, "triton": [5.0] * 4, "vllm": [9.0] * 4}})
    checks = {"aiter": Checked("aiter: self-check FAILED: q nope"), "triton": PASSED}
    found = decide(LayerFacts(None, offers, (512,)), checks, figures, Settings())
    record = files.read_record(RankRecord, path := write(folder, "7-a", "0", 0))
    decided = (DecisionGroup(NAMES, found),)
    files.write_record(path, replace(record, decision_groups=decided))
    printed = CliRunner().invoke(app, ["status", "--layer", "layers.1"]).output
    assert re.search(r"layers\.1\.attn, rank 0\n +1\.\.512 tokens +triton\n", printed)
    assert re.search(r"not aiter +aiter: self-check FAILED: q nope", printed)
    assert re.search(r"not vllm +it was at no token count", printed)
    assert "layers.0" not in printed
    skipped = {NAMES[1]: Skip("no_rope", "the graph rotates nothing")}
    files.write_record(path, replace(record, engaged={}, skipped=skipped, decision_groups=decided))
    assert "no_rope" in CliRunner().invoke(app, ["status", "--layer", "1"]).output, "a graph may skip it later"
    assert CliRunner().invoke(app, ["status", "--layer", "layers.11"]).exit_code == 2
    assert "layers" not in run().output.replace("MLA layers", "")


@pytest.mark.parametrize("engaged", [(), NAMES[:1]])
def test_a_rank_that_fell_back_is_exit_status_1(folder, engaged):
    write(folder, "7-a", "0", 0, ranks=2)
    write(folder, "7-a", "0", 1, engaged, ranks=2)
    found = run()
    assert found.exit_code == 1
    assert "rank 1 fell back: kernel_shape: wrong" in found.output


def test_a_pipeline_stage_without_mla_layers_is_well_and_an_engine_without_any_is_exit_status_1(folder):
    write(folder, "7-a", "0", 0, (), (), ranks=2)
    write(folder, "7-a", "0", 1, (), (), ranks=2)
    assert run().exit_code == 1, "nothing is engaged"
    write(folder, "7-a", "0", 0, ranks=2)
    found = run()
    assert (found.exit_code, "2/2 MLA layers engaged on 2 of 2 ranks" in found.output) == (0, True)


def test_a_rank_without_a_file_is_no_all_clear(folder):
    """It failed before it had a status, or it is another node's."""
    for rank in (1, 2, 3):
        write(folder, "7-a", "0", rank, ranks=4)
    found = run()
    assert (found.exit_code, "2/2 MLA layers engaged on 3 of 4 ranks" in found.output) == (3, True)
    assert "; 1 without a status" in found.output
    assert run("--layer", "layers.77").exit_code == 3, "the rank may have that layer"
    write(folder, "7-a", "0", 0, ranks=4)
    assert (run().exit_code, "4 of 4 ranks" in run().output) == (0, True)


def test_an_engine_whose_number_of_ranks_is_unknown_is_no_all_clear(folder):
    """A rank could not ask the others how many they are."""
    write(folder, "7-a", "0", 0, ranks=0)
    found = CliRunner().invoke(app, ["status", "--json", "-"])
    assert (found.exit_code, "; ranks unknown" in found.stderr) == (3, True)
    assert json.loads(found.stdout)["engines"][0]["num_ranks_without_file"] is None
    write(folder, "7-a", "0", 1, ranks=2)
    assert (run().exit_code, "2 of 2 ranks" in run().output) == (0, True), "one rank knows it"


def test_a_node_with_a_stage_without_mla_layers_speaks_for_itself(folder):
    write(folder, "7-a", "0", 1, (), (), ranks=2)
    found = run()
    assert (found.exit_code, "; 1 without a status" in found.output, "the model" in found.output) == (3, True, False)


@pytest.mark.parametrize(("field", "wrong"), [("num_ranks", -1), ("rank", -1), ("num_ranks", 10**12)])
def test_a_count_of_ranks_that_cannot_be_makes_a_bad_file(folder, field, wrong):
    path = write(folder, "7-a", "0", 0)
    files.write_record(path, json.loads(path.read_text()) | {field: wrong})
    found = run()
    assert (found.exit_code, isinstance(found.exception, SystemExit)) == (3, True)
    assert found.stderr.startswith(f"status: {path}: {field}: ")


def test_layer_names_what_could_not_be_read_before_it_calls_a_name_wrong(folder):
    found = run("--layer", "layers.1")
    assert (found.exit_code, str(folder) in found.stderr) == (3, True), "no file"
    path = write(folder, "7-a", "0", 0)
    path.write_text("{")
    found = run("--layer", "layers.1")
    assert (found.exit_code, str(path) in found.stderr, "no server" in found.stderr) == (3, True, False)


def test_layer_of_a_skipped_engine_is_answered_with_its_reason(folder):
    status_files.write_status(folder, skipped_engine("dcp", "made up", (0, 1)))
    found = run("--layer", "layers.1")
    assert (found.exit_code, "dcp: made up" in found.stdout, found.stderr) == (1, True, "")


def test_layer_of_an_engine_that_has_ended_is_not_here(folder):
    """The engine that serves has no such layer: the command was silent, with exit status 0."""
    other = ("model.layers.7.attn",)
    decided = (DecisionGroup(other, decide(LayerFacts(None, {}, (512,)), {}, None, Settings())),)
    for run_of_it, names in (("7-a", NAMES), ("8-b", other)):
        path = write(folder, run_of_it, "0", 0, names, names, ended=run_of_it == "8-b")
        record = files.read_record(RankRecord, path)
        groups = tuple(replace(group, layers=names) for group in decided)
        files.write_record(path, replace(record, decision_groups=groups))
    found = run("--layer", "layers.7")
    assert (found.exit_code, "no server here has a layer of that name" in found.stderr) == (2, True)
    assert run("--layer", "layers.1").exit_code == 0


def is_said_to_have_ended(folder, run_of_it):
    write(folder, run_of_it, "0", 0, ended=True)
    found = run()
    said = found.exit_code, "the engine has ended" in found.stdout, "engaged" in found.stdout
    assert said == (1, True, False), "its end is not told"
    write(folder, "7-a", "0", 0)
    assert run().exit_code == 0, "the others are"


@pytest.mark.parametrize("run_of_it", ["9-c", "8-b"], ids=["with its front end", "before its front end"])
def test_an_engine_that_has_ended_is_said_so_and_is_not_engaged(folder, run_of_it):
    """A script may shut its engine down and live on."""
    is_said_to_have_ended(folder, run_of_it)


@pytest.mark.mutation
def test_mutation_an_engine_that_ends_before_its_front_end_and_counts_as_living_is_caught(folder, monkeypatch):
    monkeypatch.setattr(liveness.ServerLocks, "is_engine_alive", lambda self, ranks: True)
    with pytest.raises(AssertionError, match="its end is not told"):
        is_said_to_have_ended(folder, "8-b")


@pytest.mark.parametrize("removed", ["lock-status-7-a", "lock-status-7-a-1-0-0", "lock-*"])
def test_a_server_whose_locks_somebody_removed_has_not_ended(folder, removed):
    write(folder, "7-a", "0", 0)
    for lock in folder.glob(removed):
        lock.unlink()
    found = run()
    assert (found.exit_code, "cannot tell" in found.stdout, "ended" in found.stdout) == (3, True, False)


def test_a_rank_that_an_earlier_engine_left_behind_completes_no_other(folder):
    """The later engine has not written the status of its second rank yet."""
    write(folder, "7-a", "0", 1, ranks=2, ended=True)
    write(folder, "7-a", "0", 0, ranks=2)
    found = run()
    assert (found.exit_code, "on 1 of 2 ranks" in found.stdout, "; 1 without a status" in found.stdout) == (
        3,
        True,
        True,
    )


def test_an_engine_of_another_machine_lives_as_long_as_its_front_end(folder):
    """A worker of Ray's: its lock may mean nothing here."""
    path = write(folder, "7-a", "0", 0, ended=True)
    data = json.loads(path.read_text())
    files.write_record(path, data | {"evidence": data["evidence"] | {"host": "another"}})
    found = run()
    assert (found.exit_code, "2/2 MLA layers engaged" in found.stdout) == (0, True)


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_a_bad_file_is_one_line_that_names_it_and_the_other_servers_are_shown(folder, spoil):
    write(folder, "7-a", "0", 0)
    path = write(folder, "8-b", "0", 0)
    spoil(path)
    found = run()
    assert isinstance(found.exception, SystemExit), found.exception
    assert found.exit_code == 3
    (line,) = found.stderr.splitlines()
    assert str(path) in line
    assert line.isprintable()
    assert found.stdout.startswith("run 7-a, r1, engine 0: 2/2 MLA layers engaged")


@pytest.mark.parametrize(
    "variables",
    [{"VLLM_CACHE_ROOT": "/a/b"}, {"VLLM_CACHE_ROOT": "~/b", "HOME": "/h"}, {"HOME": "/h"}, {"XDG_CACHE_HOME": "/x"},
     {"XDG_CACHE_HOME": "~/x", "HOME": "/h"}, {"XDG_CACHE_HOME": "", "HOME": "/h"}, {"VLLM_CACHE_ROOT": ""}],
    ids=str,
)  # fmt: skip
def test_the_folder_is_that_of_vllm(monkeypatch, variables):
    for name in ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert files.cache_folder() == compat_config.cache_folder()


def test_status_imports_neither_vllm_nor_torch(folder):
    write(folder, "7-a", "0", 0)
    code = (
        "import sys\nfrom vllm_aiter_mla.commands.main import app\n"
        "try:\n    app(['status'])\nexcept SystemExit as end:\n    print(end.code)\n"
        "print(sorted({'vllm', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["0", "[]"], done

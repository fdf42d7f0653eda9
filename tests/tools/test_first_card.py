"""``tools/first_card``: the process that watches, the archive, and sections on cards that are not there."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.sandbox.rehearsal_card import RehearsalCard, Scenario
from tests.support.waiting import LONG_S, happened, runs
from tools.common import RunError, UsageError, guarded
from tools.first_card import __main__ as first_card
from tools.first_card import asked, dry, harness, pack
from tools.first_card.asked import Asked
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import OWN_BMM, Binding
from vllm_aiter_mla.kernels.reference import ReferenceBackend

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["pack"],
        ["out", "more"],
        ["out", "--only", "facts,tmies"],
        ["out", "--aiter", "/"],
        [__file__],
        ["pack", "no/such/folder/x.tar.gz"],
        ["pack", "/"],
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(line):
    with pytest.raises(UsageError):
        first_card.parse(line)


def child(source):
    """A process of sections that does what ``source`` says with ``folder`` and the sections that are ``left``."""
    head = "import json, os, pathlib, sys, time\nfolder, left = pathlib.Path(sys.argv[1]), sys.argv[2].split(',')\n"
    head += "def done(name): (folder / f'{name}.json').write_text(json.dumps({'ok': True}))\n"
    return lambda options, folder, kind, left: [sys.executable, "-c", head + source, str(folder), ",".join(left)]


def watched(monkeypatch, folder, source):
    monkeypatch.setattr(first_card, "command", child(source))
    options = first_card.parse([str(folder), "--only", "facts,churn,times"])
    return first_card.whole(options, "card", time.monotonic())


def test_each_section_is_read_when_it_is_done(monkeypatch, tmp_path):
    found = watched(monkeypatch, tmp_path, "for name in left: done(name)")
    assert found == {name: {"ok": True} for name in ("facts", "churn", "times")}


def test_a_section_that_ends_its_process_costs_only_itself(monkeypatch, tmp_path):
    found = watched(
        monkeypatch, tmp_path, "for name in left: done(name) if name != 'churn' or len(left) < 2 else os._exit(7)"
    )
    assert found["churn"] == {"ok": False, "failed": "its process ended with 7"}
    assert found["facts"] == found["times"] == {"ok": True}


def test_a_section_that_hangs_is_ended_and_the_next_one_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(first_card, "SECONDS", dict.fromkeys(first_card.SECONDS, 0.2))
    monkeypatch.setattr(first_card, "GRACE_S", 0.2)
    monkeypatch.setattr(first_card, "START_S", LONG_S)
    found = watched(monkeypatch, tmp_path, "for name in left: time.sleep(60) if name == 'churn' else done(name)")
    assert (found["churn"]["ok"], found["times"]) == (False, {"ok": True})


WAITS = """
from tools.common import guarded
def body(argv):
    (folder / "ready").write_text(str(os.getpid()))
    while not (folder / "go").exists():
        time.sleep(0.02)
    for name in left:
        done(name)
    return 0
sys.exit(guarded("first_card", body, []))
"""
"""What begins as the process of the sections does, and goes on when it is told."""


def watches(folder):
    """Run the tool over a process that waits."""
    first_card.command = child(WAITS)
    sys.exit(guarded("first_card", first_card.run, [folder, "--only", "facts,churn"]))


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [True, False])
def test_signals_that_are_ignored_as_under_nohup_end_neither_the_tool_nor_its_child(tmp_path, ignored):
    line = [sys.executable, "-c", f"from {__name__} import watches; watches({str(tmp_path)!r})"]
    how = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    with subprocess.Popen(line, cwd=ROOT, preexec_fn=how, stdout=subprocess.DEVNULL) as tool:
        assert happened(lambda: (tmp_path / "ready").is_file() and (tmp_path / "ready").read_text())
        sections = int((tmp_path / "ready").read_text())
        for one in (sections, tool.pid) if ignored else (tool.pid,):
            os.kill(one, signal.SIGHUP)
        if ignored:
            (tmp_path / "go").touch()
        assert tool.wait(LONG_S) == (0 if ignored else 130)
    assert [(tmp_path / f"{name}.json").exists() for name in ("facts", "churn")] == [ignored] * 2
    assert happened(lambda: not runs(sections))


@pytest.mark.mutation
@pytest.mark.parametrize("one", [{"ok": True, "planted": {"a": True, "b": False}}, {"ok": False}, {"failed": "x"}])
def test_mutation_a_section_that_missed_something_does_not_pass(one):
    assert not first_card.passed(one)
    assert "NOT OK" in "\n".join(first_card.report({"churn": one}))


def test_the_table_has_times_ratios_and_the_limit():
    row = {"T": 1, "N": 16, "cache": "fp8", "weights": "bf16", "us": {"triton": 2.0, "vllm-stand-in": 3.0},
           "ratio": {"triton": 1.0, "vllm-stand-in": 1.5}, "least_bytes": 3_000_000}  # fmt: skip
    lines = first_card.report({"facts": {"ok": True, "copy_tb_s": 3.0}, "times": {"ok": True, "rows": [row]}})
    assert lines[-1].split() == ["16", "1", "fp8", "bf16", "2.00", "(1.00)", "3.00", "(1.50)", "-", "-", "1.00"]


def test_each_section_has_its_seconds_and_all_of_them_fit():
    from tools.first_card import sections

    assert [*first_card.SECONDS] == [*sections.SECTIONS]
    assert sum(first_card.SECONDS.values()) + first_card.START_S <= first_card.TOGETHER_S


@pytest.fixture
def archive(monkeypatch, tmp_path):
    """An archive without wheels and cache, which a network and a compiler make."""
    monkeypatch.setattr(pack, "_packages", lambda site, wheels: site.mkdir(parents=True))
    monkeypatch.setattr(pack, "_cache", lambda cache, aiter, python: cache.mkdir(parents=True))
    return tmp_path / "first-card.tar.gz"


def test_the_archive_runs_where_it_is_unpacked(archive, tmp_path):
    assert pack.write(archive, None, sys.executable) == 0
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    done = subprocess.run(
        [sys.executable, "-m", "tools.first_card", "--help"],
        cwd=tmp_path / "first-card",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "pack ARCHIVE" in done.stdout) == (0, True), done.stderr


@pytest.mark.mutation
def test_mutation_an_archive_that_is_too_large_is_refused(archive, monkeypatch):
    monkeypatch.setattr(pack, "MOST_BYTES", 1000)
    with pytest.raises(RunError, match="MiB"):
        pack.write(archive, None, sys.executable)


def test_a_checkout_that_is_no_repository_is_named(archive, tmp_path):
    (tmp_path / "aiter" / "ops" / "triton").mkdir(parents=True)
    with pytest.raises(RunError, match="--aiter"):
        pack.write(archive, tmp_path, sys.executable)


def test_an_archive_is_not_made_over_a_cache_that_lacks_kernels(tmp_path):
    """A section of the dry run that fails has compiled nothing: the card would, in its own minutes."""
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        + textwrap.dedent("""
        import json, os, pathlib, sys
        pathlib.Path(os.environ["TRITON_CACHE_DIR"]).mkdir(parents=True)
        found = {"ok": "times" not in os.environ["BROKEN"], "failed": "CompilationError"}
        pathlib.Path(sys.argv[3], "times.json").write_text(json.dumps(found))
    """)
    )
    python.chmod(0o755)
    for number, broken in enumerate(("", "times")):
        with (
            patch.dict(os.environ, BROKEN=broken),
            pytest.raises(RunError, match="times: Comp") if broken else nullcontext(),
        ):
            pack._cache(tmp_path / f"cache{number}", None, str(python))


def test_a_planted_fault_that_did_not_run_is_not_caught(monkeypatch):
    from tools.first_card import sections

    monkeypatch.setattr(sections, "error_of", lambda backend, made: "CompilationError")
    planted = sections.times(Asked(None, dry.VALUES, 0.0))["planted"]
    assert planted == {"a kernel that scales wrongly": False}


def rehearse(folder, only, *more):
    line = [sys.executable, "-m", "tools.first_card", str(folder), *more, "--only", only]
    variables = os.environ | (dry.ENVIRONMENT[dry.VALUES] if "--inside" in more else {})
    done = subprocess.run(line, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.relative_to(folder).as_posix(): json.loads(path.read_text()) for path in folder.rglob("*.json")}


@pytest.mark.slow
def test_a_rehearsal_catches_each_planted_fault(tmp_path):
    found = rehearse(tmp_path, "facts,churn,order", "--dry")
    assert found["values/facts.json"]["dot"] == ["decode_prep_kernel"]
    planted = {name: one["planted"] for name, one in found.items() if one.get("planted")}
    assert set(planted) == {"values/churn.json", "launches/churn.json", "launches/order.json"}
    assert len(planted["values/churn.json"]) == 3
    assert all(caught for one in planted.values() for caught in one.values())


@pytest.mark.slow
@pytest.mark.wide
def test_the_sections_of_verify_and_tuning_run_on_the_card_of_values(tmp_path):
    found = rehearse(tmp_path, "verify,tune", "--inside", "values")
    assert found["verify.json"]["counts"] == {"passed": 2, "failed": 0, "skipped": 0, "not run": 0}
    assert found["tune.json"]["ok"] is True


def one_step(part):
    """Move values to their neighbours, in place."""
    part.view(torch.uint8).bitwise_xor_(1)


CHURN = {
    "right": (lambda inputs, query: None, []),
    "a step in the cache": (lambda inputs, query: inputs.kv_cache[0, 0, :1].view(torch.uint8).add_(1), ["cache"]),
    "a step in the rotated half": (lambda inputs, query: one_step(query[:1, :1, -1:]), ["rotated"]),
    "a step on 1 % of the latent half": (lambda inputs, query: one_step(query[:1, :1, :90]), []),
    "a step on 3 % of the latent half": (lambda inputs, query: one_step(query[:1, :1, :300]), ["latent a step off"]),
    "two steps in the latent half": (
        lambda inputs, query: query[:1, :1, :8].view(torch.uint8).bitwise_xor_(2), ["latent"]),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("name", CHURN)
def test_mutation_churn_compares_bytes_and_in_the_latent_half_steps_and_their_share(monkeypatch, name):
    change, wrong = CHURN[name]

    class Planted(ReferenceBackend):
        bounds = replace(OWN_BMM, slack=0.0)  # each step counts, so that the shares are exact

        def bind(self, inputs):
            def run(given):
                query = reference.prepare(given, reference.TRITON)
                change(given, query)
                return query

            return Binding(run)

    RehearsalCard(Scenario()).install(monkeypatch)
    monkeypatch.setattr(harness, "TritonBackend", Planted)
    found = harness.replayed(Asked(None, dry.VALUES, 60.0), asked.shape_of(2, "fp8", "bf16"), 9, 1)
    assert (found["replays"], found["wrong"]) == (1, wrong), found


def test_the_command_says_what_is_wrong_and_ends_with_2():
    assert guarded("first_card", first_card.run, ["out", "--only", "nothing"]) == 2

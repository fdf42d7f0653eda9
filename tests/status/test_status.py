"""The status file line, its file, and what a warm start knows of skips."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from vllm_aiter_mla import files, worker
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.settings import SettingsError
from vllm_aiter_mla.status import file, record
from vllm_aiter_mla.status import state as status

LAYERS = ("model.layers.0.attn", "model.layers.1.attn")


@pytest.fixture
def said(monkeypatch, tmp_path):
    """A fresh status and cache folder; collects (level, line)."""
    lines: list[tuple[int, str]] = []
    monkeypatch.setattr(status, "_status", status.Status())
    monkeypatch.setattr(compat_config, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(log, "say", lambda level, text, stacklevel=2: lines.append((level, text)))
    monkeypatch.setattr(log, "_said", set())
    return lines


def config(key="k" * 64, capture_sizes=(), **others):
    """As much of vLLM's as is asked for the files."""
    compilation = SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL"), cudagraph_capture_sizes=capture_sizes)
    return SimpleNamespace(compute_hash=lambda: key, compilation_config=compilation, **others)


def after_warm_up(*, strict=False, rank=0, **changes):
    """The worker's own ``take_status``; what it would ask of a running engine is answered here."""
    one = SimpleNamespace(vllm_config=config(**changes), rank=rank)
    answers = {
        "_run_once": lambda _: None,
        "_outcome": lambda _: record.as_record(LAYERS, 512, "fp8", rank),
        "_is_strict": lambda _: strict,
    }
    with patch.multiple(worker, **answers):
        worker.take_status(one)


def test_status_all_engaged_is_one_info_line(said):
    for name in LAYERS:
        status.engage(name, "aiter")
    after_warm_up()
    assert said == [(logging.INFO, "2/2 MLA layers engaged (aiter, fp8 KV, decode limit 1..512)")]


def test_status_some_refused_names_the_first_reason(said):
    status.engage(LAYERS[0], "aiter")
    status.refuse(LAYERS[1], "no_rope", "no rotary embedding is applied to q")
    after_warm_up()
    assert said[0][1].startswith("1/2 MLA layers engaged")
    assert said[0][1].endswith("1 refused: no_rope: no rotary embedding is applied to q")


def test_status_none_engaged_is_a_warning_that_names_doctor(said):
    status.refuse(LAYERS[0], "impl", "unknown implementation")
    after_warm_up()
    assert said == [(logging.WARNING, "0/2: impl: unknown implementation (run: vllm-aiter-mla doctor)")]


def test_status_none_engaged_is_an_error_in_strict_mode(said):
    with pytest.raises(SettingsError, match="0/2"):
        after_warm_up(strict=True)


def test_status_only_rank_0_speaks_and_every_rank_writes(said, tmp_path):
    after_warm_up(rank=3)
    assert said == []
    (path,) = tmp_path.glob("status-*-3.json")
    written = json.loads(path.read_text())
    assert written["total"] == 2
    assert written["skipped"][LAYERS[0]] == ["not_run", "its fused op has not run"]


def test_status_of_a_start_that_compiles_a_draft_alone_keeps_the_targets_reasons(said, monkeypatch, tmp_path):
    status.refuse(LAYERS[0], "no_rope", "why")
    status.current().compiled["1-512"] = {"matched": 1}
    after_warm_up()
    monkeypatch.setattr(status, "_status", status.Status())
    status.refuse(LAYERS[1], "geometry", "of the draft")
    status.current().compiled["1-512"] = {"matched": 0}
    after_warm_up()
    (path,) = tmp_path.glob("status-*.json")
    assert json.loads(path.read_text())["skipped"] == {
        LAYERS[0]: ["no_rope", "why"],
        LAYERS[1]: ["geometry", "of the draft"],
    }


def test_status_of_a_start_after_one_that_failed_in_its_warm_up_knows_the_reasons(said, monkeypatch, tmp_path):
    status.refuse(LAYERS[0], "no_rope", "why")
    status.current().compiled["1-512"] = {"matched": 1}
    worker.hand_over_nothing(SimpleNamespace(vllm_config=config(), rank=0))
    monkeypatch.setattr(status, "_status", status.Status())
    after_warm_up()
    assert (logging.INFO, "noted when these graphs were compiled: no_rope: why") in said


def every_rank_speaks(monkeypatch):
    monkeypatch.setattr(worker, "_say", lambda config, stages, outcome, strict: log.say(0, record.line(outcome)))


def a_refused_layer_is_forgotten(monkeypatch):
    told = record.as_record
    monkeypatch.setattr(record, "as_record", lambda *given: told(*given) | {"skipped": {}, "total": 1})


def the_status_line_is_said_twice(monkeypatch):
    say = worker._say
    monkeypatch.setattr(worker, "_say", lambda *given: (say(*given), say(*given)))


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("plant", "test"),
    [
        (every_rank_speaks, lambda said, folder: test_status_only_rank_0_speaks_and_every_rank_writes(said, folder)),
        (a_refused_layer_is_forgotten, lambda said, folder: test_status_some_refused_names_the_first_reason(said)),
        (the_status_line_is_said_twice, lambda said, folder: test_status_all_engaged_is_one_info_line(said)),
    ],
)
def test_mutation_i8_a_outcome_that_is_not_said_once_and_whole_is_caught(said, monkeypatch, tmp_path, plant, test):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test(said, tmp_path)


def test_status_of_a_warm_start_knows_the_skips_of_the_cold_one(said, monkeypatch, tmp_path):
    status.refuse(LAYERS[0], "no_rope", "why")
    status.current().compiled["1-512"] = {"matched": 1}
    after_warm_up()
    monkeypatch.setattr(status, "_status", status.Status())
    after_warm_up()
    assert said[1] == (logging.WARNING, "0/2: not_run: its fused op has not run (run: vllm-aiter-mla doctor)")
    assert said[2] == (logging.INFO, "noted when these graphs were compiled: no_rope: why")
    (path,) = tmp_path.glob("status-*.json")
    assert json.loads(path.read_text())["skipped"][LAYERS[0]] == ["no_rope", "why"]


BROKEN = {
    "empty": "",
    "a list": "[]",
    "half of it": '{"refused": {}}',
    "lists for objects": '{"refused": [], "partial": []}',
    "no text": "\x00\x01",
    "numbers for reasons": '{"refused": {"model.layers.0.attn": [1, 2]}, "partial": {}}',
    "a text for a reason": '{"refused": {}, "partial": {"model.layers.0.attn": "no_rope"}}',
    "one reason too many": '{"refused": {"model.layers.0.attn": ["a", "b", "c"]}, "partial": {}}',
    "too deep": "[" * 200_000,
    "too large": " " * (file.LARGEST + 1),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_fail_closed_a_broken_skips_file_costs_a_warning_and_never_the_outcome(said, tmp_path, content, strict):
    (tmp_path / f"skips-{'k' * 16}-0.json").write_text(content)
    with pytest.raises(SettingsError, match="0/2") if strict else contextlib.nullcontext():
        after_warm_up(strict=strict)
    texts = [text for _, text in said if text.startswith("the skips could not be kept or read: ")]
    assert len(texts) == 1
    assert strict or said[0][1].startswith("0/2: not_run")
    assert len(list(tmp_path.glob("status-*.json"))) == 1


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_fail_closed_what_is_no_file_is_not_read(said, tmp_path, kind):
    """Nor waited for: a pipe in the place of the file would hold the worker for ever."""
    path = tmp_path / f"skips-{'k' * 16}-0.json"
    good = tmp_path / "elsewhere"
    good.write_text(json.dumps({"skipped": {LAYERS[0]: ["no_rope", "why"]}, "partial": {}}))
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to(good)}[kind]()
    with pytest.raises(SettingsError, match="0/2: not_run"):
        after_warm_up(strict=True)
    assert [text for _, text in said if "the skips could not be kept or read" in text]
    assert not [text for _, text in said if "no_rope" in text]


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_fail_closed_the_status_line_needs_no_folder(said, monkeypatch, strict):
    def unreadable():
        raise PermissionError("planted")

    monkeypatch.setattr(compat_config, "cache_folder", unreadable)
    with pytest.raises(SettingsError, match="0/2") if strict else contextlib.nullcontext():
        after_warm_up(strict=strict)
    assert strict or said[0][1].startswith("0/2: not_run")
    assert [level for level, text in said if "PermissionError: planted" in text] == [logging.WARNING] * 2


def test_fail_closed_the_status_line_is_said_before_any_file_is_touched(said, monkeypatch):
    monkeypatch.setattr(compat_config, "cache_folder", lambda: said.append((0, "a file is touched")))
    after_warm_up()
    assert said[0][1].startswith("0/2: not_run")
    assert said[1] == (0, "a file is touched")


def test_fail_closed_strict_mode_stops_every_rank_that_holds_layers(said):
    with pytest.raises(SettingsError, match="0/2"):
        after_warm_up(strict=True, rank=3)


def test_a_reason_that_was_read_from_a_file_is_said_in_one_line(said, tmp_path):
    known = {"skipped": {LAYERS[0]: ["no_rope", "a\nb\x1b[2J"]}, "partial": {}}
    (tmp_path / f"skips-{'k' * 16}-0.json").write_text(json.dumps(known))
    after_warm_up()
    assert said[-1][1].endswith("no_rope: a b [2J")


def test_status_files_are_never_seen_half_written(said, tmp_path, monkeypatch):
    status.current().compiled["1-512"] = {"matched": 1}
    status.refuse(LAYERS[0], "no_rope", "why")
    after_warm_up()
    (path,) = tmp_path.glob("skips-*.json")
    before = path.read_text()

    def full(self, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(type(path), "replace", full)
    after_warm_up()
    assert path.read_text() == before
    assert [left.name for left in tmp_path.iterdir() if left.name.endswith(".new")] == []


def test_status_of_the_next_engine_starts_empty_and_has_its_own_outcome(said):
    for _ in range(2):
        status.reset()
        status.engage(LAYERS[0], "aiter")
        after_warm_up()
    assert len(said) == 2
    status.reset()
    after_warm_up()
    assert said[-1] == (logging.WARNING, "0/2: not_run: its fused op has not run (run: vllm-aiter-mla doctor)")


def test_status_counts_every_graph_of_a_range(said):
    """A target and its draft are two graphs of the same compile range."""
    status.count("1-16", {"matched": 3, "skipped": 0})
    status.count("1-16", {"matched": 1, "skipped": 1})
    assert status.current().compiled == {"1-16": {"matched": 4, "skipped": 1}}


def test_status_of_another_configuration_is_not_mixed_in(said, monkeypatch):
    status.refuse(LAYERS[0], "no_rope", "why")
    status.current().compiled["1-512"] = {"matched": 1}
    after_warm_up()
    monkeypatch.setattr(status, "_status", status.Status())
    after_warm_up(key="j" * 64)
    assert "not_run" in said[1][1]


def test_status_that_cannot_be_written_is_a_warning(said, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compat_config, "cache_folder", lambda: tmp_path / "file" / "below")
    status.engage(LAYERS[0], "aiter")
    after_warm_up()
    assert any(level == logging.WARNING and "could not be written" in text for level, text in said)


def test_status_file_names_the_captured_sizes(said, tmp_path):
    after_warm_up(capture_sizes=[1, 2, 4])
    (path,) = tmp_path.glob("status-*.json")
    assert json.loads(path.read_text())["capture_sizes"] == [1, 2, 4]


@pytest.mark.parametrize(
    ("mode", "sizes", "captured"), [("FULL_AND_PIECEWISE", [4, 1, 2], [1, 2, 4]), ("NONE", [1], []), ("FULL", None, [])]
)
def test_status_sizes_are_those_of_graphs_that_exist(mode, sizes, captured):
    compilation = SimpleNamespace(cudagraph_mode=SimpleNamespace(name=mode), cudagraph_capture_sizes=sizes)
    assert compat_config.capture_sizes(compilation) == captured


def written_by(tmp_path, **process):
    """A status file file as another process left it, its process described by ``process``."""
    outcome = record.as_record(LAYERS, 512, "fp8", 0)
    known = file.process(os.getpid()) | process
    path = tmp_path / f"status-{known['pid']}-0.json"
    path.write_text(json.dumps(outcome | {"process": known} | files.stamp("status", 2)))
    return path


def ended_pid():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_status_files_of_ended_processes_are_removed_at_the_next_start(said, tmp_path):
    ended = written_by(tmp_path, pid=ended_pid())
    reused = written_by(tmp_path, pid=os.getppid(), started=1)
    alive = written_by(tmp_path, **file.process(1))
    after_warm_up()
    assert not ended.exists()
    assert not reused.exists(), "its number belongs to another process now"
    assert alive.exists()


def test_status_files_of_other_machines_and_containers_stay(said, tmp_path, monkeypatch):
    """On a shared cache root a process of another host cannot be looked for, and its number may be free here."""
    container = written_by(tmp_path, pid=ended_pid(), pid_namespace="pid:[1]")
    with monkeypatch.context() as patching:
        patching.setattr(files, "host", lambda: "another")
        host = written_by(tmp_path, pid=ended_pid())
    foreign = tmp_path / "status-1-1.json"
    foreign.write_text("half a fi")
    after_warm_up()
    assert container.exists()
    assert host.exists()
    assert foreign.exists()


@pytest.mark.mutation
def test_mutation_status_files_of_other_processes_are_removed(said, tmp_path, monkeypatch):
    monkeypatch.setattr(file, "has_ended", lambda process: True)
    with pytest.raises(AssertionError):
        test_status_files_of_other_machines_and_containers_stay(said, tmp_path, monkeypatch)


def test_status_and_skips_can_be_traced(said, tmp_path):
    status.current().compiled["1-512"] = {"matched": 1}
    after_warm_up()
    for kind in ("status", "skips"):
        (path,) = tmp_path.glob(f"{kind}-*.json")
        assert json.loads(path.read_text())["evidence"]["schema"] == f"vllm-aiter-mla/{kind}"


def test_status_names_model_and_engine_as_vllm_labels_its_metrics():
    parallel = SimpleNamespace(data_parallel_index=3, data_parallel_rank=0)
    given = SimpleNamespace(model_config=SimpleNamespace(served_model_name="served"), parallel_config=parallel)
    assert compat_config.metric_labels(given) == {"model_name": "served", "engine": "3"}
    assert compat_config.metric_labels(SimpleNamespace()) == {"model_name": None, "engine": None}


def test_status_of_a_layer_that_kept_two_passes_says_why_it_is_not_engaged(said):
    """Not that its fused op has not run: it was never to run."""
    status.keep_partial(LAYERS[0], "stop_after", "debug.stop_after=q_prep_lift")
    found = record.as_record(LAYERS, 512, "fp8", 0)
    assert found["skipped"][LAYERS[0]] == ["stop_after", "debug.stop_after=q_prep_lift"]
    assert found["skipped"][LAYERS[1]] == list(record.NOT_RUN)


@pytest.mark.parametrize(("card", "told"), [("cpu", ""), ("gfx950", "; speed on gfx950 not measured")])
def test_status_the_line_says_that_nobody_has_timed_this_card(said, card, told):
    status.engage(LAYERS[0], "aiter")
    found = record.as_record(LAYERS[:1], 512, "fp8", 0, card=card)
    assert record.line(found) == f"1/1 MLA layers engaged (aiter, fp8 KV, decode limit 1..512{told})"


def test_status_a_measured_card_is_not_called_unmeasured(said, monkeypatch):
    monkeypatch.setattr(record, "MEASURED_CARDS", frozenset({"gfx950"}))
    assert record.unmeasured("gfx950") == ""
    assert record.unmeasured("gfx942")


def staged(monkeypatch, others):
    """The other pipeline stages hand over ``others``."""
    monkeypatch.setattr(worker.ranks, "of_stages", lambda mine: [mine, *others])


def test_status_the_line_speaks_for_all_pipeline_stages(said, monkeypatch):
    for name in LAYERS:
        status.engage(name, "aiter")
    both = {"engaged": {"c": "aiter"}, "skipped": {"d": ["dtype", "x"]}}
    later = record.as_record([], 512, "fp8", 1) | {"total": 2} | both
    staged(monkeypatch, [later])
    after_warm_up()
    text = "3/4 MLA layers engaged (aiter, fp8 KV, decode limit 1..512) in 2 pipeline stages; 1 refused: dtype: x"
    assert said == [(logging.INFO, text)]


def test_status_a_stage_without_a_outcome_is_named(said, monkeypatch):
    for name in LAYERS:
        status.engage(name, "aiter")
    staged(monkeypatch, [{}])
    after_warm_up()
    assert said[0][1].endswith(" in 2 pipeline stages, 1 of which made no status line")


@pytest.mark.parametrize("engaged_later", [False, True])
def test_status_strict_mode_stops_a_stage_without_mla_layers_only_where_no_stage_engaged(
    said, monkeypatch, engaged_later
):
    later = record.as_record([], 512, "fp8", 1) | {"total": 1, "engaged": {"c": "aiter"} if engaged_later else {}}
    first = record.as_record([], 512, "fp8", 0)
    with contextlib.nullcontext() if engaged_later else pytest.raises(SettingsError, match="strict=true"):
        worker._say(config(), [first, later], first, strict=True)


def test_status_a_data_parallel_engine_is_named(said):
    for name in LAYERS:
        status.engage(name, "aiter")
    after_warm_up(parallel_config=SimpleNamespace(data_parallel_index=1, data_parallel_size=1))
    assert said[0][1].endswith("decode limit 1..512), data-parallel engine 1")


@pytest.mark.parametrize("strict", [False, True])
def test_fail_closed_a_rank_without_a_outcome_still_hands_over_to_the_other_stages(said, monkeypatch, strict):
    """They wait for it: a rank that stopped before would leave them hanging."""
    handed = []
    monkeypatch.setattr(worker.ranks, "of_stages", lambda mine: [handed.append(dict(mine)) or mine])

    def planted(_):
        raise RuntimeError("planted")

    monkeypatch.setattr(worker, "_run_once", lambda _: None)
    monkeypatch.setattr(worker, "_outcome", planted)
    monkeypatch.setattr(worker, "_is_strict", lambda _: strict)
    with pytest.raises(SettingsError, match="strict=true") if strict else contextlib.nullcontext():
        worker.take_status(SimpleNamespace(vllm_config=config(), rank=0))
    assert handed == [{}]

"""The status line, the status file, what a warm start knows of skipped layers, and the metrics."""

import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.config import CUDAGraphMode

from tests.support.bad_files import BAD
from tests.support.decisions import decision
from tests.support.opcalls import layer_of
from tests.support.planted import raising
from tests.support.statuses import skipped_engine, wait_for_the_file, with_layers
from tests.support.strict import both_modes, stops
from tests.support.worker import Worker, ours
from vllm_aiter_mla import __version__, files, locks
from vllm_aiter_mla import engine as engines
from vllm_aiter_mla.admission import REMEDIES, Skip
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.decided import RejectedKernel
from vllm_aiter_mla.engine import Engine
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.status import engine_status, line, liveness, metrics, status_files
from vllm_aiter_mla.status.engine_status import EngineStatus
from vllm_aiter_mla.status.line import status_line
from vllm_aiter_mla.status.record import (
    NOT_RUN,
    RankRecord,
    group_by_engine,
    merge_ranks,
)
from vllm_aiter_mla.status.skips import KeptSkips

LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
NOT_READ = "the reasons of skipped layers could not be kept or read"
full = raising(OSError("No space left on device"))


@pytest.fixture(autouse=True)
def fresh(monkeypatch, said):
    """A run and an engine of this test's own."""
    monkeypatch.setenv(liveness.RUN_VARIABLE, f"{os.getpid()}-mine")
    monkeypatch.setattr(engine_status, "REWRITE_DELAY_SECONDS", 0.0)
    workers.clear()
    another_engine()


workers = []
"""All workers of a test: an engine ends with its worker."""


def another_engine(names=LAYERS):
    """Start one, over stub layers of vLLM's."""
    global engine
    engine = Worker(ours(512))
    workers.append(engine)
    context = {name: layer_of("fp8") for name in names}
    for name, layer in context.items():
        layer.layer_name, layer._vllm_config = name, engine.vllm_config
    engine.vllm_config.compilation_config.static_forward_context = context
    engine.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    engine.vllm_config.cache_config.cache_dtype = "fp8"
    engine.engine.make_layers()
    engine.engine.our_pass.integration = "module"  # as with default options; stub layers have no wrapper


def layers():
    return {name: Layer.of(module) for name, module in compat_config.mla_modules(engine.vllm_config).items()}


def skip(name, code, message):
    layers()[name].graph_skip = Skip(code, message)


def record_of(names=LAYERS, card="cpu"):
    found = {name: layer.state() for name, layer in layers().items() if name in names}
    return with_layers(the_status(), found, card=card)


def the_status():
    return engine.engine.status


def after_warm_up(*, strict=False, rank=0, key="k" * 64, capture_sizes=(), index=0, model="m", engine_id="1"):
    """The engine's moment after a warm-up whose decode step ran nothing."""
    config = engine.vllm_config
    config.instance_id = engine_id
    config.compute_hash, config.compilation_config.cudagraph_capture_sizes = lambda: key, capture_sizes
    config.model_config.served_model_name = model
    config.parallel_config = SimpleNamespace(data_parallel_index=index, data_parallel_rank=0)
    engine.engine.strict = strict
    with patch.object(Engine, "_run_decode_step", lambda self: None), patch.object(Worker, "rank", rank):
        engine.engine.on_warmed_up()


def fail(layer):
    """Let a layer's kernel raise while it serves, and wait until the file says so."""
    layer.fail(RuntimeError("planted"))
    wait_for_the_file()


def compiled():
    the_status().add_pass_counts("1-512", {"matched": 1})


def written(tmp_path, pattern="status-*.json"):
    (path,) = tmp_path.glob(pattern)
    return json.loads(path.read_text())


def engage_all():
    for name in LAYERS:
        layers()[name].ran_kernel = "aiter"


def engage_one():
    layers()[LAYERS[0]].ran_kernel = "aiter"
    skip(LAYERS[1], "no_rope", "why")


@pytest.mark.parametrize(("ran", "tuned"), [("triton", {"a shape": "a tile 1..16"}), ("aiter", {}), ("", {})])
def test_tuned_tiles_are_told_if_triton_has_run(ran, tuned):
    the_status().tuned_tiles["a shape"] = "a tile 1..16"
    layers()[LAYERS[0]].ran_kernel = ran
    assert record_of().tuned_tiles == tuned


def test_i8_only_rank_0_speaks_and_every_rank_writes(said, tmp_path):
    after_warm_up(rank=3)
    assert said == []
    found = written(tmp_path, "status-*-3.json")
    assert (found["num_layers"], found["skipped"][LAYERS[0]]["code"], found["decode_limit"]) == (2, "not_run", 512)


@pytest.mark.parametrize(
    ("then", "engaged"),
    [
        (lambda name: None, LAYERS),
        (lambda name: skip(name, "no_rope", "why"), LAYERS[:1]),
        (lambda name: layers()[name].fail(RuntimeError("planted")), LAYERS[:1]),
        (lambda name: setattr(layers()[LAYERS[0]], "ran_kernel", "reference"), LAYERS[:1]),
        (lambda name: layers()[name]._falls_back("a stride"), LAYERS[:1]),
    ],
    ids=[
        "one of its kernels has run",
        "the passes skip it",
        "its kernel raises",
        "another kernel ran instead",
        "its kernel does not take its batches",
    ],
)
def test_a_layer_of_a_draft_counts_by_the_kernel_that_ran_for_another_layer_unless_it_is_skipped(then, engaged):
    """vLLM runs no batch of a draft while it starts."""
    layers()[LAYERS[0]].ran_kernel, layers()[LAYERS[1]].possible_kernels = "aiter", ("triton", "aiter")
    then(LAYERS[1])
    record = record_of()
    assert (tuple(record.engaged), tuple(record.skipped)) == (engaged, LAYERS[len(engaged) :])


def test_a_layer_whose_batches_no_kernel_took_says_why():
    layers()[LAYERS[0]]._falls_back("a stride")
    assert record_of().skipped == {LAYERS[0]: Skip("kernel_shape", "a stride"), LAYERS[1]: NOT_RUN}


def test_every_engine_of_a_process_starts_empty_and_has_its_own_line(said):
    for _ in range(2):
        another_engine()
        engage_all()
        after_warm_up()
    assert len(said) == 2
    another_engine()
    after_warm_up()
    assert said[-1][1].startswith("0/2: not_run")


def test_layers_are_told_of_in_the_models_order(said, tmp_path):
    """Not by the letters of their names, where layer 10 comes before layer 2."""
    names = ("model.layers.2.attn", "model.layers.10.attn")
    another_engine(names)
    skip(names[0], "no_rope", "of layer 2")
    skip(names[1], "geometry", "of layer 10")
    after_warm_up()
    assert said[-1][1].startswith("0/2: 1 skipped: no_rope: of layer 2; 1 skipped: geometry: of layer 10")
    assert list(written(tmp_path)["skipped"]) == [*names]


def test_ranks_are_told_of_in_the_order_of_their_numbers(said, tmp_path, monkeypatch):
    monkeypatch.setattr(engines.ranks, "exchange", lambda mine: (0, [mine] * 11))
    for rank in (10, 2, 0):
        another_engine()
        after_warm_up(rank=rank)
    (found,) = group_by_engine(status_files.read_records(tmp_path, "*", pytest.fail)).values()
    assert [record.rank for record in found] == [0, 2, 10]


def test_data_parallel_engines_are_told_of_in_the_order_of_their_numbers(said, tmp_path):
    for index in (10, 2):
        another_engine()
        after_warm_up(index=index)
    found = group_by_engine(status_files.read_records(tmp_path, "*", pytest.fail))
    assert [engine.dp_index for engine in found] == ["2", "10"]


def forget_the_skipped(ranks, told=merge_ranks):
    found = told(ranks)
    return replace(found, skipped={}, num_layers=1)


@pytest.mark.mutation("I8")
@pytest.mark.parametrize(
    ("owner", "name", "plant", "counts"),
    [
        (Engine, "_say_status_line", lambda self, ranks, record: log.say(0, status_line(record)), ["1/2", "1/2"]),
        (line, "merge_ranks", forget_the_skipped, ["1/1"]),
        (
            Engine,
            "_say_status_line",
            lambda *given, say=Engine._say_status_line: (say(*given), say(*given)),
            ["1/2", "1/2"],
        ),
    ],
    ids=["every rank speaks", "a skipped layer is forgotten", "the line is said twice"],
)
def test_mutation_i8_a_line_that_is_not_said_once_and_whole_is_caught(said, monkeypatch, owner, name, plant, counts):
    monkeypatch.setattr(owner, name, plant)
    engage_one()
    after_warm_up(rank=3)
    after_warm_up()
    assert [text.partition(" ")[0] for _, text in said] == counts


def failed_warm_up():
    engine.engine.on_warm_up_failed()


@pytest.mark.parametrize("end", [after_warm_up, failed_warm_up])
def test_a_warm_start_knows_the_reasons_of_the_cold_one_even_if_that_failed_in_its_warm_up(said, tmp_path, end):
    skip(LAYERS[0], "no_rope", "why")
    compiled()
    end()
    another_engine()
    after_warm_up()
    assert said[-1][1].startswith("0/2: 1 skipped: no_rope: why"), "the line tells of this start only"
    assert written(tmp_path)["skipped"][LAYERS[0]] == {"code": "no_rope", "message": "why"}
    another_engine()
    after_warm_up(key="j" * 64)
    assert "not_run" in said[-1][1], "another configuration has other graphs"


def test_a_cold_start_forgets_the_reason_of_a_layer_that_it_no_longer_leaves_out(said, tmp_path):
    skip(LAYERS[0], "not_evaluated", "out of memory")
    compiled()
    after_warm_up()
    another_engine()
    engage_all()
    compiled()
    after_warm_up()
    assert written(tmp_path, "skips-*.json")["skipped"] == {}


def test_a_start_that_compiles_only_a_draft_keeps_the_targets_reasons(said, tmp_path):
    codes = dict(zip(LAYERS, ("no_rope", "geometry"), strict=True))
    for name, code in codes.items():
        another_engine()
        skip(name, code, "why")
        compiled()
        after_warm_up()
    assert {name: skip["code"] for name, skip in written(tmp_path)["skipped"].items()} == codes


def keeps_what_graphs_left_out(tmp_path):
    """The one layer was left out by a graph; the other one's kernel raised in the warm-up."""
    skip(LAYERS[0], "no_rope", "why")
    layers()[LAYERS[1]].fail(RuntimeError("planted"))
    compiled()
    after_warm_up()
    assert list(written(tmp_path, "skips-*.json")["skipped"]) == [LAYERS[0]], "told of another start's error"


def test_a_warm_start_is_not_told_what_only_happened_to_the_cold_one(tmp_path):
    keeps_what_graphs_left_out(tmp_path)


@pytest.mark.mutation
def test_mutation_a_failure_that_is_kept_for_later_starts_is_caught(tmp_path, monkeypatch):
    failed = Skip("kernel_failed", "planted")
    monkeypatch.setattr(Layer, "fail", lambda layer, error: Layer.skip_in_graph(layer.module, failed))
    with pytest.raises(AssertionError, match="told of another start's error"):
        keeps_what_graphs_left_out(tmp_path)


def start(monkeypatch, ranks, model="m", engine_id="1", engage=engage_all):
    """Start an engine of so many ranks, and return the paths of their locks."""
    monkeypatch.setattr(engines.ranks, "exchange", lambda mine: (0, [mine] * ranks))
    for rank in range(ranks):
        another_engine()
        engage()
        after_warm_up(rank=rank, model=model, engine_id=engine_id)
    return [the_status().path.with_name(f"lock-status-{os.environ[liveness.RUN_VARIABLE]}-{engine_id}-0-{rank}")
            for rank in range(ranks)]  # fmt: skip


def end(lock_paths):
    """Let a process end: the operating system releases its lock."""
    for lock in lock_paths:
        locks.release(lock)
        lock.touch()


def engines_of(tmp_path):
    found = group_by_engine(status_files.read_records(tmp_path, "*", pytest.fail))
    return [(engine.engine_id, one[0].model_name, [record.rank for record in one]) for engine, one in found.items()]


def leaves_no_rank_behind(tmp_path, monkeypatch, first):
    """A script tries tensor-parallel sizes or models, one after the other."""
    end(start(monkeypatch, 2, first, "8"))
    start(monkeypatch, 1, "m", "9")
    assert engines_of(tmp_path) == [("9", "m", [0])], "a rank is left behind"
    assert len(list(tmp_path.glob("lock-status-*"))) == 2, "a lock of the front end and one of the rank"


@pytest.mark.parametrize("first", ["m", "a", "z"])
def test_an_engine_that_has_ended_leaves_no_file_once_the_next_of_its_run_serves(said, tmp_path, monkeypatch, first):
    liveness.ensure_run_lock(tmp_path)
    leaves_no_rank_behind(tmp_path, monkeypatch, first)


@pytest.mark.mutation
def test_mutation_an_ended_engine_that_counts_as_long_as_its_run_lives_is_caught(said, tmp_path, monkeypatch):
    liveness.ensure_run_lock(tmp_path)
    monkeypatch.setattr(status_files, "_rank_of_file", lambda path: f"{os.getpid()}-mine-0-0-0-0")
    with pytest.raises(AssertionError, match="a rank is left behind"):
        leaves_no_rank_behind(tmp_path, monkeypatch, "a")


def two_engines_stay_apart(tmp_path, monkeypatch):
    """A script has two engines at a time; the second has written its first rank, and not yet its second."""
    start(monkeypatch, 2, "a", "8")
    monkeypatch.setattr(engines.ranks, "exchange", lambda mine: (0, [mine] * 2))
    another_engine()
    engage_all()
    after_warm_up(model="a", engine_id="9")
    assert engines_of(tmp_path) == [("8", "a", [0, 1]), ("9", "a", [0])], "one engine has a rank of the other"


def test_two_living_engines_of_a_run_have_their_own_files(said, tmp_path, monkeypatch):
    two_engines_stay_apart(tmp_path, monkeypatch)


@pytest.mark.mutation
def test_mutation_two_engines_of_a_run_that_share_their_files_are_caught(said, tmp_path, monkeypatch):
    monkeypatch.setattr(compat_config, "engine_id", lambda config: "the same")
    with pytest.raises(AssertionError, match="one engine has a rank of the other"):
        two_engines_stay_apart(tmp_path, monkeypatch)


def ends_with_its_worker(tmp_path, monkeypatch):
    """With VLLM_ENABLE_V1_MULTIPROCESSING=0 the front end drops its engine and lives on."""
    global engine
    start(monkeypatch, 1)
    record = the_status().record
    assert liveness.ServerLocks(tmp_path, [record]).is_engine_alive([record])
    engine = None
    workers.clear()
    gc.collect()
    assert liveness.ServerLocks(tmp_path, [record]).is_engine_alive([record]) is False, "the engine still lives"


def test_an_engine_that_its_front_end_has_dropped_has_ended(said, tmp_path, monkeypatch):
    ends_with_its_worker(tmp_path, monkeypatch)


@pytest.mark.mutation
def test_mutation_an_engine_that_lives_as_long_as_its_front_end_is_caught(said, tmp_path, monkeypatch):
    monkeypatch.setattr(liveness, "let_go_of_rank_lock", lambda folder, record: None)
    with pytest.raises(AssertionError, match="the engine still lives"):
        ends_with_its_worker(tmp_path, monkeypatch)


@pytest.mark.parametrize("is_engine_skipped_last", [True, False])
def test_a_skipped_engine_and_the_one_before_or_after_it_are_two(said, tmp_path, monkeypatch, is_engine_skipped_last):
    """Nothing tells when a skipped engine has ended, so the next one of its run takes its place."""
    skipped = replace(skipped_engine("dcp", "made up", (0, 1)), model_name="a", dp_index="0")
    if not is_engine_skipped_last:
        status_files.write_status(tmp_path, skipped)
    ended = start(monkeypatch, 2, "m", "8")
    assert engines_of(tmp_path) == [("8", "m", [0, 1])]
    if is_engine_skipped_last:
        end(ended)
        status_files.write_status(tmp_path, skipped)
        assert engines_of(tmp_path) == [("skipped", "a", [0])]


def test_what_a_later_rank_alone_has_is_in_the_engines_record():
    first, second = (replace(record_of(), rank=rank) for rank in range(2))
    second = replace(second, nan_kernels=("aiter",), tuned_tiles={"16 heads": "1..16 32x64"})
    found = merge_ranks([first, second])
    assert (found.nan_kernels, found.tuned_tiles) == (("aiter",), {"16 heads": "1..16 32x64"})


@pytest.mark.parametrize("signal", [SystemExit(143), KeyboardInterrupt()])
def test_a_rank_that_a_signal_ends_in_its_warm_up_waits_for_no_other(said, monkeypatch, signal):
    """The others may be waiting for it in a collective of the decode step."""
    monkeypatch.setattr(Engine, "_make_record", raising(signal))
    monkeypatch.setattr(engines.ranks, "exchange", raising(AssertionError("it waits")))
    with pytest.raises(type(signal)):
        after_warm_up()


def test_a_status_file_that_goes_while_the_folder_is_read_hides_no_other(said, tmp_path, monkeypatch):
    after_warm_up(rank=3)
    after_warm_up()
    read, gone = files.read_record, []

    def first_is_gone(cls, path):
        if gone:
            return read(cls, path)
        gone.append(path)
        raise FileNotFoundError("planted")

    monkeypatch.setattr(files, "read_record", first_is_gone)
    assert len(status_files.read_records(tmp_path, "*", pytest.fail)) == 1


def fails_in_one_step(monkeypatch):
    """All layers fail in one decode step."""
    engage_all()
    after_warm_up()
    write, written_files = files.write_record, []
    monkeypatch.setattr(files, "write_record", lambda *given: (written_files.append(given), write(*given)))
    monkeypatch.setattr(engine_status, "REWRITE_DELAY_SECONDS", 0.2)
    for name in LAYERS:
        layers()[name].fail(RuntimeError("planted"))
    in_the_step = len(written_files)
    wait_for_the_file()
    assert (in_the_step, len(written_files)) == (0, 1), "the file is written in the step, or more than once"
    found = files.read_record(RankRecord, the_status().path)
    assert (found.engaged, list(found.skipped)) == ({}, [*LAYERS])


def test_a_decode_step_in_which_all_layers_fail_writes_the_status_once_and_afterwards(monkeypatch):
    fails_in_one_step(monkeypatch)


@pytest.mark.mutation
def test_mutation_a_status_that_each_failing_layer_writes_is_caught(monkeypatch):
    soon = EngineStatus._schedule_rewrite
    monkeypatch.setattr(EngineStatus, "_schedule_rewrite", lambda self: (self._rewrite(), soon(self)))
    with pytest.raises(AssertionError, match="more than once"):
        fails_in_one_step(monkeypatch)


def one_write_at_a_time(monkeypatch):
    """While the file is being corrected after a failure, a reload corrects it again: the later record stays."""
    engage_all()
    after_warm_up()
    begun, overtaken, write = threading.Event(), threading.Event(), files.write_record

    def slow_at_first(path, record):
        if begun.is_set():
            write(path, record)
            overtaken.set()
        else:
            begun.set()
            overtaken.wait(0.5)  # so long that another writer, if it does not wait for this one, has written by then
            write(path, record)

    monkeypatch.setattr(files, "write_record", slow_at_first)
    layers()[LAYERS[0]].fail(RuntimeError("planted"))
    assert begun.wait(60)
    layers()[LAYERS[1]].stop("planted")
    engine.engine.on_reloaded()
    wait_for_the_file()
    assert files.read_record(RankRecord, the_status().path).engaged == {}, "an earlier record was written last"


def test_a_status_file_is_never_left_with_an_earlier_record(monkeypatch):
    one_write_at_a_time(monkeypatch)


@pytest.mark.mutation
def test_mutation_two_writers_at_a_time_are_caught(monkeypatch):
    the_status()._write_lock = nullcontext()
    with pytest.raises(AssertionError, match="an earlier record was written last"):
        one_write_at_a_time(monkeypatch)


def apart(index):
    """Two engines live in one process; a kernel of the first raises."""
    engage_all()
    after_warm_up()
    first, raised = the_status(), layers()[LAYERS[0]]
    another_engine()
    engage_all()
    after_warm_up(index=index, engine_id="2")
    fail(raised)
    engaged = [len(one.record.engaged) for one in (first, the_status())]
    assert engaged == [1, 2], "an engine has another one's failure"
    found = files.read_record(RankRecord, the_status().path)
    assert found == the_status().record, "the file has another one's failure"


@pytest.mark.parametrize("index", [0, 1])
def test_i15_a_failure_corrects_the_status_of_its_own_engine(index):
    apart(index)


@pytest.mark.mutation("I15")
def test_mutation_i15_one_status_for_the_whole_process_is_caught(monkeypatch):
    one = EngineStatus()
    monkeypatch.setattr(engines, "EngineStatus", lambda: one)
    another_engine()
    with pytest.raises(AssertionError, match="an engine has another one's failure"):
        apart(1)


@pytest.mark.mutation("I15")
def test_mutation_i15_a_correction_of_another_engines_file_is_caught(monkeypatch):
    monkeypatch.setattr(compat_config, "engine_id", lambda config: "the same")
    with pytest.raises(AssertionError, match="the file has another one's failure"):
        apart(0)


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
@both_modes
def test_fail_closed_a_broken_file_costs_a_warning_and_never_the_line(said, tmp_path, spoil, strict):
    path = tmp_path / f"skips-{'k' * 16}-0.json"
    files.write_record(path, KeptSkips({LAYERS[0]: Skip("no_rope", "why")}))
    spoil(path)
    with stops(strict, "0/2"):
        after_warm_up(strict=strict)
    assert len([text for _, text in said if text.startswith(NOT_READ)]) == 1
    assert strict or said[-1][1].startswith("0/2: not_run")
    assert len(list(tmp_path.glob("status-*.json"))) == 1


def is_last_whatever_a_file_costs(said, monkeypatch, strict):
    monkeypatch.setattr(compat_config, "cache_folder", full)
    with stops(strict, "0/2"):
        after_warm_up(strict=strict)
    assert [level for level, text in said if "OSError: No space" in text] == [logging.WARNING] * 2
    assert strict or said[-1][1].startswith("0/2: not_run"), "the status line is not the last one"


@both_modes
def test_fail_closed_the_line_is_the_last_one_and_needs_no_folder(said, monkeypatch, strict):
    is_last_whatever_a_file_costs(said, monkeypatch, strict)


@pytest.mark.mutation("I8")
def test_mutation_a_status_line_that_is_not_the_last_one_is_caught(said, monkeypatch):
    write, say, told = Engine._write_record, Engine._say_status_line, []
    monkeypatch.setattr(Engine, "_write_record", lambda *given: told.append(given))
    monkeypatch.setattr(Engine, "_say_status_line", lambda *given: (say(*given), write(*told.pop())))
    with pytest.raises(AssertionError, match="the status line is not the last one"):
        is_last_whatever_a_file_costs(said, monkeypatch, strict=False)


def only_a_front_end_or_another_machine_holds_the_run(tmp_path, monkeypatch):
    """A worker of Ray's on another machine has a folder of its own, where no front end is."""
    held = {}
    for machine in (liveness.host_hash(), "0a1b2c3d"):
        monkeypatch.setenv(liveness.RUN_VARIABLE, f"{machine}-1-a")
        another_engine()
        engage_all()
        after_warm_up()
        held[machine] = locks.is_held(tmp_path / f"lock-status-{machine}-1-a")
    assert [*held.values()] == [False, True]


def test_a_worker_holds_the_lock_of_its_run_only_away_from_its_front_end(said, tmp_path, monkeypatch):
    only_a_front_end_or_another_machine_holds_the_run(tmp_path, monkeypatch)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("joins", "held"), [(True, r"\[True, True\]"), (False, r"\[False, False\]")], ids=["every worker", "no worker"]
)
def test_mutation_a_worker_that_takes_or_leaves_the_wrong_lock_is_caught(said, tmp_path, monkeypatch, joins, held):
    write, join = status_files.write_status, liveness.ensure_run_lock

    def plant(folder, record):
        if joins:
            join(folder)
        return write(folder, record)

    monkeypatch.setattr(status_files, "write_status", plant)
    if not joins:
        monkeypatch.setattr(liveness, "ensure_run_lock", lambda folder: None)
    with pytest.raises(AssertionError, match=held):
        only_a_front_end_or_another_machine_holds_the_run(tmp_path, monkeypatch)


def test_files_are_never_seen_half_written(said, tmp_path, monkeypatch):
    skip(LAYERS[0], "no_rope", "why")
    compiled()
    after_warm_up()
    (path,) = tmp_path.glob("skips-*.json")
    before = path.read_text()
    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(type(path), "replace", full)
    after_warm_up()
    assert path.read_text() == before
    assert [left for left in tmp_path.iterdir() if ".new" in left.name] == []


def test_counts_every_graph_of_a_range(said):
    """A target and its draft are two graphs of the same compile range."""
    the_status().add_pass_counts("1-16", {"matched": 3, "skipped": 0})
    the_status().add_pass_counts("1-16", {"matched": 1, "skipped": 1})
    assert the_status().pass_counts == {"1-16": {"matched": 4, "skipped": 1}}


def ended_servers_leave_no_files(tmp_path, monkeypatch):
    def left_by(run, host=None):
        with monkeypatch.context() as patching:
            if host:
                patching.setattr(files.socket, "gethostname", lambda: host)
            record = replace(record_of(), run=run)
        path = tmp_path / f"status-{run}-1-0-0.json"
        files.write_record(path, record)
        return path

    def of_another_version(path):
        data = json.loads(path.read_text())
        data["evidence"]["schema_version"] += 1
        del data["run"]
        files.write_record(path, data)
        return path

    def aged(path):
        long_ago = time.time() - files.MAX_UNUSED_SECONDS - 60
        os.utime(path, (long_ago, long_ago))
        return path

    half = tmp_path / f"status-{liveness.host_hash()}-7-a-1-0-0.json"  # a crash of this host has left it
    half.write_text("half a fi")
    old_half = tmp_path / f"status-{liveness.host_hash()}-7-b-1-0-0.json"  # and somebody has removed its lock
    old_half.write_text("half a fi")
    aged(old_half)
    before = f"{os.getpid()}-before"
    names_that_go = (f"{liveness.host_hash()}-7-a", "8-b", "8-b-1-0-0", "1-a", before, "..", "4-a")
    locks_that_go = [tmp_path / f"lock-status-{name}" for name in names_that_go]
    old_without_lock = aged(left_by("9-a"))
    for lock in locks_that_go:
        lock.touch()
    gone = [
        left_by("1-a"),
        left_by(before),
        old_without_lock,
        left_by(".."),
        of_another_version(left_by("4-a")),
        aged(of_another_version(left_by("8-b", host="a pod that is gone"))),
        half,
        old_half,
    ]
    stays = [
        left_by("2-a", host="another"),
        of_another_version(left_by("2-b", host="another")),
        left_by("3-a"),
        left_by("9-b"),  # somebody has removed the locks of a server that may live
        of_another_version(left_by("5-a")),
        of_another_version(left_by("6-a")),
        tmp_path / "status-1-1-1-1.json",
    ]
    free_elsewhere = ["lock-status-2-a", "lock-status-2-b"]  # here they look free, whatever holds them there
    for name in free_elsewhere:
        (tmp_path / name).touch()
    (tmp_path / "lock-status-3-a").symlink_to("nowhere")  # nobody can tell
    living = ["lock-status-5-a", "lock-status-6-a-1-0-0"]  # a front end, and an engine that outlives its own
    for name in living:
        locks.try_hold(tmp_path / name)
    other = tmp_path / "lock-status-0a1b2c3d-4-a"  # of another machine, where a lock may mean nothing here
    ended = tmp_path / f"lock-status-{liveness.host_hash()}-5-a"
    other.touch()
    ended.touch()
    stays[-1].write_text("half a fi")
    after_warm_up()
    assert [path.name for path in gone if path.exists()] == [], "a file of an ended server stays"
    assert [path.name for path in stays if not path.exists()] == []
    found = {path.name for path in tmp_path.glob("lock-*")}
    mine = f"lock-status-{os.environ[liveness.RUN_VARIABLE]}"
    engine = f"{mine}-1-0-0"
    assert found == {mine, engine, "lock-status-3-a", other.name, *living, *free_elsewhere}


def test_files_of_this_machines_ended_servers_are_removed_also_those_of_another_version(said, tmp_path, monkeypatch):
    ended_servers_leave_no_files(tmp_path, monkeypatch)


def test_the_lock_of_a_start_on_another_host_that_never_wrote_a_status_goes_when_it_is_old(tmp_path, monkeypatch, said):
    """A pod has a new host name at each start, so nobody would look at it again."""
    monkeypatch.setattr(compat_config, "cache_folder", lambda: tmp_path)
    old, new = (tmp_path / f"lock-status-{host}-1-ab" for host in ("0123abcd", "abcd0123"))
    for lock in (old, new):
        lock.touch()
    os.utime(old, (0, 0))
    after_warm_up()
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize(("left", "reported"), [("no lock", True), ("a lock that is free", False), ("a lock", True)])
def test_a_file_that_cannot_be_read_is_reported_unless_its_server_has_ended(tmp_path, left, reported):
    """A file without a lock may be anything; a server of another version leaves its locks behind too."""
    (tmp_path / "status-1-a-1-0-0.json").write_text("half a fi")
    lock = tmp_path / "lock-status-1-a"
    if left != "no lock":
        locks.try_hold(lock) if left == "a lock" else lock.touch()
    unreadable = []
    assert status_files.read_records(tmp_path, "*", unreadable.append) == []
    assert bool(unreadable) is reported


@pytest.mark.mutation
def test_mutation_a_file_of_another_version_that_stays_for_ever_is_caught(said, tmp_path, monkeypatch):
    load = files.load
    monkeypatch.setattr(files, "load", lambda path: files.to_plain(files.parse(RankRecord, path, load(path))))
    with pytest.raises(AssertionError, match=r"ended server stays\nassert \['status-4-a-"):
        ended_servers_leave_no_files(tmp_path, monkeypatch)


@pytest.mark.parametrize("error", [PermissionError("read-only"), OSError("No space left on device")])
@both_modes
def test_a_folder_that_takes_no_lock_is_one_warning_and_serving_goes_on(said, monkeypatch, tmp_path, error, strict):
    monkeypatch.setattr(locks, "try_hold", raising(error))
    engage_all()
    metrics.read_samples(tmp_path)
    after_warm_up(strict=strict)
    assert [str(error) in text for level, text in said if level == logging.WARNING] == [True]


def test_files_say_what_wrote_them(said, tmp_path):
    compiled()
    after_warm_up(capture_sizes=[1, 2, 4])
    kinds = {kind: written(tmp_path, f"{kind}-*.json")["evidence"]["schema"] for kind in ("status", "skips")}
    assert kinds == {"status": "vllm-aiter-mla/status", "skips": "vllm-aiter-mla/skips"}
    found = written(tmp_path)
    assert (found["capture_sizes"], found["full_graphs"]) == ([1, 2, 4], [1, 2, 4])


def test_model_and_engine_are_named_as_vllm_labels_its_metrics():
    parallel = SimpleNamespace(data_parallel_index=3, data_parallel_rank=0)
    given = SimpleNamespace(model_config=SimpleNamespace(served_model_name="served"), parallel_config=parallel)
    assert compat_config.metric_labels(given) == {"model_name": "served", "engine": "3"}
    assert compat_config.metric_labels(SimpleNamespace()) == {"model_name": None, "engine": None}


@pytest.mark.parametrize("card", ["cpu", "gfx950"])
def test_the_line_says_that_nobody_has_timed_this_card(said, card):
    engage_all()
    line = status_line(record_of(card=card))
    assert ("not measured" in line) == (card != "cpu")


def other(engaged=(), skipped=()):
    """The record of rank 1: names that run on AITER, and codes of the others."""
    record = replace(with_layers(EngineStatus(), {}, rank=1), model_name="m", dp_index="0")
    return replace(record, engaged=dict.fromkeys(engaged, "aiter"), skipped=dict(skipped))


WRONG = dict.fromkeys(LAYERS, Skip("kernel_shape", "wrong"))
ALONE = "MLA layers engaged (aiter, fp8 KV, decode limit 512)"
WHOLE = "MLA layers engaged on 2 of 2 ranks (aiter, fp8 KV, decode limit 512)"
PART = "MLA layers engaged on 1 of 2 ranks (aiter, fp8 KV, decode limit 512)"


@pytest.mark.parametrize(
    ("before", "others", "level", "line"),
    [
        (engage_all, [], logging.INFO, f"2/2 {ALONE}"),
        (engage_one, [], logging.INFO, f"1/2 {ALONE}; 1 skipped: no_rope: why -> {REMEDIES['no_rope']}"),
        (lambda: skip(LAYERS[0], "impl", "a b\n\x1b[2J"), [], logging.WARNING,
         f"0/2: 1 skipped: impl: a b  [2J; 1 skipped: {NOT_RUN.reason} -> {REMEDIES['impl']}"),
        (engage_all, [other(LAYERS)], logging.INFO, f"2/2 {WHOLE}"),
        (engage_all, [other("c", {"d": Skip("dtype", "x")})], logging.INFO,
         f"3/4 {WHOLE}; 1 skipped: dtype: x"),
        (engage_all, [other((), WRONG)], logging.WARNING,
         f"2/2 {PART}; rank 1 fell back: kernel_shape: wrong -> {REMEDIES['kernel_shape']}"),
        (engage_all, [other((), {"c": Skip("dtype", "x"), "d": Skip("dtype", "x")})], logging.WARNING,
         f"2/4 {PART}; rank 1 fell back: dtype: x; 2 skipped: dtype: x"),
        (engage_all, [other()], logging.INFO, f"2/2 {WHOLE}"),
        (lambda: None, [other((), {"c": NOT_RUN})], logging.WARNING,
         f"0/3: {NOT_RUN.reason} -> {REMEDIES['not_run']}"),
        (engage_all, [None], logging.WARNING, f"2/2 {PART}; 1 without a status"),
    ],
    ids=[
        "all", "some", "none", "tensor parallel", "pipeline", "one fell back", "a stage engages nothing",
        "a stage has no MLA layer", "no stage engages any", "one is silent",
    ],
)  # fmt: skip
def test_i8_the_line_says_once_what_engaged_on_all_ranks_and_the_first_reason(
    said, monkeypatch, before, others, level, line
):
    monkeypatch.setattr(engines.ranks, "exchange", lambda mine: (0, [mine, *others]))
    before()
    after_warm_up()
    assert said == [(level, line)]


@pytest.mark.parametrize(
    ("names", "rank", "elsewhere", "stopped"),
    [(LAYERS, 0, "", True), (LAYERS, 3, "c", True), ((), 0, "", True), ((), 0, "c", False)],
)
def test_strict_mode_stops_a_rank_that_engaged_nothing_but_a_stage_without_mla_layers_only_if_none_engaged(
    said, monkeypatch, names, rank, elsewhere, stopped
):
    later = other(elsewhere, {"d": Skip("dtype", "x")})
    monkeypatch.setattr(engines.ranks, "exchange", lambda mine: (0, [mine, later]))
    if not names:
        engine.vllm_config.compilation_config.static_forward_context = {}
        engine.engine.make_layers()
    with stops(stopped, f"0/{len(names)}: "):
        after_warm_up(strict=True, rank=rank)


def test_a_data_parallel_engine_is_named(said):
    engage_all()
    record = record_of()
    assert status_line(record, dp_index=1).endswith("decode limit 512), data-parallel engine 1")


@both_modes
def test_fail_closed_a_rank_without_a_status_still_hands_over_to_the_other_ranks(said, monkeypatch, strict):
    """They wait for it: a rank that stopped before would leave them hanging."""
    handed = []
    monkeypatch.setattr(engines.ranks, "exchange", lambda mine: (0, [handed.append(mine)]))
    monkeypatch.setattr(Engine, "_make_record", full)
    with stops(strict):
        after_warm_up(strict=strict)
    assert handed == [None]


# The metrics.


def collectors():
    """The collectors of this process, which prometheus_client lists by no public name."""
    return [one for one in list(REGISTRY._collector_to_names) if isinstance(one, metrics._Collector)]


@pytest.fixture
def gauge(said, tmp_path, monkeypatch):
    """Scrapes prometheus_client's registry, as vLLM's /metrics does."""
    others = collectors()  # of engines that earlier tests of this process have built
    for other in others:
        REGISTRY.unregister(other)
    monkeypatch.setattr(metrics, "_is_registered", False)
    liveness.ensure_run_lock(tmp_path)
    metrics.register_metrics(tmp_path)
    metrics.register_metrics(tmp_path)  # idempotent

    def scrape(name=metrics.LAYERS):
        text = generate_latest(REGISTRY).decode()
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        return {line.split("{")[1].split("}")[0]: float(line.split()[-1]) for line in lines}

    yield scrape
    (mine,) = collectors()
    REGISTRY.unregister(mine)
    for other in others:
        REGISTRY.register(other)


def labels(state, engine="0"):
    return f'engine="{engine}",model_name="m",state="{state}"'


def test_gauge_counts_a_layer_as_engaged_only_if_every_rank_says_so(gauge, monkeypatch):
    monkeypatch.setattr(engines.ranks, "exchange", lambda mine: (0, [mine, mine]))
    assert gauge() == {}, "a server whose workers have written nothing has no sample"
    engage_all()
    after_warm_up(rank=0)
    assert gauge() == {labels("engaged"): 2, labels("skipped"): 0}
    another_engine()
    engage_one()
    after_warm_up(rank=1)
    assert gauge() == {labels("engaged"): 1, labels("skipped"): 1}


def test_gauge_does_not_count_a_rank_without_a_file_which_may_be_another_nodes(gauge, monkeypatch):
    monkeypatch.setattr(engines.ranks, "exchange", lambda mine: (0, [mine, None]))
    engage_all()
    after_warm_up()
    assert gauge() == {labels("engaged"): 2, labels("skipped"): 0}


def test_gauge_changes_when_a_kernel_fails_while_serving(gauge):
    engage_all()
    after_warm_up()
    fail(layers()[LAYERS[1]])
    assert gauge() == {labels("engaged"): 1, labels("skipped"): 1}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_gauge_leaves_out_a_bad_file_of_its_run_and_names_it_once(gauge, said, tmp_path, spoil):
    engage_all()
    after_warm_up()
    after_warm_up(rank=1)
    path = tmp_path / f"status-{os.environ[liveness.RUN_VARIABLE]}-1-0-1.json"
    spoil(path)
    del said[:]
    assert [gauge() for _ in range(2)] == [{labels("engaged"): 2, labels("skipped"): 0}] * 2
    assert [str(path) in text for _, text in said] == [True]


@pytest.mark.parametrize("planted", [KeyError("planted"), OSError("planted"), FileNotFoundError("planted")])
def test_gauge_that_cannot_be_made_takes_no_other_metric_down(gauge, said, monkeypatch, planted):
    monkeypatch.setattr(metrics, "read_records", raising(planted))
    assert gauge() == {}
    assert b"python_info" in generate_latest(REGISTRY)
    assert len([text for _, text in said if "planted" in text]) == 1


def test_gauge_tells_engines_apart_and_ignores_other_servers(gauge, monkeypatch):
    engage_all()
    after_warm_up(index=1)
    with monkeypatch.context() as patching:
        patching.setenv(liveness.RUN_VARIABLE, "1-other")
        after_warm_up()
    assert gauge() == {labels("engaged", "1"): 2, labels("skipped", "1"): 0}
    another_engine()
    engage_one()
    after_warm_up(index=0)
    first = {labels("engaged"): 1, labels("skipped"): 1}
    assert gauge() == first | {labels("engaged", "1"): 2, labels("skipped", "1"): 0}


def test_gauge_of_an_engine_that_has_ended_has_no_sample(gauge, tmp_path):
    """A script shut it down and lives on."""
    engage_all()
    after_warm_up()
    assert gauge() == {labels("engaged"): 2, labels("skipped"): 0}
    end([tmp_path / f"lock-{the_status().path.stem}"])
    assert gauge() == {}


def test_gauge_stays_if_somebody_removes_the_locks_of_an_engine_that_lives(gauge, tmp_path, monkeypatch):
    """And another server removes none of its files."""
    engage_all()
    after_warm_up()
    path = the_status().path
    for lock in tmp_path.glob("lock-*"):
        lock.unlink()
    with monkeypatch.context() as patching:
        patching.setenv(liveness.RUN_VARIABLE, "1-other")
        another_engine()
        after_warm_up()
    assert path.exists(), "another server has removed the file of a server that lives"
    assert gauge() == {labels("engaged"): 2, labels("skipped"): 0}


def test_a_scrape_of_many_ranks_waits_at_most_once(gauge, tmp_path, monkeypatch):
    """vLLM's event loop waits for it."""
    monkeypatch.setattr(engines.ranks, "exchange", lambda mine: (0, [mine] * 8))
    for rank in range(8):
        another_engine()
        engage_all()
        after_warm_up(rank=rank)
    waits = []
    monkeypatch.setattr(locks.time, "sleep", waits.append)
    assert gauge() == {labels("engaged"): 2, labels("skipped"): 0}
    assert len(waits) <= 1


def test_gauge_does_not_count_a_rank_that_an_earlier_engine_left_behind(gauge, monkeypatch):
    """The later engine, which engages all layers, has not written the status of its second rank yet."""
    end(start(monkeypatch, 2, engine_id="8", engage=engage_one))
    another_engine()
    engage_all()
    after_warm_up(engine_id="9")
    assert gauge() == {labels("engaged"): 2, labels("skipped"): 0}
    ranks = {name.split('"')[-2]: count for name, count in gauge("aiter_mla_ranks").items()}
    assert ranks == {"agreeing": 1, "fell_back": 0, "differing": 0, "silent": 1}


def test_gauge_of_two_engines_with_the_same_labels_has_the_kernels_of_the_later_one(gauge):
    for engine_id, kernel in (("8", "triton"), ("9", "aiter")):
        another_engine()
        for layer in layers().values():
            layer.ran_kernel = kernel
        with decided((1, 512, kernel)):
            after_warm_up(engine_id=engine_id)
    assert gauge("aiter_mla_kernel_layers") == {'engine="0",kernel="aiter",model_name="m",tokens="1..512"': 2}


def test_gauge_counts_a_layer_once_if_ranks_run_different_kernels(gauge, monkeypatch):
    monkeypatch.setattr(engines.ranks, "exchange", lambda mine: (0, [mine] * 2))
    for rank, kernel in enumerate(("triton", "aiter")):
        another_engine()
        for layer in layers().values():
            layer.ran_kernel = kernel
        with decided((1, 512, kernel)):
            after_warm_up(rank=rank)
    assert gauge("aiter_mla_kernel_layers") == {'engine="0",kernel="triton",model_name="m",tokens="1..512"': 2}
    ranks = {name.split('"')[-2]: count for name, count in gauge("aiter_mla_ranks").items()}
    assert ranks == {"agreeing": 1, "fell_back": 0, "differing": 1, "silent": 0}


def test_gauge_of_a_skipped_engine_counts_all_its_layers(gauge, tmp_path):
    status_files.write_status(tmp_path, replace(skipped_engine("dcp", "why", (0, 1, 2)), model_name="m"))
    assert gauge() == {labels("engaged"): 0, labels("skipped"): 3}


def test_gauge_survives_vllms_clearing_of_its_own_metrics(gauge):
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    engage_all()
    after_warm_up()
    unregister_vllm_metrics()
    assert gauge()[labels("engaged")] == 2


def decided(*kernels, rejected_kernels=()):
    """What ``Layer.state`` tells of the decision of every layer."""
    told, made = Layer.state, decision(*kernels, rejected_kernels=rejected_kernels)
    return patch.object(Layer, "state", lambda layer: told(layer)._replace(decision=made))


OF_ENGINE = 'engine="0",model_name="m"'


def test_metrics_tell_which_kernel_runs_at_how_many_tokens_on_layers_that_are_engaged(gauge):
    engage_all()
    with decided((1, 32, "triton"), (33, 512, "vllm")):
        after_warm_up()
        assert gauge("aiter_mla_kernel_layers") == {
            'engine="0",kernel="triton",model_name="m",tokens="1..32"': 2,
            'engine="0",kernel="vllm",model_name="m",tokens="33..512"': 2,
        }
        fail(layers()[LAYERS[1]])
        assert set(gauge("aiter_mla_kernel_layers").values()) == {1}, "a layer that fell back counts"


def test_metrics_tell_version_and_integration_also_of_an_engine_that_is_skipped(gauge, tmp_path):
    after_warm_up()
    version = f'engine="0",integration="{{}}",model_name="m",version="{__version__}"'
    assert gauge("aiter_mla_info") == {version.format("module"): 1}
    skipped = skipped_engine("dcp", "why", (0, 1))
    status_files.write_status(tmp_path, replace(skipped, model_name="m", dp_index="0"))
    assert gauge("aiter_mla_info") == {version.format(""): 1}


def test_metrics_tell_ranks_that_fell_back_and_ranks_without_a_status(gauge, monkeypatch):
    monkeypatch.setattr(engines.ranks, "exchange", lambda mine: (0, [mine, mine, None]))
    for rank, engage in enumerate((engage_all, engage_one)):
        another_engine()
        engage()
        after_warm_up(rank=rank)
    found = gauge("aiter_mla_ranks")
    counts = {"agreeing": 1, "fell_back": 1, "differing": 0, "silent": 1}
    assert found == {f'{OF_ENGINE},state="{state}"': count for state, count in counts.items()}


def stages(gauge, monkeypatch):
    """A pipeline whose second stage engages none of its layers."""
    monkeypatch.setattr(engines.ranks, "exchange", lambda mine: (0, [mine, mine]))
    for rank, (engage, names) in enumerate(((engage_all, LAYERS), (lambda: None, ("c", "d")))):
        another_engine(names)
        engage()
        after_warm_up(rank=rank)
    ranks = {name.split('"')[-2]: count for name, count in gauge("aiter_mla_ranks").items()}
    assert ranks == {"agreeing": 1, "fell_back": 1, "differing": 0, "silent": 0}, "the stage counts as the others"


def test_metrics_tell_a_stage_that_engages_nothing(gauge, monkeypatch):
    stages(gauge, monkeypatch)


@pytest.mark.mutation("I8")
def test_mutation_a_stage_that_engages_nothing_and_agrees_is_caught(gauge, monkeypatch):
    def plant(ranks):
        found = merge_ranks(ranks)
        layers = {rank.rank: rank.skipped.keys() for rank in ranks}
        fallbacks = found.fallback_skips_by_rank.items()
        shared = {rank: why for rank, why in fallbacks if layers[rank] & found.engaged.keys()}
        return replace(found, fallback_skips_by_rank=shared)

    monkeypatch.setattr(metrics, "merge_ranks", plant)
    with pytest.raises(AssertionError, match="the stage counts as the others"):
        stages(gauge, monkeypatch)


@pytest.mark.parametrize("aborted", [True, False])
def test_metrics_tell_a_kernel_that_an_earlier_start_died_in(gauge, aborted):
    engage_all()
    with decided((1, 512, "triton"), rejected_kernels=(RejectedKernel("aiter", "why", aborted),)):
        after_warm_up()
    found = gauge("aiter_mla_aborted_before")
    assert found == ({'engine="0",kernel="aiter",model_name="m"': 1} if aborted else {})


@pytest.mark.mutation("I8")
def test_mutation_a_metric_that_no_alert_would_see_is_caught(gauge, monkeypatch):
    monkeypatch.setattr(metrics, "aborted_kernels", lambda ranks: [])
    with pytest.raises(AssertionError, match=r"Right contains 1 more item:\s+\{'engine=\"0\",kernel=\"aiter\""):
        test_metrics_tell_a_kernel_that_an_earlier_start_died_in(gauge, aborted=True)


@pytest.mark.mutation("I8")
@pytest.mark.parametrize("plant", ["not written", "engaged wins"])
def test_mutation_a_gauge_that_does_not_follow_a_failure_is_caught(gauge, monkeypatch, plant):
    if plant == "not written":
        monkeypatch.setattr(EngineStatus, "_rewrite", lambda self: None)
    else:
        monkeypatch.setattr(
            metrics, "read_samples", lambda folder: {metrics.LAYERS: {("m", "0", "engaged"): len(LAYERS)}}
        )
    with pytest.raises(AssertionError, match=r"engaged\"': 2\.0\} != .*: 1\}"):
        test_gauge_changes_when_a_kernel_fails_while_serving(gauge)


SEVERAL_SERVERS = """
import json, os, sys, time
from dataclasses import replace
from pathlib import Path
from tests.support.decisions import decision
from tests.support.statuses import NOTHING, with_layers
from vllm_aiter_mla.status import liveness, metrics, status_files
from vllm_aiter_mla.status.engine_status import EngineStatus
folder = Path(sys.argv[1])
liveness.ensure_run_lock(folder)
metrics.register_metrics(folder)
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
def serves(kernel, *parts):
    state = NOTHING._replace(decision=decision((1, 8, kernel)), ran_kernel=kernel)
    found = with_layers(EngineStatus(), {"a": state}, 8)
    status_files.write_status(folder, replace(found, model_name="m"))
    for _ in range(100):
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        text = generate_latest(registry).decode()
        if all(part in text for part in parts):
            return
        time.sleep(0.1)
    sys.exit(text)
runs = 'aiter_mla_kernel_layers{engine="0",kernel="%s",model_name="m",tokens="1..8"} %s'
serves("aiter", 'state="engaged"} 1.0', runs % ("aiter", 1.0))
serves("triton", runs % ("aiter", 0.0), runs % ("triton", 1.0))
"""


def test_gauge_reaches_the_shared_files_of_several_api_servers(tmp_path):
    """There prometheus_client takes no callback, and a thread sets the metrics."""
    (tmp_path / "shared").mkdir()
    environment = {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "shared"),
        liveness.RUN_VARIABLE: f"{os.getpid()}-x",
    }
    code = SEVERAL_SERVERS.replace(
        "metrics.register_metrics", "metrics.REFRESH_SECONDS = 0.1; metrics.register_metrics"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_file_says_what_the_gate_put_the_op_in_by(tmp_path):
    engine.engine.our_pass.integration = "passes"
    after_warm_up()
    assert written(tmp_path)["integration"] == "passes"

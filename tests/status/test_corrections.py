"""What a correction of an engine's status changes: the layers that it is told of, and nothing else."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.decisions import decision
from tests.support.planted import raising
from tests.support.statuses import NOTHING, wait_for_the_file, with_layers
from vllm_aiter_mla import files, locks
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.decided import LayerState, RejectedKernel
from vllm_aiter_mla.status import engine_status, liveness, metrics, status_files
from vllm_aiter_mla.status.engine_status import EngineStatus
from vllm_aiter_mla.status.record import NOT_RUN, DecisionGroup, RankRecord

WINDOW, ROPE = Skip("sliding_window", "the layer has a sliding window"), Skip("no_rope", "found in a graph")
RUNS = decision((1, 512, "aiter"))
RAN = LayerState(RUNS, "aiter")
FELL = LayerState(decision(skip=WINDOW, rejected_kernels=(RejectedKernel("aiter", "why"),)), skip=WINDOW)
DRAFT = NOTHING._replace(possible_kernels=("aiter",))


@pytest.fixture(autouse=True)
def run(monkeypatch):
    """A run of this test's own."""
    monkeypatch.setenv(liveness.RUN_VARIABLE, "1-a")


def status_of(kept=(), /, **layers):
    """The status of an engine whose line was said; ``kept`` are reasons of an earlier start."""
    status = EngineStatus()
    status.add_kept_skips(dict(kept))
    status.set_record(with_layers(status, layers))
    return status


def after(before, **layers):
    """(fell back, again, what is engaged, what is skipped)."""
    fell_back, again = before.update(layers)
    return fell_back, again, before.record.engaged, before.record.skipped


def test_nothing_is_corrected_before_the_line_was_said():
    status = EngineStatus()
    assert status.update({"a": FELL}) == ({}, [])
    assert status.record is None


def test_a_correction_is_written_although_no_thread_could_be_started_for_an_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_status, "REWRITE_DELAY_SECONDS", 0.0)
    status = status_of(a=RAN, b=RAN)
    status.write(tmp_path)
    with monkeypatch.context() as patching:
        patching.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        changes = status.update({"a": FELL})
    assert changes == ({"a": WINDOW}, []), "which layer fell back is lost"
    status.update({"b": FELL})
    wait_for_the_file()
    assert files.read_record(RankRecord, status.path).skipped == {"a": WINDOW, "b": WINDOW}


def test_a_layer_that_stays_engaged_has_neither_fallen_nor_come_again():
    assert after(status_of(a=RAN, b=RAN), a=RAN) == ({}, [], {"a": "aiter", "b": "aiter"}, {})


def test_a_layer_falls_and_comes_again_alone():
    status = status_of(a=RAN, b=RAN)
    assert after(status, a=FELL) == ({"a": WINDOW}, [], {"b": "aiter"}, {"a": WINDOW})
    assert after(status, a=FELL) == ({}, [], {"b": "aiter"}, {"a": WINDOW}), "said once"
    assert after(status, a=RAN) == ({}, ["a"], {"a": "aiter", "b": "aiter"}, {})


def test_a_layer_that_runs_for_the_first_time_has_not_come_again():
    assert after(status_of(a=NOTHING, b=RAN), a=RAN) == ({}, [], {"a": "aiter", "b": "aiter"}, {})


def test_a_layer_of_a_draft_stays_engaged_by_the_kernel_of_a_layer_that_the_correction_leaves_out():
    assert after(status_of(a=RAN, draft=DRAFT), draft=DRAFT) == ({}, [], {"a": "aiter", "draft": "aiter"}, {})


def test_a_reason_that_only_a_graph_of_an_earlier_start_knew_still_holds():
    status = status_of({"a": ROPE}, a=NOTHING, b=RAN)
    assert after(status, a=NOTHING) == ({}, [], {"b": "aiter"}, {"a": ROPE})
    assert after(status, new=NOTHING) == ({}, [], {"b": "aiter"}, {"a": ROPE, "new": NOT_RUN})


def a_reason_ends_with_the_outcome_that_had_it(kept, then):
    """First weights for which nothing is decided, then such as cannot be served, then others: three loads."""
    status, told = status_of(kept, a=NOTHING, b=RAN), []
    for outcome in (FELL, NOTHING):
        told.append(after(status, a=outcome)[3])
    assert told == [{"a": WINDOW}, {"a": then}], "a reason outlives its outcome"


REASONS = {"nothing kept": ({}, NOT_RUN), "a kept one": ({"a": ROPE}, ROPE)}


@pytest.mark.parametrize(("kept", "then"), REASONS.values(), ids=REASONS)
def test_a_reason_that_was_decided_here_ends_with_the_outcome_that_had_it(kept, then):
    a_reason_ends_with_the_outcome_that_had_it(kept, then)


def test_a_reason_that_the_line_has_said_ends_with_its_outcome_too():
    assert after(status_of(a=FELL, b=RAN), a=NOTHING) == ({}, [], {"b": "aiter"}, {"a": NOT_RUN})


@pytest.mark.mutation("I8")
def test_mutation_a_decided_reason_that_is_taken_for_a_kept_one_is_caught(monkeypatch):
    def skipped(status, engaged):
        before = status.record.skipped if status.record else status.kept_skips
        return {n: one.skip or before.get(n, NOT_RUN) for n, one in status.layers.items() if n not in engaged}

    monkeypatch.setattr(EngineStatus, "_skips_by_layer", skipped)
    with pytest.raises(AssertionError, match="a reason outlives its outcome"):
        a_reason_ends_with_the_outcome_that_had_it(*REASONS["nothing kept"])


def test_what_is_decided_changes_for_the_layers_of_the_correction():
    status = status_of(a=RAN, b=RAN, c=FELL)
    status.update({"a": FELL})
    assert set(status.record.decision_groups) == {DecisionGroup(("b",), RUNS), DecisionGroup(("a", "c"), FELL.decision)}


def forgets_what_holds_for_a_kernel_that_no_layer_runs():
    """Its overflows, and the tiles that were tuned for it; both come back with the layer."""
    triton = LayerState(decision((1, 512, "triton")), "triton")
    status = status_of(a=triton, b=RAN)
    status.add_nan_kernel("triton")
    status.add_tuned_tiles("16 heads", "a tile")
    told = []
    for now in (triton, FELL, triton):
        status.update({"a": now})
        told.append((status.record.nan_kernels, status.record.tuned_tiles))
    runs = (("triton",), {"16 heads": "a tile"})
    assert told == [runs, ((), {}), runs], "the record is stale"


def test_a_kernel_that_no_layer_runs_any_more_is_no_longer_told_of():
    forgets_what_holds_for_a_kernel_that_no_layer_runs()


@pytest.mark.mutation("I8")
def test_mutation_a_correction_of_the_layers_only_is_caught(monkeypatch):
    with_layers = EngineStatus._with_layers

    def stale(status, record):
        made, old = with_layers(status, record), status.record
        return made if old is None else replace(made, nan_kernels=old.nan_kernels, tuned_tiles=old.tuned_tiles)

    monkeypatch.setattr(EngineStatus, "_with_layers", stale)
    with pytest.raises(AssertionError, match="the record is stale"):
        forgets_what_holds_for_a_kernel_that_no_layer_runs()


@pytest.mark.parametrize("found", ["mine", "missing", "no JSON"])
def test_the_file_is_written_again_whatever_has_become_of_it(tmp_path, monkeypatch, found):
    status = status_of(a=RAN)
    status.write(tmp_path)
    if found == "missing":
        status.path.unlink()
    elif found == "no JSON":
        status.path.write_text("{")
    monkeypatch.setattr(engine_status, "REWRITE_DELAY_SECONDS", 0.0)
    status.update({"a": FELL})
    wait_for_the_file()
    assert files.read_record(RankRecord, status.path).skipped == {"a": WINDOW}


def stays_ended(folder, monkeypatch):
    """A kernel fails in the last step before a script drops its engine."""
    monkeypatch.setattr(engine_status, "REWRITE_DELAY_SECONDS", 0.2)
    status = status_of(a=RAN)
    status.write(folder)
    status.update({"a": FELL})
    status.close()
    wait_for_the_file()
    assert liveness.ServerLocks(folder, [status.record]).is_engine_alive([status.record]) is False, "it lives again"


def test_a_correction_that_comes_after_the_end_of_an_engine_does_not_revive_it(tmp_path, monkeypatch):
    stays_ended(tmp_path, monkeypatch)


@pytest.mark.mutation
def test_mutation_a_correction_that_revives_an_engine_is_caught(tmp_path, monkeypatch):
    def without_flag(status):
        liveness.let_go_of_rank_lock(status.path.parent, status.record)

    monkeypatch.setattr(EngineStatus, "close", without_flag)
    with pytest.raises(AssertionError, match="it lives again"):
        stays_ended(tmp_path, monkeypatch)


def comes_back(folder, monkeypatch, removed):
    """Somebody removes the plugin's files while the server runs, for instance to force a new compilation."""
    monkeypatch.setattr(engine_status, "REWRITE_DELAY_SECONDS", 0.0)
    monkeypatch.setenv(liveness.RUN_VARIABLE, f"{liveness.host_hash()}-1-a")  # its workers do not hold its lock
    liveness.ensure_run_lock(folder)
    run = liveness.ensure_run_name()
    status = status_of(a=RAN)
    status.write(folder)
    for path in folder.glob(removed):
        path.unlink()
    if removed == "*":
        folder.rmdir()
    status.update({"a": FELL})
    wait_for_the_file()
    assert [one.skipped for one in status_files.read_records(folder, run, pytest.fail)] == [{"a": WINDOW}], "no file"
    is_engine_alive = liveness.ServerLocks(folder, [status.record]).is_engine_alive([status.record])
    assert is_engine_alive, "its lock is not held"
    metrics.read_samples(folder)  # the front end is scraped
    assert liveness.ServerLocks(folder, [status.record]).is_serving([status.record]), "the front end's lock is not held"


@pytest.mark.parametrize("removed", ["*", "lock-*", "lock-*-1-a", "status-*"])
def test_files_that_somebody_removed_come_back_with_the_next_correction(tmp_path, monkeypatch, removed):
    comes_back(tmp_path / "aiter_mla", monkeypatch, removed)


@pytest.mark.mutation
@pytest.mark.parametrize("plant", ["no file", "its lock is not held", "the front end's lock is not held"])
def test_mutation_files_that_stay_away_are_caught(tmp_path, monkeypatch, plant):
    remove_ended, hold, held = status_files._remove_files_of_ended_servers, locks.try_hold, list[Path]()

    def hold_once(lock):
        if lock not in held:
            held.append(lock)
            hold(lock)

    if plant == "the front end's lock is not held":
        monkeypatch.setattr(metrics, "renew_run_lock", lambda folder: None)
    else:
        monkeypatch.setattr(locks, "try_hold", hold_once)
    if plant == "no file":
        monkeypatch.setattr(liveness, "have_ended", lambda lock_paths: True)
        monkeypatch.setattr(
            status_files,
            "_remove_files_of_ended_servers",
            lambda folder, mine: remove_ended(folder, replace(mine, run="another")),
        )
    with pytest.raises(AssertionError, match=plant):
        comes_back(tmp_path / "aiter_mla", monkeypatch, "*")


def is_tried_again(folder, monkeypatch):
    """The disk is full when the line is said, and has room when a layer fails."""
    monkeypatch.setattr(engine_status, "REWRITE_DELAY_SECONDS", 0.0)
    status = status_of(a=RAN)
    with monkeypatch.context() as patching:
        patching.setattr(locks, "try_hold", raising(OSError("No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            status.write(folder)
    status.update({"a": FELL})
    wait_for_the_file()
    assert [one.skipped for one in status_files.read_records(folder, "1-a", pytest.fail)] == [{"a": WINDOW}], "no file"
    assert liveness.ServerLocks(folder, [status.record]).is_serving([status.record]), "its locks are not held"


def test_a_first_write_that_failed_is_tried_again_at_the_next_correction(tmp_path, monkeypatch):
    is_tried_again(tmp_path, monkeypatch)


@pytest.mark.mutation
@pytest.mark.parametrize("plant", ["no file", "its locks are not held"])
def test_mutation_a_first_write_that_is_not_made_up_for_is_caught(tmp_path, monkeypatch, plant):
    def without_locks(status):
        status._timer = None
        files.write_record(status.path, status.record)

    writes_again = (lambda status: None) if plant == "no file" else without_locks
    monkeypatch.setattr(EngineStatus, "_rewrite", writes_again)
    with pytest.raises(AssertionError, match=plant):
        is_tried_again(tmp_path, monkeypatch)

"""Lock files: who asks about one is told whether its holder lives, and disturbs nobody."""

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.planted import raising
from vllm_aiter_mla import locks


def test_a_lock_in_a_folder_that_takes_no_file_is_an_error_and_held_by_nobody():
    with pytest.raises(FileNotFoundError, match="lock-x"):
        locks.try_hold(Path("/proc/self/fdinfo/lock-x"))


@pytest.mark.parametrize("left", ["nothing", "a file that nobody holds"])
def test_a_held_lock_whose_file_somebody_removed_is_made_again(tmp_path, left):
    lock = tmp_path / "lock-x"
    assert locks.try_hold(lock)
    lock.unlink()
    if left != "nothing":
        lock.touch()
    assert (locks.is_held(lock), locks.try_hold(lock), locks.is_held(lock)) == (False, True, True)
    locks.release(lock)
    assert not lock.exists()


def test_who_asks_about_a_lock_makes_none_and_is_not_taken_for_its_holder(tmp_path, monkeypatch):
    lock = tmp_path / "lock-x"
    assert locks.is_held(lock) is False
    assert not lock.exists()
    lock.touch()
    inner, answers = fcntl.flock, []

    def another_asks_meanwhile(fd, how):
        inner(fd, how)
        if not answers:
            answers.append(None)
            answers[0] = locks.is_held(lock)

    monkeypatch.setattr(fcntl, "flock", another_asks_meanwhile)
    assert (locks.is_held(lock), answers) == (False, [False])


@pytest.mark.parametrize(("error", "held"), [(BlockingIOError("held"), True), (OSError("no locks here"), None)])
def test_a_lock_that_cannot_be_asked_about_is_neither_held_nor_free(tmp_path, monkeypatch, error, held):
    (lock := tmp_path / "lock-x").touch()
    monkeypatch.setattr(fcntl, "flock", raising(error))
    assert [ask(lock) for ask in (locks.is_held, locks.remove_if_free)] == [held, held]
    assert lock.exists()


def test_a_lock_that_another_process_makes_again_is_not_removed(tmp_path, monkeypatch):
    lock, inner, holder = tmp_path / "lock-x", os.open, []
    lock.touch()

    def then_made_again(path, *how, **more):
        fd = inner(path, *how, **more)
        if not holder:
            lock.unlink()
            holder.append(inner(lock, os.O_CREAT | os.O_RDWR))
            fcntl.flock(holder[0], fcntl.LOCK_EX)
        return fd

    with monkeypatch.context() as patching:
        patching.setattr(os, "open", then_made_again)
        assert locks.remove_if_free(lock)
    assert lock.exists()
    os.close(holder[0])
    assert locks.remove_if_free(lock) is False
    assert not lock.exists()


def test_a_lock_that_another_process_looks_at_to_remove_it_is_held_by_nobody(tmp_path, monkeypatch):
    """It holds the file exclusively for an instant."""
    lock = tmp_path / "lock-x"
    lock.touch()
    looks = os.open(lock, os.O_RDWR)
    fcntl.flock(looks, fcntl.LOCK_EX)
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: fcntl.flock(looks, fcntl.LOCK_UN))
    assert locks.is_held(lock) is False
    fcntl.flock(looks, fcntl.LOCK_EX)
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: None)
    assert locks.is_held(lock) is True
    os.close(looks)


def test_many_locks_are_asked_about_with_one_wait(tmp_path, monkeypatch):
    names, waits = [tmp_path / f"lock-{number}" for number in range(4)], []
    for lock in names[:2]:
        locks.try_hold(lock)
    names[2].touch()
    monkeypatch.setattr(locks.time, "sleep", waits.append)
    assert list(locks.held_states(names).values()) == [True, True, False, False]
    assert len(waits) == 1
    for lock in names[:2]:
        locks.release(lock)
    assert set(locks.held_states(names).values()) == {False}
    assert len(waits) == 1, "no lock seems to be held"


def test_two_threads_that_take_a_removed_lock_again_both_hold_it(tmp_path):
    lock = tmp_path / "lock-x"
    for _ in range(20):
        assert locks.try_hold(lock)
        lock.unlink()
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda _: locks.try_hold(lock), range(4))) == [True] * 4
        locks.release(lock)

"""An AITER that ends the process at its first call is left out by the next start; one that somebody ended is not."""

import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.bad_files import BAD
from tests.support.made_up_clock import Named
from tests.support.signals import heard
from vllm_aiter_mla import files, locks, packages
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.kernels.inputs import LayerShape
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.serving.backends import Backends
from vllm_aiter_mla.serving.decision import PASSED, LayerFacts, decide
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.startup import first_call

PREFIX = "first-call-x"
MI300X = Platform("gfx942", (7, 0))
SHAPE = LayerShape(4, 16, torch.bfloat16, torch.bfloat16, 16, False)


def start(folder, kind, kernel="aiter", host="pod-a"):
    command = [sys.executable, "-m", "tests.startup.crash_loop_child", str(folder), kind, kernel, host]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["aiter", pytest.param("triton", marks=pytest.mark.wide)])
def test_crash_loop_is_broken_by_the_marker_of_the_start_that_died_under_any_host_name(tmp_path, kernel):
    assert start(tmp_path, "aborts", kernel).returncode == -signal.SIGABRT
    (marker,) = tmp_path.glob("first-call-*")
    again = start(tmp_path, "aborts", kernel, host="pod-b")
    assert again.returncode == 0, again.stderr
    assert "kernel_unavailable" in again.stdout
    named = str(marker).rpartition("-")[0]
    assert f"remove {named}-*" in again.stdout


@pytest.mark.slow
@pytest.mark.wide  # below, and in tests/startup/test_timing.py, without a start
def test_crash_loop_each_kernel_has_a_marker_and_a_start_that_goes_well_leaves_none(tmp_path):
    markers = set()
    for kernel in ("aiter", "triton"):
        assert start(tmp_path, "aborts", kernel).returncode == -signal.SIGABRT
        markers |= {*tmp_path.glob("first-call-*")}
    assert len(markers) == 2
    for marker in markers:
        marker.unlink()
    assert start(tmp_path, "works").stdout.endswith("runs aiter\n")
    assert not list(tmp_path.glob("first-call-*"))


# Ended by a kernel, or by somebody.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("calls")


@pytest.fixture(scope="module")
def child(folder):
    """A process that is loaded once and forks those that call."""
    command = [sys.executable, "-m", "tests.startup.first_call_child", str(folder), PREFIX]
    one = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=heard)
    assert one.stdout.readline() == "ready\n"
    yield one
    one.stdin.close()
    one.wait()
    one.stdout.close()


CALLS = [
    ("notes", "waits", signal.SIGTERM, 143, False), ("notes", "waits", signal.SIGINT, 130, False),
    ("notes", "wraps", signal.SIGTERM, 143, False),
    ("raises", "waits", signal.SIGTERM, 0, False), ("default", "waits", signal.SIGHUP, 129, False),
    ("notes", "waits", signal.SIGKILL, -9, True), ("notes", "waits", signal.SIGABRT, -6, True),
    ("notes", "waits", signal.SIGSEGV, -11, True), ("notes", "goes_on_and_aborts", signal.SIGTERM, -6, True),
    ("raises", "exits", 0, 3, True), ("raises", "goes_on_and_aborts", signal.SIGTERM, -6, True),
]  # fmt: skip


def ends(child, folder, handler, block, number, status, stays, plant="-"):
    """A signal, if any, comes in the middle of a first call."""
    for left in folder.iterdir():
        left.unlink()
    print(handler, block, plant, file=child.stdin, flush=True)
    called = int(child.stdout.readline())
    if number:
        os.kill(called, number)
    assert int(child.stdout.readline()) == status
    is_abort = first_call.earlier_death_reason(folder, PREFIX) is not None
    assert is_abort or not stays, "an abort is taken for somebody's end"
    assert stays or not is_abort, "somebody's end is taken for an abort"


@pytest.mark.slow
@pytest.mark.parametrize(("handler", "block", "number", "status", "stays"), CALLS)
def test_crash_loop_a_first_call_that_a_signal_ends_is_no_abort_and_any_other_end_is_one(
    child, folder, handler, block, number, status, stays
):
    ends(child, folder, handler, block, number, status, stays)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("plant", "given", "seen"),
    [("unheard", ("default", "waits", signal.SIGTERM, -15, False), "somebody's end is taken for an abort"),
     ("any_exit", CALLS[-2], "an abort is taken for somebody's end"),
     ("removed_by_the_handler", CALLS[-1], "an abort is taken for somebody's end")],
)  # fmt: skip
def test_mutation_crash_loop_a_signal_that_is_taken_wrongly_is_caught(child, folder, plant, given, seen):
    with pytest.raises(AssertionError, match=seen):
        ends(child, folder, *given, plant=plant)


def test_crash_loop_signals_are_as_before_after_a_first_call(tmp_path):
    before = [signal.getsignal(number) for number in first_call.ENDING_SIGNALS]
    with first_call.first_call_marker(tmp_path, PREFIX):
        pass
    assert [signal.getsignal(number) for number in first_call.ENDING_SIGNALS] == before


def test_crash_loop_a_check_that_raises_leaves_no_marker(tmp_path):
    with pytest.raises(KeyError), first_call.first_call_marker(tmp_path, PREFIX):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_crash_loop_the_marker_of_a_server_that_is_still_starting_is_not_an_abort(tmp_path):
    with first_call.first_call_marker(tmp_path, PREFIX):
        assert first_call.earlier_death_reason(tmp_path, PREFIX) is None


def died(folder, prefix=PREFIX):
    """A process has died in its first call: its marker stays."""
    path = folder / f"{prefix}-0a1b2c3d.json"
    files.write_record(path, first_call.FirstCall("1-a"))
    return path


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_crash_loop_a_bad_marker_is_an_abort_and_its_line_names_it(tmp_path, spoil):
    spoil(died(tmp_path))
    assert str(tmp_path / PREFIX) in first_call.earlier_death_reason(tmp_path, PREFIX)


def left_out_where_one_lock_tells_nothing(said, folder):
    """As of another user's start in a shared folder: the lock is there, and cannot be opened."""
    path = died(folder, first_call.prefix_of("AITER", MI300X))
    lock = folder / f"lock-{path.stem}"
    lock.symlink_to("nowhere")
    found = Backends(Settings(enabled=True, measure=False), MI300X, {"triton": lambda *_: Named("triton")})
    first_call.build_backends(found, folder, 0)
    (line,) = said.at(logging.ERROR)
    assert line.startswith("AITER is left out: not_marked: "), "it is said that a start has died"
    assert str(path) in line
    assert lock.name in line
    _, offers = found.offers(SHAPE, 16)
    assert "aiter" in offers
    assert offers["aiter"].absent
    assert not offers["aiter"].aborted


def test_crash_loop_a_marker_whose_lock_tells_nothing_is_left_out_and_is_no_abort(said, tmp_path):
    left_out_where_one_lock_tells_nothing(said, tmp_path)


@pytest.mark.mutation
def test_mutation_crash_loop_a_lock_that_tells_nothing_and_is_taken_for_a_dead_ones_is_caught(
    said, tmp_path, monkeypatch
):
    inner = locks.is_held
    monkeypatch.setattr(locks, "is_held", lambda lock: bool(inner(lock)))
    with pytest.raises(AssertionError, match="it is said that a start has died"):
        left_out_where_one_lock_tells_nothing(said, tmp_path)


def locks_go_once_nobody_needs_them(folder):
    """A start died, a user removed its marker as its line advises, and another start is at its first call."""
    path = died(folder)
    lock = folder / f"lock-{path.stem}"
    lock.touch()
    first_call.remove_abandoned_locks(folder)
    assert first_call.earlier_death_reason(folder, PREFIX) is not None
    assert lock.exists(), "who asks at this moment would find it held"
    path.unlink()
    with first_call.first_call_marker(folder, PREFIX):
        first_call.remove_abandoned_locks(folder)
        assert first_call.earlier_death_reason(folder, PREFIX) is None
        assert not lock.exists(), "the lock of a dead start stays for ever"
        (marker,) = folder.glob(f"{PREFIX}-*")
        marker.unlink()  # as in the moment before it is written
        first_call.remove_abandoned_locks(folder)
        assert first_call.earlier_death_reason(folder, PREFIX) is None
        assert [path.name for path in folder.iterdir()] == [f"lock-{marker.stem}"], "the lock of a living one is gone"
    assert not list(folder.iterdir())


def test_crash_loop_the_lock_of_a_start_that_died_goes_after_its_marker(tmp_path):
    locks_go_once_nobody_needs_them(tmp_path)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("plant", "seen"),
    [(locks.is_held, "for ever"), (Path.unlink, "a living one is gone")],
    ids=["none", "all"],
)
def test_mutation_crash_loop_locks_that_stay_or_are_taken_away_are_caught(tmp_path, monkeypatch, plant, seen):
    monkeypatch.setattr(locks, "remove_if_free", plant)
    with pytest.raises(AssertionError, match=seen):
        locks_go_once_nobody_needs_them(tmp_path)


@pytest.mark.slow
def test_crash_loop_without_a_marker_aiter_is_left_out_with_one_line_and_serving_goes_on(tmp_path):
    (tmp_path / "file").touch()
    done = start(tmp_path / "file" / "no folder", "works")
    assert done.returncode == 0, done.stderr
    assert "kernel_unavailable" in done.stdout
    assert (done.stdout + done.stderr).count("AITER is left out: not_marked") == 1


# Of one card and one build.


def test_crash_loop_markers_tell_builds_and_cards_apart(monkeypatch):
    given = [("AITER", MI300X), ("AITER", Platform("gfx950", (7, 0))), ("AITER", Platform("gfx942", (7, 2))),
             ("Triton", MI300X)]  # fmt: skip
    names = {first_call.prefix_of(*one) for one in given}
    for owner, name, value in ((torch, "__version__", "another"), (packages, "fingerprint", lambda: "another")):
        monkeypatch.setattr(owner, name, value)
        names.add(first_call.prefix_of("AITER", MI300X))
    assert len(names) == len(given) + 2


def test_crash_loop_a_marker_is_of_one_release_of_what_was_called(monkeypatch):
    def markers():
        return [first_call.prefix_of(family, MI300X) for family in ("AITER", "Triton")]

    before, stamp = markers(), files.stamp("first-call")
    monkeypatch.setattr(files, "stamp", lambda schema: replace(stamp, aiter="another"))
    aiter, triton = markers()
    assert (aiter == before[0], triton == before[1]) == (False, True)
    monkeypatch.setattr(stopwatch, "triton_release", lambda: "another")
    assert [aiter == markers()[0], triton == markers()[1]] == [True, False]


def holds_under_another_host_name(folder, monkeypatch):
    died(folder, first_call.prefix_of("AITER", MI300X))
    monkeypatch.setattr(socket, "gethostname", lambda: "pod-b")
    found = first_call.earlier_death_reason(folder, first_call.prefix_of("AITER", MI300X))
    assert found, "a pod with a new name calls the kernel again"


def test_crash_loop_a_marker_holds_under_another_host_name(tmp_path, monkeypatch):
    holds_under_another_host_name(tmp_path, monkeypatch)


@pytest.mark.mutation
def test_mutation_crash_loop_a_marker_of_one_host_is_caught(tmp_path, monkeypatch):
    inner = first_call.prefix_of
    monkeypatch.setattr(first_call, "prefix_of", lambda *given: f"{inner(*given)}-{socket.gethostname()}")
    with pytest.raises(AssertionError, match="a pod with a new name"):
        holds_under_another_host_name(tmp_path, monkeypatch)


# What is said.

KERNELS = ("aiter", "aiter-opt", "triton")


def begun(said, folder, rank=0):
    """A start checks two layer shapes; return the lines that it says of first calls."""
    factories = {name: lambda platform, settings, name=name: Named(name) for name in KERNELS}
    mark = first_call.build_backends(Backends(Settings(enabled=True), MI300X, factories), folder, rank).mark
    for name in (*KERNELS, "vllm") * 2:
        with mark(name):
            lines = [text for text in said.at(logging.INFO) if "are called now" in text]
            family = "Triton" if name in ("triton", "vllm") else "AITER"
            assert rank or lines[-1:] == [line for line in lines if line.startswith(family)][-1:] != [], (
                f"the log ends with another kernel than {name}"
            )
    return lines


def left_out_where_locks_tell_nothing(said, folder, monkeypatch):
    """As on a file system without locks: another start could not tell whether this one is at it or has died."""
    monkeypatch.setattr(locks, "is_held", lambda lock: None)
    factories = dict.fromkeys(KERNELS, lambda *_: pytest.fail("it is built"))
    found = Backends(Settings(enabled=True), MI300X, factories)
    mark = first_call.build_backends(found, folder, 0).mark
    assert {str(found.get(name)).partition(":")[0] for name in KERNELS} == {"not_marked"}
    assert [line.partition(":")[0] for line in said.at(logging.ERROR)] == ["AITER is left out", "Triton is left out"]
    assert not list(folder.iterdir()), "neither a marker nor a lock is left"
    for name in KERNELS:
        with mark(name):
            assert not list(folder.iterdir())


def test_crash_loop_where_locks_tell_nothing_both_are_left_out_and_nothing_is_called(said, tmp_path, monkeypatch):
    left_out_where_locks_tell_nothing(said, tmp_path, monkeypatch)


@pytest.mark.mutation
def test_mutation_crash_loop_a_lock_that_tells_nothing_and_is_trusted_is_caught(said, tmp_path, monkeypatch):
    monkeypatch.setattr(first_call, "first_call_marker", lambda folder, prefix: nullcontext())
    with pytest.raises(pytest.fail.Exception, match="it is built"):
        left_out_where_locks_tell_nothing(said, tmp_path, monkeypatch)


def the_decision_tells_which_kernels_a_start_died_in(folder):
    died(folder, first_call.prefix_of("AITER", MI300X))
    settings = Settings(enabled=True, measure=False)
    found = Backends(settings, MI300X, {name: lambda *_, name=name: Named(name) for name in ("triton", "vllm")})
    first_call.build_backends(found, folder, 0)
    points, offers = found.offers(SHAPE, 16)
    decided = decide(LayerFacts(None, offers, points), {"triton": PASSED}, None, settings)
    aborted = {other.kernel: other.aborted for other in decided.rejected_kernels}
    assert aborted == {"aiter": True, "aiter-opt": True, "vllm": False}, "an abort is not told"


def test_crash_loop_the_decision_tells_which_kernels_a_start_died_in(tmp_path):
    the_decision_tells_which_kernels_a_start_died_in(tmp_path)


@pytest.mark.mutation
def test_mutation_crash_loop_an_abort_that_is_only_words_is_caught(tmp_path, monkeypatch):
    leave_out = Backends.leave_out
    monkeypatch.setattr(Backends, "leave_out", lambda self, name, reason, aborted: leave_out(self, name, reason))
    with pytest.raises(AssertionError, match="an abort is not told"):
        the_decision_tells_which_kernels_a_start_died_in(tmp_path)


def only_triton_is_marked(said, folder, monkeypatch):
    sm90, inner, marked = Platform("sm90"), first_call.first_call_marker, []
    died(folder, first_call.prefix_of("AITER", sm90))

    def first_call_marker(folder, prefix):
        marked.append(prefix)
        return inner(folder, prefix)

    monkeypatch.setattr(first_call, "first_call_marker", first_call_marker)
    found = Backends(Settings(enabled=True), sm90, {"triton": lambda *_: Named("triton")})
    mark = first_call.build_backends(found, folder, 0).mark
    for name in KERNELS:
        with mark(name):
            pass
    assert set(marked) == {first_call.prefix_of("Triton", sm90)}, "AITER cannot run here"
    assert said.at(logging.ERROR) == []


def test_crash_loop_on_a_card_without_kernels_of_aiters_it_is_neither_marked_nor_left_out(said, tmp_path, monkeypatch):
    only_triton_is_marked(said, tmp_path, monkeypatch)


@pytest.mark.mutation
def test_mutation_crash_loop_markers_of_aiters_on_any_card_are_caught(said, tmp_path, monkeypatch):
    monkeypatch.setattr(first_call, "ARCHITECTURES", ("sm90",))
    monkeypatch.setattr(first_call, "earlier_death_reason", lambda folder, prefix: None)
    with pytest.raises(AssertionError, match="AITER cannot run here"):
        only_triton_is_marked(said, tmp_path, monkeypatch)


def test_crash_loop_the_log_says_before_a_first_call_what_is_called(said, tmp_path):
    assert len(begun(said, tmp_path)) == 4, "one line for each family and shape"


def test_crash_loop_other_ranks_do_not_say_it_again(said, tmp_path):
    assert begun(said, tmp_path, rank=1) == []


@pytest.mark.mutation
@pytest.mark.parametrize("plant", ["once", "after"])
def test_mutation_crash_loop_a_line_that_names_another_kernel_is_caught(said, tmp_path, monkeypatch, plant):
    say, held = first_call.log.say, []

    def once(*line):
        if line not in held:
            held.append(line)
            say(*line)

    @contextmanager
    def marked(folder, prefix):
        yield
        while held:
            say(*held.pop())

    monkeypatch.setattr(first_call.log, "say", once if plant == "once" else lambda *line: held.append(line))
    if plant == "after":
        monkeypatch.setattr(first_call, "first_call_marker", marked)
    with pytest.raises(AssertionError, match=r"the log ends with another kernel than (aiter|triton)"):
        begun(said, tmp_path)

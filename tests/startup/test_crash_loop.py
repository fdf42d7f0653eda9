"""An AITER that ends the process at its first call is left out by the next start."""

import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.support.bad_files import BAD
from vllm_aiter_mla import files
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.startup import first_call


def start(folder, kind, kernel="aiter"):
    command = [sys.executable, "-m", "tests.startup.crash_loop_child", str(folder), kind, kernel]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "other"), [("aiter", "triton"), pytest.param("triton", "aiter", marks=pytest.mark.wide)]
)
def test_crash_loop_is_broken_by_the_marker_of_the_start_that_died(tmp_path, kernel, other):
    assert start(tmp_path, "aborts", kernel).returncode == -signal.SIGABRT
    (marker,) = tmp_path.glob("first-call-*")
    assert start(tmp_path, "aborts", other).stdout.endswith(f"runs {other}\n") is False, "it aborts itself"
    marker_of_other = [path for path in tmp_path.glob("first-call-*") if path != marker]
    assert len(marker_of_other) == 1, "each has a marker of its own"
    marker_of_other[0].unlink()
    again = start(tmp_path, "aborts", kernel)
    assert again.returncode == 0, again.stderr
    assert "kernel_unavailable" in again.stdout
    assert f"aborted_before: an earlier start ended in its first call; remove {marker}" in again.stdout
    marker.unlink()
    assert start(tmp_path, "works", kernel).stdout.endswith(f"runs {kernel}\n")
    assert not list(tmp_path.glob("first-call-*")), "a start that went well leaves no marker"


def test_crash_loop_a_check_that_raises_leaves_no_marker(tmp_path):
    with pytest.raises(KeyError), first_call.marked(tmp_path / "first-call"):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_crash_loop_the_marker_of_a_server_that_is_still_starting_is_not_an_abort(tmp_path):
    with first_call.marked(tmp_path / "first-call"):
        assert first_call.died_before(tmp_path / "first-call") is None


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_crash_loop_a_bad_marker_is_an_abort_and_its_line_names_it(tmp_path, spoil):
    path = tmp_path / "first-call"
    files.write(path, first_call.FirstCall("1-a"))
    spoil(path)
    assert str(path) in first_call.died_before(path)


def test_crash_loop_a_marker_whose_lock_tells_nothing_is_no_abort_and_no_first_call_either(tmp_path):
    path = tmp_path / "first-call"
    files.write(path, first_call.FirstCall("1-a"))
    (tmp_path / "lock-first-call").symlink_to("nowhere")
    assert first_call.died_before(path) is None
    assert "not_marked" in first_call.why_not_marked(path)


def test_crash_loop_without_a_marker_aiter_is_left_out_with_one_line_and_serving_goes_on(tmp_path):
    (tmp_path / "file").touch()
    done = start(tmp_path / "file" / "no folder", "works")
    assert done.returncode == 0, done.stderr
    assert "kernel_unavailable" in done.stdout
    assert (done.stdout + done.stderr).count("AITER is left out: not_marked") == 1


def test_crash_loop_markers_tell_builds_cards_engines_and_ranks_apart(tmp_path):
    given = [
        ("AITER", "gfx942", None, 0), ("AITER", "gfx950", None, 0), ("AITER", "gfx942", "1", 0),
        ("AITER", "gfx942", None, 1), ("Triton", "gfx942", None, 0),
    ]  # fmt: skip
    assert len({first_call.path_of(tmp_path, *one) for one in given}) == len(given)


def test_crash_loop_a_marker_is_of_one_release_of_what_was_called(tmp_path, monkeypatch):
    def markers():
        return [first_call.path_of(tmp_path, family, "gfx942", None, 0) for family in ("AITER", "Triton")]

    before, stamp = markers(), files.stamp("first-call")
    monkeypatch.setattr(files, "stamp", lambda schema: replace(stamp, aiter="another"))
    aiter, triton = markers()
    assert (aiter == before[0], triton == before[1]) == (False, True)
    monkeypatch.setattr(stopwatch, "triton_release", lambda: "another")
    assert [aiter == markers()[0], triton == markers()[1]] == [True, False]

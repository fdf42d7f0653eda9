"""Two servers on one volume, of equal host name, both front ends process 1: neither takes the other's files.

As real processes. Process ids differ here, so the runs are named as two front ends with the id 1 name them.
"""

import contextlib
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.status import server_child
from tests.support.waiting import LONG_S, happened, runs
from vllm_aiter_mla import locks
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.status import liveness


class Server:
    """A process of its own, and its answers."""

    def __init__(self, folder, run):
        self.connection, theirs = server_child.FORKS.Pipe()
        self.process = server_child.FORKS.Process(target=server_child.serve, args=(folder, run, theirs))
        self.process.start()
        theirs.close()

    def does(self, *commands):
        """Let it do these, in turn; return its last answer."""
        for command in commands:
            self.connection.send(command)
            answer = self.connection.recv()  # EOFError: it has ended
        return answer

    def dies(self, command=None):
        if command is None:
            self.process.kill()
        else:
            self.connection.send(command)
        # Not by ``join``, which waits for its children that live on, too.
        assert happened(lambda: not runs(self.process.pid)), "it does not end"


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    with contextlib.ExitStack() as stack:

        def start(run):
            one = Server(tmp_path / "aiter_mla", run)
            stack.callback(one.connection.close)
            stack.callback(one.dies)
            return one

        yield start


def status_of(run):
    """What the command says of one server, and its exit status."""
    found = CliRunner().invoke(app, ["status"])
    return next((line for line in found.output.splitlines() if f"run {run}," in line), ""), found.exit_code


def files_in(folder, pattern="status-*"):
    return sorted(path.name for path in (folder / "aiter_mla").glob(pattern))


def runs_in(folder):
    """The run of each status file, which ``server_child`` names RUN-PID-0-0."""
    return [name.removeprefix("status-").rsplit("-", 3)[0] for name in files_in(folder)]


A, B = (f"{liveness.host_hash()}-1-{one}" for one in "ab")


def test_two_containers_keep_their_status_files(server, tmp_path):
    first, second = server(A), server(B)
    first.does("front_end", "write")
    second.does("front_end", "write")
    first.does("write")
    assert runs_in(tmp_path) == [A, B]
    assert all("1/1 MLA layers engaged" in status_of(run)[0] for run in (A, B))
    assert status_of(A)[1] == 0


def test_two_containers_of_which_one_is_killed(server, tmp_path):
    first, second = server(A), server(B)
    for one in (first, second):
        one.does("front_end", "write")
    first.dies()
    line, code = status_of(A)
    assert ("ended" in line, "engaged" in line, code) == (True, False, 0)
    second.does("write")
    assert runs_in(tmp_path) == [B]
    (file,) = files_in(tmp_path)
    assert files_in(tmp_path, "lock-*") == [f"lock-status-{B}", f"lock-{Path(file).stem}"]
    second.dies()
    assert status_of(B)[1] == 1, "no server lives"


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["forked_worker_ends", "spawned_worker_ends"])
def test_two_containers_a_worker_that_ends_ends_no_server(server, tmp_path, worker):
    first, second = server(A), server(B)
    first.does("front_end", worker)
    second.does("write")
    assert runs_in(tmp_path) == [A, B]
    first.dies()
    second.does("write")
    assert runs_in(tmp_path) == [B]


def test_two_containers_a_server_whose_forked_child_lives_on_has_ended(server, tmp_path):
    first, second = server(A), server(B)
    first.does("front_end", "write", "mark")
    child = int(first.does("fork_that_lives_on"))
    try:
        first.dies()
        assert "ended" in status_of(A)[0]
        assert "aborted_before" in second.does("why_died_before")
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.fixture
def outlived(server):
    """A worker that goes on after the front end of its server was killed."""
    front, worker = server(A), server(A)
    front.does("front_end")
    worker.does("write")
    assert "1/1 MLA layers engaged" in status_of(A)[0]
    front.dies()
    return worker


def is_told_until_it_ends(worker, server, tmp_path, seconds=LONG_S):
    line, code = status_of(A)
    assert ("front end has ended" in line, "engaged" in line, code) == (True, False, 1), "the engine is not named"
    server(B).does("front_end", "write")
    assert runs_in(tmp_path) == [A, B], "another server removes the file of an engine that runs"
    worker.dies()
    told = happened(lambda: "the engine has ended" in status_of(A)[0], seconds)
    assert told, f"its end is not told: {status_of(A)}"


def test_two_containers_an_engine_that_outlives_its_front_end_is_told(outlived, server, tmp_path):
    is_told_until_it_ends(outlived, server, tmp_path)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("holds", "seen"), [(False, "the engine is not named"), (True, "its end is not told")], ids=["ended", "runs"]
)
def test_mutation_two_containers_an_engine_of_which_the_locks_say_nothing_is_caught(
    outlived, server, tmp_path, monkeypatch, holds, seen
):
    monkeypatch.setattr(liveness.ServerLocks, "is_engine_alive", lambda self, ranks: holds)
    with pytest.raises(AssertionError, match=seen):
        is_told_until_it_ends(outlived, server, tmp_path, seconds=0.1)


def test_two_containers_a_worker_that_writes_after_its_front_end_was_killed_takes_no_place_of_it(server):
    """The front end is killed while the model loads."""
    front, worker = server(A), server(A)
    front.does("front_end")
    front.dies()
    worker.does("write")
    line, code = status_of(A)
    assert ("front end has ended" in line, "engaged" in line, code) == (True, False, 1)


def second_engine_is_told(server):
    """The second of two engines of a run outlives the first and the front end."""
    front, first, second = server(A), server(A), server(A)
    front.does("front_end")
    first.does("write")
    second.does("write")
    first.dies()
    front.dies()
    said = CliRunner().invoke(app, ["status"]).output
    assert "front end has ended" in said, "the engine that runs is not told"
    assert "the engine has ended" in said


def test_two_containers_a_second_engine_of_one_run_is_told_after_the_first_has_ended(server):
    second_engine_is_told(server)


@pytest.mark.mutation
def test_mutation_two_containers_one_lock_for_both_engines_of_a_run_is_caught(server, monkeypatch):
    monkeypatch.setattr(
        liveness, "_rank_lock_path", lambda folder, record: folder / f"lock-status-{record.run}-of-the-first"
    )
    with pytest.raises(AssertionError, match="the engine that runs is not told"):
        second_engine_is_told(server)


def test_two_containers_a_live_marker_is_no_abort_and_stays(server, tmp_path):
    first, second = server(A), server(B)
    first.does("mark")
    assert second.does("why_died_before") == "None"
    (marker,) = files_in(tmp_path, "first-call-*")
    second.does("mark")
    assert len(files_in(tmp_path, "first-call-*")) == 2, "each has its own"
    second.does("unmark")
    assert files_in(tmp_path, "first-call-*") == [marker]
    first.does("unmark")
    assert files_in(tmp_path, "*") == []
    assert second.does("why_died_before") == "None"


@pytest.mark.parametrize("how", [None, "abort"])
def test_two_containers_the_marker_of_one_that_died_is_an_abort(server, how):
    first, second = server(A), server(B)
    first.does("mark")
    first.dies(how)
    assert "aborted_before" in second.does("why_died_before")
    assert "aborted_before" in server(A).does("why_died_before"), "of the same run"


def test_two_containers_one_that_dies_while_the_other_is_at_it_too_is_an_abort(server):
    first, second = server(A), server(B)
    first.does("mark")
    second.does("mark")
    first.dies()
    second.does("unmark")
    assert "aborted_before" in second.does("why_died_before")


@pytest.fixture
def shared(server, tmp_path, monkeypatch):
    """A server, its lock, and what another user is told of it, who may write none of its files."""
    one, folder = server(A), tmp_path / "aiter_mla"
    one.does("front_end", "write")
    monkeypatch.chdir(tmp_path)  # that user may not pass through the folders above
    monkeypatch.setenv("VLLM_CACHE_ROOT", ".")
    for path, mode in ((tmp_path, 0o755), (folder, 0o755), *((path, 0o444) for path in folder.iterdir())):
        path.chmod(mode)

    def told():
        user = {"initializer": os.setuid, "initargs": (65534,)} if os.getuid() == 0 else {}
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), **user) as pool:
            return pool.submit(status_of, A).result()

    return one, folder / f"lock-status-{A}", told


def test_another_user_is_told_whether_a_server_lives(shared):
    one, lock, told = shared
    line, code = told()
    assert ("1/1 MLA layers engaged" in line, code) == (True, 0)
    one.dies()
    line, code = told()
    assert ("ended" in line, code) == (True, 1)
    assert lock.exists()


def test_another_user_who_may_not_read_the_lock_is_told_that_nothing_is_known(shared):
    one, lock, told = shared
    lock.chmod(0)
    one.dies()
    line, code = told()
    assert ("cannot tell whether the server is running" in line, "engaged" in line, code) == (True, False, 3)


@pytest.mark.mutation
@pytest.mark.parametrize("held", [False, True])
def test_mutation_two_containers_a_lock_that_says_nothing_is_caught(server, tmp_path, monkeypatch, held):
    """Liveness as it was: told by something that two live servers share."""
    one = server(A)
    one.does("front_end", "write")
    assert "engaged" in status_of(A)[0]
    monkeypatch.setattr(locks, "held_states", lambda paths, waits: dict.fromkeys(paths, held))
    assert ("ended" in status_of(A)[0]) is not held
    one.dies()
    assert ("ended" in status_of(A)[0]) is not held

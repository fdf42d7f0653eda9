"""A process of its own ends with its caller, its engine and workers with it, and its temporary files go."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.signals import heard
from tests.support.waiting import LONG_S, happened, runs
from vllm_aiter_mla.commands import process

# What a step does: it starts a worker, as vLLM does, leaves a file in the temporary folder, and waits.
CALLER = """
import sys
from tests.cli.test_process import step
from vllm_aiter_mla.commands import main, process
main.app = lambda: process.call(step, sys.argv[1])
main.main()
"""


def step(notes):
    """Run in the process of its own: note who runs and where temporary files are, then wait for ever."""
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    folder = tempfile.mkdtemp()
    Path(notes, "found").write_text(f"{os.getpid()} {worker.pid} {folder}")
    os.rename(Path(notes, "found"), Path(notes, "ready"))
    time.sleep(600)


def aborts(notes):
    Path(notes).write_text(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid))
    os.abort()


@pytest.fixture
def caller(tmp_path):
    """A command in the middle of a step: its process, and the processes and folder of the step."""
    line, variables = [sys.executable, "-c", CALLER, str(tmp_path)], os.environ | {"TMPDIR": str(tmp_path)}
    started = subprocess.Popen(line, env=variables, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    assert happened((tmp_path / "ready").exists)
    child, worker, folder = (tmp_path / "ready").read_text().split()
    yield started, (int(child), int(worker)), Path(folder)
    started.kill()
    for one in (int(child), int(worker)):
        if runs(one):
            os.kill(one, signal.SIGKILL)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_signals_to_a_command_end_what_it_has_started_and_nothing_is_left(caller, name):
    started, processes, folder = caller
    assert all(map(runs, processes))
    assert folder.is_dir()
    started.send_signal(number := getattr(signal, name))
    said = started.communicate(timeout=60)[1]
    assert happened(lambda: not any(map(runs, processes)) and not folder.exists())
    if name == "SIGKILL":
        assert started.returncode == -number
    else:
        assert started.returncode == 128 + number
        assert name in said
        assert len(said.splitlines()) == 1


def test_signals_that_are_ignored_stay_ignored(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with process.end_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_calls_at_the_same_time_do_not_remove_each_others_files(tmp_path):
    """Two engines run at once on a CPU, and the first to end takes only its own folder with it."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(process.call, stays, str(tmp_path), "first", "second")
        assert happened((tmp_path / "first").exists)
        second = pool.submit(process.call, stays, str(tmp_path), "second", "ended")
        first.result()
        (tmp_path / "ended").touch()
        assert second.result()


def stays(notes, name, until):
    """Make a temporary file, and return whether it is still there once ``until`` has happened."""
    path = Path(tempfile.mkstemp()[1])
    Path(notes, name).touch()
    assert happened(Path(notes, until).exists)
    return path.exists()


@pytest.mark.mutation
def test_mutation_a_folder_for_all_calls_is_caught(tmp_path, monkeypatch):
    call = process.call

    def shared(*arguments):
        with process.workspace():
            return call(*arguments)

    monkeypatch.setattr(process, "call", shared)
    with pytest.raises(FileNotFoundError, match="output"):
        test_calls_at_the_same_time_do_not_remove_each_others_files(tmp_path)


def told_by_a_child(number):
    """Tell two values, and abort if there is a third."""
    process.send_value(1)
    process.send_value({"two": [2]})
    if number == 3:
        os.abort()
    return number


def finds_nothing():
    raise FileNotFoundError("planted")


def test_an_error_that_the_caller_names_is_raised_here_and_any_other_ends_the_process():
    with pytest.raises(FileNotFoundError, match="planted"):
        process.call(finds_nothing, expected_errors=(OSError,))
    with pytest.raises(process.EndedError, match="status 1"):
        process.call(finds_nothing, expected_errors=(ValueError,))


@pytest.mark.parametrize("number", [2, 3])
def test_what_a_process_tells_is_heard_in_order_also_if_it_aborts_then(number):
    heard = []
    try:
        assert process.call(told_by_a_child, number, on_value=heard.append) == 2
    except process.EndedError:
        assert number == 3
    assert heard == [1, {"two": [2]}]


def tells_and_waits(folder, seconds):
    """Tell three numbers, each once the one before was heard; return those whose hearing was noted in time."""
    return [number for number in range(3) if tell(number) or happened(Path(folder, str(number)).exists, seconds)]


def tell(number):
    process.send_value(number)


def heard_at_once(folder, seconds=LONG_S, then=lambda: None):
    """Check that what a process tells is heard before it goes on."""

    def hear(number):
        Path(folder, str(number)).touch()
        then()

    found = process.call(tells_and_waits, str(folder), seconds, on_value=hear)
    assert found == [0, 1, 2], "what it told was not heard while it ran"


def test_what_is_told_is_heard_while_the_process_runs(tmp_path):
    heard_at_once(tmp_path)


@pytest.mark.mutation
def test_mutation_what_is_told_and_heard_at_the_end_only_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "POLL_SECONDS", LONG_S)
    with pytest.raises(AssertionError, match="not heard while it ran"):
        heard_at_once(tmp_path, seconds=0.1)


class Clock:
    """Stands still, unless a test puts it forward."""

    def __init__(self, monkeypatch):
        self.seconds = 0
        monkeypatch.setattr(process, "time", self)
        monkeypatch.setattr(process, "TIMEOUT_SECONDS", 20)
        monkeypatch.setattr(process, "GRACE_SECONDS", 5)

    def monotonic(self):
        return self.seconds

    def pass_by(self, seconds):
        self.seconds += seconds


def test_a_process_that_tells_something_may_go_on(tmp_path, monkeypatch):
    """The limit is one of silence: a soak of a kernel takes hours."""
    clock = Clock(monkeypatch)
    heard_at_once(tmp_path, then=lambda: clock.pass_by(15))
    assert clock.seconds == 45


@pytest.mark.mutation
def test_mutation_a_limit_that_telling_does_not_extend_is_caught(tmp_path, monkeypatch):
    hear = process._deliver_values
    monkeypatch.setattr(process, "_deliver_values", lambda values, heard: hear(values, heard) and False)
    with pytest.raises(process.EndedError, match="was silent for 20 s"):
        test_a_process_that_tells_something_may_go_on(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("told", "answered", "how", "after"),
    [
        ((), None, "was silent for 20 s", 20),
        ((15, 30), None, "was silent for 20 s", 50),
        ((), 3, "", 8),
        ((15,), 33, "", 38),
        ((4,), 3, "", 8),
    ],
)
def test_a_process_that_does_not_end_is_ended(tmp_path, monkeypatch, told, answered, how, after):
    """By a clock that goes on by a second at each look at what the process tells."""
    clock, outcome, arguments = Clock(monkeypatch), tmp_path / "outcome", tmp_path / "arguments"
    monkeypatch.setattr(process, "POLL_SECONDS", 0.001)
    arguments.write_bytes(pickle.dumps(((600,), ())))

    def hear():
        clock.pass_by(1)
        assert clock.seconds <= after, "nobody ends it"
        if clock.seconds == answered:
            outcome.touch()
        return clock.seconds in told

    words = ("time:sleep", str(arguments), str(tmp_path / "none"), str(tmp_path / "told"))
    assert process._run_process(words, str(tmp_path), os.environ, 2, hear, outcome) == how
    assert clock.seconds == after


@pytest.mark.mutation
@pytest.mark.parametrize(("limit", "case"), [("GRACE_SECONDS", ((), 3)), ("TIMEOUT_SECONDS", ((), None))])
def test_mutation_a_process_that_nobody_ends_is_caught(tmp_path, monkeypatch, limit, case):
    setattr_ = monkeypatch.setattr
    monkeypatch.setattr(Clock, "monotonic", lambda clock: setattr_(process, limit, 1e9) or clock.seconds)
    with pytest.raises(AssertionError, match="nobody ends it"):
        test_a_process_that_does_not_end_is_ended(tmp_path, monkeypatch, *case, "", 25)


def test_a_process_imports_nothing_from_the_folder_that_the_command_was_typed_in(tmp_path, monkeypatch):
    """A checkout of vLLM has a folder of that name."""
    (tmp_path / "pickle.py").write_text("raise SystemExit('of the folder')")
    monkeypatch.chdir(tmp_path)
    assert process.call(dict, {1: 2}) == {1: 2}


@pytest.mark.slow
def test_torchs_compile_cache_is_where_it_is_without_a_call(monkeypatch):
    """It holds what torch found out about the compiler: half a minute for each engine on a CPU."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    with process.workspace():
        called = process.call(cache_dir)
    assert called == cache_dir()


def binds_vllms_socket():
    """Bind a socket where vLLM's engine and its front end have theirs; return whether that is in the own folder."""
    from vllm.utils.network_utils import get_open_zmq_ipc_path

    path = get_open_zmq_ipc_path().removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)
    os.unlink(path)
    return path.startswith(tempfile.gettempdir())


@pytest.mark.slow
@pytest.mark.parametrize(("length", "own"), [(40, True), (69, False)])
def test_vllms_sockets_have_a_path_that_is_short_enough(monkeypatch, length, own):
    """A folder of a job's own, as of a scheduler: vLLM alone could have its sockets there."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = Path(short, "x" * (length - len(short) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
        with process.workspace():
            assert process.call(binds_vllms_socket) is own


@pytest.mark.slow
@pytest.mark.mutation
def test_mutation_a_folder_that_is_too_long_for_a_socket_is_caught(monkeypatch):
    monkeypatch.setattr(process, "MAX_SOCKET_FOLDER_LENGTH", 1000)
    with pytest.raises(process.EndedError, match="AF_UNIX path too long"):
        test_vllms_sockets_have_a_path_that_is_short_enough(monkeypatch, 69, False)


def test_a_process_that_was_not_called_ends_nothing_and_removes_nothing(tmp_path):
    """Typed by hand, or by a version that calls it otherwise: its group would be the shell's."""
    line = [sys.executable, "-m", process.__name__, "builtins:dict", "arguments", "outcome"]
    for more in ([], ["0", str(tmp_path)]):
        done = subprocess.run([*line, *more], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert done.returncode == 1
    assert tmp_path.is_dir()


def test_a_process_that_aborts_takes_its_workers_with_it(tmp_path):
    with pytest.raises(process.EndedError, match="SIGABRT"):
        process.call(aborts, str(tmp_path / "worker"))
    worker = int((tmp_path / "worker").read_text())
    assert happened(lambda: not runs(worker))


@pytest.mark.slow
@pytest.mark.mutation
@pytest.mark.parametrize(("name", "left"), [("SIGTERM", "_running_groups"), ("SIGKILL", "_end_with_caller")])
def test_mutation_a_process_that_does_not_end_with_its_caller_is_seen(tmp_path, name, left, monkeypatch):
    """Without the group's end on a signal the other side serves, so both are planted for the signal that is caught."""
    spoil = "from vllm_aiter_mla.commands import process\nprocess._kill_group = lambda group: None\n"
    plant = spoil * (left == "_running_groups")
    child = tmp_path / "planted"
    child.mkdir()
    (child / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('commands.process' in word for word in getattr(sys, 'orig_argv', ())):\n"
        "    import os\n"
        "    os.fork = lambda: 1\n"
    )
    path = os.pathsep.join([str(child), os.environ["PYTHONPATH"]])
    line, variables = (
        [sys.executable, "-c", plant + CALLER, str(tmp_path)],
        {"PYTHONPATH": path, "TMPDIR": str(tmp_path)},
    )
    started = subprocess.Popen(line, env=os.environ | variables, stderr=subprocess.DEVNULL, preexec_fn=heard)
    assert happened((tmp_path / "ready").exists)
    processes = [int(one) for one in (tmp_path / "ready").read_text().split()[:2]]
    started.send_signal(getattr(signal, name))
    is_over = happened(lambda: not any(map(runs, processes)), 5)
    left_over = [one for one in processes if runs(one)]
    started.kill()
    for one in left_over:
        os.kill(one, signal.SIGKILL)
    assert not is_over


def test_a_process_that_printed_nothing_has_a_sentence_too():
    error = process.EndedError("was ended by SIGKILL")
    assert error.sentence() == "its process was ended by SIGKILL"
    assert error.sentence("the check of aiter") == "its process was ended by SIGKILL in the check of aiter"


def test_a_process_that_prints_may_go_on(tmp_path, monkeypatch):
    """vLLM tells nothing while it loads a checkpoint, and logs."""
    clock, outcome, arguments = Clock(monkeypatch), tmp_path / "outcome", tmp_path / "arguments"
    monkeypatch.setattr(process, "POLL_SECONDS", 0.001)
    arguments.write_bytes(pickle.dumps(((600,), ())))
    with (tmp_path / "output").open("w") as output:

        def hear():
            clock.pass_by(1)
            if clock.seconds == 15:
                print("a shard is loaded", file=output, flush=True)
            assert clock.seconds <= 60, "nobody ends it"
            return False

        words = ("time:sleep", str(arguments), str(tmp_path / "none"), str(tmp_path / "told"))
        how = process._run_process(words, str(tmp_path), os.environ, output.fileno(), hear, outcome)
    assert (how, clock.seconds) == ("was silent for 20 s", 36)  # the print is seen at the next look


def test_what_others_print_on_standard_error_keeps_no_silent_process_alive(tmp_path, monkeypatch):
    """With --verbose its log goes there, and so do the heartbeats of the command itself."""
    clock, outcome, arguments = Clock(monkeypatch), tmp_path / "outcome", tmp_path / "arguments"
    monkeypatch.setattr(process, "POLL_SECONDS", 0.001)
    arguments.write_bytes(pickle.dumps(((600,), ())))
    with (tmp_path / "stderr").open("w") as log, redirected_stderr(log):

        def beat():
            clock.pass_by(1)
            os.write(2, b"plan, 30 s\n")
            assert clock.seconds <= 60, "nobody ends it"
            return False

        words = ("time:sleep", str(arguments), str(tmp_path / "none"), str(tmp_path / "told"))
        assert process._run_process(words, str(tmp_path), os.environ, 2, beat, outcome) == "was silent for 20 s"


@contextmanager
def redirected_stderr(log):
    """Standard error is a file, as after ``2>log`` in a shell."""
    saved = os.dup(2)
    os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)

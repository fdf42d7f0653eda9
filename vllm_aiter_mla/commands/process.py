# SPDX-License-Identifier: Apache-2.0
"""Call a function in a process of its own, because AITER's checks end a process by an abort, and vLLM keeps state.

``call`` starts ``python -m vllm_aiter_mla.commands.process`` with the arguments of ``main``. The new process leads a
group, to which vLLM's engine and workers belong. The group ends with its caller, however the caller ends. Otherwise it
would keep the cards.
"""

import getpass
import os
import pickle
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, TypeVar, TypeVarTuple

TIMEOUT_SECONDS = 3600
"""A process that is silent for so long is ended: it sent no value, and wrote no output to a file."""
GRACE_SECONDS = 60
"""A process that has written its outcome may run for so long."""
STDERR_DESCRIPTOR = 2
"""The file descriptor of standard error."""
POLL_SECONDS = 0.5
"""Interval at which ``call`` reads the values that its process sends."""
MAX_LAST_LINES = 12
"""Lines of output in an ``EndedError``."""
MAX_SOCKET_FOLDER_LENGTH = 70
"""Characters in the path of a folder for vLLM's sockets: vLLM adds 37, and the path of a socket has at most 107."""

Arguments = TypeVarTuple("Arguments")
Returned = TypeVar("Returned")

_running_groups: set[int] = set()
"""The ids of the process groups of the calls that run now, in all threads. A signal to this process ends them all."""

_workspace_folders: set[str] = set()
"""The folder of ``workspace`` while its block runs."""

_value_listeners: list[Callable[[Any], None]] = []
"""The functions that get each value that this process sends; empty if no ``call`` started this process."""


class EndedError(RuntimeError):
    """A process ended without an outcome.

    Args:
        ending: how the process ended, as in "was ended by SIGABRT".
        lines: the last lines that the process wrote.
        process_label: the process in words.
    """

    def __init__(self, ending: str, *lines: str, process_label: str = "its process") -> None:
        super().__init__(ending, *lines)
        self.ending, self.lines, self.process_label = ending, lines, process_label

    def sentence(self, activity: str | None = None) -> str:
        """Return one sentence: how the process ended, in which ``activity``, and its last line of output."""
        last_line_text = f": {self.lines[-1]}" if self.lines else ""  # after a kill by the kernel there may be none
        return f"{self.process_label} {self.ending}" + (f" in {activity}" if activity else "") + last_line_text


class SignalError(BaseException):
    """A signal, the first argument, asks this process to end.

    It does not derive from ``Exception``, so that no step catches it.
    """


@contextmanager
def end_on_signals() -> Iterator[None]:
    """During the block, SIGINT, SIGTERM and SIGHUP end the running calls and raise SignalError.

    A signal that is ignored stays ignored.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old_handlers = {number: signal.getsignal(number) for number in signals}
    handled_signals = [number for number, handler in old_handlers.items() if handler != signal.SIG_IGN]
    for number in handled_signals:
        signal.signal(number, _handle_signal)
    try:
        yield
    finally:
        for number in handled_signals:
            signal.signal(number, old_handlers[number])


def _handle_signal(number: int, _: FrameType | None) -> None:
    end_calls()
    raise SignalError(signal.Signals(number))


def end_calls() -> None:
    """End the running calls of all threads."""
    for group_id in tuple(_running_groups):
        _kill_group(group_id)


def _kill_group(group_id: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group_id, signal.SIGKILL)


class NoWorkspaceError(OSError):
    """No folder for temporary files can be made; the message says why."""


@contextmanager
def workspace() -> Iterator[None]:
    """Keep all temporary files, also those of calls, in one folder during the block. The outermost block removes it.

    Raises:
        NoWorkspaceError: the folder cannot be made.
    """
    if tempfile.tempdir in _workspace_folders:  # inside another block
        yield
        return
    outer_folder = tempfile.tempdir
    try:
        temporary = tempfile.TemporaryDirectory(prefix="aiter-mla-")
    except OSError as error:
        reason = error.strerror or error
        raise NoWorkspaceError(
            f"no folder for temporary files: {reason}; set TMPDIR to one that can be written"
        ) from error
    with temporary as folder:
        _workspace_folders.add(folder)
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = outer_folder
            _workspace_folders.discard(folder)


def send_value(value: Any) -> None:
    """Send a value to ``on_value`` of the call that runs this process. The value arrives even if the process aborts."""
    for listener in _value_listeners:
        listener(value)


def import_path_of(function: Callable[..., Any]) -> str:
    """Return "module:function", from which another process imports the function."""
    return f"{function.__module__}:{function.__qualname__}"


def call(
    function: Callable[[*Arguments], Returned], *arguments: *Arguments, environment: Mapping[str, str] = os.environ,
    log_descriptor: int | None = None, on_value: Callable[[Any], None] = lambda value: None,
    expected_errors: tuple[type[Exception], ...] = (),
) -> Returned:  # fmt: skip
    """Call a function in a process of its own; return its result.

    Args:
        function: a function at the top of a module, which the process imports.
        arguments: the arguments of the function, which are pickled.
        environment: the environment of the process.
        log_descriptor: the file descriptor that the process writes to. By default the last lines go into EndedError.
        on_value: is called with each value that the process sends, in order, before this function returns or raises.
        expected_errors: errors of the function that are raised here too. Any other error ends the process.

    Raises:
        EndedError: the process ended without an outcome, by an exception or otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="aiter-mla-") as call_folder:
        arguments_file, outcome_file, values_file, output_file = (
            Path(call_folder) / name for name in ("arguments", "outcome", "values", "output")
        )
        arguments_file.write_bytes(pickle.dumps((arguments, expected_errors)))
        values_file.touch()
        child_arguments = (import_path_of(function), *map(str, (arguments_file, outcome_file, values_file)))
        own_folder = tempfile.gettempdir()
        child_folder = own_folder if own_folder in _workspace_folders else call_folder
        with output_file.open("wb") as output, values_file.open("rb") as values:
            deliver_values = partial(_deliver_values, values, on_value)
            child_log = output.fileno() if log_descriptor is None else log_descriptor
            ending = _run_process(child_arguments, child_folder, environment, child_log, deliver_values, outcome_file)
        last_lines = output_file.read_text(encoding="utf-8", errors="replace").splitlines()[-MAX_LAST_LINES:]
        if outcome_file.is_file():
            returned, error = pickle.loads(outcome_file.read_bytes())
            if error is not None:
                raise error
            return returned
    raise EndedError(ending, *last_lines)


def _deliver_values(values: BinaryIO, on_value: Callable[[Any], None]) -> bool:
    """Call ``on_value`` with each value that has been written completely; return whether there was one."""
    num_delivered = 0
    while True:
        position = values.tell()
        try:
            value = pickle.load(values)
        except (EOFError, pickle.UnpicklingError):  # no further value, or the process has not written all of it yet
            values.seek(position)
            return num_delivered > 0
        on_value(value)
        num_delivered += 1


def _run_process(
    child_arguments: tuple[str, ...],
    temp_folder: str,
    environment: Mapping[str, str],
    log_descriptor: int,
    deliver_values: Callable[[], bool],
    outcome_file: Path,
) -> str:
    """Run the process, then end its group. Return how the process ended, or "" if it wrote its outcome and went on.

    ``deliver_values`` is called every ``POLL_SECONDS`` and returns whether the process has sent a value.
    """
    read_end, write_end = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, *child_arguments, str(read_end), temp_folder],
        env=_environment_with_folder(environment, temp_folder), stdin=subprocess.DEVNULL, stdout=log_descriptor,
        stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(read_end,),
    )  # fmt: skip
    os.close(read_end)
    _running_groups.add(child.pid)
    deadline, has_outcome, output_bytes = time.monotonic() + TIMEOUT_SECONDS, False, 0
    try:
        while True:
            timeout = min(POLL_SECONDS, max(deadline - time.monotonic(), 0))
            if (exit_status := _wait_for_exit_status(child, timeout)) is not None:
                break
            # Output counts as well as values: vLLM logs while it loads and compiles. Others write to stderr, too.
            previous_bytes = output_bytes
            output_bytes = os.fstat(log_descriptor).st_size if log_descriptor > STDERR_DESCRIPTOR else 0
            if (deliver_values() or output_bytes > previous_bytes) and not has_outcome:
                deadline = time.monotonic() + TIMEOUT_SECONDS
            if not has_outcome and outcome_file.is_file():
                has_outcome, deadline = True, time.monotonic() + GRACE_SECONDS
            if time.monotonic() >= deadline:
                return "" if has_outcome else f"was silent for {TIMEOUT_SECONDS} s"
        deliver_values()
    finally:
        _kill_group(child.pid)
        child.wait()
        _running_groups.discard(child.pid)
        os.close(write_end)
    if exit_status >= 0:
        return f"ended with status {exit_status}"
    return f"was ended by {signal.Signals(-exit_status).name}"


def _wait_for_exit_status(child: subprocess.Popen[bytes], timeout: float) -> int | None:
    """Return the exit status of a process; None if it still runs after ``timeout`` seconds."""
    try:
        return child.wait(timeout)
    except subprocess.TimeoutExpired:
        return None


def _environment_with_folder(environment: Mapping[str, str], temp_folder: str) -> dict[str, str]:
    """Return the environment with ``temp_folder`` as the folder for temporary files.

    torch's compile cache stays outside that folder. vLLM's sockets do too if its path is too long for them.
    """
    own_folder = tempfile.gettempdir()
    outer_folder = Path(own_folder).parent if own_folder in _workspace_folders else own_folder
    child_environment = {**environment, "TMPDIR": temp_folder}
    if len(temp_folder) > MAX_SOCKET_FOLDER_LENGTH:
        child_environment.setdefault("VLLM_RPC_BASE_PATH", str(outer_folder))
    with suppress(KeyError, OSError):  # a container's user may have no name
        child_environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{outer_folder}/torchinductor_{getpass.getuser()}")
    return child_environment


def main(
    function_path: str, arguments_file: str, outcome_file: str, values_file: str, caller_pipe: str, temp_folder: str
) -> None:
    """Call the function and write its outcome.

    Args:
        function_path: as ``import_path_of`` returns it.
        arguments_file: has the pickled arguments of the function, and the expected errors.
        outcome_file: gets the pickled result of the function, or an expected error.
        values_file: gets the values that the function sends.
        caller_pipe: the descriptor of a pipe that carries no data. It closes when the caller has gone.
        temp_folder: has the temporary files, and is removed when the caller has gone.
    """
    _end_with_caller(int(caller_pipe), temp_folder)
    # This module is ``__main__`` here. The function imports it by name, and so gets another copy of the list.
    listeners = pkgutil.resolve_name("vllm_aiter_mla.commands.process:_value_listeners")
    listeners.append(partial(_append_value, Path(values_file)))
    arguments, expected_errors = pickle.loads(Path(arguments_file).read_bytes())
    try:
        returned, error = pkgutil.resolve_name(function_path)(*arguments), None
    except expected_errors as expected_error:
        returned, error = None, expected_error
    unfinished_file = Path(f"{outcome_file}.whole")
    unfinished_file.write_bytes(pickle.dumps((returned, error)))
    unfinished_file.rename(outcome_file)


def _append_value(values_file: Path, value: Any) -> None:
    with values_file.open("ab") as stream:
        stream.write(pickle.dumps(value))


def _end_with_caller(caller_pipe: int, temp_folder: str) -> None:
    """Fork a process that ends this group and removes the temporary files once the caller has gone.

    A thread would not be enough: an abort, or code that holds Python's lock, would stop it. A fork is safe here,
    because no library that a fork could harm has been imported yet.
    """
    group_id = os.getpid()
    if os.getpgrp() != group_id:
        raise RuntimeError("this process leads no group: only `call` starts it")
    if os.fork():
        os.close(caller_pipe)
        return
    try:
        while os.read(caller_pipe, 1):
            pass
        shutil.rmtree(temp_folder, ignore_errors=True)
    finally:
        os.killpg(group_id, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])

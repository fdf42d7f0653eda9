# SPDX-License-Identifier: Apache-2.0
"""Call a function in a process of its own, because AITER's checks end a process by an abort, and vLLM keeps state.

``call`` starts ``python -m vllm_aiter_mla.commands.process MODULE:FUNCTION ARGUMENTS OUTCOME TOLD LIFELINE FOLDER``.
That process leads a group, to which vLLM's engine and workers belong. The group ends with its caller, however the
caller ends: otherwise it would keep the cards.
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

TIMEOUT_S = 3600
"""Seconds without a value, and without output where that goes to a file, after which a process is ended."""
GRACE_S = 60
"""Seconds that a process may still run after it has written its outcome."""
LOOK_S = 0.5
"""How often ``call`` looks for the values that its process tells."""
LAST_LINES = 12
"""How many of its lines an error of a process has."""
LONGEST_SOCKET_FOLDER = 70
"""Most characters of a folder for vLLM's sockets: vLLM adds 37, and the path of a socket has at most 107."""

Arguments = TypeVarTuple("Arguments")
Returned = TypeVar("Returned")

_groups: set[int] = set()
"""The process groups of the calls that run now, in any thread. A signal to this process ends them all."""

_folders: set[str] = set()
"""The folder of ``workspace``, while its block runs."""

_listeners: list[Callable[[Any], None]] = []
"""What takes each value that this process tells; empty if no ``call`` started this process."""


class EndedError(RuntimeError):
    """A process ended without an outcome.

    Args:
        how: as in "was ended by SIGABRT".
        lines: the last lines that the process wrote.
        who: the process in words.
    """

    def __init__(self, how: str, *lines: str, who: str = "its process") -> None:
        super().__init__(how, *lines)
        self.how, self.lines, self.who = how, lines, who

    def sentence(self, doing: str | None = None) -> str:
        """Return how the process ended, what it was ``doing``, and its last line."""
        last_line = f": {self.lines[-1]}" if self.lines else ""  # the kernel's own kill leaves none
        return f"{self.who} {self.how}" + (f" in {doing}" if doing else "") + last_line


class SignalError(BaseException):
    """A signal, the first argument, asks this process to end. Not an ``Exception``: no step may take it for its own."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP end the calls that run and raise SignalError; an ignored signal stays ignored."""
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in ends}
    handled = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


def _end(number: int, _: FrameType | None) -> None:
    end_calls()
    raise SignalError(signal.Signals(number))


def end_calls() -> None:
    """End the calls that run, in whichever thread."""
    for group in tuple(_groups):
        _kill(group)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


@contextmanager
def workspace() -> Iterator[None]:
    """Keep temporary files, those of calls too, in one folder during the block; remove it with the outermost block."""
    if tempfile.tempdir in _folders:  # in the block of another call
        yield
        return
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="aiter-mla-") as folder:
        _folders.add(folder)
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before
            _folders.discard(folder)


def send(value: Any) -> None:
    """Hand a value to ``on_value`` of the call that runs this process, now: it is kept if the process aborts later."""
    for listener in _listeners:
        listener(value)


def name_of(function: Callable[..., Any]) -> str:
    """Return "module:function", by which another process imports the function."""
    return f"{function.__module__}:{function.__qualname__}"


def call(
    function: Callable[[*Arguments], Returned], *arguments: *Arguments, environment: Mapping[str, str] = os.environ,
    log: int | None = None, on_value: Callable[[Any], None] = lambda value: None,
    raises: tuple[type[Exception], ...] = (),
) -> Returned:  # fmt: skip
    """Return what a function returns that is called in a process of its own.

    Args:
        function: a function at the top of a module, which the process imports.
        arguments: its arguments, which are pickled.
        environment: the variables of the process.
        log: the descriptor that the process writes to; by default its last lines are kept for EndedError.
        on_value: called with each value that the process tells, in order, before this returns or raises.
        raises: errors of the function that are raised here too. Any other one ends the process.

    Raises:
        EndedError: the process ended without an outcome, by an exception or otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="aiter-mla-") as work:
        pickled, outcome, told, output = (Path(work) / name for name in ("arguments", "outcome", "told", "output"))
        pickled.write_bytes(pickle.dumps((arguments, raises)))
        told.touch()
        words, shared = (name_of(function), *map(str, (pickled, outcome, told))), tempfile.gettempdir()
        folder = shared if shared in _folders else work
        with output.open("wb") as out, told.open("rb") as values:
            where = out.fileno() if log is None else log
            how = _run_to_its_end(words, folder, environment, where, lambda: _deliver(values, on_value), outcome)
        last_lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        if outcome.is_file():
            returned, error = pickle.loads(outcome.read_bytes())
            if error is not None:
                raise error
            return returned
    raise EndedError(how, *last_lines)


def _deliver(values: BinaryIO, on_value: Callable[[Any], None]) -> bool:
    """Hand on each value that has been written completely; return whether there was one."""
    count = 0
    while True:
        at = values.tell()
        try:
            value = pickle.load(values)
        except (EOFError, pickle.UnpicklingError):  # none, or the process is about to write the rest
            values.seek(at)
            return count > 0
        on_value(value)
        count += 1


def _run_to_its_end(
    words: tuple[str, ...],
    folder: str,
    environment: Mapping[str, str],
    log: int,
    hear: Callable[[], bool],
    outcome: Path,
) -> str:
    """Run the process to its end, and end what it leaves behind; return how it ended, or "" if only its outcome counts.

    ``hear`` runs every ``LOOK_S``; it returns whether the process told something.
    """
    end, lifeline = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, *words, str(end), folder], env=_with_folder(environment, folder),
        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(end,),
    )  # fmt: skip
    os.close(end)
    _groups.add(child.pid)
    until, has_outcome, printed = time.monotonic() + TIMEOUT_S, False, 0
    try:
        while (code := _exit_status(child, min(LOOK_S, max(until - time.monotonic(), 0)))) is None:
            earlier, printed = printed, 0 if log < 0 else os.fstat(log).st_size  # vLLM logs while it loads and compiles
            if (hear() or printed > earlier) and not has_outcome:
                until = time.monotonic() + TIMEOUT_S
            if not has_outcome and outcome.is_file():
                has_outcome, until = True, time.monotonic() + GRACE_S
            if time.monotonic() >= until:
                return "" if has_outcome else f"was silent for {TIMEOUT_S} s"
        hear()
    finally:
        _kill(child.pid)
        child.wait()
        _groups.discard(child.pid)
        os.close(lifeline)
    return f"ended with status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def _exit_status(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return a process's exit status; None if it still runs after so many seconds."""
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _with_folder(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the variables with ``folder`` for temporary files.

    torch's compile cache stays where it is without ``folder``; so do vLLM's sockets if the path of ``folder`` is too
    long for them.
    """
    shared = tempfile.gettempdir()
    outside = Path(shared).parent if shared in _folders else shared
    variables = {**environment, "TMPDIR": folder}
    if len(folder) > LONGEST_SOCKET_FOLDER:
        variables.setdefault("VLLM_RPC_BASE_PATH", str(outside))
    with suppress(KeyError, OSError):  # a container's user may have no name
        variables.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{outside}/torchinductor_{getpass.getuser()}")
    return variables


def main(function: str, arguments: str, outcome: str, told: str, lifeline: str, folder: str) -> None:
    """Call the function and write its outcome.

    Args:
        function: as ``name_of`` names it.
        arguments: the file of its pickled arguments, and of the errors that the caller raises too.
        outcome: the file for what it returns or raises.
        told: the file for the values that it tells before.
        lifeline: a descriptor. Nothing comes from it; its end says that the caller is gone.
        folder: the temporary files, which are removed then.
    """
    _end_with_caller(int(lifeline), folder)
    # This module is ``__main__`` here, and what it runs imports it by its name.
    pkgutil.resolve_name("vllm_aiter_mla.commands.process:_listeners").append(partial(_append, Path(told)))
    values, raises = pickle.loads(Path(arguments).read_bytes())
    try:
        returned, error = pkgutil.resolve_name(function)(*values), None
    except raises as raised:
        returned, error = None, raised
    whole = Path(f"{outcome}.whole")
    whole.write_bytes(pickle.dumps((returned, error)))
    whole.rename(outcome)


def _append(told: Path, value: Any) -> None:
    with told.open("ab") as out:
        out.write(pickle.dumps(value))


def _end_with_caller(lifeline: int, folder: str) -> None:
    """Fork a process that ends this group, and removes the command's temporary files, once the caller is gone.

    A thread would not do: code that holds Python's lock, or an abort, would stop it. Nothing has been imported yet that
    a fork could harm.
    """
    group = os.getpid()
    if os.getpgrp() != group:
        raise RuntimeError("this process leads no group: only `call` starts it")
    if os.fork():
        os.close(lifeline)
        return
    try:
        while os.read(lifeline, 1):
            pass
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])

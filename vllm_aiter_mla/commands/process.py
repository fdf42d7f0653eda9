# SPDX-License-Identifier: Apache-2.0
"""A process of its own: AITER's checks end a process by an abort, and vLLM keeps much of a platform and of a config.

``python -m vllm_aiter_mla.commands.process MODULE:FUNCTION ASKED ANSWER TOLD LIFELINE FOLDER`` is such a process. It
leads a group, to which vLLM's engine and workers belong. The group ends with its caller, however that ends: it would
hold the cards.
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
from typing import Any, BinaryIO

TIMEOUT_S = 3600  # without a word that it tells: a first start of AITER compiles for minutes
GRACE_S = 60  # for a process that has answered and does not end
LOOK_S = 0.5  # how often ``call`` looks for what its process tells
LAST_LINES = 12
LONGEST_SOCKET_FOLDER = 70
"""Characters of a folder in which vLLM can have a socket: it adds 37, and the path of one has at most 107."""

_groups: set[int] = set()
"""The groups of the calls that run. Of the process, as its signals are, which end them all."""

_folders: set[str] = set()
"""That of ``workspace``, where one is entered."""

_telling: list[Callable[[Any], None]] = []
"""Where what this process tells goes; nowhere if nobody called it."""


class EndedError(RuntimeError):
    """A process ended without an answer.

    Args:
        how: as in "was ended by SIGABRT".
        lines: the last that it said.
        who: the process in words.
    """

    def __init__(self, how: str, *lines: str, who: str = "its process") -> None:
        super().__init__(how, *lines)
        self.how, self.lines, self.who = how, lines, who

    def said(self, doing: str = "") -> str:
        """Return in one sentence how it ended, while it was ``doing`` what, and its last line."""
        return f"{self.who} {self.how}" + f" in {doing}" * bool(doing) + f": {self.lines[-1]}" * bool(self.lines)


class SignalError(BaseException):
    """A signal, the first argument, asks this process to end. Not an ``Exception``: no step may take it for its own."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP end the calls that run and raise SignalError; one that is ignored stays so."""
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
    """Let temporary files, those of calls too, lie in one folder, which goes with the outermost such block."""
    if tempfile.tempdir in _folders:
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


def tell(value: Any) -> None:
    """Hand a value to ``heard`` of the call that runs this process, now: it is kept if the process aborts later."""
    for to in _telling:
        to(value)


def call(
    function: str, *arguments: Any, environment: Mapping[str, str] = os.environ, log: int | None = None,
    heard: Callable[[Any], None] = lambda value: None,
) -> Any:  # fmt: skip
    """Return what "module:function" returns, called in a process of its own.

    Args:
        function: its module and name.
        arguments: its arguments, which are pickled.
        environment: the variables of the process.
        log: the descriptor that the process writes to; by default its last lines are kept for EndedError.
        heard: called with each value that the process tells, in order, before this returns or raises.

    Raises:
        EndedError: the process ended without an answer, by an exception or otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="aiter-mla-") as work:
        asked, answer, told, said = (Path(work) / name for name in ("asked", "answer", "told", "said"))
        asked.write_bytes(pickle.dumps(arguments))
        told.touch()
        words, shared = (function, *map(str, (asked, answer, told))), tempfile.gettempdir()
        folder = shared if shared in _folders else work
        with said.open("wb") as out, told.open("rb") as values:
            where = out.fileno() if log is None else log
            how = _run(words, folder, environment, where, lambda: _hear(values, heard), answer)
        last = said.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        if answer.is_file():
            return pickle.loads(answer.read_bytes())
    raise EndedError(how, *last)


def _hear(values: BinaryIO, heard: Callable[[Any], None]) -> bool:
    """Hand on each value that is whole by now, and return whether there was one."""
    count = 0
    while True:
        at = values.tell()
        try:
            value = pickle.load(values)
        except (EOFError, pickle.UnpicklingError):  # none, or the process is about to write the rest
            values.seek(at)
            return count > 0
        heard(value)
        count += 1


def _run(
    words: tuple[str, ...],
    folder: str,
    environment: Mapping[str, str],
    log: int,
    hear: Callable[[], bool],
    answer: Path,
) -> str:
    """Run the process to its end, and end what it leaves behind; return how it ended. ``hear`` runs now and then."""
    end, lifeline = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, *words, str(end), folder], env=_with_folder(environment, folder),
        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(end,),
    )  # fmt: skip
    os.close(end)
    _groups.add(child.pid)
    until, answered = time.monotonic() + TIMEOUT_S, False
    try:
        while (code := _waited(child, min(LOOK_S, max(until - time.monotonic(), 0)))) is None:
            if hear() and not answered:
                until = time.monotonic() + TIMEOUT_S
            if not answered and answer.is_file():
                answered, until = True, time.monotonic() + GRACE_S
            if time.monotonic() >= until:
                return (
                    f"was silent for {TIMEOUT_S} s" if not answered else f"had not ended {GRACE_S} s after its answer"
                )
        hear()
    finally:
        _kill(child.pid)
        child.wait()
        _groups.discard(child.pid)
        os.close(lifeline)
    return f"ended with status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def _waited(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return a process's exit status, None if it runs for so long yet."""
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _with_folder(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the variables with ``folder`` for temporary files, and torch's compile cache where it is without that.

    vLLM's sockets lie where they do without that, too, if ``folder`` is too long for them.
    """
    shared = tempfile.gettempdir()
    outside = Path(shared).parent if shared in _folders else shared
    variables = {**environment, "TMPDIR": folder}
    if len(folder) > LONGEST_SOCKET_FOLDER:
        variables.setdefault("VLLM_RPC_BASE_PATH", str(outside))
    with suppress(KeyError, OSError):  # a container's user may have no name
        variables.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{outside}/torchinductor_{getpass.getuser()}")
    return variables


def main(function: str, asked: str, answer: str, told: str, lifeline: str, folder: str) -> None:
    """Call the function and write what it returns.

    Args:
        function: as for ``call``.
        asked: the file of its pickled arguments.
        answer: the file for what it returns.
        told: the file for what it tells before.
        lifeline: a descriptor. Nothing comes from it; its end says that the caller is gone.
        folder: the temporary files, which go then.
    """
    _end_with_caller(int(lifeline), folder)
    # This module is ``__main__`` here, and what it runs imports it by its name.
    pkgutil.resolve_name("vllm_aiter_mla.commands.process:_telling").append(partial(_write, Path(told)))
    arguments = pickle.loads(Path(asked).read_bytes())
    whole = Path(f"{answer}.whole")
    whole.write_bytes(pickle.dumps(pkgutil.resolve_name(function)(*arguments)))
    whole.rename(answer)


def _write(told: Path, value: Any) -> None:
    with told.open("ab") as out:
        out.write(pickle.dumps(value))


def _end_with_caller(lifeline: int, folder: str) -> None:
    """Fork what ends this group, and removes the command's temporary files, once the caller is gone.

    A process and no thread: code that holds Python's lock, or an abort, would keep a thread from it. Nothing has been
    imported yet that a fork could hurt.
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

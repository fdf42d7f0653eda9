# SPDX-License-Identifier: Apache-2.0
"""A marker around the first calls of AITER and of Triton: a start after one that died in them does not try them again.

AITER's C++ checks and a GPU's fault end the process: without the marker a restarted server would end the same way. A
marker is of a card and a build. It is not of a host, because a pod has a new host name at each start.

A signal that asks the process to end raises in the block, and the marker goes. SIGKILL leaves it: nobody can tell that
from a kernel that ended the process.
"""

import hashlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_aiter_mla import files, locks
from vllm_aiter_mla.admission import ABORTED
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.kernels.aiter.contract import ARCHITECTURES
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.serving.backends import AITER_KERNELS, FAMILIES, Backends
from vllm_aiter_mla.status import status_files

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a process to end."""


def prepare(backends: Backends, folder: Path, rank: int) -> Callable[[str], AbstractContextManager[None]]:
    """Build the back ends of an engine, but for those in whose first calls an earlier start has died.

    Args:
        backends: of the engine.
        folder: where the plugin keeps its files.
        rank: of this worker; rank 0 says when first calls begin.

    Returns:
        What marks the first calls of a back end, by its name.
    """
    marks = dict[str, tuple[str, str]]()  # family and marker's name by back end
    for family, names in FAMILIES.items():
        concerned, arch = set(names) & set(backends.names), backends.platform.arch
        if not concerned or arch == "cpu" or (family == "AITER" and arch not in ARCHITECTURES):
            continue
        marker = marker_of(family, backends.platform)
        died = died_before(folder, marker)
        reason = died or why_not_marked(folder, marker)
        if reason is None:
            marks |= dict.fromkeys(concerned, (family, marker))
            continue
        log.say_once(logging.ERROR, f"{family} is left out: {reason}")
        for name in concerned:
            backends.leave_out(name, reason, aborted=died is not None)
    last = ""  # family that was marked last

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        nonlocal last
        family, marker = marks.get(name, ("", ""))
        if family and rank == 0 and family != last:
            begins = f"{family}'s kernels are called now; a first build takes minutes"
            log.say(logging.INFO, f"{begins}; if the start ends here, the next start leaves them out")
        last = family or last
        with marked(folder, marker) if family else nullcontext():
            yield

    for name in backends.names:
        with mark(name) if name in AITER_KERNELS else nullcontext():  # AITER's import may build
            backends.get(name)
    return mark


@dataclass(frozen=True)
class FirstCall:
    """The marker."""

    run: str  # of the server that is at it
    evidence: files.Stamp = files.stamped("first-call")


def died_before(folder: Path, marker: str) -> str | None:
    """Return why the build must not be called if a process has left its marker, else None.

    Locks that ended processes have left, and whose markers somebody has removed, are removed too.
    """
    for lock in folder.glob("lock-first-call-*"):
        # Where the marker is still there the lock stays: another start that asks at this moment would find it held.
        if not os.path.lexists(folder / f"{lock.name.removeprefix('lock-')}.json"):
            locks.is_held(lock, remove=True)
    for path in folder.glob(f"{marker}-*.json"):
        # Whatever the marker holds: what is not known is not called. If its lock is held, a process is at it. One that
        # ends well removes its marker before its lock.
        if not locks.is_held(_lock_of(path)) and os.path.lexists(path):
            ended = "a start ended in its first call, or somebody ended that start"
            return f"{ABORTED}: {ended}; to try again remove {folder / marker}-*"
    return None


def why_not_marked(folder: Path, marker: str) -> str | None:
    """Return why first calls cannot be marked, or None: a process that they end would not be known of."""
    try:
        with marked(folder, marker):
            return None
    except OSError as error:
        return f"not_marked: if it ended the process, the next start would not know: {error}"


@contextmanager
def marked(folder: Path, marker: str) -> Iterator[None]:
    """Keep a marker in ``folder`` during the block. It stays if the block ends the process, and goes if it raises.

    Each block has a file of its own, so that nobody takes one process's end for another's.

    Raises:
        OSError: the marker cannot be written, or its lock tells nothing, as on a file system without locks.
        SystemExit: a signal asks the process to end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{marker}-{secrets.token_hex(4)}.json"
    lock = _lock_of(path)
    if not locks.hold(lock):
        raise OSError(f"{lock}: somebody else holds it")
    stays = False
    try:
        if not locks.is_held(lock):
            raise OSError(f"{lock}: nobody could tell that it is held")
        with _ended_by_signals() as heard:
            try:
                files.write(path, FirstCall(status_files.start_run()))
                yield
            except SystemExit:
                stays = not heard  # a library has ended the process
                raise
        if heard:  # a library took the first SystemExit for its own
            raise SystemExit(128 + heard[-1])
    finally:
        if not stays:
            path.unlink(missing_ok=True)
            locks.release(lock)


@contextmanager
def _ended_by_signals() -> Iterator[list[int]]:
    """Let a signal that asks this process to end raise in the block, once the handler that it has is through.

    Yields the signals that came.

    The handler of a vLLM worker raises. That of an engine's process goes on, and its front end kills it seconds later.
    Python calls handlers in the main thread, between two of its instructions: while AITER waits for its compiler, and
    not in a call of C++.
    """
    handlers: dict[int, Any] = {}
    heard: list[int] = []

    def end(number: int, frame: Any) -> None:
        heard.append(number)
        if callable(handlers[number]):
            handlers[number](number, frame)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
    replaced = [number for number, one in handlers.items() if callable(one) or one is signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, end)
    try:
        yield heard
    finally:
        for number in replaced:
            if signal.getsignal(number) is end:
                signal.signal(number, handlers[number])


def _lock_of(path: Path) -> Path:
    return path.with_name(f"lock-{path.stem}")


def marker_of(family: str, platform: Platform) -> str:
    """Return how the names of the markers begin for this build of AITER or Triton, this card and this plugin."""
    release = files.stamp("first-call").aiter if family == "AITER" else stopwatch.triton_release()
    about = (family, release, torch.__version__, platform.rocm, platform.arch, files.fingerprint())
    return f"first-call-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}"

# SPDX-License-Identifier: Apache-2.0
"""Mark the first calls of AITER and of Triton, so that a start after one that died in them does not try them again.

Those are the import of AITER, the self-check, and the timing, which calls kernels at more token counts.

AITER's C++ checks and a GPU's fault end the process: without the marker a restarted server would end the same way. A
marker is a file. Its name begins with a prefix that stands for one family of back ends, one build, and one architecture
of cards. The prefix does not name the host, because a pod has a new host name at each start.

A signal that asks the process to end raises in the marked block, which removes the marker. SIGKILL leaves the marker
behind: the next start cannot tell it from a kernel that ended the process.
"""

import hashlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_aiter_mla import files, locks, packages
from vllm_aiter_mla.admission import ABORTED
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.kernels.aiter.contract import ARCHITECTURES
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.serving.backends import AITER_KERNELS, FAMILIES, Backends
from vllm_aiter_mla.status import status_files

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a process to end."""


def build_backends(backends: Backends, folder: Path, rank: int) -> "FirstCallMarks":
    """Build the back ends of an engine, except those in whose first calls an earlier start has died.

    Args:
        backends: of the engine.
        folder: where the plugin keeps its files.
        rank: of this worker; rank 0 logs when first calls begin.

    Returns:
        What marks the first calls of these back ends.
    """
    marks = FirstCallMarks(leave_out_unsafe(backends, folder), folder, rank)
    for name in backends.names:
        with marks.around(name) if name in AITER_KERNELS else nullcontext():  # AITER's import may build
            backends.get(name)
    return marks


class MarkedFamily(NamedTuple):
    """What marks the first calls of one family of back ends."""

    family: str  # "AITER" or "Triton"
    prefix: str  # of the names of its files; see ``prefix_of``


def leave_out_unsafe(backends: Backends, folder: Path) -> dict[str, MarkedFamily]:
    """Leave out the families whose first calls must not be made; return the markers of the others, by back end.

    A first call must not be made if an earlier start has died in it, or if nobody can tell whether one has. It must not
    be made if it cannot be marked, either. A family that has no kernels for this card has no marker.
    """
    remove_abandoned_locks(folder)
    markers, arch = dict[str, MarkedFamily](), backends.platform.arch
    for family, kernels in FAMILIES.items():
        names = set(kernels) & set(backends.names)
        if not names or arch == "cpu" or (family == "AITER" and arch not in ARCHITECTURES):
            continue
        prefix = prefix_of(family, backends.platform)
        died = why_died_before(folder, prefix)
        reason = died or why_liveness_unknown(folder, prefix) or why_cannot_mark(folder, prefix)
        if reason is None:
            markers |= dict.fromkeys(names, MarkedFamily(family, prefix))
            continue
        log.say_once(logging.ERROR, f"{family} is left out: {reason}")
        for name in names:
            backends.leave_out(name, reason, aborted=died is not None)
    return markers


class FirstCallMarks:
    """Marks the first calls of an engine's back ends, and logs on rank 0 whenever those of another family begin.

    If the process ends in such a call, the log ends with the family that was called.

    Args:
        markers: by back end; the calls of the others are not marked.
        folder: where the markers are kept.
        rank: of this worker.
    """

    def __init__(self, markers: Mapping[str, MarkedFamily], folder: Path, rank: int) -> None:
        self._markers, self._folder, self._rank = markers, folder, rank
        self._logged_family: str | None = None

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Keep the marker of the back end called ``name`` during the block, if the back end has one."""
        marker = self._markers.get(name)
        if marker is None:
            yield
            return
        if self._rank == 0 and marker.family != self._logged_family:
            first = f"{marker.family}'s kernels are called now; a first build takes minutes"
            log.say(logging.INFO, f"{first}; if the start ends here, the next start leaves them out")
        self._logged_family = marker.family
        with marked(self._folder, marker.prefix):
            yield

    @contextmanager
    def around_all(self) -> Iterator[None]:
        """Keep the marker of each family during the block, in which kernels of all of them are called.

        A family whose marker cannot be written any more is called without one, because other ranks wait for this one.
        """
        with ExitStack() as markers:
            for prefix in dict.fromkeys(marker.prefix for marker in self._markers.values()):
                with suppress(Exception):
                    markers.enter_context(marked(self._folder, prefix))
            yield


@dataclass(frozen=True)
class FirstCall:
    """The record in a marker's file."""

    run: str  # of the server that makes the call
    evidence: files.Stamp = files.stamp_field("first-call")


def remove_abandoned_locks(folder: Path) -> None:
    """Remove locks that processes have left which died in a first call, and whose markers somebody has removed."""
    for lock in folder.glob("lock-first-call-*"):
        # The lock stays as long as its marker: another start that asks at this moment would find it held.
        if not os.path.lexists(folder / f"{lock.name.removeprefix('lock-')}.json"):
            locks.remove_if_free(lock)


def why_died_before(folder: Path, prefix: str) -> str | None:
    """Return why a build must not be called, if a process has died in its first call and left its marker; else None."""
    if any(held is False for _, held in _markers_of_others(folder, prefix)):
        cause = "an earlier start died in the first call of these kernels, or was killed there"
        return f"{ABORTED}: {cause}; to try again remove {folder / prefix}-*"
    return None


def why_liveness_unknown(folder: Path, prefix: str) -> str | None:
    """Return why nobody can tell whether a process has died in a first call, else None.

    Another user's start in a shared folder may have a lock that this process cannot read.
    """
    for path, held in _markers_of_others(folder, prefix):
        if held is None:
            cause = f"cannot tell whether the start that wrote {path} still runs"
            lock = _lock_of(path).name
            return f"not_marked: {cause}, because {lock} cannot be read; if it has ended, remove both files"
    return None


def _markers_of_others(folder: Path, prefix: str) -> Iterator[tuple[Path, bool | None]]:
    """Yield each marker that is there, whatever its file holds, and what ``locks.is_held`` says of its lock.

    A process holds the lock while it is in its first call, and removes its marker before its lock when it leaves.
    """
    for path in folder.glob(f"{prefix}-*.json"):
        held = locks.is_held(_lock_of(path))
        if os.path.lexists(path):  # asked after the lock: the process may have left the call
            yield path, held


def why_cannot_mark(folder: Path, prefix: str) -> str | None:
    """Return why first calls cannot be marked, else None. Without a marker the next start would repeat the call."""
    try:
        with marked(folder, prefix):
            return None
    except OSError as error:
        return f"not_marked: no marker can be written, so the next start would not notice a crash: {error}"


@contextmanager
def marked(folder: Path, prefix: str) -> Iterator[None]:
    """Keep a marker in ``folder`` during the block. It stays if the block ends the process, and not if it raises.

    Each block has its own file, so that the end of one process is never taken for that of another.

    Raises:
        OSError: the marker cannot be written, or nobody can tell whether its lock is held: a file system without locks.
        SystemExit: a signal asks the process to end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{prefix}-{secrets.token_hex(4)}.json"
    lock = _lock_of(path)
    if not locks.hold(lock):
        raise OSError(f"{lock}: somebody else holds it")
    keep_marker = False
    try:
        if not locks.is_held(lock):
            raise OSError(f"{lock}: nobody could tell that it is held")
        with _ended_by_signals() as received:
            try:
                files.write(path, FirstCall(status_files.ensure_run_name()))
                yield
            except SystemExit:
                keep_marker = not received  # without a signal it was a library that ended the process
                raise
            except Exception as error:
                if received:  # a library has made this error of the first SystemExit
                    raise SystemExit(128 + received[-1]) from error
                raise
            finally:
                if not keep_marker:  # before the signals' own handlers are back
                    path.unlink(missing_ok=True)
        if received:  # a library has swallowed the first SystemExit
            raise SystemExit(128 + received[-1])
    finally:
        if not keep_marker:
            path.unlink(missing_ok=True)
            locks.release(lock)


@contextmanager
def _ended_by_signals() -> Iterator[list[int]]:
    """Let a signal that asks this process to end raise SystemExit in the block, after the signal's own handler has run.

    Yield the list of the signals that have come.

    The handler of a vLLM worker raises. The handler of an engine's process returns, and its front end kills the process
    seconds later. Python calls handlers in the main thread, between two instructions: while AITER waits for its
    compiler, but not during a call of C++.
    """
    handlers: dict[int, Any] = {}
    received: list[int] = []

    def end(number: int, frame: Any) -> None:
        received.append(number)
        if callable(handlers[number]):
            handlers[number](number, frame)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
    replaced = [number for number, handler in handlers.items() if callable(handler) or handler is signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, end)
    try:
        yield received
    finally:
        for number in replaced:
            if signal.getsignal(number) is end:
                signal.signal(number, handlers[number])


def _lock_of(path: Path) -> Path:
    """Return the lock file of a marker's file."""
    return path.with_name(f"lock-{path.stem}")


def prefix_of(family: str, platform: Platform) -> str:
    """Return the prefix of markers for the builds of this plugin and of ``family`` on this card's architecture.

    Args:
        family: "AITER" or "Triton".
        platform: of this worker.
    """
    release = files.stamp("first-call").aiter if family == "AITER" else stopwatch.triton_release()
    about = (family, release, torch.__version__, platform.rocm, platform.arch, packages.fingerprint())
    return f"first-call-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}"

# SPDX-License-Identifier: Apache-2.0
"""Mark the first calls of AITER and of Triton. If a start dies in such a call, the next start does not repeat the call.

First calls are the import of AITER, the self-check, and the timing, which calls kernels at more token counts.

AITER's C++ checks and a GPU's fault end the process. Without the marker a restarted server would end the same way. A
marker is a file. Its name begins with a prefix that stands for one family of back ends, one build, and one architecture
of cards. The prefix does not name the host, because a pod has a new host name at each start.

A signal that asks the process to end raises in the marked block, and the block then removes the marker. SIGKILL leaves
the marker behind: the next start cannot tell a SIGKILL from a kernel that ended the process.
"""

import hashlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
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
from vllm_aiter_mla.status import liveness

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a process to end."""


def build_backends(backends: Backends, folder: Path, rank: int) -> "FirstCallMarkers":
    """Build the back ends of an engine, except those whose first calls ended an earlier start.

    Args:
        backends: the back ends of the engine.
        folder: the folder of the plugin's files.
        rank: the rank of this worker. Rank 0 logs when first calls begin.

    Returns:
        The markers for the first calls of these back ends.
    """
    markers = FirstCallMarkers(leave_out_unsafe_families(backends, folder), folder, rank)
    for name in backends.names:
        with markers.mark(name) if name in AITER_KERNELS else nullcontext():  # AITER's import may build
            backends.get(name)
    return markers


class FamilyMarker(NamedTuple):
    """The marker for the first calls of one family of back ends."""

    family: str  # "AITER" or "Triton"
    prefix: str  # start of the names of the marker's files; see ``prefix_of``


def leave_out_unsafe_families(backends: Backends, folder: Path) -> dict[str, FamilyMarker]:
    """Leave out the families whose first calls must not be made; return the markers of the others, by back end.

    A first call must not be made if an earlier start died in it, or if nobody can tell whether one died. A call that
    cannot be marked must not be made either. A family that has no kernels for this card has no marker.
    """
    remove_abandoned_locks(folder)
    markers, arch = dict[str, FamilyMarker](), backends.platform.arch
    for family, kernels in FAMILIES.items():
        names = set(kernels) & set(backends.names)
        if not names or arch == "cpu" or (family == "AITER" and arch not in ARCHITECTURES):
            continue
        prefix = prefix_of(family, backends.platform)
        death_reason = earlier_death_reason(folder, prefix)
        reason = death_reason or unknown_liveness_reason(folder, prefix) or no_marker_reason(folder, prefix)
        if reason is None:
            markers |= dict.fromkeys(names, FamilyMarker(family, prefix))
            continue
        log.say_once(logging.ERROR, f"{family} is left out: {reason}")
        for name in names:
            backends.leave_out(name, reason, aborted=death_reason is not None)
    return markers


class FirstCallMarkers:
    """Mark the first calls of an engine's back ends. Rank 0 logs each time that the calls of another family begin.

    If the process ends in a call that ``mark`` marks, the last line of the log names the family that was called.

    Args:
        markers: the markers by back end. Calls of other back ends are not marked.
        folder: the folder of the markers.
        rank: the rank of this worker.
    """

    def __init__(self, markers: Mapping[str, FamilyMarker], folder: Path, rank: int) -> None:
        self._markers, self._folder, self._rank = markers, folder, rank
        self._logged_family: str | None = None

    @contextmanager
    def mark(self, name: str) -> Iterator[None]:
        """Keep the marker of the back end ``name`` during the block, if the back end has a marker."""
        marker = self._markers.get(name)
        if marker is None:
            yield
            return
        if self._rank == 0 and marker.family != self._logged_family:
            message = f"{marker.family}'s kernels are called now; a first build takes minutes"
            log.say(logging.INFO, f"{message}; if the start ends here, the next start leaves them out")
        self._logged_family = marker.family
        with first_call_marker(self._folder, marker.prefix):
            yield

    @contextmanager
    def mark_all(self, names: Iterable[str]) -> Iterator[None]:
        """Keep the markers of several back ends during the block, which calls them in turn. No line is logged.

        Raises:
            OSError: a marker can no longer be written, so none of these calls may be made.
        """
        with ExitStack() as markers:
            for prefix in dict.fromkeys(self._markers[name].prefix for name in names if name in self._markers):
                markers.enter_context(first_call_marker(self._folder, prefix))
            yield


@dataclass(frozen=True)
class FirstCall:
    """The record in a marker's file."""

    run: str  # name of the run of the server that makes the call
    evidence: files.Stamp = files.stamp_field("first-call")


def remove_abandoned_locks(folder: Path) -> None:
    """Remove the locks of processes that died in a first call, if somebody has removed the marker."""
    for lock in folder.glob("lock-first-call-*"):
        # A lock with a marker is not touched: another start that looks at that moment would find it held.
        if not os.path.lexists(folder / f"{lock.name.removeprefix('lock-')}.json"):
            locks.remove_if_free(lock)


def earlier_death_reason(folder: Path, prefix: str) -> str | None:
    """Return why a build must not be called if a process died in marked calls and left its marker, else None."""
    if any(is_held is False for _, is_held in _other_markers(folder, prefix)):
        cause = "an earlier start died in the first call of these kernels, or while it timed them, or was killed there"
        return f"{ABORTED}: {cause}; to try again remove {folder / prefix}-*"
    return None


def unknown_liveness_reason(folder: Path, prefix: str) -> str | None:
    """Return why nobody can tell whether a process died in a first call, else None.

    In a shared folder, the lock of another user's start may not be readable for this process.
    """
    for path, is_held in _other_markers(folder, prefix):
        if is_held is None:
            cause = f"cannot tell whether the start that wrote {path} still runs"
            lock = _lock_of(path).name
            return f"not_marked: {cause}, because {lock} cannot be read; if it has ended, remove both files"
    return None


def _other_markers(folder: Path, prefix: str) -> Iterator[tuple[Path, bool | None]]:
    """Yield each marker in the folder with the result of ``locks.is_held`` for its lock. No file is read.

    A process holds the lock while it is in its first call. When it leaves, it removes its marker before its lock.
    """
    for path in folder.glob(f"{prefix}-*.json"):
        is_held = locks.is_held(_lock_of(path))
        if os.path.lexists(path):  # look after asking for the lock: the process may have left the call by now
            yield path, is_held


def no_marker_reason(folder: Path, prefix: str) -> str | None:
    """Return why first calls cannot be marked, else None. Without a marker the next start would repeat the call."""
    try:
        with first_call_marker(folder, prefix):
            return None
    except OSError as error:
        return f"not_marked: no marker can be written, so the next start would not notice a crash: {error}"


@contextmanager
def first_call_marker(folder: Path, prefix: str) -> Iterator[None]:
    """Keep a marker in ``folder`` during the block. The marker stays only if the block ends the process.

    If the block raises, the marker is removed, except after a SystemExit that no signal caused. Each block has its own
    file, so that the end of one process is never taken for the end of another.

    Raises:
        OSError: the marker cannot be written, or the file system has no locks.
        SystemExit: a signal asked the process to end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{prefix}-{secrets.token_hex(4)}.json"
    lock = _lock_of(path)
    if not locks.try_hold(lock):
        raise OSError(f"{lock}: another process holds this lock")
    keep_marker = False
    try:
        if not locks.is_held(lock):
            raise OSError(f"{lock}: the lock was taken, but it cannot be seen as held")
        with _exit_on_signals() as received_signals:
            try:
                files.write_record(path, FirstCall(liveness.ensure_run_name()))
                yield
            except SystemExit:
                keep_marker = not received_signals  # without a signal, a library ended the process
                raise
            except Exception as error:
                if received_signals:  # a library has turned the first SystemExit into this error
                    raise SystemExit(128 + received_signals[-1]) from error
                raise
            finally:
                if not keep_marker:  # before the signals' own handlers are back
                    path.unlink(missing_ok=True)
        if received_signals:  # a library has swallowed the first SystemExit
            raise SystemExit(128 + received_signals[-1])
    finally:
        if not keep_marker:
            path.unlink(missing_ok=True)
            locks.release(lock)


@contextmanager
def _exit_on_signals() -> Iterator[list[int]]:
    """Raise SystemExit in the block when a signal asks this process to end, after the signal's own handler has run.

    Yield the list of the signals that the process received.

    The handler of a vLLM worker raises. The handler of an engine's process returns, and its front end kills the process
    seconds later. Python calls handlers in the main thread between two instructions. So a handler runs while AITER
    waits for its compiler, but not during a call of C++.
    """
    handlers: dict[int, Any] = {}
    received_signals: list[int] = []

    def raise_exit(number: int, frame: Any) -> None:
        received_signals.append(number)
        if callable(handlers[number]):
            handlers[number](number, frame)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    caught_signals = [number for number, handler in handlers.items() if callable(handler) or handler is signal.SIG_DFL]
    for number in caught_signals:
        signal.signal(number, raise_exit)
    try:
        yield received_signals
    finally:
        for number in caught_signals:
            if signal.getsignal(number) is raise_exit:
                signal.signal(number, handlers[number])


def _lock_of(path: Path) -> Path:
    """Return the lock file of a marker's file."""
    return path.with_name(f"lock-{path.stem}")


def prefix_of(family: str, platform: Platform) -> str:
    """Return the prefix of markers for the builds of this plugin and of ``family`` on this card's architecture.

    Args:
        family: "AITER" or "Triton".
        platform: the platform of this worker.
    """
    release = files.stamp("first-call").aiter if family == "AITER" else stopwatch.triton_release()
    build_facts = (family, release, torch.__version__, platform.rocm, platform.arch, packages.fingerprint())
    return f"first-call-{hashlib.sha256(repr(build_facts).encode()).hexdigest()[:16]}"

# SPDX-License-Identifier: Apache-2.0
"""A marker around the first calls of AITER and of Triton: a start after one that died in them does not try them again.

AITER's C++ checks and a GPU's fault end the process: without the marker a restarted server would end the same way.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from vllm_aiter_mla import files, status
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.serving.backends import FAMILIES, Backends


def prepare(
    backends: Backends, folder: Path, engine: str | None, rank: int
) -> Callable[[str], AbstractContextManager[None]]:
    """Build the back ends of an engine, but for those in whose first calls an earlier start has died.

    Args:
        backends: of the engine.
        folder: where the plugin keeps its files.
        engine: index of the data-parallel engine, None if unknown.
        rank: of this worker.

    Returns:
        What marks the first calls of a back end, by its name.
    """
    paths = dict[str, Path]()
    for family, names in FAMILIES.items():
        concerned = set(names) & set(backends.names)
        if not concerned or backends.platform.arch == "cpu":
            continue
        path = path_of(folder, family, backends.platform.arch, engine, rank)
        reason = died_before(path) or why_not_marked(path)
        if reason is None:
            paths |= dict.fromkeys(concerned, path)
            continue
        log.say_once(logging.ERROR, f"{family} is left out: {reason}")
        for name in concerned:
            backends.leave_out(name, reason)

    def mark(name: str) -> AbstractContextManager[None]:
        return marked(paths[name]) if name in paths else nullcontext()

    for name in backends.names:
        with mark(name):  # AITER's import may build
            backends.get(name)
    return mark


@dataclass(frozen=True)
class FirstCall:
    """The marker."""

    run: str  # of the server that is at it
    evidence: files.Stamp = files.stamped("first-call")


def died_before(path: Path) -> str | None:
    """Return why the build must not be called if the marker of a process that has ended is there, else None."""
    # Whatever the marker holds: what is not known is not called. If its lock is held, another server is at it.
    if not os.path.lexists(path) or files.is_held(_lock_of(path)) is not False:
        return None
    return f"aborted_before: an earlier start ended in its first call; remove {path} to try again"


def why_not_marked(path: Path) -> str | None:
    """Return why first calls cannot be marked, or None: a process that they end would not be known of."""
    try:
        with marked(path):
            return None
    except OSError as error:
        return f"not_marked: if it ended the process, the next start would not know: {error}"


@contextmanager
def marked(path: Path) -> Iterator[None]:
    """Keep a marker at ``path`` during the block. It stays if the process dies, and goes if the block raises.

    The marker of another process that is still at it stays as it is; the block then runs without one of its own.

    Raises:
        OSError: the marker cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock_of(path)
    if not files.hold(lock):
        yield
        return
    try:
        files.write(path, FirstCall(status.record.start_run()))
        yield
    finally:
        path.unlink(missing_ok=True)
        files.release(lock)


def _lock_of(path: Path) -> Path:
    return path.with_name(f"lock-{path.stem}")


def path_of(folder: Path, family: str, arch: str, engine: str | None, rank: int) -> Path:
    """Return the marker of one rank for this build of AITER or Triton, this card and this plugin."""
    stamp = files.stamp("first-call")
    release = stamp.aiter if family == "AITER" else stopwatch.triton_release()
    about = f"{family} {release} {arch} {stamp.host} {files.fingerprint()}"
    return folder / f"first-call-{hashlib.sha256(about.encode()).hexdigest()[:16]}-{engine or 0}-{rank}.json"

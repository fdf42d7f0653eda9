# SPDX-License-Identifier: Apache-2.0
"""A marker around the first calls of AITER: a start after one that died in them does not try that build again.

AITER's C++ checks end the process: without the marker a restarted server would end the same way, without a line.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_aiter_mla import files, status


@dataclass(frozen=True)
class FirstCall:
    """The marker."""

    run: str  # of the server that is at it
    evidence: files.Stamp = files.stamped("first-call")


def died_before(path: Path) -> str | None:
    """Return why the build must not be called if the marker of an ended server is there, else None.

    Raises:
        OSError: the marker cannot be read.
        ValueError: it holds something else.
    """
    try:
        run = files.read(FirstCall, path).run
    except FileNotFoundError:
        return None
    mine = status.start_run()
    # A worker of this run that has left its marker is dead too: each rank has a marker of its own.
    if run != mine and not status.has_ended(run, mine):
        return None  # another server is at it
    return f"aborted_before: an earlier start ended in its first call; remove {path} to try again"


@contextmanager
def marked(path: Path) -> Iterator[None]:
    """Keep a marker at ``path`` during the block. It stays if the process dies, and goes if the block raises.

    Raises:
        OSError: the marker cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, FirstCall(status.start_run()))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def path_of(folder: Path, arch: str, engine: str | None, rank: int) -> Path:
    """Return the marker of one rank for this build of AITER, this card and this plugin."""
    stamp = files.stamp("first-call")[files.KEY]
    about = f"{arch} {stamp['aiter']} {stamp['host']} {files.fingerprint()}"
    return folder / f"first-call-{hashlib.sha256(about.encode()).hexdigest()[:16]}-{engine or 0}-{rank}.json"

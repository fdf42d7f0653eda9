# SPDX-License-Identifier: Apache-2.0
"""The status files of a server's run, and the locks that tell whether the server still runs.

A run is one server: its front end names it in the environment, and its workers inherit the name. The front end holds
the run's lock. Each engine of a worker holds a lock of its own, which tells whether the engine outlives its front end.
"""

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from vllm_aiter_mla import files, locks
from vllm_aiter_mla.status.record import RankStatus

RUN_VARIABLE = "AITER_MLA_RUN"
"""Environment variable that names this server's run; the front end sets it and its workers inherit it."""
LOCK_PREFIX = "lock-status-"
"""Start of the name of each lock file: of a run's, which its front end holds, and of those that its engines hold."""
UNFINISHED_S = 24 * 3600
"""Seconds after which nobody writes a file any more: the process that began to write was killed."""


def run_name() -> str:
    """Name this server's run in the environment, unless a parent process has done so, and return the name."""
    return os.environ.setdefault(RUN_VARIABLE, f"{host_id()}-{os.getpid()}-{secrets.token_hex(4)}")


def host_id() -> str:
    """Return how the names of this machine's runs begin: other machines may share the folder."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def hold_run_lock(folder: Path) -> str:
    """Return the name of this server's run; hold its lock to the end of this process, unless another process does.

    The front end calls this first. Workers on another machine (Ray) call it too: they have a folder of their own, where
    the first worker holds the lock.

    Args:
        folder: where the plugin keeps its files; made if it is missing.

    Raises:
        OSError: the lock cannot be taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = run_name()
    locks.hold(_lock_of_run(folder, run))
    return run


def renew_run_lock(folder: Path) -> str:
    """Return the name of this server's run, whose lock may have been removed with the folder: then join the run again.

    Raises:
        OSError: the lock cannot be taken.
    """
    run = run_name()
    return hold_run_lock(folder) if locks.is_held(_lock_of_run(folder, run)) is False else run


def path_of(folder: Path, record: RankStatus) -> Path:
    """Return where the status file of one rank of a run is, ``status-RUN-ENGINE-RANK.json``."""
    return folder / f"status-{_name_of(record)}.json"


def write(folder: Path, record: RankStatus) -> None:
    """Write the status file of one rank of this server's run.

    Holds the lock of the record's engine to the end of this process. Removes the files of this machine's servers that
    have ended, and files that nobody has finished for ``UNFINISHED_S``.

    Args:
        folder: where the plugin keeps its files; made if it is missing.
        record: of ``EngineStatus.make_record`` or ``record_of_skipped_engine``, with the run.

    Raises:
        OSError: the file cannot be written, or a lock cannot be taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A worker on its front end's machine does not take the run's lock: if it is free, the front end has ended.
    if not record.run.startswith(f"{host_id()}-"):
        hold_run_lock(folder)
    # Only this process has an engine of this ``instance``. An engine that is skipped as a whole has no ``instance``:
    # each process of the run that reads its config writes the same record, and the lock of one process is enough.
    locks.hold(_lock_of_engine(folder, record))
    files.write(path_of(folder, record), record)
    _remove_ended(folder, record)
    files.remove_old(folder, files.UNFINISHED_PATTERN, UNFINISHED_S)


def _remove_ended(folder: Path, mine: RankStatus) -> None:
    """Remove status files and locks of servers of this machine that have ended; ``mine`` is of a server that lives.

    Files of another machine that shares the folder stay for ``files.UNUSED_AFTER_S``, because its locks may mean
    nothing here: a pod has a new host name at each start. A file of another version is removed too: its name has its
    run.
    """
    for path in folder.glob("status-*-*.json"):
        with suppress(Exception):  # another program's file: it stays
            run = _run_of(path)
            if run != mine.run and _has_ended(folder, run) and _is_removable(path, mine.evidence.host):
                path.unlink(missing_ok=True)
                for lock in _locks_of_run(folder, run):
                    locks.remove_if_free(lock)
    for lock in folder.glob(f"{LOCK_PREFIX}{host_id()}-*"):
        with suppress(Exception):
            locks.remove_if_free(lock)


def _is_removable(path: Path, host: str) -> bool:
    """Return whether a file of a run that has ended is a status file that this host wrote, or one that is old."""
    try:
        data = files.load(path)
    except ValueError:  # a crash of the host has left half a file; the run's name has the host
        return path.name.startswith(f"status-{host_id()}-")
    is_old = time.time() - path.lstat().st_mtime > files.UNUSED_AFTER_S
    return files.layout_of(data)[0] == "status" and (data[files.STAMP_KEY]["host"] == host or is_old)


def _has_ended(folder: Path, run: str) -> bool:
    """Return whether neither the front end of a run nor any of its engines lives."""
    return all(locks.is_held(lock) is False for lock in _locks_of_run(folder, run))


def _locks_of_run(folder: Path, run: str) -> list[Path]:
    return [lock for lock in folder.glob(f"{LOCK_PREFIX}*") if f"{lock.name}-".startswith(f"{LOCK_PREFIX}{run}-")]


def _run_of(path: Path) -> str:
    """Return the run of a status file."""
    return path.stem.removeprefix("status-").rsplit("-", 2)[0]


def read_all(folder: Path, run: str, on_unreadable: Callable[[str], None]) -> list[RankStatus]:
    """Return the records of the status files in a folder, sorted by the files' names.

    Args:
        folder: where the plugin keeps its files.
        run: the name of one server's run, or "*" for all runs.
        on_unreadable: takes one line for each file that cannot be read, or holds something else. A file of a run
            whose locks are all free is passed over: a server of another version has left it.
    """
    records = []
    for path in sorted(folder.glob(f"status-{run}-*.json")):
        try:
            records.append(files.read(RankStatus, path))
        except FileNotFoundError:
            continue  # removed since the folder was listed
        except (OSError, ValueError) as error:
            if not (_locks_of_run(folder, _run_of(path)) and _has_ended(folder, _run_of(path))):
                on_unreadable(str(error))
    return records


def is_serving(folder: Path, records: Sequence[RankStatus]) -> bool | None:
    """Return whether an engine and its front end live; None if that cannot be told.

    A script may shut its engine down and live on. An engine that has a rank on another machine (Ray) is taken to live
    as long as its front end, because the lock of that rank may mean nothing here.

    Args:
        folder: where the plugin keeps its files.
        records: of the engine's ranks, at least one.
    """
    front_end_lives = locks.is_held(_lock_of_run(folder, records[0].run))
    all_here = all(record.evidence.host == socket.gethostname() for record in records)
    return is_engine_alive(folder, records) if front_end_lives and all_here else front_end_lives


def is_engine_alive(folder: Path, records: Sequence[RankStatus]) -> bool | None:
    """Return whether a process that wrote one of these records still lives; None if that cannot be told."""
    held = [locks.is_held(_lock_of_engine(folder, record)) for record in records]
    return True if True in held else None if None in held else False


def _name_of(record: RankStatus) -> str:
    return f"{record.run}-{record.engine or 0}-{record.rank}"


# The name of a lock may come from a file, so ``Path.name`` cuts off whatever would lead to another folder.


def _lock_of_run(folder: Path, run: str) -> Path:
    return folder / f"{LOCK_PREFIX}{Path(run).name}"


def _lock_of_engine(folder: Path, record: RankStatus) -> Path:
    instance = f"-{record.instance}" if record.instance else ""
    return folder / f"{LOCK_PREFIX}{Path(f'{_name_of(record)}{instance}').name}"

# SPDX-License-Identifier: Apache-2.0
"""The status files of a server's run, and the locks that tell whether the server still runs.

A run is one server. Its front end names the run in the environment, and its workers inherit the name. The front end
holds the run's lock. Each engine of a worker has its own lock, which tells whether the engine outlives its front end.
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
"""Environment variable with the name of this server's run. The front end sets it, and its workers inherit it."""
LOCK_PREFIX = "lock-status-"
"""Start of the name of each lock file: of the run's lock, which its front end holds, and of its engines' locks."""
MAX_UNFINISHED_SECONDS = 24 * 3600
"""Age at which an unfinished file may be removed: the process that began to write the file was killed."""


def ensure_run_name() -> str:
    """Name this server's run in the environment, unless a parent process has named it; return the name."""
    return os.environ.setdefault(RUN_VARIABLE, f"{host_hash()}-{os.getpid()}-{secrets.token_hex(4)}")


def host_hash() -> str:
    """Return the prefix of the names of this machine's runs: other machines may share the folder."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def ensure_run_lock(folder: Path) -> None:
    """Hold the lock of this server's run until this process ends, unless another process holds it.

    The front end calls this function first. Workers on another machine (Ray) call it too. They have another folder,
    where the first worker holds the lock.

    Args:
        folder: where the plugin keeps its files; made if it is missing.

    Raises:
        OSError: the lock cannot be taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    locks.hold(_run_lock_path(folder, ensure_run_name()))


def renew_run_lock(folder: Path) -> None:
    """Take the lock of this server's run again if somebody has removed the lock file.

    Raises:
        OSError: the lock cannot be taken.
    """
    if locks.is_held(_run_lock_path(folder, ensure_run_name())) is False:
        ensure_run_lock(folder)


def status_path(folder: Path, record: RankStatus) -> Path:
    """Return the path of the status file of one rank of a run, ``status-RUN-ENGINE-RANK.json``."""
    return folder / f"status-{_rank_name(record)}.json"


def write_status(folder: Path, record: RankStatus) -> None:
    """Write the status file of one rank of this server's run.

    Hold the lock of the record's engine to the end of this process. Remove the files of this machine's servers that
    have ended, and unfinished files that are older than ``MAX_UNFINISHED_SECONDS``.

    Args:
        folder: where the plugin keeps its files; made if it is missing.
        record: of ``EngineStatus.make_record`` or ``record_of_skipped_engine``, with the run.

    Raises:
        OSError: the file cannot be written, or a lock cannot be taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A worker on its front end's machine does not take the run's lock: a free lock means that the front end has ended.
    if not record.run.startswith(f"{host_hash()}-"):
        ensure_run_lock(folder)
    # Only this process has an engine of this ``engine_id``. An engine that is skipped as a whole has no ``engine_id``:
    # each process of the run that reads its config writes the same record, and the lock of one process is enough.
    locks.hold(_engine_lock_path(folder, record))
    files.write_record(status_path(folder, record), record)
    _remove_files_of_ended_servers(folder, record)
    files.remove_old_files(folder, files.UNFINISHED_PATTERN, MAX_UNFINISHED_SECONDS)


def _remove_files_of_ended_servers(folder: Path, live_record: RankStatus) -> None:
    """Remove status files and locks of servers of this machine that have ended. ``live_record`` is of this server.

    Files of another machine that shares the folder stay for ``files.MAX_UNUSED_SECONDS``, because its locks may mean
    nothing here: a pod has a new host name at each start. A file of another version is removed too, because its name
    contains its run.
    """
    for path in folder.glob("status-*-*.json"):
        with suppress(Exception):  # a file of another program stays
            run = _run_of_file(path)
            is_other_run = run != live_record.run
            if is_other_run and _has_ended(folder, run) and _is_removable(path, live_record.evidence.host):
                path.unlink(missing_ok=True)
                for lock in _lock_paths_of_run(folder, run):
                    locks.remove_if_free(lock)
    for lock in folder.glob(f"{LOCK_PREFIX}{host_hash()}-*"):
        with suppress(Exception):
            locks.remove_if_free(lock)


def _is_removable(path: Path, host: str) -> bool:
    """Return whether a file of a run that has ended is a status file of this host, or an old status file."""
    try:
        data = files.load(path)
    except ValueError:  # a crash of the host has left half a file; the run's name contains the host
        return path.name.startswith(f"status-{host_hash()}-")
    is_old = time.time() - path.lstat().st_mtime > files.MAX_UNUSED_SECONDS
    return files.layout_of(data)[0] == "status" and (data[files.STAMP_KEY]["host"] == host or is_old)


def _has_ended(folder: Path, run: str) -> bool:
    """Return whether neither the front end of a run nor any of its engines lives."""
    return all(locks.is_held(lock) is False for lock in _lock_paths_of_run(folder, run))


def _lock_paths_of_run(folder: Path, run: str) -> list[Path]:
    return [lock for lock in folder.glob(f"{LOCK_PREFIX}*") if f"{lock.name}-".startswith(f"{LOCK_PREFIX}{run}-")]


def _run_of_file(path: Path) -> str:
    """Return the run of a status file."""
    return path.stem.removeprefix("status-").rsplit("-", 2)[0]


def read_records(folder: Path, run: str, on_unreadable: Callable[[str], None]) -> list[RankStatus]:
    """Return the records of the status files in a folder, in the order of the files' names.

    Args:
        folder: where the plugin keeps its files.
        run: the name of one server's run, or "*" for all runs.
        on_unreadable: takes one line for each file that cannot be read or is not such a record. If all locks of its
            run are free, a server of another version has left the file, and ``on_unreadable`` is not called.
    """
    records = []
    for path in sorted(folder.glob(f"status-{run}-*.json")):
        try:
            records.append(files.read_record(RankStatus, path))
        except FileNotFoundError:
            continue  # removed since the folder was listed
        except (OSError, ValueError) as error:
            if not (_lock_paths_of_run(folder, _run_of_file(path)) and _has_ended(folder, _run_of_file(path))):
                on_unreadable(str(error))
    return records


def is_serving(folder: Path, records: Sequence[RankStatus]) -> bool | None:
    """Return whether an engine and its front end live; None if this is not known.

    A script may shut its engine down and live on. If an engine has a rank on another machine (Ray), only the lock of
    the front end is read, because the lock of that rank may mean nothing here.

    Args:
        folder: where the plugin keeps its files.
        records: of the engine's ranks, at least one.
    """
    is_front_end_alive = locks.is_held(_run_lock_path(folder, records[0].run))
    is_local = all(record.evidence.host == socket.gethostname() for record in records)
    return is_engine_alive(folder, records) if is_front_end_alive and is_local else is_front_end_alive


def is_engine_alive(folder: Path, records: Sequence[RankStatus]) -> bool | None:
    """Return whether a process that wrote one of these records still lives; None if this is not known."""
    lock_states = [locks.is_held(_engine_lock_path(folder, record)) for record in records]
    return True if True in lock_states else None if None in lock_states else False


def _rank_name(record: RankStatus) -> str:
    return f"{record.run}-{record.dp_index or 0}-{record.rank}"


# The name of a lock may come from a file, so ``Path.name`` removes any part that would lead to another folder.


def _run_lock_path(folder: Path, run: str) -> Path:
    return folder / f"{LOCK_PREFIX}{Path(run).name}"


def _engine_lock_path(folder: Path, record: RankStatus) -> Path:
    engine_suffix = f"-{record.engine_id}" if record.engine_id else ""
    return folder / f"{LOCK_PREFIX}{Path(f'{_rank_name(record)}{engine_suffix}').name}"

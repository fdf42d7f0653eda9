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
from collections.abc import Callable, Iterable, Sequence
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
    locks.try_hold(_run_lock_path(folder, ensure_run_name()))


def renew_run_lock(folder: Path) -> None:
    """Take the lock of this server's run again if somebody has removed the lock file.

    Raises:
        OSError: the lock cannot be taken.
    """
    if locks.seems_held(_run_lock_path(folder, ensure_run_name())) is False:
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
    locks.try_hold(_engine_lock_path(folder, record))
    files.write_record(status_path(folder, record), record)
    _remove_files_of_ended_servers(folder, record)
    files.remove_old_files(folder, files.UNFINISHED_PATTERN, MAX_UNFINISHED_SECONDS)


def _remove_files_of_ended_servers(folder: Path, live_record: RankStatus) -> None:
    """Remove status files and locks of servers of this machine that have ended. ``live_record`` is of this server.

    Files of another machine that shares the folder stay for ``files.MAX_UNUSED_SECONDS``, because its locks may mean
    nothing here: a pod has a new host name at each start. So do files without a lock: somebody may have removed the
    locks of a server that lives. A file of another version is removed too, because its name contains its run.
    """
    paths_by_run: dict[str, list[Path]] = {}
    for path in folder.glob("status-*-*.json"):
        paths_by_run.setdefault(_run_of_file(path), []).append(path)
    for run, paths in paths_by_run.items():
        if run != live_record.run:
            _remove_files_of_run(_lock_paths_of_run(folder, run), paths, live_record.evidence.host)
    # The lock of an engine that has ended stays as long as a file of its run, which otherwise nobody could judge.
    locks_with_files = {
        lock
        for run, paths in paths_by_run.items()
        if any(map(Path.exists, paths))
        for lock in _lock_paths_of_run(folder, run)
    }
    for lock in folder.glob(f"{LOCK_PREFIX}{host_hash()}-*"):
        if lock not in locks_with_files:
            with suppress(Exception):
                locks.remove_if_free(lock)


def _remove_files_of_run(lock_paths: Sequence[Path], paths: Sequence[Path], host: str) -> None:
    """Remove the status files of another run if the run has ended, then its locks.

    Args:
        lock_paths: all locks of the run.
        paths: all status files of the run.
        host: this host. A file of another host, or of a run without a lock, is removed only if it is old.
    """
    has_ended = _has_ended(lock_paths)
    if lock_paths and not has_ended:
        return
    for path in paths:
        with suppress(Exception):  # a file of another program stays
            if _is_removable(path, host if has_ended else None):
                path.unlink(missing_ok=True)
    if not any(path.exists() for path in paths):
        for lock in lock_paths:
            with suppress(Exception):
                locks.remove_if_free(lock)


def _is_removable(path: Path, host: str | None) -> bool:
    """Return whether a file is an old status file, or a status file of ``host`` if that is not None."""
    is_old = time.time() - path.lstat().st_mtime > files.MAX_UNUSED_SECONDS
    try:
        data = files.load(path)
    except ValueError:  # a crash of the host has left half a file; the run's name contains the host
        return is_old or (host is not None and path.name.startswith(f"status-{host_hash()}-"))
    return files.layout_of(data)[0] == "status" and (is_old or data[files.STAMP_KEY]["host"] == host)


def _has_ended(lock_paths: Sequence[Path]) -> bool:
    """Return whether neither the front end of a run nor any of its engines lives; False if this is not known.

    ``lock_paths`` are all locks of the run. Without a lock nothing is known.
    """
    return bool(lock_paths) and all(is_held is False for is_held in locks.held_states(lock_paths).values())


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
            if not _has_ended(_lock_paths_of_run(folder, _run_of_file(path))):
                on_unreadable(str(error))
    return records


class ServerLocks:
    """Which engines and front ends live, by the locks in a folder. All locks are read once, when the object is made.

    Args:
        folder: where the plugin keeps its files.
        records: of the engines that the methods are asked about.
    """

    def __init__(self, folder: Path, records: Iterable[RankStatus]) -> None:
        paths = {
            path
            for record in records
            for path in (_run_lock_path(folder, record.run), _engine_lock_path(folder, record))
        }
        # Somebody may have removed the lock of a server that lives, so a missing lock tells nothing.
        self._folder, self._states = folder, locks.held_states(filter(os.path.lexists, paths))

    def is_serving(self, records: Sequence[RankStatus]) -> bool | None:
        """Return whether an engine and its front end live; None if this is not known.

        A script may shut its engine down and live on. If an engine has a rank on another machine (Ray), only the lock
        of the front end counts, because the lock of that rank may mean nothing here.

        Args:
            records: of the engine's ranks, at least one.
        """
        is_front_end_alive = self._states.get(_run_lock_path(self._folder, records[0].run))
        is_local = all(map(_is_of_this_host, records))
        return self.is_engine_alive(records) if is_front_end_alive and is_local else is_front_end_alive

    def is_engine_alive(self, records: Sequence[RankStatus]) -> bool | None:
        """Return whether a process that wrote one of these records still lives; None if this is not known."""
        states = [self._is_rank_alive(record) for record in records]
        return True if True in states else None if None in states else False

    def without_ended_ranks(self, records: Sequence[RankStatus]) -> list[RankStatus]:
        """Return the records, without ranks of this host that have ended while another rank of their engine lives.

        An earlier engine of the same run may have left such a record, which the later engine has not yet replaced.
        """
        living_engines = {_engine_name(record) for record in records if self._is_rank_alive(record)}
        return [
            record for record in records
            if not (_engine_name(record) in living_engines and _is_of_this_host(record))
            or self._is_rank_alive(record) is not False
        ]  # fmt: skip

    def _is_rank_alive(self, record: RankStatus) -> bool | None:
        return self._states.get(_engine_lock_path(self._folder, record))


def is_serving(folder: Path, records: Sequence[RankStatus]) -> bool | None:
    """Return whether an engine and its front end live; see ``ServerLocks.is_serving``."""
    return ServerLocks(folder, records).is_serving(records)


def _is_of_this_host(record: RankStatus) -> bool:
    return record.evidence.host == socket.gethostname()


def _engine_name(record: RankStatus) -> str:
    return f"{record.run}-{record.dp_index or 0}"


def _rank_name(record: RankStatus) -> str:
    return f"{_engine_name(record)}-{record.rank}"


def _run_lock_path(folder: Path, run: str) -> Path:
    """Return the path of a run's lock. ``Path.name`` removes any part of the name that leads to another folder."""
    return folder / f"{LOCK_PREFIX}{Path(run).name}"


def _engine_lock_path(folder: Path, record: RankStatus) -> Path:
    """Return the path of the lock of one rank of an engine, made as by ``_run_lock_path``."""
    engine_suffix = f"-{record.engine_id}" if record.engine_id else ""
    return folder / f"{LOCK_PREFIX}{Path(f'{_rank_name(record)}{engine_suffix}').name}"

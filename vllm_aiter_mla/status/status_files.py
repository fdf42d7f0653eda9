# SPDX-License-Identifier: Apache-2.0
"""The status files of the servers on this machine: how they are written, read and removed."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vllm_aiter_mla import files, locks
from vllm_aiter_mla.status import liveness
from vllm_aiter_mla.status.record import SKIPPED_ENGINE_ID, RankRecord

MAX_UNFINISHED_SECONDS = 24 * 3600
"""Age at which an unfinished file may be removed: the process that began to write the file was killed."""


def status_path(folder: Path, record: RankRecord) -> Path:
    """Return the path of the status file of one rank, ``status-RUN-ENGINE_ID-DP_INDEX-RANK.json``."""
    return folder / f"status-{liveness.rank_name(record)}.json"


def write_status(folder: Path, record: RankRecord) -> None:
    """Write the status file of one rank of this server's run.

    Hold the lock of the rank until the engine or this process ends. Remove the files of this machine's servers and
    engines that have ended, and unfinished files that are older than ``MAX_UNFINISHED_SECONDS``.

    Nothing shows when a fully skipped engine ends. So the next engine of its run that has the same data-parallel index
    removes its file.

    Args:
        folder: where the plugin keeps its files; made if it is missing.
        record: of ``EngineStatus.make_record`` or ``record_of_skipped_engine``, with the run.

    Raises:
        OSError: the file cannot be written, or a lock cannot be taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    liveness.hold_rank_lock(folder, record)
    files.write_record(status_path(folder, record), record)
    if record.engine_id != SKIPPED_ENGINE_ID:
        status_path(folder, replace(record, engine_id=SKIPPED_ENGINE_ID, rank=0)).unlink(missing_ok=True)
    _remove_files_of_ended_servers(folder, record)
    files.remove_old_files(folder, files.UNFINISHED_PATTERN, MAX_UNFINISHED_SECONDS)


def _remove_files_of_ended_servers(folder: Path, live_record: RankRecord) -> None:
    """Remove the status files and locks of this machine's servers that have ended, and of ended engines of this server.

    Files of another machine that shares the folder stay for ``files.MAX_UNUSED_SECONDS``, because its locks may mean
    nothing here: a pod has a new host name at each start. Files without a lock stay as long: somebody may have removed
    the locks of a running server. A file of another version is removed too, because its name contains its run.

    Args:
        folder: where the plugin keeps its files.
        live_record: of this server.
    """
    host, paths_by_run = live_record.evidence.host, dict[str, list[Path]]()
    for path in folder.glob("status-*-*.json"):
        paths_by_run.setdefault(_run_of_file(path), []).append(path)
    for run, paths in paths_by_run.items():
        if run != live_record.run:
            _remove_files_if_ended(liveness.lock_paths(folder, run), paths, host)
        else:  # the server lives, and each of its engines may have ended
            for path in paths:
                _remove_files_if_ended(liveness.lock_paths(folder, _rank_of_file(path)), [path], host)
    # The lock of an engine that has ended stays as long as a file of its run, which otherwise nobody could judge.
    locks_with_files = {
        lock
        for run, paths in paths_by_run.items()
        if any(map(Path.exists, paths))
        for lock in liveness.lock_paths(folder, run)
    }
    for lock in folder.glob(f"{liveness.LOCK_PREFIX}*"):
        if lock not in locks_with_files:
            with suppress(Exception):
                # Of a start that ended before its status. Another host's lock may mean nothing here, until it is old.
                is_local = lock.name.startswith(f"{liveness.LOCK_PREFIX}{liveness.host_hash()}-")
                if is_local or time.time() - lock.lstat().st_mtime > files.MAX_UNUSED_SECONDS:
                    locks.remove_if_free(lock)


def _remove_files_if_ended(lock_paths: Sequence[Path], paths: Sequence[Path], host: str) -> None:
    """Remove status files if the processes of their locks have ended, then the locks.

    Args:
        lock_paths: all locks of a run, or the lock of one rank.
        paths: all status files of the run, or the file of the rank.
        host: this host. A file of another host, or a file without a lock, is removed only if it is old.
    """
    has_ended = liveness.have_ended(lock_paths)
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
        return is_old or (host is not None and path.name.startswith(f"status-{liveness.host_hash()}-"))
    return files.layout_of(data)[0] == "status" and (is_old or data[files.STAMP_KEY]["host"] == host)


def _rank_of_file(path: Path) -> str:
    """Return the ``rank_name`` in the name of a status file."""
    return path.stem.removeprefix("status-")


def _run_of_file(path: Path) -> str:
    """Return the run in the name of a status file."""
    return _rank_of_file(path).rsplit("-", 3)[0]


def read_records(folder: Path, run: str, on_unreadable: Callable[[str], None]) -> list[RankRecord]:
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
            records.append(files.read_record(RankRecord, path))
        except FileNotFoundError:
            continue  # removed since the folder was listed
        except (OSError, ValueError) as error:
            if not liveness.have_ended(liveness.lock_paths(folder, _run_of_file(path))):
                on_unreadable(str(error))
    return records

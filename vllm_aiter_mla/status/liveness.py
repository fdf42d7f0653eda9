# SPDX-License-Identifier: Apache-2.0
"""The run of a server, and the locks that show whether the server and its engines are running.

A run is one server. Its front end names the run in the environment, and its workers inherit the name. The front end
holds the run's lock. Each worker holds a lock for its rank of an engine, which shows whether the engine outlives
its front end.
"""

import hashlib
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm_aiter_mla import locks
from vllm_aiter_mla.status.record import RankRecord, engine_key

RUN_VARIABLE = "AITER_MLA_RUN"
"""Environment variable with the name of this server's run. The front end sets it, and its workers inherit it."""
LOCK_PREFIX = "lock-status-"
"""Start of the name of each lock file: of the run's lock, which its front end holds, and of the locks of its ranks."""


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


def hold_rank_lock(folder: Path, record: RankRecord) -> None:
    """Hold the lock of one rank of an engine until ``let_go_of_rank_lock`` or the end of this process.

    Args:
        folder: where the plugin keeps its files.
        record: of the rank.

    Raises:
        OSError: the lock cannot be taken.
    """
    # A worker on its front end's machine does not take the run's lock: a free lock means that the front end has ended.
    if not record.run.startswith(f"{host_hash()}-"):
        ensure_run_lock(folder)
    # Only this process has this rank of this engine. But each process of the run that reads the config of a skipped
    # engine writes the same record, and then the lock of one process is enough.
    locks.try_hold(_rank_lock_path(folder, record))


def let_go_of_rank_lock(folder: Path, record: RankRecord) -> None:
    """Let go of the lock of one rank: its engine has ended, and this process lives on."""
    locks.let_go(_rank_lock_path(folder, record))


def lock_paths(folder: Path, name: str) -> list[Path]:
    """Return the paths of the locks of a run and its ranks, or of one rank.

    Args:
        folder: where the plugin keeps its files.
        name: of the run, or ``rank_name`` of one rank.
    """
    return [path for path in folder.glob(f"{LOCK_PREFIX}*") if f"{path.name}-".startswith(f"{LOCK_PREFIX}{name}-")]


def have_ended(paths: Sequence[Path]) -> bool:
    """Return whether the process of every lock has ended; False if this is not known, and if there is no lock."""
    return bool(paths) and all(is_held is False for is_held in locks.held_states(paths).values())


class ServerLocks:
    """Which engines and front ends live, by the locks in a folder. All locks are read once, when the object is made.

    Args:
        folder: where the plugin keeps its files.
        records: of the engines that the methods are asked about.
        waits: whether to wait for a lock that another process may only be looking at.
    """

    def __init__(self, folder: Path, records: Iterable[RankRecord], waits: bool = True) -> None:
        paths = {
            path for record in records for path in (_run_lock_path(folder, record.run), _rank_lock_path(folder, record))
        }
        # Somebody may have removed the lock of a server that lives, so a missing lock proves nothing.
        self._folder, self._states = folder, locks.held_states(filter(os.path.lexists, paths), waits)

    def is_serving(self, records: Sequence[RankRecord]) -> bool | None:
        """Return whether an engine and its front end live; None if this is not known.

        A script may shut its engine down and keep running. If an engine has a rank on another machine (Ray), only the
        lock of the front end counts, because the lock of that rank may mean nothing here.

        Args:
            records: of the engine's ranks, at least one.
        """
        is_front_end_alive = self._states.get(_run_lock_path(self._folder, records[0].run))
        is_local = all(map(_is_of_this_host, records))
        return self.is_engine_alive(records) if is_front_end_alive and is_local else is_front_end_alive

    def is_engine_alive(self, records: Sequence[RankRecord]) -> bool | None:
        """Return whether a process that wrote one of these records still lives; None if this is not known."""
        states = [self._is_rank_alive(record) for record in records]
        return True if True in states else None if None in states else False

    def _is_rank_alive(self, record: RankRecord) -> bool | None:
        return self._states.get(_rank_lock_path(self._folder, record))


def rank_name(record: RankRecord) -> str:
    """Return the name of one rank of an engine, ``RUN-ENGINE_ID-DP_INDEX-RANK``."""
    return "-".join((*engine_key(record), str(record.rank)))


def _is_of_this_host(record: RankRecord) -> bool:
    return record.evidence.host == socket.gethostname()


def _run_lock_path(folder: Path, run: str) -> Path:
    """Return the path of a run's lock. ``Path.name`` removes any part of the name that leads to another folder."""
    return folder / f"{LOCK_PREFIX}{Path(run).name}"


def _rank_lock_path(folder: Path, record: RankRecord) -> Path:
    """Return the path of the lock of one rank, made as by ``_run_lock_path``."""
    return folder / f"{LOCK_PREFIX}{Path(rank_name(record)).name}"

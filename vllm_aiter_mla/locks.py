# SPDX-License-Identifier: Apache-2.0
"""Lock files: each tells whether the process that wrote another file still lives.

A process id does not tell that, because in a container every front end is process 1. The operating system releases a
lock when its process ends, even after a crash.
"""

import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock, Timeout

ACQUIRE_TIMEOUT_SECONDS = 0.1
"""How long ``try_hold`` waits for a lock: another process holds the lock for an instant while it probes the lock."""
PROBE_INTERVAL_SECONDS = 0.01
"""Time to the second probe of a lock that seems to be held: ``remove_if_free`` holds a lock for an instant."""
# By process id and path. A forked process does not hold the locks of its parent, because filelock 3.30.3 and later
# close the descriptors that a fork inherits.
_file_locks: dict[tuple[int, Path], FileLock] = {}


def try_hold(lock: Path) -> bool:
    """Hold a lock file until ``release`` or the end of this process; return False if another process holds the lock.

    If somebody has removed a lock file that this process holds, no other process sees the lock. Then make the file
    again.

    Raises:
        OSError: the file cannot be made or locked.
    """
    key = (os.getpid(), lock)
    old_file_lock = _file_locks.get(key)
    if old_file_lock is not None and seems_held(lock) is False:
        _file_locks.pop(key, None)  # another thread may have removed the key
        old_file_lock.release()
    if key not in _file_locks:
        # Another thread may release the lock: a correction of the status takes it in a timer's thread.
        file_lock = FileLock(lock, timeout=ACQUIRE_TIMEOUT_SECONDS, thread_local=False)
        try:
            file_lock.acquire(poll_interval=ACQUIRE_TIMEOUT_SECONDS / 5)
        except Timeout:
            if not lock.exists():  # no process holds the lock: FileLock has waited for a folder that takes no file
                raise FileNotFoundError(f"{lock} cannot be made") from None
            return key in _file_locks  # another thread may have taken the lock meanwhile
        _file_locks[key] = file_lock
    return True


def release(lock: Path) -> None:
    """Remove a lock file that this process holds, and release the lock."""
    lock.unlink(missing_ok=True)
    _file_locks.pop((os.getpid(), lock)).release()


def let_go(lock: Path) -> None:
    """Release a lock and leave its file, as at the end of this process; do nothing if this process does not hold it."""
    file_lock = _file_locks.pop((os.getpid(), lock), None)
    if file_lock is not None:
        file_lock.release()


def is_held(lock: Path) -> bool | None:
    """Return whether a living process holds a lock file; None if this is not known. A missing file counts as free."""
    return held_states([lock])[lock]


def held_states(lock_paths: Iterable[Path], waits: bool = True) -> dict[Path, bool | None]:
    """Return for each lock file what ``is_held`` returns. However many locks seem to be held, wait once.

    If ``waits`` is False, return what ``seems_held`` returns, and never wait.
    """
    states = {lock: seems_held(lock) for lock in lock_paths}
    locked = [lock for lock, is_locked in states.items() if is_locked and waits]
    if locked:  # perhaps only by a process that is in ``remove_if_free``
        time.sleep(PROBE_INTERVAL_SECONDS)
    return states | {lock: seems_held(lock) for lock in locked}


def seems_held(lock: Path) -> bool | None:
    """Return what ``is_held`` returns, without a wait: a process in ``remove_if_free`` counts as a holder."""
    return _probe(lock, remove=False)


def remove_if_free(lock: Path) -> bool | None:
    """Remove a lock file that no living process holds; return whether a process holds the lock, as ``is_held``."""
    return _probe(lock, remove=True)


def _probe(lock: Path, remove: bool) -> bool | None:
    """Return whether a process holds a lock file at this instant, and on request remove a free file."""
    # Read access and a shared lock suffice for a probe: another user may own the file, and shared locks never conflict.
    mode, operation = (os.O_RDWR, fcntl.LOCK_EX) if remove else (os.O_RDONLY, fcntl.LOCK_SH)
    try:
        descriptor = os.open(lock, mode | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return False if isinstance(error, FileNotFoundError) else None
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)  # FileLock's kind of lock
        if os.fstat(descriptor).st_nlink == 0:  # removed since it was opened: there may be a new file
            return _probe(lock, remove)
        if remove:  # under the lock: a process that has just opened the file sees the removal, and makes a new file
            lock.unlink(missing_ok=True)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a process that was forked meanwhile
        return False
    except OSError as error:
        return True if isinstance(error, BlockingIOError) else None
    finally:
        os.close(descriptor)

# SPDX-License-Identifier: Apache-2.0
"""Lock files, which tell whether the process that wrote another file still lives.

A process id does not tell that, because in a container every front end is process 1. The operating system releases a
lock when its process ends, however it ends.
"""

import fcntl
import os
import time
from pathlib import Path

from filelock import FileLock, Timeout

WAIT_S = 0.1
"""Seconds to wait for a lock: another process may hold the lock for the instant in which it asks who holds it."""
PROBE_S = 0.01
"""Seconds after which a lock that seems to be held is looked at again: ``remove_if_free`` holds one for an instant."""
# By process. A forked process does not hold the locks of its parent, because filelock 3.30.3 and later close the
# descriptors that a fork inherits.
_held: dict[tuple[int, Path], FileLock] = {}


def hold(lock: Path) -> bool:
    """Hold a lock file until ``release`` or the end of this process; return False if another process holds it.

    If somebody has removed a lock file that this process holds, nobody else sees the lock, and it is made again.

    Raises:
        OSError: the file cannot be made or locked.
    """
    key = (os.getpid(), lock)
    held = _held.get(key)
    if held is not None and is_held(lock) is False:
        _held.pop(key, None)  # another thread may have done so
        held.release()
    if key not in _held:
        file_lock = FileLock(lock, timeout=WAIT_S)
        try:
            file_lock.acquire(poll_interval=WAIT_S / 5)
        except Timeout:
            if not lock.exists():  # nobody holds it: FileLock has waited for a folder that takes no file
                raise FileNotFoundError(f"{lock} cannot be made") from None
            return key in _held  # by another thread, meanwhile
        _held[key] = file_lock
    return True


def release(lock: Path) -> None:
    """Remove a lock file that this process holds, and let go of it."""
    lock.unlink(missing_ok=True)
    _held.pop((os.getpid(), lock)).release()


def is_held(lock: Path) -> bool | None:
    """Return whether a living process holds a lock file; None if that cannot be told."""
    held = _probe(lock, remove=False)
    if held:  # or another process is in ``remove_if_free``
        time.sleep(PROBE_S)
        held = _probe(lock, remove=False)
    return held


def remove_if_free(lock: Path) -> bool | None:
    """Remove a lock file that no living process holds, and return what ``is_held`` does."""
    return _probe(lock, remove=True)


def _probe(lock: Path, remove: bool) -> bool | None:
    # To ask, reading and a shared lock are enough: the file may be another user's, and shared locks do not conflict.
    mode, kind = (os.O_RDWR, fcntl.LOCK_EX) if remove else (os.O_RDONLY, fcntl.LOCK_SH)
    try:
        descriptor = os.open(lock, mode | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return False if isinstance(error, FileNotFoundError) else None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)  # FileLock's kind of lock
        if os.fstat(descriptor).st_nlink == 0:  # removed since it was opened: there may be a new one
            return _probe(lock, remove)
        if remove:  # while it is locked: who has just opened the file sees that it is gone, and makes a new one
            lock.unlink(missing_ok=True)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a process that was forked meanwhile
        return False
    except OSError as error:
        return True if isinstance(error, BlockingIOError) else None
    finally:
        os.close(descriptor)

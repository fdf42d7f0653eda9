# SPDX-License-Identifier: Apache-2.0
"""Lock files, which tell whether the process that wrote another file still lives.

A process id does not tell that, because in a container every front end is process 1. The operating system releases a
lock when its process ends, however it ends.
"""

import fcntl
import os
from pathlib import Path

from filelock import FileLock, Timeout

TAKEN_S = 0.1  # another process may hold a lock for the instant in which it asks whether somebody holds it
_held: dict[tuple[int, Path], FileLock] = {}  # by process: a forked one does not hold the locks of its parent


def hold(lock: Path) -> bool:
    """Hold a lock file until ``release`` or the end of this process; return False if another process holds it.

    Raises:
        OSError: the file cannot be made or locked.
    """
    mine = (os.getpid(), lock)
    if mine not in _held:
        made = FileLock(lock, timeout=TAKEN_S)
        try:
            made.acquire(poll_interval=TAKEN_S / 5)
        except Timeout:
            if not lock.exists():  # nobody holds it: FileLock has waited for a folder that takes no file
                raise FileNotFoundError(f"{lock} cannot be made") from None
            return False
        _held[mine] = made
    return True


def release(lock: Path) -> None:
    """Remove a lock file that this process holds, and let go of it."""
    lock.unlink(missing_ok=True)
    _held.pop((os.getpid(), lock)).release()


def is_held(lock: Path, remove: bool = False) -> bool | None:
    """Return whether a living process holds a lock file, None if that cannot be told; ``remove`` it if none does."""
    # To ask, reading and a shared lock are enough: the file may be another user's, and two that ask do not meet.
    mode, kind = (os.O_RDWR, fcntl.LOCK_EX) if remove else (os.O_RDONLY, fcntl.LOCK_SH)
    try:
        probe = os.open(lock, mode | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return False if isinstance(error, FileNotFoundError) else None
    try:
        fcntl.flock(probe, kind | fcntl.LOCK_NB)  # FileLock's kind of lock
        if os.fstat(probe).st_nlink == 0:  # removed since it was opened: there may be a new one
            return is_held(lock, remove)
        if remove:  # while it is locked: who has just opened the file sees that it is gone, and makes a new one
            lock.unlink(missing_ok=True)
        fcntl.flock(probe, fcntl.LOCK_UN)  # also for a process that was forked meanwhile
        return False
    except OSError as error:
        return True if isinstance(error, BlockingIOError) else None
    finally:
        os.close(probe)

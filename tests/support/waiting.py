"""Wait for what another process or thread does."""

import time
from collections.abc import Callable
from pathlib import Path

LONG_S = 60.0
"""Nobody waits so long unless something is broken: what a test waits for does not depend on the machine's load."""


def happened(what: Callable[[], object], seconds: float = LONG_S) -> bool:
    """Return whether ``what`` becomes true within so many seconds."""
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)
    return True


def runs(pid: int) -> bool:
    """Return whether a process is there, and no zombie that nobody has asked how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

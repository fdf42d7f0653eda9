"""What a command is at, on stderr, once it has taken longer than a reader waits without a word."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0
"""Seconds."""

Step = Callable[[str], None]
"""Called with what begins now, in a few words."""


def silent(step: str) -> None:
    """Say nothing of ``step``."""


@contextmanager
def shown(command: str, patience: float = PATIENCE) -> Iterator[Step]:
    """For a block: the step at which it is after ``patience`` seconds, and every later one, on a line of its own."""
    current, late, lock = "starting", False, threading.Lock()

    def say() -> None:
        print(f"{command}: {current} ...", file=sys.stderr, flush=True)

    def begin(step: str) -> None:
        nonlocal current
        with lock:
            current = step
            if late:
                say()

    def lose_patience() -> None:
        nonlocal late
        with lock:
            late = True
            say()

    timer = threading.Timer(patience, lose_patience)
    timer.daemon = True
    timer.start()
    try:
        yield begin
    finally:
        timer.cancel()

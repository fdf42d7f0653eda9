"""Processes in a first call: ``python -m tests.startup.first_call_child FOLDER PREFIX`` forks one for each line.

A line of stdin names a handler, a block and a plant, or "-" for none. The process says its id once it is in the call.
After that its exit status is said, below 0 for a signal.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from vllm_aiter_mla.startup import first_call

FOLDER, PREFIX = Path(sys.argv[1]), sys.argv[2]


def raises(number: int, frame: Any) -> None:
    """As a worker of vLLM."""
    raise SystemExit


def notes(number: int, frame: Any) -> None:
    """As vLLM's engine process."""


HANDLERS: dict[str, Any] = {"raises": raises, "notes": notes, "default": signal.SIG_DFL}


def waits() -> None:
    """As for a compiler."""
    print(os.getpid(), flush=True)
    time.sleep(60)


def goes_on_and_aborts() -> None:
    """As a kernel that ends the process while somebody else does."""
    try:
        waits()
    finally:
        os.abort()


def wraps() -> None:
    """As a library that makes an error of each exit."""
    try:
        waits()
    except SystemExit as error:
        raise RuntimeError("the compiler ended") from error


def exits() -> None:
    """As a library that ends the process."""
    print(os.getpid(), flush=True)
    raise SystemExit(3)


@contextmanager
def removed_by_the_handler() -> Iterator[list[int]]:
    """A signal removes the marker, and the call goes on."""

    def remove(number: int, frame: Any) -> None:
        for path in FOLDER.glob(f"{PREFIX}-*"):
            path.unlink()
        raise SystemExit

    signal.signal(signal.SIGTERM, remove)
    yield []


BLOCKS: dict[str, Callable[[], None]] = {one.__name__: one for one in (waits, goes_on_and_aborts, exits, wraps)}
PLANTS: dict[str, Any] = {
    "unheard": lambda: nullcontext([]),
    "removed_by_the_handler": removed_by_the_handler,
    "any_exit": lambda: nullcontext([signal.SIGTERM]),
}


def call(handler: str, block: str, plant: str) -> None:
    for number in first_call.SIGNAL_EXIT_OFFSET:
        signal.signal(number, HANDLERS[handler])
    if plant != "-":
        first_call._ended_by_signals = PLANTS[plant]
    with first_call.marked(FOLDER, PREFIX):
        BLOCKS[block]()


if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 1
            try:
                call(*line.split())
            except SystemExit as end:
                status = int(end.code or 0)
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

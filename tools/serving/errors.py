"""How the tools fail: a wrong option, or a run that gives no table."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType


class UsageError(ValueError):
    """A wrong option or a missing package; names option and value. Exit status 2, before any server starts."""


class ServingError(RuntimeError):
    """A server or client failed, or what was compared is not what was asked for. Exit status 1."""


def guarded(tool: str, body: Callable[[], int]) -> int:
    """Run ``body`` and return its exit status, or that of its failure: 2 usage, 1 run, 130 interrupted.

    SIGTERM is taken like Ctrl-C, so that servers are stopped then too.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return body()
    except UsageError as error:
        print(f"{tool}: {error}", file=sys.stderr)
        return 2
    except ServingError as error:
        print(f"{tool}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{tool}: interrupted, servers stopped, nothing written", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt

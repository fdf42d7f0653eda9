"""The plugin's log lines: under vLLM's own logger, so that its handlers and levels apply, and each only once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger("vllm.aiter_mla")
"""A child of "vllm": vLLM configures handlers for that name alone, so a logger of another name would print nothing."""

PREFIX = "aiter-mla: "

_said: set[tuple[int, str]] = set()


def say_once(level: int, message: str, key: str | None = None) -> None:
    """Log ``message`` unless this process has already said it, or another message with the same ``key``.

    vLLM's ``replace()`` rebuilds configs often, and each is read again.
    """
    said = (level, key or message)
    if said not in _said:
        _said.add(said)
        say(level, message, stacklevel=3)


def say(level: int, message: str, stacklevel: int = 2) -> None:
    """Log ``message`` at ``level``; vLLM prints the file and line, and they should be those of the caller."""
    logger.log(level, "%s%s", PREFIX, message, stacklevel=stacklevel)


@contextlib.contextmanager
def warned(what: str) -> Iterator[None]:
    """Turn an exception of the block into one warning that begins with ``what``: for steps nothing depends on."""
    try:
        yield
    except Exception as error:
        say_once(logging.WARNING, f"{what}: {type(error).__name__}: {error}")


def forget() -> None:
    """Forget what was said, so that the next run in this process reports again (demo, tests)."""
    _said.clear()

# SPDX-License-Identifier: Apache-2.0
"""The plugin's log lines, through a child of the logger "vllm", the only name for which vLLM configures handlers."""

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger("vllm.aiter_mla")
PREFIX = "aiter-mla: "

# Of the process, as its log is: vLLM reads a config many times in it.
_said: set[tuple[int, str]] = set()


def say_once(level: int, message: str, key: str | None = None) -> None:
    """Log ``message`` unless this process has already logged it, or another one with the same ``key``.

    vLLM's ``replace()`` rebuilds configs often, and each is read again.
    """
    said = (level, key or message)
    if said not in _said:
        _said.add(said)
        say(level, message, stacklevel=3)


def say(level: int, message: str, stacklevel: int = 2) -> None:
    """Log ``message`` at ``level``; vLLM prints the file and line, and they should be the caller's."""
    logger.log(level, "%s%s", PREFIX, message, stacklevel=stacklevel)


@contextlib.contextmanager
def warned(what: str) -> Iterator[None]:
    """Turn an exception of the block into one warning that begins with ``what``; for steps that nothing depends on."""
    try:
        yield
    except Exception as error:
        say_once(logging.WARNING, f"{what}: {type(error).__name__}: {error}")

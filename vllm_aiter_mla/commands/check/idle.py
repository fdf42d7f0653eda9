# SPDX-License-Identifier: Apache-2.0
"""Check that the cards are idle: another check or a server on them would spoil times and leave an engine no memory."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOST_IN_USE = 0.05
"""Largest share of an idle card's memory that is in use: a driver takes less than a hundredth, and vLLM 0.9."""
DEVICE_FILES = re.compile(r"/dev/(kfd|nvidia\d+)$")
GIB = 1 << 30


def why_busy(needed: int) -> str | None:
    """Return which of the first ``needed`` cards is in use, and who has one open; None if all are idle.

    For a process of its own.
    """
    from vllm_aiter_mla.kernels.device import card

    try:
        memory = card().in_use(needed)
    except Exception as error:  # no memory is left for the question
        return f"the memory of the cards could not be read: {type(error).__name__}: {error}"
    for number, (used, total) in enumerate(memory):
        if used > MOST_IN_USE * total:
            who = ", ".join(holders()) or "none that can be seen from here"
            sizes = f"{used / GIB:.0f} of {total / GIB:.0f} GiB are in use"
            return f"card {number} is not idle: {sizes}; processes that have a card open: {who}"
    return None


def holders() -> Iterator[str]:
    """Yield the processes that have the device file of a card open, except this one and its caller.

    All AMD cards share one device file.
    """
    own = {str(os.getpid()), str(os.getppid())}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if path.name not in own and any(_is_device(opened) for opened in (path / "fd").iterdir()):
                yield f"{(path / 'comm').read_text().strip()} (process {path.name})"


def _is_device(path: Path) -> bool:
    with suppress(OSError):
        return bool(DEVICE_FILES.match(os.readlink(path)))
    return False

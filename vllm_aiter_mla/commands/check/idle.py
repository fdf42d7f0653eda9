# SPDX-License-Identifier: Apache-2.0
"""Whether the cards are idle: another check or a server on them spoils times, and leaves an engine no memory."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOST_IN_USE = 0.05
"""Share of a card's memory. A driver takes less than a hundredth; vLLM asks for 0.9 of it all."""
DEVICE_FILES = re.compile(r"/dev/(kfd|nvidia\d+)$")
GIB = 1 << 30


def why_not(needed: int) -> str:
    """Return which of the first cards is in use, and by whom if that can be told, or "". For a process of its own."""
    from vllm_aiter_mla.kernels.device import card

    try:
        found = card().in_use()
    except Exception as error:  # no memory is left for the question
        return f"the cards cannot be asked for their memory: {type(error).__name__}: {error}"
    for number, (used, total) in enumerate(found[:needed]):
        if used > MOST_IN_USE * total:
            who = ", ".join(holders()) or "a process that cannot be seen from here"
            return f"card {number} is not idle: {used / GIB:.0f} of {total / GIB:.0f} GiB are in use, by {who}"
    return ""


def holders() -> Iterator[str]:
    """Yield the processes with a card's device file open, but for this one and its parents."""
    own, pid = set[str](), str(os.getpid())
    while pid not in ("0", ""):
        own.add(pid)
        pid = _parent(pid)
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if path.name not in own and any(_is_device(one) for one in (path / "fd").iterdir()):
                yield f"{(path / 'comm').read_text().strip()} (process {path.name})"


def _is_device(path: Path) -> bool:
    with suppress(OSError):
        return bool(DEVICE_FILES.match(os.readlink(path)))
    return False


def _parent(pid: str) -> str:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return ""

# SPDX-License-Identifier: Apache-2.0
"""Check that the cards are idle: another check or a server on them would spoil times and leave an engine no memory."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MAX_IDLE_MEMORY_SHARE = 0.05
"""Largest share of memory in use on an idle card. A driver takes less than 0.01, and vLLM takes 0.9."""
DEVICE_FILES = re.compile(r"/dev/(kfd|nvidia\d+)$")
GIB = 1 << 30


def busy_cards_reason(num_cards: int) -> str | None:
    """Return which of the first ``num_cards`` cards is in use, and by which processes; None if all are idle.

    Call this function in a process of its own.
    """
    from vllm_aiter_mla.kernels.device import card

    try:
        memory_by_card = card().in_use(num_cards)
    except Exception as error:  # for example, no memory is left for the query itself
        return f"the memory of the cards could not be read: {type(error).__name__}: {error}"
    for number, (used_bytes, total_bytes) in enumerate(memory_by_card):
        if used_bytes > MAX_IDLE_MEMORY_SHARE * total_bytes:
            processes = ", ".join(processes_with_open_card()) or "none is visible from here"
            memory_text = f"{used_bytes / GIB:.0f} of {total_bytes / GIB:.0f} GiB are in use"
            return f"card {number} is not idle: {memory_text}; processes that have a card open: {processes}"
    return None


def processes_with_open_card() -> Iterator[str]:
    """Yield the processes that have the device file of a card open, except this process and its caller.

    All AMD cards share one device file.
    """
    own_pids = {str(os.getpid()), str(os.getppid())}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if path.name not in own_pids and any(_is_card_file(descriptor) for descriptor in (path / "fd").iterdir()):
                yield f"{(path / 'comm').read_text().strip()} (process {path.name})"


def _is_card_file(path: Path) -> bool:
    with suppress(OSError):
        return bool(DEVICE_FILES.match(os.readlink(path)))
    return False

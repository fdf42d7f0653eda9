"""The lanes of the Makefile: how many tests each runs at least, and what a run has skipped, by reason.

``tests/lanes.json`` has the number for each expression that the Makefile gives to pytest's ``-m``, with the folder that
it names. Raise it with the suite; a run that collects less has lost tests.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
LANES: dict[str, int] = json.loads((TESTS / "lanes.json").read_text(encoding="utf-8"))


def too_few(arguments: Sequence[str], chosen: str, keyword: str, ran: int) -> str:
    """Return why a run of a whole lane is too short, or "".

    Args:
        arguments: files and folders that pytest was given.
        chosen: by ``-m``.
        keyword: by ``-k``; a run with one is no lane.
        ran: tests that passed or failed.
    """
    named = {Path(one).resolve() for one in arguments} - {TESTS, TESTS.parent}
    lane = " ".join([chosen, *sorted(os.path.relpath(one, TESTS.parent) for one in named)])
    least = LANES.get(lane, 0)
    if keyword or ran >= least:
        return ""
    return f"{ran} tests ran of at least {least} in the lane -m {lane!r}: tests/lanes.json"


def skips(reports: Iterable[Any]) -> list[str]:
    """Return a line for each reason for which tests were skipped, the most frequent first."""
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    return [f"skipped {count}: {reason}" for reason, count in reasons.most_common()]

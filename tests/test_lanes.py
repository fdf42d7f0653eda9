"""A lane that runs fewer tests than its minimum fails, and a run says what it skipped in one line per reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.docs.test_suite import selections
from tests.support import lanes

QUICK = "not engine and not slow"


def test_every_lane_of_the_makefile_has_a_minimum() -> None:
    assert {" ".join(lane) for lane in selections("test-all")} == set(lanes.LANES)
    assert all(least > 0 for least in lanes.LANES.values())


def finished(ran: int, argument: str, chosen: str, keyword: str = "") -> Any:
    """A session of pytest at its end."""
    stats = {"passed": [None] * (ran - 1), "failed": [None], "skipped": [None] * 9}
    reporter = SimpleNamespace(stats=stats, write_line=lambda text, **_: said.append(text))
    said: list[str] = []
    option = SimpleNamespace(markexpr=chosen, keyword=keyword)
    plugins = SimpleNamespace(get_plugin=lambda name: reporter)
    config = SimpleNamespace(option=option, args=[argument], pluginmanager=plugins)
    session = SimpleNamespace(config=config, exitstatus=0)
    conftest.pytest_sessionfinish(session)
    return session.exitstatus, len(said)


@pytest.mark.parametrize(
    ("missing", "argument", "chosen", "keyword", "failed"),
    [
        (0, str(lanes.TESTS), QUICK, "", False),
        (1, str(lanes.TESTS), QUICK, "", True),
        (1, str(lanes.TESTS.parent), QUICK, "", True),
        (1, str(lanes.TESTS / "plan"), QUICK, "", False),
        (1, str(lanes.TESTS), QUICK, "field", False),
        (1, str(lanes.TESTS), "mutation", "", False),
    ],
    ids=["enough", "one lacks", "the same by testpaths", "a part", "by keyword", "no lane"],
)
def test_a_lane_that_runs_fewer_tests_fails(
    missing: int, argument: str, chosen: str, keyword: str, failed: bool
) -> None:
    assert finished(lanes.LANES[QUICK] - missing, argument, chosen, keyword) == (int(failed), int(failed))


@pytest.mark.mutation
def test_mutation_a_lane_that_counts_skipped_tests_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lanes.too_few
    monkeypatch.setattr(lanes, "too_few", lambda given, chosen, word, ran: real(given, chosen, word, ran + 9))
    with pytest.raises(AssertionError, match=r"assert \(0, 0\) == \(1, 1\)"):
        test_a_lane_that_runs_fewer_tests_fails(1, str(lanes.TESTS), QUICK, "", True)


def test_skips_are_one_line_for_each_reason() -> None:
    reports = [
        SimpleNamespace(longrepr=("a.py", line, f"Skipped: {why}")) for line, why in enumerate(["x", "no GPU", "x"])
    ]
    assert lanes.skips(reports) == ["skipped 2: x", "skipped 1: no GPU"]

"""``check`` over the real engine on this CPU: the fast path passes, a decode that is wrong on both sides does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sandbox import check
from vllm_aiter_mla.commands.check import steps

pytestmark = [pytest.mark.slow, pytest.mark.engine]
NAMES = ("plan", "engine", "decode against prefill")


@pytest.mark.wide
def test_the_engine_passes_over_two_ranks(tmp_path: Path) -> None:
    asked = check.context(tmp_path / "model", check.environment(tmp_path / "inductor", ranks=2))
    asked.arguments += ("-tp", "2")
    found = {name: steps.STEPS[name](asked) for name in NAMES}
    assert {outcome.status for outcome in found.values()} == {"passed"}, found


@pytest.mark.parametrize(
    ("mutation", "failed"),
    [
        pytest.param("", [], marks=pytest.mark.wide),  # what `make demo` runs
        ("tests.check.broken_decode:decode_reads_another_channel", [NAMES[2]]),
    ],
)
def test_the_engine_passes_and_prefill_shows_a_decode_that_is_wrong_on_both_sides(
    tmp_path: Path, mutation: str, failed: list[str]
) -> None:
    asked = check.context(tmp_path / "model", check.environment(tmp_path / "inductor", mutation))
    found = {name: steps.STEPS[name](asked) for name in NAMES}
    assert [name for name, outcome in found.items() if outcome.status != "passed"] == failed, found

"""``check`` over the real engine on this CPU: the fast path passes, and each planted bug fails its own step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check import planted_in_engines
from tests.sandbox import check
from vllm_aiter_mla.commands.check import steps
from vllm_aiter_mla.commands.check.record import StepResult

pytestmark = [pytest.mark.slow, pytest.mark.engine]
NAMES = ("plan", "engine", "prefill", "decode")


def outcomes(folder: Path, mutation: str = "", ranks: int = 1, *typed: str) -> dict[str, StepResult]:
    asked = check.with_arguments(check.context(folder / "model"), "-tp", str(ranks), *typed)
    with check.engines_on_this_cpu(check.environment(folder / "inductor", mutation, ranks)):
        return {name: steps.STEPS[name].run(asked) for name in NAMES}


@pytest.mark.wide
@pytest.mark.parametrize("ranks", [1, 2])  # one rank is what `make demo` runs
def test_the_engine_passes(tmp_path: Path, ranks: int) -> None:
    found = outcomes(tmp_path, ranks=ranks)
    assert {outcome.status for outcome in found.values()} == {"passed"}, found


@pytest.mark.wide
def test_the_engine_runs_without_the_options_of_a_deployment(tmp_path: Path) -> None:
    """With ``-dp 2`` an engine would wait for another one."""
    found = outcomes(tmp_path, "", 1, "-dp", "2", "--port", "8001", "--reasoning-parser", "deepseek_r1")
    assert {outcome.status for outcome in found.values()} == {"passed"}, found
    assert any("--port, --reasoning-parser, --data-parallel-size" in line for line in found["engine"].lines)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("bug", "failed", "shown"),
    [
        pytest.param(
            "decode_reads_another_channel", NAMES[3], "vLLM's own decode", id="decode", marks=pytest.mark.wide
        ),
        pytest.param(
            "prefill_rows_are_rotated_with_three_roundings", NAMES[2], "above the decode limit, prompts among decodes",
            id="three-roundings", marks=pytest.mark.wide,
        ),
    ],
)  # fmt: skip
def test_mutation_a_bug_in_the_engine_fails_its_own_step(tmp_path: Path, bug: str, failed: str, shown: str) -> None:
    """No bound on tokens would show the roundings of prefill rows."""
    found = outcomes(tmp_path, f"{planted_in_engines.__name__}:{bug}")
    assert [name for name, outcome in found.items() if outcome.status != "passed"] == [failed], found
    assert shown in found[failed].detail

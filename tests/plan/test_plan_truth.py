"""Claims about plan's answers on configs after published checkpoints: what the engine's own gate and layers decide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plan.plan_support import asked, codes, planned
from tests.plan.truth_configs import FP8, ROWS, V3, Row
from vllm_aiter_mla.commands.plan import printout

# vLLM takes a second or two for each: some of them in `make test`, the others with the slow tests.
QUICK = {
    "amd/DeepSeek-R1-MXFP4 with attention left out by regex", "fp8 with one kv_b_proj left out", "a draft",
    "every reason", "meta-llama/Llama-3.1-8B",
}  # fmt: skip


def check(row: Row, folder: Path, bug: str = "") -> None:
    """Compare a plan with the gate's decision and with what the row expects."""
    for file, content in row.written().items():
        (folder / file).write_text(json.dumps(content))
    asking = (str(folder), "-tp", "4", *row.arguments)
    plan, decision = planned(*asking, bug=bug), asked(*asking, bug=bug)["decision"]
    found, total = codes(plan), sum(row.forms.values())
    engine = [reason["code"] for reason in plan["reasons"] if reason["scope"] == "engine"]
    assert tuple(found) == row.codes
    assert decision["limit"] == row.limit
    assert decision["skip"] == (None if row.limit or "vllm_refuses" in found else engine[0])
    assert plan["limit"] == decision["limit"] or decision["limit"] is None
    assert plan["compile_ranges"]["inside"] == int(row.limit is not None and plan["integration"] == "passes")
    assert plan["absorb_weights"] == row.forms
    assert plan["layers"]["engaged"] == (0 if found else total)
    assert "vllm_refuses" in found or plan["layers"]["mla"] == total
    assert f"Status line: {0 if found else total}/" in printout.text(plan)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ROWS])
def test_plan_truth(name: str, tmp_path: Path) -> None:
    check(ROWS[name], tmp_path)


def test_plan_truth_has_45_configs() -> None:
    assert len(ROWS) >= 45
    assert set(ROWS) >= QUICK


@pytest.mark.slow
@pytest.mark.mutation
@pytest.mark.parametrize("bug", ["nothing is quantised", "the limit is not the gate's"])
def test_plan_truth_catches_a_planted_bug(bug: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(Row(V3, {"fp8": 61}, FP8), tmp_path, bug)

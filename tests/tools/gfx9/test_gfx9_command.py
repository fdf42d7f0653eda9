"""The exit status of ``python -m tools.gfx9``, where what it runs and counts is made up."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tools.common import guarded
from tools.gfx9 import __main__ as tool
from tools.gfx9 import against, cases, cost
from tools.gfx9.parse import Fault


@pytest.mark.parametrize(("outcome", "status"), [(0, 0), (1, 1), (Fault("planted"), 1)])
def test_a_byte_that_differs_or_a_launch_that_stops_fails_the_run(monkeypatch, outcome, status):
    ran = []

    def record(compiled, case):
        ran.append(case)
        if isinstance(outcome, Fault):
            raise outcome
        return {"instructions": 1, "different": outcome}

    monkeypatch.setattr(cases, "Compiled", lambda target, variant: variant)
    monkeypatch.setattr(cases, "record", record)
    assert tool.run(["--arch", "gfx942", "--variant", "neox", "--tokens", "3"]) == status
    assert {case.tokens for case in ran} == {3}
    assert all(case.variant.is_neox for case in ran)


@pytest.mark.parametrize("broken", [[], ["a bound"]])
def test_a_broken_bound_fails_the_count(monkeypatch, broken):
    monkeypatch.setattr(cost, "count", lambda target, chosen: [])
    monkeypatch.setattr(cost, "text", lambda *given: "")
    monkeypatch.setattr(cost, "breaches", lambda *given: broken)
    assert tool.run(["--arch", "gfx950", "--cost"]) == len(broken)


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "status"), [("", 1), (30 * "; acc *= scale", 0)])
def test_a_ratio_above_its_goal_fails_the_comparison_with_another_kernel(tmp_path, extra, status):
    """The other kernel is ours, or one that multiplies each value 30 times more. A process compiles for one card."""
    shutil.copytree(against.ROOT / "vllm_aiter_mla", tmp_path / "vllm_aiter_mla")
    kernel, found = tmp_path / tool.KERNEL, tmp_path / "found.json"
    kernel.write_text(kernel.read_text().replace("acc *= weight_scale", f"acc *= weight_scale{extra}"))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tools.gfx9", "--arch", "gfx942", "--cost", "--against", tmp_path, "--json", found]
    command += ["--variant", "N32 fp8 gptj W-fp8", "--tokens", "256"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=against.ROOT, check=False)
    assert done.returncode == status, done.stderr
    (row,) = json.loads(found.read_text())["rows"]
    assert row["ratio"] == 1 if status else row["ratio"] < row["goal"]


@pytest.mark.parametrize(
    "line",
    [
        ["--variant", "none such"],
        ["--tokens", "0"],
        ["--against", ".", "--tokens", "3"],
        ["--against", "/", "--cost"],
        # Nothing is counted: no bound of it is kept.
        ["--variant", "none such", "--cost"],
        ["--tokens", "3", "--cost"],
        ["--all-heads", "--cost"],
        ["--tokens", "64", "--cost", "--against", "."],
    ],
)
def test_a_wrong_command_line_is_one_line(capsys, line):
    assert guarded("gfx9", tool.run, ["--arch", "gfx942", *line]) == 2
    assert line[0] in capsys.readouterr().err

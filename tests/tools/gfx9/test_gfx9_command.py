"""The exit status of ``python -m tools.gfx9``, where what it runs and counts is made up."""

import pytest

from tools.common import guarded
from tools.gfx9 import __main__ as tool
from tools.gfx9 import cases, cost
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


@pytest.mark.parametrize("line", [["--variant", "none such"], ["--tokens", "0"]])
def test_a_wrong_command_line_is_one_line(capsys, line):
    assert guarded("gfx9", tool.run, ["--arch", "gfx942", *line]) == 2
    assert line[0] in capsys.readouterr().err

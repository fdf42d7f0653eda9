"""What `make test` leaves out is named here, and none is left out unseen. It lists its ten slowest tests itself."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
# Files that hold slow tests, and why.
SLOW = {
    "gate/test_gate_gpu_platforms.py": "a process for each platform and card",
    "kernels/triton/test_triton_aiter_vectors.py": "two of every three calls",
    "passes/test_recognised.py": "one test that starts pytest again",
    "report/test_report_gauge.py": "a process for each broken file; `make test` has one",
    "report/test_report_hostile.py": "all kinds of files but one",
    "test_distribution.py": "builds and installs the packages",
    "test_host_cost.py": "times every row",
    "kernels/triton/test_triton_compiled.py": "compiles every variant for three cards",
    "kernels/triton/test_triton_interpreter.py": "interprets the kernel; tests/verify does so once",
    "gfx9/test_gfx9_kernel.py": "executes compiled kernels; the other files of tests/gfx9 execute instructions",
    "plan/test_plan_command.py": "the page of every example",
    "plan/test_plan_figures.py": "vLLM takes a second for each set of options",
    "plan/test_plan_outcome.py": "a process for each card and set of variables",
    "plan/test_plan_truth.py": "all configurations but five",
    "plan/test_plan_wrong_input.py": "a process of its own for a wrong variable",
    "runner_v2/test_runner_v2.py": "builds vLLM's second model runner twice, its Triton kernels interpreted",
    "test_vector_unit.py": "imports vLLM anew as on AVX2",
}


def _marked() -> set[str]:
    """Files that hold the marker, this one aside."""
    files = (path for path in TESTS.rglob("test_*.py") if path != Path(__file__))
    return {path.relative_to(TESTS).as_posix() for path in files if re.search(r"mark\.slow\b", path.read_text())}


def test_slow_files_are_those_of_the_list():
    assert _marked() == set(SLOW)


def test_what_make_test_leaves_the_other_two_run():
    """Every test is in exactly one of the three; what is wide is an engine or slow too."""
    makefile = (TESTS.parent / "Makefile").read_text()
    run = re.findall(r"^\t.*pytest .*-m (\"[^\"]+\"|\w+)$", makefile, re.MULTILINE)
    assert sorted(run) == sorted(['"not engine and not slow"', '"(engine or slow) and not wide"', "wide"])
    assert re.search(r"^test-all: test test-rest test-wide$", makefile, re.MULTILINE)
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        if path != Path(__file__) and re.search(r"mark\.wide\b", text):
            assert re.search(r"pytestmark = pytest\.mark\.(engine|slow)|mark\.engine\(", text), path
    ci = (TESTS.parent / ".ci" / "run").read_text().splitlines()
    assert [line for line in ci if line.startswith("make ")] == ["make test", "make test-rest"]


def test_make_test_touches_each_invariant():
    """The invariants' planted bugs are in the table of docs/development.md."""
    rows = re.findall(r"^\| I\d+ \|.*$", (TESTS.parent / "docs" / "development.md").read_text(), re.MULTILINE)
    assert len(rows) >= 13
    for row in rows:
        planted = set(re.findall(r"`tests/([\w/]+\.py)`", row.split("|")[-2]))
        assert {name for name in planted - set(SLOW) if not name.startswith("engine/")}, row


def test_what_no_target_runs_can_be_imported():
    """Files that are run by hand; their name keeps them from being collected."""
    sys.path.insert(0, str(TESTS / "engine"))
    try:
        matrix = importlib.import_module("aiter_class_matrix")
    finally:
        sys.path.remove(str(TESTS / "engine"))
    assert matrix.test_tokens_are_those_of_vllm_in_all_scenarios

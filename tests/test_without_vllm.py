"""``check --only kernels,timing`` on a bare card: torch and Triton are there, vLLM is not. `make test-bare`."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.sandbox import rehearsal_card
from vllm_aiter_mla.commands import outputs

CARD = {"arch": "sm90", "name": "NVIDIA H100 80GB HBM3", "rocm": None}
TIMING = ("--only", "timing", "--heads", "2", "--tokens", "1", "--type", "bf16")
KERNELS = ("--only", "kernels", "--small", "--limit", "8", "--case", "fresh-data")
COMMANDS = {
    "triton": (*KERNELS, "--backend", "triton", "--variant", "fp8"),
    "reference": (*KERNELS, "--backend", "reference", "--variant", "bf16"),
    "timing": TIMING,
    "tune": ("--tune", *TIMING),
    "plan": ("deepseek-v3", "--only", "plan"),
}
# One process for all commands: importing torch costs more than they do.
CHILD = """
import json, os, sys
import tests.support.without_vllm
from tests.sandbox import rehearsal_card
rehearsal_card.install_from_environment()
import pytest
from tests.support import in_process
in_process.install(pytest.MonkeyPatch())
from typer.testing import CliRunner
from vllm_aiter_mla.commands import main
found = {}
for name, line in json.loads(sys.argv[1]).items():
    done = CliRunner().invoke(main.app, ["check", *line])
    found[name] = [done.exit_code, done.output, getattr(done.exception, "name", None)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Exit status, output and the name of a missing module, by command, on a card that rehearses an H100."""
    cache = tmp_path_factory.mktemp("cache")
    variables = {rehearsal_card.VARIABLE: json.dumps(CARD), "VLLM_CACHE_ROOT": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(COMMANDS)], env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), cache


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [
    ("triton", "1 passed, 0 failed"), ("reference", "1 passed, 0 failed"), ("tune", "kept in"),
])  # fmt: skip
def test_a_command_runs_without_vllm(ran, name, said):
    status, output, _ = ran[0][name]
    assert (status, said in output) == (outputs.EXIT_OK, True), output


@pytest.mark.slow
def test_timing_runs_without_vllm_and_is_unknown_where_the_stand_in_cannot_run(ran):
    status, output, _ = ran[0]["timing"]
    assert (status, "5.00" in output, "nothing to compare" in output) == (outputs.EXIT_INCOMPLETE, True, True), output


@pytest.mark.slow
def test_timing_says_why_vllms_own_kernels_are_not_timed(ran):
    assert "vllm: not timed: this build of vLLM has no" in ran[0]["timing"][1]


@pytest.mark.slow
def test_tiles_go_to_the_folder_that_vllm_would_name(ran):
    assert [one.parent.name for one in ran[1].rglob("tuned-*.json")] == ["aiter_mla"]


@pytest.mark.slow
@pytest.mark.mutation
def test_mutation_a_command_that_needs_vllm_fails_there(ran):
    """What is absent in that process is vLLM, and a command that asks it for something ends so."""
    status, output, _ = ran[0]["plan"]
    assert (status, "vllm is not installed here" in output) == (outputs.EXIT_INCOMPLETE, True)


def collect(folder, source):
    """The result of collecting one test file without vLLM, as pytest says it."""
    (folder / "test_one.py").write_text(source)
    line = ["-m", "pytest", "-p", "tests.support.without_vllm", "-p", "tests.support.collecting", "-q", "-n0"]
    done = subprocess.run([sys.executable, *line, "-c", "/dev/null", folder], capture_output=True, text=True)
    return done.stdout.splitlines()[-1]


def test_a_test_file_that_needs_vllm_is_skipped_there(tmp_path):
    assert collect(tmp_path, "from vllm.config import VllmConfig").startswith("1 skipped")


def test_a_folder_whose_conftest_needs_vllm_is_skipped_there(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "conftest.py").write_text("import vllm")
    (tmp_path / "folder" / "test_two.py").write_text("def test_two(): pass")
    assert collect(tmp_path, "def test_one(): pass").startswith("1 passed, 1 skipped")


def test_a_test_that_imports_vllm_is_skipped_there(tmp_path):
    source = "def test_one(): pass\ndef test_two():\n    import vllm.config"
    assert collect(tmp_path, source).startswith("1 passed, 1 skipped")


@pytest.mark.mutation
@pytest.mark.parametrize("source", ["import a_package_that_is_not_there", "def test_one(): assert 0"])
def test_mutation_what_fails_otherwise_fails_there_too(tmp_path, source):
    assert re.match("1 (error|failed)", collect(tmp_path, source))

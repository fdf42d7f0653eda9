"""The command as a whole: it runs anywhere, imports no AITER, and its exit status sums up the checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support import in_process
from vllm_aiter_mla.commands import machine as command
from vllm_aiter_mla.commands.check import steps
from vllm_aiter_mla.commands.check.context import CheckOptions, StepContext
from vllm_aiter_mla.commands.check.run import exit_status_of
from vllm_aiter_mla.commands.machine import CheckResult, Environment, check_name, run_checks
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.kernels.aiter.op import OP, REQUIRED

LINE = ("check", "--only", "machine", "--json", "-")
# A machine without torch and vLLM: neither can be found.
BARE = (
    "import sys\n"
    "class Nothing:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.partition('.')[0] in ('torch', 'vllm'):\n"
    "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
    "sys.meta_path.insert(0, Nothing())\n"
)


def machine(code: str, folder: Path) -> dict[str, dict[str, str]]:
    """What is found, by check, where ``code`` runs as each process begins; it and more packages are in ``folder``."""
    (folder / "sitecustomize.py").write_text(code)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    done = subprocess.run([sys.executable, "-m", "vllm_aiter_mla", *LINE], env=env, capture_output=True, text=True)
    assert done.stdout, done.stderr
    record = json.loads(done.stdout)
    assert record["exit"] == done.returncode
    return {check["name"]: check for check in record["steps"][0]["data"]}


def simulated_aiter(folder: Path, marker: Path) -> None:
    """Make an AITER that leaves a trace when it is imported, as the real one may start a compiler."""
    (folder / "aiter" / "ops").mkdir(parents=True)
    for package in (folder / "aiter", folder / "aiter" / "ops"):
        (package / "__init__.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    (folder / "aiter" / "ops" / "cache.py").write_text(f"def {OP}({', '.join(REQUIRED)}): ...\n")


def test_the_machine_is_looked_at_without_torch_and_vllm(tmp_path: Path) -> None:
    checks = machine(BARE, tmp_path)
    statuses = {name: check["status"] for name, check in checks.items()}
    assert statuses["torch"] == statuses["vllm"] == "problem"
    for name in ("surface", "patches"):
        assert statuses[name] == "unknown", name
    assert not [check for check in checks.values() if "the check failed" in check["detail"]]


@pytest.mark.slow
def test_the_look_at_this_machine_never_imports_aiter(tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    simulated_aiter(tmp_path, marker)
    # Whatever a vLLM release may try while it is looked at.
    eager = "from vllm_aiter_mla.commands import machine as command\n"
    eager += "def importing(given):\n    import aiter.ops.cache\n"
    eager += "command.CHECKS = (*command.CHECKS, importing)\n"
    checks = machine(eager, tmp_path)
    assert not marker.exists()
    assert "does not import aiter" in checks["importing"]["detail"]
    assert checks["aiter"]["status"] == "warning", "found, and not built"
    # Real vLLM, as installed here.
    for name in ("vllm", "plugin", "surface", "patches"):
        assert checks[name]["status"] == "ok", checks[name]


def test_aiter_can_be_imported_again_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_aiter(tmp_path, tmp_path / "imported")
    monkeypatch.syspath_prepend(str(tmp_path))
    with command.forbid_aiter_import(), pytest.raises(ImportError, match="compiler"):
        import aiter
    try:
        import aiter

        assert aiter.__file__
        assert (tmp_path / "imported").exists()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
            del sys.modules[name]


def test_one_line_per_check_and_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CHECKS", (command.checks.check_verified, command.checks.check_switches))
    in_process.install(monkeypatch)
    done = CliRunner().invoke(app, ["check", "--only", "machine"], env={"VLLM_MLA_DISABLE": "1"})
    assert done.exit_code == 1
    # What does not fit into a line goes on under its last column.
    first, second, *_ = re.sub(r"\n {3,}", " ", done.stdout).splitlines()
    assert first.split()[1] == "verified"
    assert second.split()[:2] == ["problem", "switches"]
    assert " -> " in second
    assert "1 problem, 0 unknown" in done.stdout


def test_the_names_of_the_checks_are_those_that_scripts_know() -> None:
    names = "torch rocm gpu triton hip-python vllm plugin surface patches aiter code-objects verified atom switches "
    names += "cache-root"
    assert sorted(map(check_name, command.CHECKS)) == sorted(names.split())


@pytest.mark.parametrize(
    ("statuses", "status"),
    [(("ok", "warning"), 0), (("ok", "unknown"), 3), (("unknown", "problem"), 1), (("problem",), 1)],
)
def test_a_problem_outweighs_an_unknown(
    monkeypatch: pytest.MonkeyPatch, statuses: tuple[Any, ...], status: int
) -> None:
    monkeypatch.setattr(command, "run_checks", lambda *_: tuple(CheckResult(one, "", name=one) for one in statuses))
    in_process.install(monkeypatch)
    step = steps.inspect_machine(StepContext(CheckOptions(named_steps=("machine",))))
    assert exit_status_of([step], uses_cpu=False, require_all=True) == status


@pytest.mark.parametrize("error", [RuntimeError("broken\nbox"), SystemExit(3), ImportError("no")])
def test_a_check_that_fails_is_unknown_and_stops_no_other(error: BaseException) -> None:
    def failing(_: Environment) -> CheckResult:
        raise error

    first, second = run_checks([failing, command.checks.check_switches], {})
    assert (first.name, first.status) == ("failing", "unknown")
    assert type(error).__name__ in first.detail
    assert second.status != "unknown"

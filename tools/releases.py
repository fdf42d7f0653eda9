"""Run the demo and the tests on another release of vLLM, in an environment of its own, and print one status line.

Usage: python tools/releases.py 0.31 [--only demo|tests] [--json FILE] [--folder DIR] [-- OPTIONS OF THE DEMO]

0.30 and 0.31 are their CPU builds. There is none of 0.33: its Python files run over the compiled ops of the
environment that runs this, which must be the one that `make setup` makes. The tests are those of passes, gate, ops
and plan; the demo starts four engines, two at a time. Exits 1 when anything is missed.

    python tools/releases.py 0.33
    python tools/releases.py 0.33 --only demo -- --kernel simulated-aiter
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.common import Parser, RunError, guarded, writable
from tools.overlay import ROOT, Overlay, overlay
from vllm_aiter_mla import files

TESTS = ("tests/passes", "tests/gate", "tests/ops", "tests/plan")
COUNTS = ("tests", "failures", "errors", "skipped")
MAIN = "from vllm_aiter_mla.commands.main import main; main()"


def run_demo(env: Overlay, options: Sequence[str]) -> dict[str, Any]:
    """The record of `demo --json` (docs/files.md). Raises RunError where the demo leaves none.

    Args:
        env: where to run it.
        options: the demo's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "demo.json"
        status = _run(env, "-c", MAIN, "demo", "--json", str(record), *options)
        if not record.is_file():
            raise RunError(f"the demo ended with status {status} and without figures")
        found: dict[str, Any] = json.loads(record.read_text())
    return found


def run_tests(env: Overlay) -> dict[str, int]:
    """Counts of pytest's report, by ``COUNTS``. Raises RunError where pytest stopped early, or ran nothing."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = _run(env, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS)
        counts = counted(report.read_text()) if report.is_file() else {}
    # 0: all passed, 1: some failed. An interrupted run leaves a report of its first part.
    if status not in (0, 1) or not counts.get("tests"):
        raise RunError(f"pytest ended with status {status} and ran {counts.get('tests', 0)} tests")
    return counts


def counted(report: str) -> dict[str, int]:
    """The counts in a JUnit report."""
    suites = ElementTree.fromstring(report).iter("testsuite")
    found = [{name: int(suite.get(name, 0)) for name in COUNTS} for suite in suites]
    return {name: sum(suite[name] for suite in found) for name in COUNTS}


def check(env: Overlay) -> None:
    """Raise RunError unless the environment imports the release that it is for, and this tree's plugin."""
    code = "import vllm, vllm_aiter_mla; print(vllm.__version__, vllm_aiter_mla.__file__, sep='\\n')"
    command = [str(env.python), "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, text=True, check=False)
    version, plugin = (["", "", *done.stdout.split("\n")[:-1]])[-2:]
    if version.partition("+")[0] != env.version or not Path(plugin).is_relative_to(ROOT):
        raise RunError(f"{env.python} imports vLLM {version or '-'} and the plugin from {plugin or 'nowhere'}")


def outcome(env: Overlay, demo: dict[str, Any] | None, tests: dict[str, int] | None) -> tuple[bool, str]:
    """Whether all is well, and one line that says what ran."""
    said, ok = [], True
    if demo is not None:
        ok = ok and demo["ok"] is True
        said += _about_demo(demo)
    if tests is not None:
        failed = tests["failures"] + tests["errors"]
        ok = ok and not failed
        passed = tests["tests"] - failed - tests["skipped"]
        said.append(f"tests: {passed} passed, {failed} failed, {tests['skipped']} skipped")
    return ok, f"{env.name}: {'; '.join(said)}: {'ok' if ok else 'MISSED'}"


def _about_demo(demo: dict[str, Any]) -> list[str]:
    on = [run["layers"] for run in demo["runs"] if run["flag"]]
    engaged, total = sum(one["engaged"] for one in on), sum(one["total"] for one in on)
    said = [f"layers engaged: {engaged} of {total} in {len(on)} runs"]
    for run in demo["runs"]:
        figures = run["scenarios"].values()
        equal, tokens = sum(one["tokens_equal"] for one in figures), sum(one["tokens"] for one in figures)
        said.append(f"{run['name']}: {equal} of {tokens} tokens equal{'' if run['ok'] else ', a bound is missed'}")
    return said


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _run(env: Overlay, *arguments: str) -> int:
    return subprocess.run([str(env.python), *arguments], cwd=ROOT, env=_environment(), check=False).returncode


def run(argv: Sequence[str]) -> int:
    """Make the environment, run in it, print the status line."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(__doc__, "%(prog)s RELEASE [options] [-- OPTIONS OF THE DEMO]")
    parser.add_argument("release", help="0.30, 0.31 or 0.33")
    parser.add_argument("--only", choices=("demo", "tests"), help="leave the other out")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--folder", type=Path, default=cache / "vllm-aiter-mla", help="where environments are kept")
    options = parser.parse_args(argv[:split])
    writable({"--json": options.json}, {"--folder": options.folder})
    env = overlay(options.release, options.folder)
    check(env)
    tests = None if options.only == "demo" else run_tests(env)
    demo = None if options.only == "tests" else run_demo(env, argv[split + 1 :])
    ok, line = outcome(env, demo, tests)
    print(line)
    if options.json is not None:
        record = {"vllm": env.version, "ops": env.ops, "demo": demo, "tests": tests, "ok": ok, "outcome": line}
        files.write(options.json, record | files.stamp("release", 1))
    return 0 if ok else 1


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0, 1 when something is missed or fails, 2 for a wrong option."""
    return guarded("releases", lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())

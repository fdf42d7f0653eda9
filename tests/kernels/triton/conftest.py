"""The interpreting process and the compiling ones, started when the first test asks and shared by all."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def interpreted():
    """Ask the interpreting process: ``interpreted("compare", case={...})``; its exception fails the test."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernels.triton.triton_worker"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    worker = subprocess.Popen(command, text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    to, answers = worker.stdin, worker.stdout
    assert to is not None
    assert answers is not None

    def ask(op: str, **arguments: Any) -> dict[str, Any]:
        print(json.dumps({"op": op, **arguments}), file=to, flush=True)
        line = answers.readline()
        assert line, f"the interpreting process ended with status {worker.wait()}"
        answer = json.loads(line)
        assert "error" not in answer, answer.get("error")
        return answer

    yield ask
    to.close()
    worker.wait(timeout=30)


@pytest.fixture(scope="session")
def isa_report(tmp_path_factory):
    """Run tools/isa_report.py with a compile cache of this session's own."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton-cache"))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "tools" / "isa_report.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    return run

"""Start each distinct engine that the selected tests need once, while other tests run."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.engine import engine_checks, engine_specs
from tests.sandbox import engine
from tests.sandbox.spec import EngineResult, load


class Engines:
    """Results by name of ``engine_specs.SPECS``, from a process that runs them."""

    def __init__(self, names: list[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="aiter-mla-tests-"))
        command = [sys.executable, "-m", "tests.engine.engine_pool", str(self.folder), *names]
        with (self.folder / "pool.log").open("w") as log:
            self.pool = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        self.results: dict[str, EngineResult] = {}

    def __call__(self, name: str) -> EngineResult:
        """Return an engine's result, waited for; its layers have the integration of the spec.

        Raises:
            engine.EngineFailedError: the engine failed.
        """
        if name not in self.results:
            done, failed = self.folder / f"{name}.result", self.folder / f"{name}.failed"
            ended = False
            while not done.exists() and not failed.exists():
                if ended:
                    raise RuntimeError(f"{name} was not run: {(self.folder / 'pool.log').read_text()[-2000:]}")
                ended = self.pool.poll() is not None
                time.sleep(0.2)
            if failed.exists():
                raise engine.EngineFailedError(failed.read_text())
            self.results[name] = load(done)
            engine_checks.assert_integration(engine_specs.SPECS[name], self.results[name])
        return self.results[name]

    def close(self) -> None:
        if self.pool.poll() is None:
            os.killpg(self.pool.pid, signal.SIGTERM)
        self.pool.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_runner: list[Engines] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the engines at once; tests that need no engine run meanwhile, engine tests come last."""
    if session.config.option.collectonly:
        return
    wanted = [name for item in session.items for marker in item.iter_markers("engine") for name in marker.args]
    if wanted and hasattr(session.config, "workerinput"):
        raise pytest.UsageError("engines already run two at a time: run their tests without -n")
    if wanted:
        _runner.append(Engines(engine_specs.longest_first(list(dict.fromkeys(wanted)))))


def pytest_sessionfinish() -> None:
    while _runner:
        _runner.pop().close()


@pytest.fixture(scope="session")
def engines():
    return _runner[0]

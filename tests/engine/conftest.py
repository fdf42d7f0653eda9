"""Starts each distinct engine that the selected tests need once, two at a time, ahead of the tests that read them."""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import engine_specs
import pytest

from vllm_aiter_mla.sandbox import engine
from vllm_aiter_mla.sandbox.spec import EngineResult

HERE = Path(__file__).parent


class Engines:
    """Results by name of ``engine_specs.SPECS``; a spec that builds on another's cache starts after it."""

    def __init__(self, names: list[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="aiter-mla-tests-"))
        # Compilation is single-threaded: two engines fill two cores.
        self.pool = ThreadPoolExecutor(max_workers=2)
        self.futures: dict[str, Future[EngineResult]] = {}
        for name in names:
            self._submit(name)

    def __call__(self, name: str) -> EngineResult:
        """The result of an engine; raises ``engine.EngineFailedError`` if it failed."""
        return self._submit(name).result()

    def _submit(self, name: str) -> Future[EngineResult]:
        if name not in self.futures:
            after = engine_specs.AFTER.get(name)
            earlier = self._submit(after) if after else None
            self.futures[name] = self.pool.submit(self._run, name, earlier)
        return self.futures[name]

    def _run(self, name: str, earlier: Future[EngineResult] | None) -> EngineResult:
        if earlier is not None:
            earlier.result()
        cache = self.folder / engine_specs.CACHES.get(name, name)
        spec = engine_specs.SPECS[name]
        inductor = cache / "inductor" if spec.compile_cache else self.folder / "inductor"
        return engine.run(spec, cache=cache, inductor=inductor)

    def close(self) -> None:
        """Stop waiting engines and remove what they left."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)


_engines: Engines | None = None
_wanted: list[str] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        for marker in item.iter_markers("engine"):
            _wanted.extend(name for name in marker.args if name not in _wanted)


@pytest.fixture(scope="session")
def engines():
    # The engines' processes import the planted bugs by module name.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    runner = Engines(_wanted)
    yield runner
    runner.close()

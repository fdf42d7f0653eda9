"""``python -m tests.engine.engine_pool FOLDER NAME ...``: run engines two at a time, write their results to the folder.

A separate process, because tests meanwhile plant bugs and change the environment in theirs.
"""

import os
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.engine import engine_specs
from tests.sandbox import engine
from tests.sandbox.spec import save


class Pool:
    """Each distinct engine once; a spec that builds on another's cache starts after it."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder = folder
        # Compilation is single-threaded: two engines fill two cores.
        self.threads = ThreadPoolExecutor(max_workers=2)
        self.futures: dict[str, Future[None]] = {}
        for name in names:
            self._submit(name)

    def _submit(self, name: str) -> Future[None]:
        if name not in self.futures:
            after = engine_specs.AFTER.get(name)
            earlier = self._submit(after) if after else None
            self.futures[name] = self.threads.submit(self._run, name, earlier)
        return self.futures[name]

    def _run(self, name: str, earlier: Future[None] | None) -> None:
        if earlier is not None:
            earlier.result()
        cache = self.folder / engine_specs.cache_of(name)
        spec = engine_specs.SPECS[name]
        written = self.folder / f"{name}.new"
        try:
            save(engine.run(spec, cache=cache, inductor=self.folder / "inductor"), written)
            written.rename(self.folder / f"{name}.result")
        except Exception as error:
            written.write_text(error.log if isinstance(error, engine.EngineFailedError) else repr(error))
            written.rename(self.folder / f"{name}.failed")


def end_with_caller() -> None:
    """End this process and its engines once the caller has ended, however it did: then its pipe to us is closed."""

    def wait() -> None:
        sys.stdin.read()
        if os.getpgrp() == os.getpid():  # started by the tests, in a session of its own
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main(folder: str, *names: str) -> None:
    end_with_caller()
    Pool(Path(folder), list(names)).threads.shutdown(wait=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Plans by a few long-lived processes: each imports vLLM once, and answers in a fork of its own."""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
import tempfile
from typing import Any

from vllm_aiter_mla.commands.plan import model

ARCH = "gfx950"


class Worker:
    """The process for a card and variables; :attr:`about` is what it says when it is ready."""

    def __init__(self, arch: str, env: tuple[str, ...]) -> None:
        self.variables, self._cache = model.environment(env, {}), tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.plan_child", arch], text=True, stderr=subprocess.DEVNULL,
            env=model.child_environment(self.variables, self._cache.name),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        atexit.register(self.close)

    def ask(self, source: model.Source, arguments: tuple[str, ...], bug: str = "") -> dict[str, Any]:
        """Return the plan, or ``failed``, with what was asked of the gate in ``decision``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with source.folder() as folder:
            request = {"folder": str(folder), "arguments": arguments, "variables": self.variables, "bug": bug}
            print(json.dumps(request), file=self._process.stdin, flush=True)
            found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._cache.cleanup()


worker = functools.cache(Worker)


@functools.cache
def planned(name: str, *arguments: str, arch: str = ARCH, env: tuple[str, ...] = (), bug: str = "") -> dict[str, Any]:
    """The plan of the model ``name`` as ``plan --json`` prints it."""
    source = model.find(name)
    plan = worker(arch, env).ask(source, arguments, bug)
    assert "failed" not in plan, plan
    plan["model"] |= {"name": source.name, "source": source.source, "basis": source.basis, "assumed": source.assumed}
    return plan


def ask(source: model.Source, arguments: Any, arch: str, variables: Any, verbose: bool) -> dict[str, Any]:
    """Answer for ``model.ask`` by the process of all tests, whatever the card and the variables."""
    return worker(ARCH, ()).ask(source, tuple(arguments))


def codes(plan: dict[str, Any]) -> list[str]:
    """Codes of the reasons, in order."""
    return [reason["code"] for reason in plan["reasons"]]

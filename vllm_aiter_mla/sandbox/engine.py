"""Start one engine of the sandbox in a process of its own, and collect what it gives."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from vllm_aiter_mla.sandbox import SANDBOX_ENV
from vllm_aiter_mla.sandbox.spec import EngineResult, EngineSpec

TIMEOUT_S = 600


class EngineFailedError(RuntimeError):
    """The engine's process ended without a result; ``log`` is what it printed."""

    def __init__(self, log: str) -> None:
        super().__init__(f"the engine failed; its last lines:\n{chr(10).join(log.splitlines()[-40:])}")
        self.log = log


def run(
    spec: EngineSpec, cache: Path | None = None, on_step: Callable[[str], None] = lambda line: None
) -> EngineResult:
    """Run ``spec`` and wait for it.

    Args:
        spec: what to run.
        cache: vLLM's cache root; a fresh one by default, so that the graphs are compiled anew.
        on_step: called with each progress line.

    Raises:
        EngineFailedError: no result.
    """
    with tempfile.TemporaryDirectory(prefix="aiter-mla-") as folder:
        work = Path(folder)
        spec.save(work / "spec.json")
        command = [
            sys.executable,
            "-m",
            "vllm_aiter_mla.sandbox.child",
            str(work / "spec.json"),
            str(work / "out.json"),
        ]
        environment = environment_for(spec, cache or work / "cache")
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        lines: list[str] = []
        for line in process.stdout or ():
            lines.append(line)
            on_step(line.rstrip())
        process.wait(TIMEOUT_S)
        if process.returncode or not (work / "out.json").is_file():
            raise EngineFailedError("".join(lines))
        result = EngineResult.load(work / "out.json")
        result.log = [line.rstrip() for line in lines if "aiter-mla:" in line]
        return result


def environment_for(spec: EngineSpec, cache: Path) -> dict[str, str]:
    """Environment of the engine's process: sandbox on, a private cache, quiet logs."""
    environment = {
        **os.environ,
        SANDBOX_ENV: "1",
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if spec.spawn or spec.tensor_parallel_size > 1 else "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.tensor_parallel_size > 1:
        # Two workers on two cores deadlock on vLLM's automatic binding.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(spec.tensor_parallel_size))
    return environment

"""Start one engine of the sandbox in a process of its own, and return its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.sandbox import cuda_graphs, platform, plugin, worker
from tests.sandbox.spec import EngineResult, EngineSpec, load, save
from vllm_aiter_mla.status import liveness

# An engine of a minute takes twenty on a machine that does other work.
TIMEOUT_S = 1800
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
"""Environment variables of folders, which are read whenever a folder is wanted."""


class EngineFailedError(RuntimeError):
    """The engine's process ended without a result; ``log`` is what it printed."""

    def __init__(self, log: str) -> None:
        super().__init__(f"the engine failed; its last lines:\n{chr(10).join(log.splitlines()[-40:])}")
        self.log = log


@dataclass(frozen=True, slots=True)
class Request:
    """What a process that has imported vLLM is asked for: paths of the spec, of the result and of what is printed.

    ``caches`` are the environment variables in which engines of one such process differ.
    """

    spec: str
    result: str
    log: str
    caches: dict[str, str]


class Importer:
    """A process that has imported vLLM in one environment, and forks engines: see ``child``."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="aiter-mla-importer-")
        self._log = Path(self._folder.name) / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.sandbox.child"],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def engine(self, request: Request) -> tuple[int | None, str]:
        """Return an engine's exit status, None where the importer ended, and what both printed."""
        watchdog = threading.Timer(TIMEOUT_S, self.end)
        watchdog.start()
        try:
            self._process.stdin.write(f"{json.dumps(asdict(request))}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:
            self.end()  # An interrupted run leaves no engine behind.
            raise
        finally:
            watchdog.cancel()
        logs = (path for path in (self._log, Path(request.log)) if path.exists())
        return int(answer) if answer else None, "".join(path.read_text(errors="replace") for path in logs)

    def end(self) -> None:
        """End it and its engine."""
        self._process.kill()
        self._process.wait()


_idle: dict[tuple[tuple[str, str], ...], list[Importer]] = {}
"""Importers that wait, by what their environment has besides the folders of caches. They end with this process."""


def run(
    spec: EngineSpec,
    cache: Path | None = None,
    inductor: Path | None = None,
) -> EngineResult:
    """Run ``spec`` in a process of its own and return its result.

    Args:
        spec: what to run.
        cache: vLLM's cache root; a fresh one by default, so that the graphs are compiled again.
        inductor: cache folder that engines share: compiled C++ kernels, found again by their source, and vLLM's notes
            on the model class. Without the notes each engine spends ten seconds on inspecting the class.

    Raises:
        EngineFailedError: no result.
    """
    with tempfile.TemporaryDirectory(prefix="aiter-mla-") as folder:
        work = Path(folder)
        save(spec, work / "spec")
        cache, inductor = cache or work / "cache", inductor or work / "inductor"
        _share_model_notes(cache, inductor)
        environment = environment_for(spec, cache, inductor)
        caches = {name: environment[name] for name in CACHES}
        idle = _idle.setdefault(tuple(sorted(environment.items() - caches.items())), [])
        importer = idle.pop() if idle else Importer(environment)
        status, log = importer.engine(Request(*(str(work / name) for name in ("spec", "result", "log")), caches))
        if status is not None:
            idle.append(importer)
        if status != 0 or not (work / "result").is_file():
            raise EngineFailedError(log)
        if spec.fault.bug and plugin.BUG_RAN not in log:
            raise EngineFailedError(f"{log}{spec.fault.bug}: the planted bug never ran")
        result: EngineResult = load(work / "result")
        result.log = [line.rstrip() for line in log.splitlines() if "aiter-mla:" in line]
        return result


def _share_model_notes(cache: Path, shared: Path) -> None:
    notes = shared / "modelinfos"
    notes.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / notes.name).exists():
        (cache / notes.name).symlink_to(notes.resolve(), target_is_directory=True)


def environment_for(spec: EngineSpec, cache: Path, inductor: Path) -> dict[str, str]:
    """Return the environment of an engine's process: the sandbox's plugin on its path, private caches."""
    path = os.pathsep.join(filter(None, [str(plugin.FOLDER), str(plugin.CHECKOUT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        **_environment_of_device(spec),
        "PYTHONPATH": path,
        "VLLM_PLUGINS": f"aiter_mla,{plugin.NAME}" if spec.plugin.loaded else plugin.NAME,
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(inductor),
        "VLLM_DISABLE_COMPILE_CACHE": "0" if spec.vllm.compile_cache else "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if spec.vllm.spawn else "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if not spec.vllm.compile_cache:
        # Compiled C++ is found again by its source. Whole graphs must not be, or a planted bug is not compiled in.
        environment |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    # This process may have built a config itself; the engine must not write into this process's run. pytest names each
    # test, and engines of different tests share an importer.
    for name in (liveness.RUN_VARIABLE, "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    return environment


def runs_on_ray(spec: EngineSpec) -> bool:
    """Whether the workers are Ray actors."""
    return bool(spec.vllm.extra.get("distributed_executor_backend") == "ray")


def _environment_of_device(spec: EngineSpec) -> dict[str, str]:
    if spec.emulation.device == "gpu":
        # The demo's bounds are for plain absorb weights; where AITER is on, vLLM would hold fp8 or mxfp4 ones.
        return {"VLLM_ROCM_USE_AITER_FP8BMM": "0", "VLLM_ROCM_USE_AITER_FP4BMM": "0"}
    # One thread: two threads wait for each other by spinning, and small GEMMs took six times the processor time.
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        cuda_graphs.VARIABLE: str(int(spec.emulation.graphs)),
        worker.OURS: str(int(spec.emulation.interpret)),
    }
    if spec.vllm.runner == "v2" or spec.emulation.interpret:
        environment[worker.TRITON] = "1"
    if spec.vllm.runner == "v1":
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if runs_on_ray(spec):
        environment |= {platform.RAY_SWITCH: "1", "RAY_USAGE_STATS_ENABLED": "0"}
    workers = spec.vllm.tensor_parallel_size * spec.vllm.extra.get("pipeline_parallel_size", 1)
    if workers > 1:
        # Two workers on two cores deadlock on vLLM's automatic binding.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(workers))
    return environment

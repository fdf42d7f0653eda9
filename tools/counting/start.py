"""The processes of ``tools/start_cost.py``: ``python -m tools.counting.start`` with what it starts, and its arguments.

``engine SPEC OUT`` starts one engine of the sandbox in one process; ``register KIND FOLDER OUT`` loads the plugin in a
fresh process. Each writes CPU seconds by phase, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

PLUGIN = "aiter_mla"
REGISTRATION, IMPORTS = "registration", "imports"
GATE, CHECK, TIMING, COMPILE, WARM_UP, STATUS, REST = (
    "gate", "self-check", "timing of kernels", "compile, or load it", "warm-up and capture", "status line",
    "all the rest",
)  # fmt: skip
PHASES = (GATE, CHECK, TIMING, STATUS, COMPILE, WARM_UP, REST)
"""Of an engine; registration has a fresh process."""
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "front end": (
        ("vllm.entrypoints.openai.api_server",),
        (),
        ("vllm_aiter_mla.gate", "vllm_aiter_mla.serving.ops", "vllm.v1.worker.worker_base"),
    ),
    "engine core": (("vllm.v1.engine.core",), (), ()),
    "worker": (
        ("vllm.v1.executor.multiproc_executor",),
        ("vllm.v1.worker.gpu_worker", "vllm.model_executor.models.deepseek_v2"),
        ("vllm_aiter_mla.engine", "vllm_aiter_mla.serving.module", "vllm_aiter_mla.kernels.triton.backend"),
    ),
}
"""vLLM's processes: what each has imported when it loads plugins, what it imports next, and what the flag adds."""
PIPELINE = "vllm_aiter_mla.passes.pipeline"
"""In every process where the flag is on: the config carries the pass."""


class Phases:
    """Seconds by phase. A phase inside another one is taken out of it, so the phases add up to the whole."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.spent = dict.fromkeys(PHASES, 0.0)
        self._clock, self._names, self._mark = clock, [REST], 0.0

    def turn(self) -> None:
        """Give the time since the last turn to the phase that is on."""
        now = self._clock()
        self.spent[self._names[-1]] += now - self._mark
        self._mark = now

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Give the block's time to ``name``."""
        self.turn()
        self._names.append(name)
        try:
            yield
        finally:
            self.turn()
            self._names.pop()

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Replace a function by one whose time counts as ``name``."""
        inner = getattr(owner, function)

        @wraps(inner)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.inside(name):
                return inner(*args, **kwargs)

        setattr(owner, function, watched)


def engine(spec_path: str, out: str) -> None:
    """Start an engine, with the phases of its start watched."""
    started, phases = time.time(), Phases()
    from vllm.plugins import load_general_plugins

    from tests.sandbox import child, knobs
    from tests.sandbox.spec import EngineSpec, load
    from vllm_aiter_mla import plugin

    phases.watch(plugin, "apply_gate", GATE)  # ``register`` hands these over
    phases.watch(plugin, "attach", GATE)
    load_general_plugins()
    spec: EngineSpec = load(Path(spec_path))
    knobs.apply(spec)
    watch_vllm(phases)
    watch_ours(phases)
    llm = child.build(spec, Path(os.environ["VLLM_CACHE_ROOT"]) / "model")
    phases.turn()
    from vllm.compilation.counter import compilation_counter as counted

    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    record = {
        "phases": phases.spent,
        "children": children.ru_utime + children.ru_stime,
        "loaded": counted.num_aot_artifacts_loaded,
        "runner": llm.collective_rpc("runner_module"),
        "status": child.status_records(started),
    }
    Path(out).write_text(json.dumps(record))


def watch_vllm(phases: Phases) -> None:
    """Watch what vLLM does with the flag on and off."""
    from vllm.compilation import decorators
    from vllm.v1.worker.cpu_worker import CPUWorker

    inner = decorators.monitor_torch_compile

    @contextmanager
    def monitored(*args: Any, **kwargs: Any) -> Iterator[None]:
        with phases.inside(COMPILE), inner(*args, **kwargs):
            yield

    decorators.monitor_torch_compile = monitored  # around a compilation, and around the load of one
    for method in ("determine_available_memory", "compile_or_warm_up_model"):
        phases.watch(CPUWorker, method, WARM_UP)


def watch_ours(phases: Phases) -> None:
    """Watch what the plugin does once the flag is on."""
    from vllm_aiter_mla.engine import Engine
    from vllm_aiter_mla.startup import prefill, timing

    phases.watch(Engine, "on_loaded", CHECK)
    phases.watch(timing, "time_kernels", TIMING)
    phases.watch(prefill, "compile_quantisation", WARM_UP)  # vLLM's, which compiles it in its warm-up
    phases.watch(Engine, "on_warmed_up", STATUS)


def register(kind: str, folder: str, out: str) -> None:
    """Load the plugin as ``kind`` of vLLM's processes does, then import what the flag adds there."""
    before, later, ours = KINDS[kind]
    for name in before:
        importlib.import_module(name)
    # As installed by pip: with bytecode, which a checkout may lack.
    sys.dont_write_bytecode, sys.pycache_prefix = False, folder
    spent = {REGISTRATION: registration()}
    for name in later:
        importlib.import_module(name)
    began = time.process_time()
    for name in (PIPELINE, *ours):
        importlib.import_module(name)
    spent[IMPORTS] = time.process_time() - began
    Path(out).write_text(json.dumps(spent))


def registration() -> float:
    """CPU seconds of ``load_general_plugins`` that are ours: the import of the entry point and its call."""
    from importlib.metadata import EntryPoint

    from vllm.plugins import load_general_plugins

    spent, load = [], EntryPoint.load

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args)
            finally:
                spent.append(time.process_time() - began)

        return call

    def loaded(point: EntryPoint) -> Any:
        return load(point) if point.name != PLUGIN else timed(timed(load)(point))

    EntryPoint.load = loaded  # type: ignore[method-assign]
    try:
        load_general_plugins()
    finally:
        EntryPoint.load = load  # type: ignore[method-assign]
    if len(spent) != 2:
        raise RuntimeError(f"vLLM has not loaded the plugin once: {len(spent)} of 2 steps ran")
    return sum(spent)


if __name__ == "__main__":
    {"engine": engine, "register": register}[sys.argv[1]](*sys.argv[2:])

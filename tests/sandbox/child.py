"""The process of one engine run, forked from a process that has imported vLLM: ``python -m tests.sandbox.child``.

Importing vLLM and loading its plugins is half of what a small engine costs, and the same for each engine in the same
environment. ``engine`` writes a ``Request`` to the standard input in each line, and reads the engine's exit status.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.sandbox import model, plugin
from tests.sandbox.engine import Request, runs_on_ray
from tests.sandbox.spec import EngineResult, EngineSpec, load, save
from vllm_aiter_mla.commands.compat.llm_engine import RANDOM_LOAD_FORMAT, generate

# 16 requests of 512 tokens in 4 layers take 38 MB of bf16 rows.
GPU_KV_BYTES = 256 << 20
STEPS: list[float] = []  # seconds of each engine step
PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>


def serve() -> None:
    """Load vLLM's plugins, then fork an engine for each request, one after the other.

    Returns:
        In this process when no request is left, and in an engine's when that has written its result: it ends as any
        other Python process does.
    """
    statuses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    while line := sys.stdin.readline():
        request = Request(**json.loads(line))
        child = os.fork()
        if not child:
            statuses.close()
            run(request)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=statuses, flush=True)


def run(request: Request) -> None:
    """Turn this process, a fork, into the engine's."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(request.caches)
    main(load(Path(request.spec)), Path(request.result))


def main(spec: EngineSpec, result_path: Path) -> None:
    """Build the model, start the engine, run the scenarios, write the result."""
    started = time.time()
    if runs_on_ray(spec):
        import ray

        ray.init(num_gpus=spec.vllm.tensor_parallel_size, include_dashboard=False)  # it takes our word for them
    plugin.check_device(spec.emulation.device)
    from tests.sandbox import knobs

    knobs.apply(spec)
    # In the cache root: vLLM's cache key holds the model's path, and a warm start must find the same.
    llm = build(spec, Path(os.environ["VLLM_CACHE_ROOT"]) / "model")
    knobs.check_kept(spec, llm)
    print("sandbox: engine is up", flush=True)
    if spec.emulation.scales is not None:
        knobs.set_scales(llm, *spec.emulation.scales)
    outcome = run_all(spec, llm)
    if spec.reload is not None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other_weights(spec))})
        again = replace(spec, scenarios=spec.scenarios[:1])
        outcome |= {f"{name}, reloaded": steps for name, steps in run_all(again, llm).items()}
        from tests.sandbox import transfer

        transfer.send(llm, Path(os.environ["VLLM_CACHE_ROOT"]) / "model")
        outcome |= {f"{name}, transferred": steps for name, steps in run_all(again, llm).items()}
    save(result(spec, llm, outcome, started), result_path)
    if runs_on_ray(spec):
        # At the interpreter's exit Ray is gone before vLLM ends its actors, and is started again for that.
        llm.llm_engine.engine_core.shutdown()


def run_all(spec: EngineSpec, llm: Any) -> dict[str, Any]:
    """The spec's scenarios, one after the other."""
    from tests.sandbox.scenarios import SCENARIOS

    step = llm.llm_engine.step

    def timed() -> Any:
        began = time.perf_counter()
        outputs = step()
        STEPS.append(time.perf_counter() - began)
        return outputs

    llm.llm_engine.step = timed
    if spec.vllm.lora:
        llm.llm_engine.add_request = with_adapter(spec, llm.llm_engine.add_request)
    outcome = {}
    for name in spec.scenarios:
        print(f"sandbox: scenario {name}", flush=True)
        outcome[name] = generate(llm.llm_engine, SCENARIOS[name])
    return outcome


def with_adapter(spec: EngineSpec, add_request: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``add_request`` of vLLM's engine with a LoRA adapter of the spec's model for every second request."""
    from vllm.lora.request import LoRARequest

    folder = model.TinyDeepseek(**spec.vllm.model).save_adapter(Path(os.environ["VLLM_CACHE_ROOT"]) / "adapter")
    adapter = LoRARequest("random", 1, str(folder))

    def add(request_id: str, *given: Any) -> Any:
        lora = adapter if int(request_id.rpartition("-")[2]) % 2 else None
        return add_request(request_id, *given, lora_request=lora)

    return add


def other_weights(spec: EngineSpec) -> Path:
    """Write the same model with the weights of the spec's other seed."""
    other = model.TinyDeepseek(**spec.vllm.model | {"seed": spec.reload})
    return other.save(Path(os.environ["VLLM_CACHE_ROOT"]) / "reloaded")


def build(spec: EngineSpec, folder: Path) -> Any:
    """vLLM's ``LLM`` for the spec."""
    from vllm import LLM

    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        # Without this vLLM turns a float32 checkpoint into bfloat16.
        "dtype": spec.vllm.model.get("dtype", "auto"),
        "max_model_len": 512,
        "max_num_seqs": spec.vllm.max_num_seqs,
        "max_num_batched_tokens": spec.vllm.max_num_batched_tokens,
        "enable_prefix_caching": False,
        "kv_cache_dtype": spec.vllm.kv_cache_dtype,
        "tensor_parallel_size": spec.vllm.tensor_parallel_size,
        "compilation_config": compilation(spec),
        "additional_config": additional(spec),
        "seed": 0,
    }
    return LLM(
        str(checkpoint(spec, folder)),
        **options
        | speculative(spec, folder)
        | on_device(spec)
        | connector(spec, folder)
        | (model.LORA_OPTIONS if spec.vllm.lora else {})
        | weight_transfer(spec)
        | spec.vllm.extra,
    )


def weight_transfer(spec: EngineSpec) -> dict[str, Any]:
    """The option by which a trainer may send weights."""
    if spec.reload is None:
        return {}
    from tests.sandbox import transfer

    return {"weight_transfer_config": transfer.config()}


def checkpoint(spec: EngineSpec, folder: Path) -> Path:
    """Write the model that the spec names."""
    if spec.vllm.config:
        return model.save_config(spec.vllm.config, folder)
    return model.TinyDeepseek(**{"num_nextn_predict_layers": int(spec.vllm.drafts > 0)} | spec.vllm.model).save(folder)


def on_device(spec: EngineSpec) -> dict[str, Any]:
    """Options that the device needs: on a GPU a fixed back end and little memory."""
    if spec.emulation.device == "cpu":
        return {}
    backend, _ = plugin.GPU_ATTENTION
    return {"attention_backend": backend, "kv_cache_memory_bytes": GPU_KV_BYTES, "gpu_memory_utilization": 0.1}


def speculative(spec: EngineSpec, folder: Path) -> dict[str, Any]:
    """The ``speculative_config``, and how weights are loaded. Without a draft model the model's own layer drafts."""
    found: dict[str, Any] = {"load_format": RANDOM_LOAD_FORMAT} if spec.vllm.config else {}
    if spec.vllm.drafts:
        draft: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": spec.vllm.drafts}
        if spec.vllm.draft_config:
            draft |= {"method": "eagle3", "model": str(model.save_config(spec.vllm.draft_config, folder / "draft"))}
        found["speculative_config"] = draft
    return found


def connector(spec: EngineSpec, folder: Path) -> dict[str, Any]:
    """The ``kv_transfer_config``: vLLM's own connector for tests, over files."""
    if not spec.vllm.shares_kv:
        return {}
    extra = {"shared_storage_path": str(folder.parent / "kv")}
    return {
        "kv_transfer_config": {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    }


def compilation(spec: EngineSpec) -> dict[str, Any]:
    """The ``compilation_config``, the same on both sides."""
    return {"pass_config": {"fuse_rope_kvcache_cat_mla": spec.vllm.own_pass}} | spec.vllm.compilation


def additional(spec: EngineSpec) -> dict[str, Any]:
    """The ``additional_config``; empty where the flag is off."""
    if spec.side == "off":
        return {}
    own = {"kernel": spec.plugin.kernel, "integration": spec.plugin.integration}
    debug = {"rounding": spec.plugin.rounding}
    return {"aiter_mla": {"enabled": True, **own, "debug": debug} | spec.plugin.additional}


def result(spec: EngineSpec, llm: Any, outcome: dict[str, Any], started: float) -> EngineResult:
    """Collect what the parent wants of a run that started at this time."""
    import torch
    import vllm

    from tests.sandbox import cuda_graphs, knobs

    config = llm.llm_engine.vllm_config
    return EngineResult(
        scenarios=outcome,
        status=status_records(started),
        ranges=[(r.start, r.end) for r in config.compilation_config.get_compile_ranges()],
        graphs={name: "\n".join(pieces) for name, pieces in knobs.GRAPHS.items()},
        code={name: "\n".join(pieces) for name, pieces in knobs.CODE.items()},
        compilations=sum(map(len, knobs.CODE.values())),
        step_us=1e6 * statistics.median(STEPS),
        branches=dict(knobs.BRANCHES),
        scheduler=config.scheduler_config.get_scheduler_cls().__name__,
        counters=counters(llm) if spec.vllm.extra.get("disable_log_stats") is False else {},
        captured=dict(cuda_graphs.CAPTURED),
        replayed=dict(cuda_graphs.REPLAYED),
        replays=dict(cuda_graphs.REPLAYS),
        draft_replays=dict(cuda_graphs.DRAFT_REPLAYS),
        log=[],
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),  # a class that a reader without torch cannot load
            "vllm": vllm.__version__,
            "device": "CPU" if spec.emulation.device == "cpu" else torch.cuda.get_device_name(),
        },
        seconds=time.time() - started,
    )


def counters(llm: Any) -> dict[str, float]:
    """vLLM's counters, summed over their labels."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            found[metric.name] = found.get(metric.name, 0.0) + metric.value
    return found


def status_records(started: float) -> list[dict[str, Any]]:
    """Return the status files that this run's workers wrote, by rank."""
    from vllm_aiter_mla.compat.config import cache_folder

    files = [path for path in cache_folder().glob("status-*.json") if path.stat().st_mtime >= started - 1]
    return sorted((json.loads(path.read_text()) for path in files), key=lambda record: record["rank"])


if __name__ == "__main__":
    serve()

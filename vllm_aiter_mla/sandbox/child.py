"""The process of one engine run: ``python -m vllm_aiter_mla.sandbox.child SPEC OUT``."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from vllm_aiter_mla.sandbox import plugin
from vllm_aiter_mla.sandbox.spec import EngineResult, EngineSpec, load, save

# 16 requests of 512 tokens in 4 layers take 38 MB of bf16 rows.
GPU_KV_BYTES = 256 << 20
STARTED = time.perf_counter()


def main(spec_path: str, out_path: str) -> None:
    """Build the model, start the engine, run the scenarios, write the result."""
    spec: EngineSpec = load(Path(spec_path))
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    plugin.check_device(spec.device)
    from vllm_aiter_mla.sandbox import knobs, scenarios

    knobs.apply(spec)
    # In the cache root: vLLM's cache key holds the model's path, and a warm start must find the same.
    llm = build(spec, Path(os.environ["VLLM_CACHE_ROOT"]) / "model")
    print("sandbox: engine is up", flush=True)
    if spec.scales is not None:
        knobs.set_scales(llm, *spec.scales)
    outcome = {}
    for name in spec.scenarios:
        print(f"sandbox: scenario {name}", flush=True)
        outcome[name] = scenarios.run(llm.llm_engine, name)
    save(result(spec, llm, outcome), Path(out_path))


def build(spec: EngineSpec, folder: Path) -> Any:
    """vLLM's ``LLM`` for the spec."""
    from vllm import LLM

    from vllm_aiter_mla.sandbox.model import TinyDeepseek

    model = TinyDeepseek(**{"num_nextn_predict_layers": int(spec.drafts > 0)} | spec.model).save(folder)
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        enable_prefix_caching=False,
        kv_cache_dtype=spec.kv_cache_dtype,
        tensor_parallel_size=spec.tensor_parallel_size,
        compilation_config=compilation(spec),
        additional_config=options(spec),
        seed=0,
        **speculative(spec),
        **on_device(spec),
    )


def on_device(spec: EngineSpec) -> dict[str, Any]:
    """Options of vLLM's that the device needs: on a GPU a fixed back end and little memory, beside other work."""
    if spec.device == "cpu":
        return {}
    backend, _ = plugin.GPU_ATTENTION
    return {"attention_backend": backend, "kv_cache_memory_bytes": GPU_KV_BYTES, "gpu_memory_utilization": 0.1}


def speculative(spec: EngineSpec) -> dict[str, Any]:
    """The ``speculative_config``; the draft is the model's own layer, under the name of its checkpoint."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": spec.drafts}} if spec.drafts else {}


def compilation(spec: EngineSpec) -> dict[str, Any]:
    """The ``compilation_config``: flag off is stock in the same ranges and partitioning, so that runs compare."""
    config: dict[str, Any] = {"pass_config": {"fuse_rope_kvcache_cat_mla": spec.stock_pass}}
    if not spec.enabled:
        config |= {
            "use_inductor_graph_partition": True,
            "compile_ranges_endpoints": [spec.max_num_seqs * (1 + spec.drafts)],
        }
    return config | spec.compilation


def options(spec: EngineSpec) -> dict[str, Any]:
    """The ``additional_config``; empty where the flag is off."""
    if not spec.enabled:
        return {}
    debug = {"rounding": spec.rounding, "stop_after": spec.stop_after}
    return {"aiter_mla": {"enabled": True, "kernel": spec.kernel, "debug": debug} | spec.additional}


def result(spec: EngineSpec, llm: Any, outcome: dict[str, Any]) -> EngineResult:
    """Collect what the parent wants."""
    import torch
    import vllm

    from vllm_aiter_mla.sandbox import full_graphs, knobs, piecewise

    config = llm.llm_engine.vllm_config
    return EngineResult(
        scenarios=outcome,
        census=census_records(),
        ranges=[(r.start, r.end) for r in config.compilation_config.get_compile_ranges()],
        graphs=dict(knobs.GRAPHS),
        code=dict(knobs.CODE),
        branches=dict(knobs.BRANCHES),
        pieces=max(piecewise.PIECES, default=0),
        replays=dict(full_graphs.REPLAYS),
        log=[],
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),  # a class of torch's, which a reader may not have
            "vllm": vllm.__version__,
            "device": "CPU" if spec.device == "cpu" else torch.cuda.get_device_name(),
        },
        seconds=time.perf_counter() - STARTED,
    )


def census_records() -> list[dict[str, Any]]:
    """The census files that this run's workers wrote, by rank; the cache root is this run's own."""
    from vllm_aiter_mla.compat.config import cache_folder

    files = [path for path in cache_folder().glob("census-*.json") if path.stat().st_mtime >= _start_of_process()]
    return sorted((json.loads(path.read_text()) for path in files), key=lambda record: record["rank"])


def _start_of_process() -> float:
    return time.time() - (time.perf_counter() - STARTED) - 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

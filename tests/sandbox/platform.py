"""vLLM's CPU platform for the sandbox: it keeps the compile pipeline, takes fp8 caches for MLA, and runs under Ray.

The CPU platform otherwise turns the pipeline into a plain Inductor trace. ``entry_point`` names ``find``.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection
from dataclasses import fields
from functools import cache, wraps
from typing import Any

from tests.sandbox import worker

# Set by a spec: vLLM's own MLA RoPE pass, which PassConfig switches off without a GPU.
vllm_pass = False
# Whether CUDA graphs are emulated, so that vLLM's dispatcher pads batches to captured sizes.
has_graphs = False
# Whether something here gathers the context of a chunked prompt from an fp8 cache.
chunks_fp8_prompts = False


def see_no_amx() -> None:
    """Let vLLM find no AMX tiles, whatever this processor has.

    With them it takes an MLA back end without ``W_UK_T``, blocks of 128 rows, chunked prefill with another budget,
    and other GEMMs. What else vLLM decides by the machine is set elsewhere: ``environment_for`` gives the KV cache's
    size and the threads. AVX-512 moves no option of a dense model.
    """
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


@cache
def wrap(platform_cls: type) -> None:
    """Wrap ``platform_cls.check_and_update_config`` so that the compile pipeline survives it. Idempotent."""
    inner = platform_cls.check_and_update_config

    @wraps(inner)
    def check_and_update_config(vllm_config: Any) -> None:
        asked = (copy.copy(vllm_config.compilation_config), copy.copy(vllm_config.scheduler_config))
        asked[0].inductor_compile_config = {**asked[0].inductor_compile_config}
        caches_prefixes = vllm_config.cache_config.enable_prefix_caching
        options, fp8 = _options(vllm_config), vllm_config.cache_config.cache_dtype.startswith("fp8")
        inner(vllm_config)
        _restore(vllm_config, *asked)
        # A prompt that continues a cached prefix takes the path of a chunk.
        vllm_config.cache_config.enable_prefix_caching = (
            caches_prefixes and vllm_config.scheduler_config.enable_chunked_prefill
        )
        if vllm_config.model_config is not None:  # an engine's
            allowed = CHANGED.keys() | _lacking(fp8, vllm_config.model_config.use_mla)
            check_unchanged(options, _options(vllm_config), allowed)

    platform_cls.check_and_update_config = staticmethod(check_and_update_config)


@cache
def allow_fp8_mla(platform_cls: type) -> None:
    """Let MLA have an fp8 cache on a CPU: vLLM 0.33 rejects it before it asks the back end, and ours reads one.

    It has no effect on older releases. Remove it when vLLM asks the back end. Idempotent.
    """
    inner = platform_cls.get_attn_backend_cls

    @wraps(inner)
    def get_attn_backend_cls(selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> Any:
        if attn_selector_config.use_mla:
            attn_selector_config = attn_selector_config._replace(kv_cache_dtype="auto")
        return inner(selected_backend, attn_selector_config, num_heads)

    platform_cls.get_attn_backend_cls = staticmethod(get_attn_backend_cls)


CHANGED = {
    "cache_config.kv_cache_memory_bytes": "the environment's VLLM_CPU_KVCACHE_SPACE",
    "cache_config.mamba_ssm_cache_dtype": "of layers that no MLA model has",
    "parallel_config.worker_cls": "the CPU's worker",
    "parallel_config.distributed_executor_backend": "a spawned engine core has its worker in a process too",
}
"""Options that the CPU platform changes and the sandbox leaves so, and why that hides nothing."""


def _lacking(fp8: bool, use_mla: bool) -> set[str]:
    """What changes besides: the spec asks for no graphs, nothing gathers the context from an fp8 cache, or no MLA.

    The CPU's attention without MLA takes blocks of 128 tokens.
    """
    chunks = {"cache_config.enable_prefix_caching", "scheduler_config.enable_chunked_prefill"}
    return (
        (chunks if fp8 and not chunks_fp8_prompts else set())
        | (set() if has_graphs else {"compilation_config.cudagraph_capture_sizes"})
        | ({"compilation_config.pass_config"} if vllm_pass else set())
        | (set() if use_mla else {"cache_config.block_size"})
    )


def check_unchanged(asked: dict[str, str], kept: dict[str, str], allowed: Collection[str]) -> None:
    """Check that the CPU platform has changed no option but those allowed.

    Raises:
        RuntimeError: names the options, what was asked for and what is left.
    """
    lost = {name: (value, kept[name]) for name, value in asked.items() if kept[name] != value and name not in allowed}
    if lost:
        raise RuntimeError(f"vLLM's CPU platform has changed options of the engine: {lost}")


def _options(vllm_config: Any) -> dict[str, str]:
    found = {}
    for section in (f"{name}_config" for name in ("compilation", "scheduler", "cache", "parallel")):
        config = getattr(vllm_config, section)
        found |= {f"{section}.{field.name}": repr(getattr(config, field.name, None)) for field in fields(config)}
    if vllm_config.compilation_config.compile_sizes is None:  # an empty list says the same
        found["compilation_config.compile_sizes"] = "[]"
    return found


def _restore(vllm_config: Any, compilation_asked: Any, scheduler_asked: Any) -> None:
    """Put the compile mode and, where the cache's context can be gathered, chunked prefill back to what was asked."""
    from vllm.config import CompilationMode

    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    if compilation_asked.mode == CompilationMode.VLLM_COMPILE:
        compilation.mode = CompilationMode.VLLM_COMPILE
        # The platform names another back end for its plain trace.
        compilation.backend = compilation_asked.backend or "inductor"
        compilation.ir_enable_torch_wrap = compilation_asked.ir_enable_torch_wrap
        compilation.inductor_compile_config = compilation_asked.inductor_compile_config
        # None makes the piecewise back end assert "out of considered ranges" without a GPU.
        compilation.compile_sizes = compilation_asked.compile_sizes or []
    if has_graphs:
        # What vLLM has computed for a platform with graphs; the CPU's empties it.
        compilation.cudagraph_capture_sizes = compilation_asked.cudagraph_capture_sizes
    if vllm_pass:
        compilation.pass_config.fuse_rope_kvcache_cat_mla = True
    # vLLM's chunked path for CPUs reads no fp8 cache.
    is_fp8 = vllm_config.cache_config.cache_dtype.startswith("fp8")
    if scheduler_asked.enable_chunked_prefill and (chunks_fp8_prompts or not is_fp8):
        scheduler.enable_chunked_prefill = True
    scheduler.max_num_batched_tokens = scheduler_asked.max_num_batched_tokens
    scheduler.async_scheduling = scheduler_asked.async_scheduling  # vLLM's default on a GPU


RAY_SWITCH = "AITER_MLA_SANDBOX_RAY"


def find() -> str | None:
    """Name the platform class for engines on Ray, and show Triton to vLLM.

    A platform plugin: an actor needs the class before other plugins, and vLLM asks for its platform before it looks for
    Triton.
    """
    worker.show_triton()
    return f"{__name__}.RayCpuPlatform" if os.environ.get(RAY_SWITCH) == "1" else None


if os.environ.get(RAY_SWITCH) == "1":
    from vllm.platforms.cpu import CpuPlatform

    class RayCpuPlatform(CpuPlatform):
        """The CPU platform with the key by which Ray counts devices; vLLM rejects Ray on a platform without one."""

        ray_device_key = "GPU"

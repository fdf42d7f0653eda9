"""What the plugin does in a worker whose fast path is on: the self-check after loading, the census after warm-up.

vLLM's memory profiling may already capture graphs, so the self-check comes right after loading; the census can tell
the truth only once the compiled graphs have run.
"""

from __future__ import annotations

from typing import Any

from vllm_aiter_mla.compat import config_view, user_pass
from vllm_aiter_mla.compat.patches import worker_hook


def attach(worker: Any) -> None:
    """Hook one worker; with the flag off, or with the gate's decline, it is left as it is."""
    if not config_view.settings_of(worker.vllm_config).enabled or engaged_pass(worker.vllm_config) is None:
        return
    worker_hook.after(worker, "load_model", check_kernels)
    worker_hook.after(worker, "compile_or_warm_up_model", take_census)


def engaged_pass(vllm_config: Any) -> Any:
    """Our ``AiterMLAPipeline`` where the gate has engaged, else None."""
    current = user_pass.current(vllm_config.compilation_config)
    return current if current is not None and isinstance(current, pipeline_class()) else None


def pipeline_class() -> Any:
    """``AiterMLAPipeline``, imported late: it imports torch's compiler, and a run with the flag off must not pay."""
    from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline

    return AiterMLAPipeline


def check_kernels(worker: Any) -> None:
    """Start this engine's census, check every kernel that is about to run, and tell the compile cache which those are.

    Raises:
        SettingsError: a kernel fails its check in strict mode.
    """
    from vllm_aiter_mla.report import census
    from vllm_aiter_mla.runtime import selfcheck

    census.reset()
    config = worker.vllm_config
    pipeline = engaged_pass(config)
    sizes = config.compilation_config.cudagraph_capture_sizes or ()
    layers = mla_layers(config)
    selfcheck.check_layers(
        layers,
        strict=config_view.settings_of(config).strict,
        capture_sizes=[size for size in sizes if size <= pipeline.limit],
    )
    # Before the first graph is compiled: which layers the passes leave alone depends on it.
    pipeline.kernels = selfcheck.verdicts(layers)


def take_census(worker: Any) -> None:
    """Complete and publish this rank's census.

    Raises:
        SettingsError: no layer engaged, in strict mode.
    """
    from vllm_aiter_mla.report import announce, census

    config = worker.vllm_config
    layers = mla_layers(config)
    if layers and not census.current().engaged:
        # Nothing inside the bucket has run yet: warm-up covers the largest batch, and there may be no graphs.
        worker.execute_dummy_batch()
    announce.after_warm_up(
        total=sorted(layers),
        limit=engaged_pass(config).limit,
        kv_cache_dtype=_cache_name(config),
        strict=config_view.settings_of(config).strict,
        rank=int(getattr(worker, "rank", 0)),
        key=str(config.compute_hash()),
        capture_sizes=capture_sizes(config.compilation_config),
    )


def mla_layers(vllm_config: Any) -> dict[str, Any]:
    """The MLA attention layers of the model by name."""
    layers = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if hasattr(layer, "kv_lora_rank") and hasattr(layer, "impl")}


def capture_sizes(compilation: Any) -> list[int]:
    """Sizes of the graphs that this engine captured; vLLM keeps its list even where the graph mode is NONE."""
    mode = compilation.cudagraph_mode
    return [] if mode is None or mode.name == "NONE" else sorted(compilation.cudagraph_capture_sizes or ())


def _cache_name(config: Any) -> str:
    """The cache's dtype; "auto" is the model's."""
    name = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if name == "auto" else name

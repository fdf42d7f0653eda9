"""Read a ``VllmConfig`` into the plain records that ``settings`` and ``admission`` decide on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

from vllm_aiter_mla.admission import ConfigView
from vllm_aiter_mla.compat import patches, surface
from vllm_aiter_mla.compat import version as compat_version
from vllm_aiter_mla.compat.patches import pass_config, platform_hook
from vllm_aiter_mla.settings import Settings, resolve


def settings_of(vllm_config: Any) -> Settings:
    """The user's options, both spellings merged. Raises ``SettingsError`` naming the option."""
    values = pass_config.values_of(vllm_config.compilation_config.pass_config)
    return resolve(values, vllm_config.additional_config)


def view_of(vllm_config: Any, settings: Settings) -> ConfigView:
    """The facts that admission looks at, as they stand after the platform's own ``check_and_update_config``."""
    compilation = vllm_config.compilation_config
    knobs = platform_hook.knobs_of(compilation)
    version = compat_version.installed()
    return ConfigView(
        vllm_version=version,
        version_supported=compat_version.in_window(version) or settings.debug.untested_vllm,
        missing=surface.missing_capabilities(),
        failed_steps=patches.failed_requirements(),
        atom_active=_atom_active(),
        breakable_cudagraph=_breakable_cudagraph(),
        mode="unset" if compilation.mode is None else compilation.mode.name,
        backend=compilation.backend,
        hisparse=getattr(vllm_config.attention_config, "hisparse_config", None) is not None,
        use_inductor_graph_partition=knobs.use_inductor_graph_partition,
        splitting_ops=knobs.splitting_ops,
        dcp=getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1),
        pcp=getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1),
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        integration=integration_asked(settings),
        **_model_facts(vllm_config.model_config),
    )


def integration_asked(settings: Settings) -> str:
    """The integration that the options ask for; only the passes can stop early."""
    return settings.integration if settings.debug.stop_after is None else "passes"


def mla_layers(model: Any) -> tuple[int, ...]:
    """Indices of the MLA layers of a ``ModelConfig``; in a hybrid with linear attention those that it lists from 1."""
    if model is None or not model.use_mla:
        return ()
    text = model.hf_text_config
    listed = (getattr(text, "linear_attn_config", None) or {}).get("full_attn_layers")
    # A shortened model keeps the list of the whole one.
    kept = range(1, text.num_hidden_layers + 1)
    return tuple(index - 1 for index in (kept if listed is None else listed) if index in kept)


def mla_modules(vllm_config: Any) -> dict[str, Any]:
    """The MLA attention layers of a worker's model by name."""
    found = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in found.items() if hasattr(layer, "kv_lora_rank") and hasattr(layer, "impl")}


def capture_sizes(compilation: Any) -> list[int]:
    """Sizes of the graphs that an engine captured; vLLM keeps its list even where the graph mode is NONE."""
    mode = compilation.cudagraph_mode
    return [] if mode is None or mode.name == "NONE" else sorted(compilation.cudagraph_capture_sizes or ())


def cache_name(vllm_config: Any) -> str:
    """The KV cache's dtype as vLLM spells it; "auto" is the model's."""
    name = str(vllm_config.cache_config.cache_dtype)
    return str(vllm_config.model_config.dtype).removeprefix("torch.") if name == "auto" else name


def cache_folder() -> Path:
    """Where the plugin keeps its files: under vLLM's own cache root."""
    from vllm import envs

    return Path(envs.VLLM_CACHE_ROOT) / "aiter_mla"


def device_type(vllm_config: Any) -> str | None:
    """ "cuda" (ROCm's too), "cpu", ...: of the engine's workers; None where the config does not tell."""
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", None)
    return None if device is None else str(device)


def as_current(vllm_config: Any) -> AbstractContextManager[None]:
    """Make it vLLM's current config for a block, as it is while vLLM builds its layers."""
    from vllm.config import set_current_vllm_config

    return cast("AbstractContextManager[None]", set_current_vllm_config(vllm_config))


def compiled_as(vllm_config: Any) -> list[str]:
    """Mode, back end and custom ops: what decides how vLLM makes the small functions of its layers."""
    compilation = vllm_config.compilation_config
    return [str(compilation.mode), str(compilation.backend), *sorted(map(str, compilation.custom_ops))]


def metric_labels(vllm_config: Any) -> dict[str, str | None]:
    """``model_name`` and ``engine`` as vLLM's metrics label this engine; a fact that cannot be read is None."""
    model = getattr(vllm_config, "model_config", None)
    parallel = getattr(vllm_config, "parallel_config", None)
    # vLLM resets data_parallel_rank for dense models; data_parallel_index keeps it.
    index = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", None))
    name = getattr(model, "served_model_name", None)
    return {"model_name": None if name is None else str(name), "engine": None if index is None else str(index)}


def replica(vllm_config: Any) -> int | None:
    """Which data-parallel engine this is, counted from 0; None where it is known to be the only one.

    Of dense models vLLM tells each engine that it is alone; those after the first still have their index.
    """
    parallel = getattr(vllm_config, "parallel_config", None)
    index = int(getattr(parallel, "data_parallel_index", 0))
    return index if index or int(getattr(parallel, "data_parallel_size", 1)) > 1 else None


def _model_facts(model: Any) -> dict[str, Any]:
    if model is None:
        return {"is_mla": False}
    return {
        "is_mla": bool(model.use_mla),
        "is_sparse": getattr(model.hf_text_config, "index_topk", None) is not None,
        "enforce_eager": bool(model.enforce_eager),
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "op_schema": surface.op_differences() if model.use_mla else (),
    }


def _atom_active() -> bool:
    """ATOM replaces the models through a platform of its own; with ATOM_DISABLE_VLLM_PLUGIN=1 it offers none."""
    from vllm.platforms import current_platform

    return any(cls.__module__.partition(".")[0] == "atom" for cls in type(current_platform).__mro__)


def _breakable_cudagraph() -> bool:
    try:
        from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    except ImportError:
        return False
    return bool(is_breakable_cudagraph_enabled())

# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``VllmConfig``: read into plain records, written by the gate, and its slot for a custom pass."""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, cast

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import ConfigView, Engagement
from vllm_aiter_mla.compat import patches, release
from vllm_aiter_mla.settings import NAMESPACE, Settings, resolve_settings

# -- the gate's reads and writes


def settings_of(vllm_config: Any) -> Settings:
    """Return the user's options, both spellings merged. Raises ``SettingsError`` naming the option."""
    values = patches.pass_config_values(vllm_config.compilation_config.pass_config)
    return resolve_settings(values, vllm_config.additional_config)


def is_decided(vllm_config: Any) -> bool:
    """Return whether the gate must leave a config alone: it has engaged, or layers stand on the options.

    vLLM builds further configs around the same ``compilation_config``, for a draft model or a part of the model. Its
    compiler holds a copy of the options by the time it builds layers; other processes' layers do not count.
    """
    compilation = vllm_config.compilation_config
    return is_ours(current_pass(compilation)) or bool(getattr(compilation, "static_forward_context", None))


def read(vllm_config: Any) -> ConfigView:
    """Return every fact of a finished config that the gate decides by.

    Raises:
        Exception: of any kind, if this vLLM keeps them elsewhere.
    """
    compilation, model, version = vllm_config.compilation_config, vllm_config.model_config, release.vllm_version()
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    facts: dict[str, Any] = {
        "vllm_version": version,
        "is_supported_version": release.in_window(version),
        "missing_names": release.missing_capabilities(),
        "failed_steps": tuple(f"{name}: {error}" for name, error in patches.failures(needed=True).items()),
        "user_pass": why_not_chainable(compilation),
        "is_atom_active": _atom_active(),
        "breakable_cudagraph": _breakable_cudagraph(),
        "mode": "unset" if compilation.mode is None else compilation.mode.name,
        "backend": compilation.backend,
        "use_inductor_graph_partition": bool(compilation.use_inductor_graph_partition),
        "splitting_ops": tuple(compilation.splitting_ops or ()),
        "endpoints": tuple(compilation.compile_ranges_endpoints or ()),
        "cache_dir": str(compilation.cache_dir or ""),
        "has_vllm_fusion": bool(getattr(compilation.pass_config, release.VLLMS_FUSION, False)),
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "num_drafts": vllm_config.num_speculative_tokens,
        "has_hisparse": getattr(vllm_config.attention_config, "hisparse_config", None) is not None,
        "dcp": getattr(parallel, "decode_context_parallel_size", 1),
        "pcp": getattr(parallel, "prefill_context_parallel_size", 1),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "layers": mla_layers(model),
        **metric_labels(vllm_config),
    }
    if model is None or not model.use_mla:  # then nothing of vLLM's attention is imported
        return ConfigView(**facts, is_mla=False, is_mla_disabled=_mla_disabled())
    from vllm_aiter_mla.compat.layer import missing_names

    facts["missing_names"] += missing_names()
    return ConfigView(
        **facts,
        is_sparse=getattr(model.hf_text_config, "index_topk", None) is not None,
        enforce_eager=bool(model.enforce_eager),
        model_dtype=str(model.dtype).removeprefix("torch."),
        op_differences=release.op_differences(fused=False),
        fused_op_differences=release.op_differences(fused=True),
        unknown_forward=_unknown_forward(),
        model_impl=str(model.model_impl) if model.using_transformers_backend() else "",
        **platform_facts(vllm_config),
    )


def write(vllm_config: Any, engagement: Engagement, made: Any) -> None:
    """Engage a config: the pass in its slot, our splitting ops, and for the passes one end of a compile range.

    Nothing else changes. Containers are new, because another config may hold the same list or dict.
    """
    compilation = vllm_config.compilation_config
    if compilation.splitting_ops is not None:
        compilation.splitting_ops = list(engagement.splitting_ops)
    compilation.compile_ranges_endpoints = list(engagement.endpoints)
    compilation.inductor_compile_config = {**compilation.inductor_compile_config, pass_slot(): made}


def drop_options(vllm_config: Any) -> None:
    """Remove our entry of ``additional_config``, whose content vLLM hashes into its cache keys."""
    options = vllm_config.additional_config
    if isinstance(options, dict) and NAMESPACE in options:
        vllm_config.additional_config = {key: value for key, value in options.items() if key != NAMESPACE}


def platform_facts(vllm_config: Any) -> dict[str, Any]:
    """Return what the rules of the platform read of an MLA model's config: ``card``, ``uses_aiter``, ``attention``.

    Other platforms than ROCm are told by ``card``; nothing else is asked there.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_rocm():
        return {"card": str(current_platform.device_name or current_platform.device_type)}
    from vllm._aiter_ops import rocm_aiter_ops
    from vllm.platforms import rocm
    from vllm.v1.attention.selector import get_attn_backend

    model, cache = vllm_config.model_config, str(vllm_config.cache_config.cache_dtype)
    heads = model.get_num_attention_heads(vllm_config.parallel_config)
    try:  # as a layer asks for its back end
        with as_current(vllm_config):
            backend = get_attn_backend(model.get_head_size(), model.dtype, cache, use_mla=True, num_heads=heads)
        attention = str(backend.get_name())
    except Exception as error:  # also what vLLM raises where no back end takes the layers
        attention = f"not known ({type(error).__name__}: {' '.join(str(error).split())})"
    return {
        "card": str(rocm._GCN_ARCH).partition(":")[0],
        "uses_aiter": bool(rocm_aiter_ops.is_mla_enabled()),
        "attention": attention,
    }


def _unknown_forward() -> str:
    from vllm_aiter_mla.compat.wrapper import why_forwards_unknown

    skip = why_forwards_unknown()
    return "" if skip is None else skip.message


# -- what else is asked of a config


def mla_layers(model: Any) -> Sequence[int]:
    """Return the indices of a ``ModelConfig``'s MLA layers. In a hybrid the others have linear attention."""
    if model is None or not model.use_mla:
        return ()
    text, num_layers = model.hf_text_config, model.hf_text_config.num_hidden_layers
    listed = (getattr(text, "linear_attn_config", None) or {}).get("full_attn_layers")  # from 1
    if listed is not None:
        # A shortened model keeps the list of the whole one.
        return tuple(index - 1 for index in listed if 0 < index <= num_layers)
    group = getattr(text, "layer_group_size", None) or 1  # of Ling and Ring: the last layer of each group
    last_of_groups = range(group - 1, num_layers, group)  # a wrong config may name a thousand million layers
    if not any(name.startswith("BailingMoeV3") for name in getattr(model, "architectures", ())):
        return last_of_groups
    return (*last_of_groups, *range(num_layers // group * group, num_layers))  # and what is behind the last whole group


def mla_modules(vllm_config: Any) -> dict[str, Any]:
    """Return the MLA attention layers of a worker's model by name."""
    found = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in found.items() if hasattr(layer, "kv_lora_rank") and hasattr(layer, "impl")}


def is_updating_weights(worker: Any) -> bool:
    """Return whether a worker is between ``start_weight_update`` and ``finish_weight_update``."""
    return bool(getattr(worker, "_weight_update_active", False))


class GraphSizes(NamedTuple):
    """Token counts of the CUDA graphs that a worker captures of its model, in ascending order."""

    full: list[int]  # full graphs, of decode batches
    pieces: list[int]  # piecewise graphs, of any batch

    @property
    def captured(self) -> list[int]:
        """Both."""
        return sorted({*self.full, *self.pieces})


def graph_sizes(vllm_config: Any) -> GraphSizes:
    """Return the sizes of the CUDA graphs that a worker captures of its model; the same before and after it has.

    A full graph holds whole requests of 1 + drafts tokens. vLLM's first model runner rounds the sizes of its config up
    when it starts. The second one rounds them for full graphs only, and its config stays as it is.

    Raises:
        ValueError: the first runner cannot start with these sizes.
    """
    from vllm.v1.attention.backend import AttentionCGSupport

    # A runner asks so too, and writes the answer into its config. AITER's attention supports no other full graphs.
    support, width = AttentionCGSupport.UNIFORM_BATCH, 1 + vllm_config.num_speculative_tokens
    compilation, is_v2 = copy(vllm_config.compilation_config), vllm_config.use_v2_model_runner
    mode = compilation.resolve_cudagraph_mode_and_sizes(support, "MLA", width, use_v2_model_runner=is_v2)
    sizes, full = compilation.cudagraph_capture_sizes or (), set[int]()
    if mode.decode_mode().name == "FULL":
        for rows, most in _decode_graphs(vllm_config):
            most = min(most, compilation.max_cudagraph_capture_size)
            full.update(rounded for size in sizes if (rounded := -(-size // rows) * rows) <= most)
    return GraphSizes(sorted(full), sorted(sizes) if mode.mixed_mode().name == "PIECEWISE" else [])


def _decode_graphs(vllm_config: Any) -> list[tuple[int, int]]:
    """Return for each kind of full graph the number whose multiples are its sizes, and the largest decode batch."""
    requests, drafts = vllm_config.scheduler_config.max_num_seqs, vllm_config.num_speculative_tokens
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.enable_adaptive_verification:
        return [(1, requests * (1 + drafts))]  # any number of drafts for each request
    if speculative is None or not speculative.uses_dynamic_speculative_decoding():
        return [(1 + drafts, requests * (1 + drafts))]
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    # As many drafts for each request, but how many depends on the number of requests.
    by_requests = build_dynamic_sd_schedule_lookup(
        speculative.num_speculative_tokens_per_batch_size,
        vllm_max_batch_size=requests,
        vllm_num_speculative_tokens=drafts,
    )
    return [(1 + number, requests * (1 + number)) for number in sorted(set(by_requests[1:]))]


def final_block_size(vllm_config: Any) -> int:
    """Return the tokens in a block of the KV cache, as vLLM will set them once the model is loaded.

    Its executor asks the platform only then: pages of a hybrid model, and of layers with another cache dtype, need
    larger blocks. The platform is asked about a copy here.
    """
    from vllm.platforms import current_platform

    asked, cache = copy(vllm_config), copy(vllm_config.cache_config)
    asked.cache_config = cache
    current_platform.update_block_size_for_backend(asked)
    return int(cache.block_size)


def run_decode_step(worker: Any) -> None:
    """Let a worker run one decode step with attention metadata; its rows have no slot, so no KV row is written.

    vLLM's second model runner always gives a dummy batch its metadata, and the first one if it is told to.
    """
    runner = worker.model_runner
    if "force_attention" in inspect.signature(runner._dummy_run).parameters:
        runner._dummy_run(getattr(runner, "uniform_decode_query_len", 1), uniform_decode=True, force_attention=True)
    else:
        worker.execute_dummy_batch()


def cache_name(vllm_config: Any) -> str:
    """Return the KV cache's dtype as vLLM spells it, and the model's dtype for "auto"."""
    name = str(vllm_config.cache_config.cache_dtype)
    return str(vllm_config.model_config.dtype).removeprefix("torch.") if name == "auto" else name


def cache_folder() -> Path:
    """Return the folder of the plugin's files, under vLLM's own cache root; without vLLM, under its default one."""
    if not release.is_installed():
        return files.cache_folder()
    from vllm import envs

    return Path(envs.VLLM_CACHE_ROOT) / "aiter_mla"


def as_current(vllm_config: Any = None) -> AbstractContextManager[None]:
    """Make it, or vLLM's default config, the current one for a block, as it is while vLLM builds its layers.

    Where vLLM is not installed, nothing of it asks for a config.
    """
    if not release.is_installed():
        return nullcontext()
    from vllm.config import VllmConfig, set_current_vllm_config

    return cast("AbstractContextManager[None]", set_current_vllm_config(vllm_config or VllmConfig()))


def compiled_as(vllm_config: Any) -> list[str]:
    """Return mode, back end and custom ops, which decide how vLLM makes the small functions of its layers."""
    compilation = vllm_config.compilation_config
    return [str(compilation.mode), str(compilation.backend), *sorted(map(str, compilation.custom_ops))]


def metric_labels(vllm_config: Any) -> dict[str, str | None]:
    """Return ``model_name`` and ``engine`` as vLLM's metrics label this engine; None for what cannot be read."""
    model = getattr(vllm_config, "model_config", None)
    parallel = getattr(vllm_config, "parallel_config", None)
    # vLLM resets data_parallel_rank for dense models; data_parallel_index keeps it.
    index = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", None))
    name = getattr(model, "served_model_name", None)
    return {"model_name": None if name is None else str(name), "engine": None if index is None else str(index)}


def engine_id(vllm_config: Any) -> str:
    """Return vLLM's ``instance_id`` without hyphens, "0" without one. All workers of an engine have the same."""
    return str(getattr(vllm_config, "instance_id", 0)).replace("-", "_")


def replica(vllm_config: Any) -> int | None:
    """Return the index of this data-parallel engine, counted from 0; None if it is known to be the only one.

    The index is read first: for dense models vLLM resets data_parallel_size to 1 and keeps data_parallel_index.
    """
    parallel = getattr(vllm_config, "parallel_config", None)
    index = int(getattr(parallel, "data_parallel_index", 0))
    return index if index or int(getattr(parallel, "data_parallel_size", 1)) > 1 else None


# -- the slot for a custom pass


def pass_slot() -> str:
    """Return the slot's key in ``inductor_compile_config``; only out-of-tree platforms have another than vLLM's."""
    from vllm.platforms import current_platform

    return str(getattr(current_platform, "pass_key", "post_grad_custom_post_pass"))


def current_pass(compilation: Any) -> Any:
    """Return the object in the slot, or ``None``; also of a vLLM without slots, which the gate skips later."""
    return getattr(compilation, "inductor_compile_config", {}).get(pass_slot())


def engaged_pass(vllm_config: Any) -> Any:
    """Return the plugin's own pass if the gate has engaged, else None."""
    found = current_pass(getattr(vllm_config, "compilation_config", None))
    return found if is_ours(found) else None


def is_ours(found: Any) -> bool:
    """Return whether a pass is the plugin's, told by its module: importing the class imports torch's compiler."""
    return any(cls.__module__.partition(".")[0] == "vllm_aiter_mla" for cls in type(found).__mro__)


def wrapped_pass(compilation: Any) -> Any:
    """Return the user's pass as an ``InductorPass``, ``None`` when there is none.

    vLLM wraps a callable given as ``inductor_passes``. One that is put into ``inductor_compile_config`` directly would
    fail while compiling, so it is wrapped here in the same way.

    Raises:
        TypeError: not callable, or of a kind whose source cannot be found.
        OSError: its source cannot be read, so it has no identity for the compile cache.
    """
    from vllm.compilation.passes.inductor_pass import CallableInductorPass, InductorPass

    pass_ = current_pass(compilation)
    if pass_ is None or isinstance(pass_, InductorPass):
        return pass_
    if not callable(pass_):
        raise TypeError("a custom pass must be callable")
    return CallableInductorPass(pass_)


def why_not_chainable(compilation: Any) -> str:
    """Return why the pass in the slot cannot run, or cannot be identified in a cache key; "" if it can."""
    try:
        wrapped_pass(compilation)
    except (TypeError, OSError) as error:
        where = f"compilation_config.inductor_compile_config[{pass_slot()!r}]"
        return f"{where} is {type(current_pass(compilation)).__name__}: {error}"
    return ""


def _atom_active() -> bool:
    """ATOM replaces the models through a platform of its own; with ATOM_DISABLE_VLLM_PLUGIN=1 it offers none."""
    from vllm.platforms import current_platform

    return any(cls.__module__.partition(".")[0] == "atom" for cls in type(current_platform).__mro__)


def _mla_disabled() -> bool:
    from vllm import envs

    return bool(getattr(envs, "VLLM_MLA_DISABLE", False))


def _breakable_cudagraph() -> bool:
    try:
        from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    except ImportError:
        return False
    return bool(is_breakable_cudagraph_enabled())

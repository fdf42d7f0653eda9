# SPDX-License-Identifier: Apache-2.0
"""vLLM's release: the supported window, the names that the gate needs, and the arguments of vLLM's MLA ops.

The gate skips an engine whose vLLM differs from this file. docs/development.md: what to do about a new op argument.
"""

import re
from importlib import import_module
from importlib.util import find_spec

WINDOW: tuple[tuple[int, int], tuple[int, int]] = ((0, 30), (0, 34))
"""First supported release and first unsupported one: 0.30 <= vLLM < 0.34. The only place that says so."""
CONFIG_FIELDS = ("compile_ranges_endpoints", "inductor_compile_config", "splitting_ops", "use_inductor_graph_partition")
PLATFORM_NAMES = ("pass_key",)

ATTENTION_MODULE = "vllm.model_executor.layers.attention.mla_attention"
# vLLM imports it on GPU platforms only, but it can be imported anywhere. Pass 1 writes its op into every graph.
FUSED_MODULE = "vllm.compilation.passes.fusion.mla_rope_kvcache_cat_fusion"
FUSED = "fused_rope_unified_mla_kv_cache_update"

VLLMS_FUSION = "fuse_rope_kvcache_cat_mla"
"""vLLM's pass that puts that op into a graph, as a field of ``PassConfig``."""

OP_ARGUMENTS: dict[str, str] = {
    "unified_mla_attention_with_output": "q kv_c_normed k_pe output! layer_name output_scale output_block_scale! "
    "kv_cache_dummy_dep quant_group_size quant_scale_ue8m0 quant_col_major quant_tma_aligned q_dcp_replicated",
    "unified_mla_kv_cache_update": "kv_c_normed k_pe layer_name kv_cache_dtype k_scale",
    FUSED: "positions q_pe! k_pe! kv_c cos_sin_cache is_neox kv_cache_dtype kv_cache_scale layer_name",
}
"""Arguments of vLLM's MLA ops, the same in 0.30, 0.31, 0.32 and 0.33; ``!`` marks one that the op writes."""


# -- the release


def is_installed() -> bool:
    """Return whether there is a vLLM here. The steps ``kernels`` and ``timing`` also run where there is none."""
    return find_spec("vllm") is not None


def vllm_version() -> str:
    """Return vLLM's version as it prints it, e.g. ``0.32.0+cpu``."""
    import vllm

    return str(vllm.__version__)


def in_window(version: str) -> bool:
    """Return whether ``version`` is supported; "dev", other unreadable versions and 0.34.0rc1 are not.

    Builds from a shallow checkout call themselves ``0.1.dev1+g...``. For them the user sets ``debug.untested_vllm``.
    """
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return found is not None and WINDOW[0] <= (int(found[1]), int(found[2])) < WINDOW[1]


def missing_capabilities() -> tuple[str, ...]:
    """Return the names that the gate needs and this vLLM's config and platform lack."""
    from vllm.config import CompilationConfig
    from vllm.platforms import current_platform

    fields = getattr(CompilationConfig, "__dataclass_fields__", {})
    missing = [f"CompilationConfig.{name}" for name in CONFIG_FIELDS if name not in fields]
    if not hasattr(CompilationConfig, "_attention_ops"):  # of the class, not a field
        missing.append("CompilationConfig._attention_ops")
    platform = type(current_platform)
    return (*missing, *(f"Platform.{name}" for name in PLATFORM_NAMES if not hasattr(platform, name)))


def op_differences(fused: bool) -> tuple[str, ...]:
    """Return how vLLM's fused RoPE + KV write, or its other MLA ops, differ from ``OP_ARGUMENTS``: a sentence for each.

    This imports the ops' modules, which takes one or two seconds: ask only if the fast path is switched on.
    """
    import torch

    differences: list[str] = []
    for name, arguments in OP_ARGUMENTS.items():
        if (name == FUSED) is not fused:
            continue
        try:
            import_module(FUSED_MODULE if name == FUSED else ATTENTION_MODULE)
            schema = getattr(torch.ops.vllm, name).default._schema
        except Exception as error:
            line = f"{type(error).__name__}: {error}".replace("\n", " ")
            differences.append(f"the op vllm::{name} cannot be found ({line})")
            continue
        known = arguments.split()
        given = [arg.name + "!" * bool(arg.alias_info and arg.alias_info.is_write) for arg in schema.arguments]
        if given != known:
            unlike = [name for name in (*given, *known) if (name in given) != (name in known)]
            differences.append(f"the op vllm::{name} differs in {', '.join(unlike) or 'the order of its arguments'}")
    return tuple(differences)

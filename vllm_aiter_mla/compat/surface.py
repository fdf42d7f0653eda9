"""What of vLLM this plugin is built on: names of its config and platform, and the schemas of its MLA ops.

The gate declines an engine whose vLLM differs. A new argument of an op has to be added to ``SCHEMAS`` here, and to
the lists of ``passes.match`` or ``passes.kv_update``: docs/development.md says what each of them then does with it.
"""

from __future__ import annotations

import re
from importlib import import_module

CONFIG_FIELDS = ("compile_ranges_endpoints", "inductor_compile_config", "splitting_ops", "use_inductor_graph_partition")
PLATFORM_NAMES = ("check_and_update_config", "apply_config_platform_defaults", "pass_key")

ATTENTION_MODULE = "vllm.model_executor.layers.attention.mla_attention"
# vLLM imports it on GPU platforms alone, but it can be imported anywhere. Pass 1 writes its op into every graph.
FUSED_MODULE = "vllm.compilation.passes.fusion.mla_rope_kvcache_cat_fusion"

ATTENTION, KV_UPDATE = "unified_mla_attention_with_output", "unified_mla_kv_cache_update"
FUSED = "fused_rope_unified_mla_kv_cache_update"

SCHEMAS: dict[str, str] = {
    ATTENTION: "(Tensor q, Tensor kv_c_normed, Tensor k_pe, Tensor! output, LayerName layer_name, "
    "Tensor? output_scale=None, Tensor!? output_block_scale=None, Tensor? kv_cache_dummy_dep=None, "
    "SymInt? quant_group_size=None, bool? quant_scale_ue8m0=None, bool? quant_col_major=None, "
    "bool? quant_tma_aligned=None, Tensor? q_dcp_replicated=None) -> ()",
    KV_UPDATE: "(Tensor kv_c_normed, Tensor k_pe, LayerName layer_name, str kv_cache_dtype, Tensor k_scale) -> Tensor",
    FUSED: "(Tensor positions, Tensor! q_pe, Tensor! k_pe, Tensor kv_c, Tensor cos_sin_cache, bool is_neox, "
    "str kv_cache_dtype, Tensor kv_cache_scale, LayerName layer_name) -> Tensor",
}
"""vLLM's MLA ops of 0.30, 0.31, 0.32 and 0.33: their sources declare the same arguments in each of the four.

``!`` marks an argument that the op writes. ``LayerName`` is an object; with VLLM_USE_LAYERNAME=0 it is a string.
"""


def missing_capabilities() -> tuple[str, ...]:
    """Names of the config-level things the gate builds on that this vLLM lacks; empty on a supported one."""
    from vllm.config import CompilationConfig
    from vllm.platforms import current_platform

    fields = getattr(CompilationConfig, "__dataclass_fields__", {})
    missing = [f"CompilationConfig.{name}" for name in CONFIG_FIELDS if name not in fields]
    if not hasattr(CompilationConfig, "_attention_ops"):  # of the class, not a field
        missing.append("CompilationConfig._attention_ops")
    platform = type(current_platform)
    return (*missing, *(f"Platform.{name}" for name in PLATFORM_NAMES if not hasattr(platform, name)))


def op_differences() -> tuple[str, ...]:
    """What this vLLM's MLA ops have otherwise than ``SCHEMAS``, one sentence each; empty on a supported vLLM.

    vLLM registers the ops when it imports their modules, which takes a second or two in a process that has not done
    so: ask only where the fast path is switched on.
    """
    import torch

    found: list[str] = []
    for name, known in SCHEMAS.items():
        try:
            import_module(FUSED_MODULE if name == FUSED else ATTENTION_MODULE)
            schema = getattr(torch.ops.vllm, name).default._schema
        except Exception as error:
            # Whatever an import of vLLM's raises here: an op that cannot be looked at is not known.
            found.append(f"the op vllm::{name} cannot be found ({type(error).__name__}: {error})".replace("\n", " "))
            continue
        found += [f"the op vllm::{name} {difference}" for difference in differences(known, plain(schema))]
    return tuple(found)


def plain(schema: object) -> str:
    """A schema of torch's in the spelling of ``SCHEMAS``: without a name, and without names of aliases."""
    text = re.sub(r"\(\w+!\)", "!", str(schema))
    return re.sub(r"\b(PyObject|str) layer_name\b", "LayerName layer_name", text[text.index("(") :])


def differences(known: str, found: str) -> list[str]:
    """What tells the schema ``found`` from ``known``, one phrase for each argument."""
    (wanted, returned), (given, returns) = _parsed(known), _parsed(found)
    said = [f"has the unknown argument {given[name]!r}" for name in given if name not in wanted]
    said += [f"lacks the argument {name}" for name in wanted if name not in given]
    both = [name for name in wanted if name in given]
    said += [f"declares {given[name]!r}, known is {wanted[name]!r}" for name in both if given[name] != wanted[name]]
    if not said and list(given) != list(wanted):
        moved = next(name for name, other in zip(given, wanted, strict=True) if name != other)
        said.append(f"takes {moved} in another place")
    if returns != returned:
        said.append(f"returns {returns}, known is {returned}")
    return said


def _parsed(schema: str) -> tuple[dict[str, str], str]:
    """The declarations of a schema by argument, and what it returns."""
    arguments, _, returns = schema.rpartition(" -> ")
    declared = [item for item in arguments.removeprefix("(").removesuffix(")").split(", ") if item]
    return {item.rpartition(" ")[2].partition("=")[0]: item for item in declared}, returns

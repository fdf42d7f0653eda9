"""Would the layers engage? Asked of ``admission``, with views filled from a config instead of from a running vLLM.

Admission answers with its first reason. A user wants all of them, so each is noted, taken out of the view, and the
question put again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from vllm_aiter_mla.admission import ConfigView, LayerView, Refusal, admit_config, admit_layer
from vllm_aiter_mla.commands.plan.model import ModelFacts
from vllm_aiter_mla.commands.plan.serve_options import FP4_BMM, FP8_BMM, USE_AITER, ServeOptions
from vllm_aiter_mla.compat import offline, surface
from vllm_aiter_mla.compat import version as compat_version

# What the matcher says of a layer without RoPE (passes/match.py); it reads graphs, and here is none.
NO_ROPE = ("no_rope", "no rotary embedding is applied to q (a NoPE layer, or outside this graph)")


def reasons(options: ServeOptions, model: ModelFacts) -> list[Refusal]:
    """Every reason, in the order in which they would stop the fast path; a code appears once."""
    found = _undivided(options, model) + _all(config_view(options, model), admit_config)
    if model.is_mla:
        found += _all(layer_view(options, model), admit_layer)
    if model.is_mla and model.is_nope:
        found.append(Refusal(*NO_ROPE))
    first: dict[str, Refusal] = {}
    for refusal in found:
        first.setdefault(refusal.code, refusal)
    return list(first.values())


def config_view(options: ServeOptions, model: ModelFacts) -> ConfigView:
    """What the gate would read after vLLM's own defaults; what cuts the graph stands as the user gave it."""
    version, env = compat_version.installed(), options.env
    breakable = env.on("VLLM_USE_BREAKABLE_CUDAGRAPH")
    return replace(
        options.view,
        vllm_version=version,
        version_supported=compat_version.in_window(version) or options.settings.debug.untested_vllm,
        missing=surface.missing_capabilities(),
        op_schema=surface.op_differences() if model.is_mla else (),
        is_mla=model.is_mla and not env.on("VLLM_MLA_DISABLE"),
        is_sparse=model.is_sparse,
        breakable_cudagraph=breakable,
        mode="NONE" if breakable else options.view.mode,
        model_dtype=options.dtype,
    )


def layer_view(options: ServeOptions, model: ModelFacts) -> LayerView:
    """One of the model's MLA layers as the pass would read it; all of them are alike."""
    return LayerView(
        impl=implementation(options, model),
        is_sparse=model.is_sparse,
        kv_cache_dtype=options.view.kv_cache_dtype,
        model_dtype=options.dtype,
        dcp_world_size=options.view.dcp,
        pcp_world_size=options.view.pcp,
        hisparse=options.view.hisparse,
        # Heads that the ranks do not divide are a reason of their own, not a wrong geometry.
        num_heads=heads_per_rank(options, model) or model.heads,
        qk_nope_head_dim=model.nope,
        qk_rope_head_dim=model.rope,
        kv_lora_rank=model.latent,
        v_head_dim=model.v,
    )


def weight_form(options: ServeOptions, model: ModelFacts) -> str:
    """Form in which vLLM would hold the absorbed weight, by the name of ``kernels.absorb``; fp4 is asked first.

    Source: vLLM's ``MLAAttention``. mxfp4 is for CDNA 4 alone, and where ``kv_b_proj`` is held in bfloat16.
    """
    if not _uses_aiter(options):
        return "plain"
    bf16 = not model.kv_b_quantised and options.dtype == "bfloat16"
    if options.arch == "gfx950" and bf16 and options.env.on(FP4_BMM):
        return "mxfp4"
    return "fp8" if options.env.on(FP8_BMM) else "plain"


def _uses_aiter(options: ServeOptions) -> bool:
    return options.arch.startswith("gfx") and options.env.on(USE_AITER)


def heads_per_rank(options: ServeOptions, model: ModelFacts) -> int:
    """N: query heads of one tensor-parallel rank; 0 where the ranks do not divide them."""
    return 0 if model.heads % options.tp else model.heads // options.tp


def implementation(options: ServeOptions, model: ModelFacts) -> str:
    """Class of the attention implementation vLLM would pick: the given backend's, else the platform's first choice."""
    if options.attention_backend:
        return offline.impl_name(options.attention_backend)
    if not options.arch.startswith("gfx"):
        return "FlashMLASparseImpl" if model.is_sparse else "FlashAttnMLAImpl"
    if model.is_sparse:
        return "ROCMAiterMLASparseImpl"
    aiter = _uses_aiter(options) and options.env.on("VLLM_ROCM_USE_AITER_MLA")
    return "AiterMLAImpl" if aiter else "TritonMLAImpl"


def _undivided(options: ServeOptions, model: ModelFacts) -> list[Refusal]:
    """vLLM's own refusal (``ModelConfig.verify_with_parallel_config``)."""
    if model.heads % options.tp == 0:
        return []
    text = f"{model.heads} heads are not divisible by --tensor-parallel-size {options.tp}: vLLM will not start"
    return [Refusal("heads_not_divisible", text)]


def _all(view: Any, admit: Callable[[Any], Refusal | None]) -> list[Refusal]:
    """Every refusal of the view: each one's cause is put back to its default, and the question asked again."""
    found = []
    while (refusal := admit(view)) is not None:
        found.append(refusal)
        view = replace(view, **_cause(view, admit, refusal.code))
    return found


def _cause(view: Any, admit: Callable[[Any], Refusal | None], code: str) -> dict[str, Any]:
    """The field that a refusal comes from, with its default: the defaults describe what is admitted.

    It is the last of the fields that must go, in their order, before the answer is another one.
    """
    for item in fields(view):
        view = replace(view, **{item.name: item.default})
        refusal = admit(view)
        if refusal is None or refusal.code != code:
            # Breakable graphs are what set the mode; alone it would be a second reason.
            more = {"mode": ConfigView.mode} if item.name == "breakable_cudagraph" else {}
            return {item.name: item.default, **more}
    raise AssertionError(f"a view of defaults is refused: {code}")

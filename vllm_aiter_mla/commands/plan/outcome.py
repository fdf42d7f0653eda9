"""Would the layers engage? Asked of ``admission``, with views filled from a config instead of from a running vLLM.

Admission answers with its first reason. A user wants all of them, so each is noted, taken out of the view, and the
question put again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from vllm_aiter_mla.admission import ConfigView, LayerView, Skip, admit_config, admit_layer
from vllm_aiter_mla.commands.plan.model import Kind, ModelFacts
from vllm_aiter_mla.commands.plan.serve_options import ServeOptions
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import offline
from vllm_aiter_mla.compat.dry_model import MlaLayer
from vllm_aiter_mla.compat.switches import (
    BATCH_INVARIANT,
    BREAKABLE_GRAPHS,
    FP4_BMM,
    FP8_BMM,
    NO_MLA,
    USE_AITER,
    USE_AITER_MLA,
)  # fmt: skip

# What the matcher says of a layer without RoPE (passes/match.py); it reads graphs, and here is none.
NO_ROPE = ("no_rope", "no rotary embedding is applied to q (a NoPE layer, or outside this graph)")
NOT_KNOWN = "not known"


def engine_reasons(options: ServeOptions, model: ModelFacts) -> list[Skip]:
    """Every reason for which no layer would engage, in the order in which they would stop the fast path."""
    own = []
    if model.vllm.skips:
        own.append(Skip("vllm_refuses", "; ".join(model.vllm.skips)))
    if model.vllm.unknown:
        own.append(Skip("not_known", "; ".join(model.vllm.unknown)))
    return own + _all(config_view(options, model), admit_config)


def layer_reasons(options: ServeOptions, model: ModelFacts, kind: Kind) -> list[Skip]:
    """Every reason against the layers of one kind."""
    found = _all(layer_view(options, model, kind.layer), admit_layer)
    if not kind.layer.has_rope:
        found.append(Skip(*NO_ROPE))
    if kind.layer.unknown:
        found.append(Skip("not_known", f"vLLM does not say how it holds kv_b_proj: {kind.layer.unknown}"))
    return found


def config_view(options: ServeOptions, model: ModelFacts) -> ConfigView:
    """What the gate would read after vLLM's own defaults; what cuts the graph stands as the user gave it."""
    version, env = compat_config.vllm_version(), options.env
    breakable = env.on(BREAKABLE_GRAPHS)
    return replace(
        options.view,
        vllm_version=version,
        version_supported=compat_config.in_window(version) or options.settings.debug.untested_vllm,
        missing=compat_config.missing_capabilities(),
        op_schema=compat_config.op_differences() if model.vllm.is_mla else (),
        is_mla=model.vllm.is_mla and not env.on(NO_MLA),
        is_sparse=_is_sparse(model),
        breakable_cudagraph=breakable,
        mode="NONE" if breakable else options.view.mode,
        kv_cache_dtype=model.vllm.cache_dtype,
        model_dtype=model.vllm.dtype,
    )


def layer_view(options: ServeOptions, model: ModelFacts, layer: MlaLayer) -> LayerView:
    """One of the model's MLA layers as the pass would read it."""
    return LayerView(
        impl=implementation(options, model),
        is_sparse=layer.is_sparse,
        kv_cache_dtype=model.vllm.cache_dtype,
        model_dtype=model.vllm.dtype,
        dcp=options.view.dcp,
        pcp=options.view.pcp,
        hisparse=options.view.hisparse,
        # Heads that the ranks do not divide are vLLM's own skip, not a wrong geometry.
        num_heads=heads_per_rank(options, layer.heads) or layer.heads,
        qk_nope_head_dim=layer.nope,
        qk_rope_head_dim=layer.rope,
        kv_lora_rank=layer.latent,
        v_head_dim=layer.v,
    )


def weight_form(options: ServeOptions, layer: MlaLayer) -> str:
    """Form in which vLLM would hold the absorbed weight, by the name of ``kernels.absorb``; ``NOT_KNOWN``.

    Source: vLLM's ``MLAAttention``. It asks fp4 first, which is for CDNA 4 alone, and where the weight of ``kv_b_proj``
    is created in bfloat16.
    """
    if layer.unknown:
        return NOT_KNOWN
    if not _uses_aiter(options):
        return "plain"
    if options.arch == "gfx950" and layer.weight == "bfloat16" and options.env.on(FP4_BMM):
        return "mxfp4"
    return "fp8" if options.env.on(FP8_BMM) else "plain"


def _uses_aiter(options: ServeOptions) -> bool:
    return options.arch.startswith("gfx") and options.env.on(USE_AITER)


def heads_per_rank(options: ServeOptions, heads: int) -> int:
    """N: query heads of one tensor-parallel rank; 0 where the ranks do not divide them."""
    return 0 if heads % options.tp else heads // options.tp


def _is_sparse(model: ModelFacts) -> bool:
    return any(kind.layer.is_sparse for kind in model.kinds)


def implementation(options: ServeOptions, model: ModelFacts) -> str:
    """Class of the attention implementation vLLM would pick: the given backend's, else the platform's first choice."""
    if options.attention_backend:
        return offline.impl_name(options.attention_backend)
    if not options.arch.startswith("gfx"):
        return "FlashMLASparseImpl" if _is_sparse(model) else "FlashAttnMLAImpl"
    if _is_sparse(model):
        return "ROCMAiterMLASparseImpl"
    aiter = _uses_aiter(options) and options.env.on(USE_AITER_MLA) and not options.env.on(BATCH_INVARIANT)
    return "AiterMLAImpl" if aiter else "TritonMLAImpl"


def _all(view: Any, admit: Callable[[Any], Skip | None]) -> list[Skip]:
    """Every skip of the view: each one's cause is put back to its default, and the question asked again."""
    found = []
    while (skip := admit(view)) is not None:
        found.append(skip)
        view = replace(view, **_cause(view, admit, skip.code))
    return found


def _cause(view: Any, admit: Callable[[Any], Skip | None], code: str) -> dict[str, Any]:
    """The field that a skip comes from, with its default: the defaults describe what is admitted.

    It is the last of the fields that must go, in their order, before the answer is another one.
    """
    for item in fields(view):
        view = replace(view, **{item.name: item.default})
        skip = admit(view)
        if skip is None or skip.code != code:
            # Breakable graphs are what set the mode; alone it would be a second reason.
            more = {"mode": ConfigView.mode} if item.name == "breakable_cudagraph" else {}
            return {item.name: item.default, **more}
    raise AssertionError(f"a view of defaults is refused: {code}")

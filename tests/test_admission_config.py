"""Claims about who may take the fast path: one skip per knob, each with a registered code. No vLLM needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_aiter_mla import admission
from vllm_aiter_mla.admission import (
    ENGINE_REASONS,
    KV_UPDATE_OP,
    LAYER_REASONS,
    MLA_ATTENTION_OP,
    REASONS,
    ConfigView,
    LayerView,
    Skip,
    admit_config,
    admit_layer,
    integration_of,
    why_not_passes,
)

PASSES = ConfigView(integration="passes")
"""The passes asked for by name: what cuts their graph is a skip."""

CONFIG_SKIPS: list[tuple[dict[str, Any], str, str]] = [
    ({"vllm_version": "0.34.0", "version_supported": False}, "vllm_version", "0.34.0"),
    ({"missing": ("Platform.pass_key",)}, "capability", "Platform.pass_key"),
    ({"op_schema": ("the op vllm::f has the unknown argument 'int window'",)}, "op_schema", "window"),
    ({"atom_active": True}, "atom", "ATOM_DISABLE_VLLM_PLUGIN"),
    ({"is_mla": False}, "not_mla", "MLA"),
    ({"is_sparse": True}, "sparse_mla", "index_topk"),
    ({"enforce_eager": True}, "enforce_eager", "enforce_eager"),
    ({"mode": "NONE", "breakable_cudagraph": True}, "breakable_cudagraph", "VLLM_USE_BREAKABLE_CUDAGRAPH"),
    ({"mode": "DYNAMO_TRACE_ONCE"}, "compilation_mode", "compilation_config.mode"),
    ({"backend": "eager"}, "backend", "compilation_config.backend"),
    ({"dcp": 2}, "dcp", "decode_context_parallel_size"),
    ({"pcp": 2}, "pcp", "prefill_context_parallel_size"),
    ({"hisparse": True}, "hisparse", "hisparse_config"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype", "kv_cache_dtype"),
    ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype", "fp8_ds_mla"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype", "nvfp4"),
    ({"kv_cache_dtype": "bfloat16", "model_dtype": "float16"}, "kv_cache_dtype", "float16"),
    ({"use_inductor_graph_partition": False}, "graph_partition", "use_inductor_graph_partition"),
    ({"splitting_ops": (MLA_ATTENTION_OP,)}, "splitting_ops", "splitting_ops"),
    ({"splitting_ops": (MLA_ATTENTION_OP, KV_UPDATE_OP)}, "splitting_ops", KV_UPDATE_OP),
    ({"use_inductor_graph_partition": False, "splitting_ops": (KV_UPDATE_OP,)}, "splitting_ops", "splitting_ops"),
]


def test_the_default_view_is_admitted() -> None:
    assert admit_config(ConfigView()) is None
    assert admit_layer(LayerView()) is None


@pytest.mark.parametrize(("facts", "code", "knob"), CONFIG_SKIPS)
def test_each_contradiction_is_refused_with_its_code_and_its_knob(facts: dict[str, Any], code: str, knob: str) -> None:
    skip = admit_config(replace(PASSES, **facts))
    assert skip is not None
    assert skip.code == code
    assert knob in skip.message
    assert "\n" not in str(skip)


@pytest.mark.parametrize(
    "facts",
    [
        {"splitting_ops": ()},
        {"splitting_ops": (), "use_inductor_graph_partition": False},
        {"splitting_ops": ("vllm::mamba_mixer",)},
        {"splitting_ops": (MLA_ATTENTION_OP,), "use_inductor_graph_partition": True},
        {"use_inductor_graph_partition": True},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3", "model_dtype": "bfloat16"},
        {"kv_cache_dtype": "bfloat16", "model_dtype": "bfloat16"},
        {"kv_cache_dtype": "auto", "model_dtype": "float32"},
        {"breakable_cudagraph": True},
    ],
)
def test_what_leaves_the_layer_in_one_graph_and_its_cache_writable_is_admitted(facts: dict[str, Any]) -> None:
    assert admit_config(replace(PASSES, **facts)) is None
    assert integration_of(replace(ConfigView(), **facts)) == "passes"


CUT = {"enforce_eager", "breakable_cudagraph", "compilation_mode", "backend", "graph_partition", "splitting_ops"}
"""The six reasons that are about a graph."""


@pytest.mark.parametrize(("facts", "code"), [(facts, code) for facts, code, _ in CONFIG_SKIPS if code in CUT])
def test_auto_takes_the_module_integration_where_the_passes_cannot_run(facts: dict[str, Any], code: str) -> None:
    view = replace(ConfigView(), **facts)
    assert (admit_config(view), integration_of(view)) == (None, "module")
    reason = why_not_passes(view)
    assert reason is not None
    assert reason.code == code


def test_an_integration_that_is_asked_for_is_taken() -> None:
    for asked in admission.INTEGRATIONS:
        assert integration_of(ConfigView(integration=asked, enforce_eager=True)) == asked
    assert admit_config(ConfigView(integration="module", enforce_eager=True)) is None


@pytest.mark.parametrize(("facts", "code"), [(facts, code) for facts, code, _ in CONFIG_SKIPS if code not in CUT])
def test_what_is_no_matter_of_a_graph_is_refused_whoever_emits(facts: dict[str, Any], code: str) -> None:
    for asked in ("auto", *admission.INTEGRATIONS):
        skip = admit_config(replace(ConfigView(integration=asked), **facts))
        assert skip is not None
        assert skip.code == code


LAYER_SKIPS: list[tuple[dict[str, Any], str]] = [
    ({"is_sparse": True}, "sparse_mla"),
    ({"impl": "TritonMLAImpl"}, "impl"),
    ({"q_pad_num_heads": 16}, "q_padding"),
    ({"sliding_window": True}, "sliding_window"),
    ({"missing": ("use_pcp", "impl.is_sparse")}, "capability"),
    ({"amx_bmm": True, "has_absorbed_weight": False}, "amx_bmm"),
    ({"has_absorbed_weight": False}, "no_absorbed_weight"),
    ({"has_rope_kernel": False}, "no_rope_kernel"),
    ({"dcp_world_size": 4}, "dcp"),
    ({"dcp_q_replicate": True}, "dcp"),
    ({"pcp_world_size": 2}, "pcp"),
    ({"hisparse": True}, "hisparse"),
    ({"kv_cache_ndim": 4}, "kv_cache_ndim"),
    ({"cos_sin_dtype_matches": False}, "cos_sin_dtype"),
    ({"graph_dtype": "float16"}, "activation_dtype"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
    ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype"),
    ({"num_heads": 0}, "geometry"),
    ({"qk_rope_head_dim": 63}, "geometry"),
]


@pytest.mark.parametrize(("facts", "code"), LAYER_SKIPS)
def test_each_unsupported_layer_is_refused_with_its_code(facts: dict[str, Any], code: str) -> None:
    skip = admit_layer(replace(LayerView(), **facts))
    assert skip is not None
    assert skip.code == code
    assert "\n" not in skip.message


def test_every_registered_code_can_be_reached_and_is_described_in_one_line() -> None:
    engine, layer = {code for _, code, _ in CONFIG_SKIPS}, {code for _, code in LAYER_SKIPS}
    assert engine == set(ENGINE_REASONS) - {"user_pass", "vllm_refuses", "not_known"}
    assert layer <= set(ENGINE_REASONS) | set(LAYER_REASONS)
    assert set(LAYER_REASONS) <= layer
    assert all(text and "\n" not in text for text in REASONS.values())


def test_a_code_stands_at_one_level() -> None:
    assert sum(len(table) for table in admission.LEVELS.values()) == len(REASONS)
    assert list(admission.LEVELS) == ["engine", "layer", "graph", "kernel"]


def test_a_code_that_is_not_registered_cannot_be_raised() -> None:
    with pytest.raises(KeyError, match="unheard_of"):
        Skip("unheard_of", "message")


def test_a_layer_without_a_bound_cache_is_admitted_because_compilation_comes_first() -> None:
    assert admit_layer(LayerView(kv_cache_ndim=None)) is None
    assert admit_layer(LayerView(kv_cache_ndim=3)) is None


def test_an_impl_is_admitted_where_the_view_names_it_as_known() -> None:
    view = LayerView(impl="ReferenceMLAImpl")
    assert admit_layer(view) is not None
    assert admit_layer(replace(view, known_impls=view.known_impls | {"ReferenceMLAImpl"})) is None


@given(st.lists(st.sampled_from(CONFIG_SKIPS), min_size=1, max_size=4))
def test_any_combination_of_contradictions_is_refused(picked: list[tuple[dict[str, Any], str, str]]) -> None:
    facts: dict[str, Any] = {}
    for part, _, _ in picked:
        facts.update(part)
    skip = admit_config(replace(PASSES, **facts))
    assert skip is not None
    assert skip.code in {code for _, code, _ in CONFIG_SKIPS}


@given(st.lists(st.sampled_from(LAYER_SKIPS), min_size=1, max_size=4))
def test_any_combination_of_layer_troubles_is_refused(picked: list[tuple[dict[str, Any], str]]) -> None:
    facts: dict[str, Any] = {}
    for part, _ in picked:
        facts.update(part)
    assert admit_layer(replace(LayerView(), **facts)) is not None

"""Claims about the reasons to skip, one row for each, and about the decode limit's arithmetic. No vLLM needed."""

from collections import ChainMap
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_aiter_mla import admission
from vllm_aiter_mla.admission import ConfigView, Engagement, LayerView, Skip, config_skips, decide_engine, layer_skips
from vllm_aiter_mla.settings import DebugSettings, Kernel, Settings

KV_UPDATE_OP, MLA_ATTENTION_OP = admission.KV_UPDATE_OP, admission.MLA_ATTENTION_OP
NONE = Skip("not_run", "not skipped")


def first(skips):
    return next(iter(skips), NONE)


AUTO, PASSES, MODULE = (Settings(enabled=True, integration=name) for name in ("auto", "passes", "module"))
"""With the passes asked for by name, what cuts their graph is a skip."""
CUT = (MLA_ATTENTION_OP, KV_UPDATE_OP)
"""Where vLLM cuts the graph by default."""

CONFIG_SKIPS = [
    ({"vllm_version": "0.34.0", "is_supported_version": False}, "vllm_version", "0.34.0"),
    ({"missing_names": ("Platform.pass_key",)}, "capability", "Platform.pass_key"),
    ({"failed_steps": ("torch ops: OSError",)}, "capability", "torch ops"),
    ({"op_differences": ("the op vllm::f differs in window",)}, "op_schema", "window"),
    ({"is_atom_active": True}, "atom", "ATOM_DISABLE_VLLM_PLUGIN"),
    ({"is_mla": False}, "not_mla", "MLA"),
    ({"is_mla": False, "is_mla_disabled": True}, "mla_disabled", "VLLM_MLA_DISABLE"),
    ({"model_impl": "transformers"}, "transformers_backend", "--model-impl vllm"),
    ({"model_impl": "auto"}, "no_vllm_class", "no class of its own"),
    ({"cache_dir": "/given"}, "cache_dir", "VLLM_CACHE_ROOT"),
    ({"is_sparse": True}, "sparse_mla", "index_topk"),
    ({"card": "cuda"}, "platform", "kernel=triton"),
    ({"card": "gfx90a"}, "platform", "gfx942"),
    ({"uses_aiter": False, "attention": "TRITON_MLA"}, "aiter_off", "VLLM_ROCM_USE_AITER=1"),
    ({"attention": "TRITON_MLA"}, "attention_backend", "--attention-backend"),
    ({"attention": "not known (ValueError: none)"}, "attention_backend", "not known"),
    ({"fused_op_differences": ("the fused op vllm::f differs in window",)}, "op_schema", "fused op"),
    ({"enforce_eager": True}, "enforce_eager", "enforce_eager"),
    ({"mode": "NONE", "breakable_cudagraph": True}, "breakable_cudagraph", "VLLM_USE_BREAKABLE_CUDAGRAPH"),
    ({"mode": "DYNAMO_TRACE_ONCE"}, "compilation_mode", "compilation_config.mode"),
    ({"backend": "eager"}, "backend", "compilation_config.backend"),
    ({"dcp": 2}, "dcp", "decode_context_parallel_size"),
    ({"pcp": 2}, "pcp", "prefill_context_parallel_size"),
    ({"has_hisparse": True}, "hisparse", "hisparse_config"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype", "fp8_e5m2"),
    ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype", "fp8_ds_mla"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype", "nvfp4"),
    ({"kv_cache_dtype": "bfloat16", "model_dtype": "float16"}, "kv_cache_dtype", "float16"),
    ({"splitting_ops": CUT}, "graph_partition", "-cc.use_inductor_graph_partition=true"),
    ({"splitting_ops": (MLA_ATTENTION_OP,)}, "graph_partition", MLA_ATTENTION_OP),
    ({"splitting_ops": (f"{MLA_ATTENTION_OP}.default",)}, "graph_partition", MLA_ATTENTION_OP),
    ({"splitting_ops": (KV_UPDATE_OP,)}, "graph_partition", KV_UPDATE_OP),
    ({"user_pass": "the slot is str: a custom pass must be callable"}, "user_pass", "callable"),
]
LAYER_SKIPS = [
    ({"is_sparse": True}, "sparse_mla"),
    ({"impl": "TritonMLAImpl"}, "impl"),
    ({"known_impls": frozenset()}, "impl"),
    ({"forward_origin": "Subclass"}, "unknown_forward"),
    ({"q_pad_num_heads": 16}, "q_padding"),
    ({"has_sliding_window": True}, "sliding_window"),
    ({"is_query_scaled": True}, "query_scaled"),
    ({"missing_names": ("use_pcp", "impl.is_sparse")}, "capability"),
    ({"has_amx_bmm": True, "has_absorbed_weight": False}, "amx_bmm"),
    ({"has_absorbed_weight": False}, "no_absorbed_weight"),
    ({"has_rope_kernel": False}, "no_rope_kernel"),
    ({"dcp": 4}, "dcp"),
    ({"dcp_q_replicate": True}, "dcp"),
    ({"pcp": 2}, "pcp"),
    ({"has_hisparse": True}, "hisparse"),
    ({"kv_cache_ndim": 4}, "kv_cache_ndim"),
    ({"cudagraph_support": "ALWAYS"}, "captured_prefill"),
    ({"cudagraph_support": "OF_TOMORROW"}, "captured_prefill"),
    ({"cos_sin_dtype_matches": False}, "cos_sin_dtype"),
    ({"graph_dtype": "float16"}, "activation_dtype"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
    ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype"),
    ({"kv_cache_dtype": "bfloat16", "model_dtype": "float16"}, "kv_cache_dtype"),
    ({"num_heads": 0}, "geometry"),
    ({"kv_lora_rank": -1}, "geometry"),
    ({"qk_rope_head_dim": 63}, "geometry"),
]
GRAPH_ONLY = {"enforce_eager", "breakable_cudagraph", "compilation_mode", "backend", "graph_partition"}
UNKNOWN = "the source of MLAAttention.forward is not known (abc)"


@pytest.mark.parametrize(("facts", "code", "knob"), CONFIG_SKIPS)
def test_an_engine_is_skipped_with_its_code_and_its_knob(facts, code, knob):
    skip = first(config_skips(replace(ConfigView(), **facts), PASSES))
    assert (skip.code, knob in str(skip), "\n" in str(skip)) == (code, True, False)


@pytest.mark.parametrize(("facts", "code"), LAYER_SKIPS)
def test_a_layer_is_skipped_with_its_code(facts, code):
    skip = first(layer_skips(replace(LayerView(), **facts)))
    assert (skip.code, "\n" in skip.message) == (code, False)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"splitting_ops": ("vllm::mamba_mixer",)},
        {"splitting_ops": CUT, "use_inductor_graph_partition": True},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3", "model_dtype": "bfloat16"},
        {"kv_cache_dtype": "bfloat16", "model_dtype": "bfloat16"},
        {"kv_cache_dtype": "bfloat16", "model_dtype": ""},
        {"kv_cache_dtype": "auto", "model_dtype": "float32"},
        {"breakable_cudagraph": True},
        {"unknown_forward": UNKNOWN},
    ],
)
def test_an_engine_with_a_whole_graph_and_a_writable_cache_gets_the_passes(facts):
    view = replace(ConfigView(), **facts)
    for settings in (AUTO, PASSES):
        assert config_skips(view, settings) == []
        assert decide_engine(view, settings).integration == "passes"
    if not view.unknown_forward:
        assert decide_engine(replace(view, enforce_eager=True), MODULE).integration == "module"


@pytest.mark.parametrize("settings", [AUTO, MODULE])
def test_the_module_must_know_vllms_forwards_and_its_skip_names_partition(settings):
    skip = decide_engine(ConfigView(splitting_ops=CUT, unknown_forward=UNKNOWN), settings)
    assert isinstance(skip, Skip)
    assert (skip.code, admission.PARTITION_OPTION in str(skip)) == ("unknown_forward", True)


@pytest.mark.parametrize(
    ("facts", "settings", "wanted"),
    [
        ({"splitting_ops": CUT, "endpoints": (2048,)}, AUTO,
         Engagement(16, "module", (*CUT, *admission.ATTENTION_OPS), (2048,))),
        ({"splitting_ops": (MLA_ATTENTION_OP,), "use_inductor_graph_partition": True, "endpoints": (100, 2048)}, AUTO,
         Engagement(16, "passes", (MLA_ATTENTION_OP, *admission.ATTENTION_OPS), (16, 100, 2048))),
        ({"splitting_ops": (), "endpoints": (2048,)}, AUTO, Engagement(16, "passes", (), (16, 2048))),
        # vLLM does not cut at the attention, so our op must not be cut out either.
        ({"splitting_ops": (KV_UPDATE_OP,), "use_inductor_graph_partition": True}, AUTO,
         Engagement(16, "passes", (KV_UPDATE_OP,), (16,))),
        # vLLM drops an end that no batch exceeds, and ends below 2, which is the least limit.
        ({"endpoints": (16,), "max_num_batched_tokens": 16}, PASSES, Engagement(16, "passes", (), (16,))),
        ({"endpoints": (), "max_num_batched_tokens": 16}, PASSES, Engagement(16, "passes", (), ())),
        ({"endpoints": (2048,), "max_num_seqs": 1}, PASSES, Engagement(2, "passes", (), (2, 2048))),
        ({"splitting_ops": (), "mode": "NONE"}, AUTO, Engagement(16, "module", (), ())),
        ({"splitting_ops": (KV_UPDATE_OP,)}, MODULE,
         Engagement(16, "module", (KV_UPDATE_OP, *admission.ATTENTION_OPS), ())),
        ({"splitting_ops": (*CUT, *admission.ATTENTION_OPS)}, AUTO,
         Engagement(16, "module", (*CUT, *admission.ATTENTION_OPS), ())),
    ],
)  # fmt: skip
def test_what_the_gate_writes_is_vllms_own_and_the_least_of_ours(facts, settings, wanted):
    view = replace(ConfigView(max_num_seqs=16, max_num_batched_tokens=2048), **facts)
    assert decide_engine(view, settings) == wanted


def test_a_release_outside_the_window_may_be_tried():
    untested = replace(AUTO, debug=DebugSettings(untested_vllm=True))
    assert isinstance(decide_engine(ConfigView(is_supported_version=False), untested), Engagement)


PLATFORM_SKIPS = [facts for facts, code, _ in CONFIG_SKIPS if code in ("platform", "aiter_off", "attention_backend")]


@pytest.mark.parametrize("facts", PLATFORM_SKIPS)
@pytest.mark.parametrize("kernel", get_args(Kernel))
def test_platform_skip_holds_for_every_kernel_but_those_for_tests_by_name(facts, kernel):
    view = replace(ConfigView(), **facts)
    assert (config_skips(view, replace(AUTO, kernel=kernel)) == []) == (kernel in ("triton", "reference"))
    assert admission.platform_skip(view) is not None


def test_platform_skip_spares_aiters_attention_that_the_user_named_while_aiter_is_off():
    assert config_skips(replace(ConfigView(), uses_aiter=False), AUTO) == []


@pytest.mark.mutation("I11")
def test_mutation_platform_skip_without_its_rules_is_caught(monkeypatch):
    for number, facts in enumerate(PLATFORM_SKIPS):
        code = first(config_skips(replace(ConfigView(), **facts), AUTO)).code
        with monkeypatch.context() as patch:
            others = tuple(rule for rule in admission.PLATFORM_RULES if rule.code != code)
            patch.setattr(admission, "PLATFORM_RULES", others)
            with pytest.raises(AssertionError, match=r"^assert \(\[\] == \[\]"):
                test_platform_skip_holds_for_every_kernel_but_those_for_tests_by_name(PLATFORM_SKIPS[number], "auto")


@pytest.mark.parametrize(
    "facts", [{}, {"kv_cache_ndim": 3}, {"impl": "Another", "known_impls": frozenset({"Another"})}]
)
def test_a_layer_is_admitted(facts):
    assert layer_skips(replace(LayerView(), **facts)) == []


@pytest.mark.parametrize(("facts", "code"), [(facts, code) for facts, code, _ in CONFIG_SKIPS])
def test_only_reasons_about_a_graph_depend_on_the_integration(facts, code):
    view = replace(ConfigView(), **facts)
    if code in GRAPH_ONLY or "fused_op_differences" in facts:
        assert decide_engine(view, AUTO).integration == "module"
        assert (admission.passes_skip(view) or NONE).code == code
        return
    for settings in (AUTO, PASSES, MODULE):
        assert first(config_skips(view, settings)).code == code


def test_every_registered_code_can_be_reached():
    engine, layer = {code for _, code, _ in CONFIG_SKIPS}, {code for _, code in LAYER_SKIPS}
    engines, layers = set(admission.CODES_BY_LEVEL["engine"]), set(admission.CODES_BY_LEVEL["layer"])
    assert engine == engines - {"not_known", "config_class"}, "which a plan alone gives"
    assert layers <= layer <= engines | layers | {"unknown_forward"}


@given(
    st.lists(st.sampled_from(CONFIG_SKIPS), min_size=1, max_size=4),
    st.lists(st.sampled_from(LAYER_SKIPS), min_size=1, max_size=4),
)
def test_any_combination_of_contradictions_is_skipped(engine, layer):
    facts = [dict(ChainMap(*(facts for facts, *_ in picked))) for picked in (engine, layer)]
    assert config_skips(replace(ConfigView(), **facts[0]), PASSES)
    assert layer_skips(replace(LayerView(), **facts[1]))


counts = st.integers(1, 4096)
drafts = st.integers(0, 16)


@pytest.mark.parametrize(
    ("seqs", "drafted", "override", "limit"),
    [(256, 0, None, 256), (256, 3, None, 1024), (1, 1, None, 2), (1, 0, None, 2), (256, 0, 1, 2), (256, 3, 64, 64)],
)
def test_the_limit_is_sequences_times_one_plus_drafts(seqs, drafted, override, limit):
    assert admission.decode_limit(seqs, drafted, override) == limit


@given(counts, drafts, st.integers(1, 10**6))
def test_every_decode_step_lies_inside_the_limit(seqs, drafted, override):
    limit = admission.decode_limit(seqs, drafted)
    assert all(admission.is_within_limit(running * (1 + drafted), limit) for running in (1, seqs))
    assert not admission.is_within_limit(limit + 1, limit)
    assert admission.decode_limit(seqs, drafted, override) == max(override, admission.MIN_DECODE_LIMIT_TOKENS)

"""Claims about the gate on real configs: what it changes when on, that it touches nothing when off, the cache key."""

import copy
import logging
import pickle
import sys

import pytest
import torch
from vllm.compilation.passes.inductor_pass import CallableInductorPass
from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig
from vllm.config.utils import replace

from tests.gate import gate_support
from tests.gate.gate_support import ON, PASSES, SLOT, USERS_PASS, WHOLE, assert_skipped, pass_of, ranges_of
from vllm_aiter_mla import gate, packages
from vllm_aiter_mla.admission import ATTENTION_OPS, KV_UPDATE_OP, MLA_ATTENTION_OP, Skip
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import wrapper
from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD

BUDGET = 2048
FLAG = {"compilation_config": {"pass_config": {FLAG_FIELD: True}}}
SPELLINGS = [{"additional_config": ON}, FLAG]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


def limited(tokens):
    return {"compilation_config": {"pass_config": {FLAG_FIELD: True, LIMIT_FIELD: tokens}}}


def whole(options):
    """The options with which the passes can run, as a user would add them."""
    return options | {"compilation_config": {**WHOLE, **options.get("compilation_config", {})}}


LIMITS = [
    ({"additional_config": ON}, 16, [(1, 16), (17, BUDGET)]),
    (FLAG, 16, [(1, 16), (17, BUDGET)]),
    (limited(64), 64, [(1, 64), (65, BUDGET)]),
    ({"additional_config": ON, "speculative_config": DRAFTS}, 64, [(1, 64), (65, BUDGET)]),
    # vLLM drops an endpoint of 1.
    ({"additional_config": ON, "max_num_seqs": 1}, 2, [(1, 2), (3, BUDGET)]),
    # Wider than any batch: no range is added, and the only one lies inside.
    (limited(99999), 99999, [(1, BUDGET)]),
    (limited(BUDGET), BUDGET, [(1, BUDGET)]),
    ({"additional_config": ON, "compilation_config": {"compile_ranges_endpoints": [100]}}, 16,
     [(1, 16), (17, 100), (101, BUDGET)]),
    ({"additional_config": ON, "compilation_config": {"compile_ranges_endpoints": [16]}}, 16,
     [(1, 16), (17, BUDGET)]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "limit", "ranges"), LIMITS)
def test_the_limit_ends_a_compile_range_where_the_user_keeps_layers_whole(config, options, limit, ranges):
    built = config(max_num_batched_tokens=BUDGET, **whole(options))
    assert isinstance(pass_of(built), AiterMLAPipeline)
    assert (pass_of(built).limit, pass_of(built).integration) == (limit, "passes")
    assert ranges_of(built) == ranges
    ops = built.compilation_config.splitting_ops
    assert ops == [*CompilationConfig._attention_ops, *ATTENTION_OPS], "ours split next to vLLM's"
    assert KV_UPDATE_OP not in ops


@pytest.mark.parametrize(("options", "limit"), [(options, limit) for options, limit, _ in LIMITS])
def test_the_module_has_the_same_limit_and_no_range_of_its_own(config, options, limit):
    built = config(max_num_batched_tokens=BUDGET, **options)
    assert (pass_of(built).limit, pass_of(built).integration) == (limit, "module")
    given = options.get("compilation_config", {}).get("compile_ranges_endpoints", [])
    assert built.compilation_config.compile_ranges_endpoints == [*given, BUDGET]


def test_full_and_piecewise_graphs_are_kept(config, monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", classmethod(lambda cls: True))
    for built in (config(), config(additional_config=ON), config(**whole({"additional_config": ON}))):
        assert built.compilation_config.splitting_ops_contain_attention()
        assert built.compilation_config.is_attention_compiled_piecewise()
        assert built.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE


# I18: the flag changes no compile option but its pass slot, its own splitting ops and, for the passes, one end.

COMPILE_OPTIONS = {
    "default": {},
    **{f"O{level}": {"optimization_level": level} for level in range(4)},
    **{f"mode {mode}": {"compilation_config": {"mode": mode}} for mode in range(4)},
    **{mode: {"compilation_config": {"cudagraph_mode": mode}} for mode in CUDAGraphMode.__members__},
    "rotary op": {"compilation_config": {"custom_ops": ["+rotary_embedding"]}},
    "rotary op, fusions": {"compilation_config": {"custom_ops": ["+rotary_embedding"], "pass_config": {
        "fuse_rope_kvcache": True, "fuse_qk_norm_rope_kvcache": True}}},
    "all ops": {"compilation_config": {"custom_ops": ["all"]}},
    "partition": {"compilation_config": WHOLE},
    "partition, vLLM's fusion": {"compilation_config": {**WHOLE, "pass_config": {"fuse_rope_kvcache_cat_mla": True}}},
    "no partition": {"compilation_config": {"use_inductor_graph_partition": False}},
    "nothing splits": {"compilation_config": {"splitting_ops": []}},
    "attention splits": {"compilation_config": {"splitting_ops": [MLA_ATTENTION_OP]}},
    "something else splits": {"compilation_config": {"splitting_ops": ["own::op"]}},
    "output quantised": {"compilation_config": {"pass_config": {"fuse_attn_quant": True}}},
    "own ranges": {"compilation_config": {"compile_ranges_endpoints": [4, 100]}},
    "sizes": {"compilation_config": {"compile_sizes": [1, 8]}},
    "user's pass": {"compilation_config": USERS_PASS},
    "eager": {"enforce_eager": True},
    "eager back end": {"compilation_config": {"backend": "eager"}},
}  # fmt: skip


FUSIONS = ("fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache", "fuse_rope_kvcache_cat_mla")


@pytest.fixture
def as_on_a_gpu(compiling, monkeypatch):
    """The CPU platform with CUDA graphs, and with the fusions that vLLM otherwise drops without a GPU."""
    from vllm.config import PassConfig
    from vllm.platforms import current_platform

    platform, drop = type(current_platform), PassConfig.__post_init__

    def keep(self):
        asked = {name: getattr(self, name) for name in FUSIONS}
        drop(self)
        for name, value in asked.items():
            setattr(self, name, value)

    monkeypatch.setattr(PassConfig, "__post_init__", keep)
    monkeypatch.setattr(platform, "support_static_graph_mode", classmethod(lambda cls: True))


@pytest.mark.parametrize("options", COMPILE_OPTIONS.values(), ids=COMPILE_OPTIONS)
@pytest.mark.parametrize("flag", [{"additional_config": ON}, FLAG], ids=["additional_config", "pass_config"])
def test_i18_no_compile_option_changes_by_the_flag_but_its_own(config, as_on_a_gpu, flag, options):
    def built(extra):
        asked = {**options.get("compilation_config", {}), **extra.get("compilation_config", {})}
        pass_config = options.get("compilation_config", {}).get("pass_config", {})
        if "pass_config" in asked:
            asked["pass_config"] = {**pass_config, **asked["pass_config"]}
        return config(**{**options, **extra, "compilation_config": copy.deepcopy(asked)})

    off, on = (gate_support.compile_options(built(extra)) for extra in ({}, flag))
    assert on["slot"].limit == 16
    assert gate_support.wrongly_changed(off, on) == {}


def sets_partition(inner, vllm_config, engage, made):
    inner(vllm_config, engage, made)
    vllm_config.compilation_config.use_inductor_graph_partition = True


def fills_splitting_ops_first(inner):
    """As the gate once did: vLLM then does not see that the user gave none, and keeps two of its fusions on."""

    def fill(self, *args, **kwargs):
        if self.splitting_ops is None:
            self.splitting_ops = [*self._attention_ops, "vllm::unified_kv_cache_update", KV_UPDATE_OP]
        inner(self, *args, **kwargs)

    return fill


@pytest.mark.mutation("I18")
def test_mutation_i18_no_compile_option_changes_but_a_gate_sets_partition(config, monkeypatch):
    inner = compat_config.write
    monkeypatch.setattr(compat_config, "write", lambda *given: sets_partition(inner, *given))
    with pytest.raises(AssertionError, match="use_inductor_graph_partition"):
        test_i18_no_compile_option_changes_by_the_flag_but_its_own(config, None, FLAG, {})


@pytest.mark.mutation("I18")
def test_mutation_i18_no_compile_option_changes_but_a_gate_fills_splitting_ops_first(config, as_on_a_gpu, monkeypatch):
    options, off_is_built, inner = COMPILE_OPTIONS["rotary op, fusions"], [], CompilationConfig.set_splitting_ops_for_v1

    def fill(self, *args, **kwargs):
        off_is_built.append(self)  # the first config is the one without the flag
        (inner if len(off_is_built) == 1 else fills_splitting_ops_first(inner))(self, *args, **kwargs)

    monkeypatch.setattr(CompilationConfig, "set_splitting_ops_for_v1", fill)
    with pytest.raises(AssertionError, match="fuse_rope_kvcache"):
        test_i18_no_compile_option_changes_by_the_flag_but_its_own(config, as_on_a_gpu, FLAG, options)


def test_a_config_is_handed_on_at_most_ten_times_by_the_gate(config):
    """Every call of ours that is given a ``VllmConfig``, from the gate's first to its last."""
    handed: list[str] = []

    def trace(frame, event, argument):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("vllm_aiter_mla"):
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(isinstance(frame.f_locals.get(name), VllmConfig) for name in names):
                handed.append(f"{frame.f_globals['__name__']}.{code.co_qualname}")

    sys.setprofile(trace)
    try:
        built = config(**whole({"additional_config": ON}))
    finally:
        sys.setprofile(None)
    assert pass_of(built) is not None
    assert "patches" in handed.pop(0), "the hook"
    assert len(handed) <= 10, handed


def test_the_log_says_once_for_a_config_what_is_on(config, said):
    for _ in range(2):
        said.clear()
        again = replace(config(additional_config=ON))
        (on, how) = said.at(logging.INFO)
        assert "decode limit 16 tokens (max_num_seqs 16" in on
        assert "integration module" in on
        assert "-cc.use_inductor_graph_partition=true" in how
        assert said.at(logging.WARNING) == []
        assert pass_of(again).limit == 16


@pytest.mark.parametrize("fused", [True, False])
def test_the_log_says_whether_vllms_own_fusion_is_on_with_the_passes(config, as_on_a_gpu, said, fused):
    fusion = {"pass_config": {"fuse_rope_kvcache_cat_mla": fused}}
    built = config(additional_config=ON, compilation_config={**WHOLE, **fusion})
    assert built.compilation_config.pass_config.fuse_rope_kvcache_cat_mla is fused
    assert [
        line for line in said.at(logging.INFO) if f"fuse_rope_kvcache_cat_mla is {'on' if fused else 'off'}" in line
    ]


def test_options_without_the_switch_are_said_to_have_no_effect(config, said):
    config(compilation_config={"pass_config": {LIMIT_FIELD: 64}})
    assert [line for line in said.at(logging.WARNING) if "max_token_num set" in line and "no effect" in line]


@pytest.mark.parametrize("name", ATTENTION_OPS)
def test_the_ops_the_gate_splits_at_are_defined_and_cut_inductors_graphs_by_their_tag_too(name):
    namespace, _, op = name.partition("::")
    assert torch.Tag.cudagraph_unsafe in getattr(getattr(torch.ops, namespace), op).default.tags


@pytest.mark.parametrize(
    "options",
    [
        USERS_PASS,
        {"inductor_compile_config": {SLOT: gate_support.users_pass}},
        {"inductor_compile_config": {SLOT: CallableInductorPass(gate_support.users_pass)}},
    ],
)
def test_a_users_pass_is_chained_as_vllm_wraps_it(config, options):
    built = config(additional_config=ON, compilation_config=options)
    assert isinstance(pass_of(built), AiterMLAPipeline)
    assert type(pass_of(built).chained) is CallableInductorPass
    assert pass_of(built).chained.callable is gate_support.users_pass


def test_something_that_is_not_a_pass_skips_the_engine_and_names_the_slot(config, said):
    built = config(additional_config=ON, compilation_config={"inductor_compile_config": {SLOT: "my.module.fn"}})
    assert pass_of(built) == "my.module.fn"
    assert [line for line in said.at(logging.WARNING) if "user_pass" in line and SLOT in line]


def test_replacing_a_config_installs_and_adds_nothing_twice(config):
    built = config(**whole({"additional_config": ON}))
    first, options = pass_of(built), gate_support.compile_options(built)
    again = replace(built)
    assert pass_of(again) is first
    assert gate_support.compile_options(again) == options
    assert gate.apply(again) is None


def test_a_config_with_the_pass_survives_pickling_and_copying(config):
    built = config(additional_config=ON, compilation_config=USERS_PASS)
    for arrived in (pickle.loads(pickle.dumps(built)), copy.deepcopy(built)):
        assert pass_of(arrived).limit == 16
        assert pass_of(arrived).uuid() == pass_of(built).uuid()
        assert arrived.compute_hash() == built.compute_hash()
        assert gate.apply(arrived) is None
        assert arrived.compilation_config.splitting_ops == built.compilation_config.splitting_ops


def test_flag_off_changes_no_field(config, registered):
    built = config()
    assert pass_of(built) is None, "the gate has engaged"
    before = pickle.dumps(vars(built.compilation_config))
    assert gate.apply(built) is None
    assert pickle.dumps(vars(built.compilation_config)) == before


def test_flag_off_after_a_flag_on_config_in_the_same_process_is_still_vllm(config):
    before = gate_support.observed(config())
    config(additional_config=ON)
    assert gate_support.differing(gate_support.observed(config()), before) == []


@pytest.mark.mutation("I5")
def test_mutation_a_gate_that_edits_the_shared_op_list_is_caught(config, monkeypatch):
    monkeypatch.setattr(CompilationConfig, "_attention_ops", list(CompilationConfig._attention_ops))
    write = compat_config.write
    spoilt = lambda one, *given: (one.compilation_config._attention_ops.append(ATTENTION_OPS[1]), write(one, *given))  # noqa: E731
    monkeypatch.setattr(compat_config, "write", spoilt)
    with pytest.raises(AssertionError, match="ttention_ops"):  # pytest shortens the list
        test_flag_off_after_a_flag_on_config_in_the_same_process_is_still_vllm(config)


@pytest.mark.mutation("I5")
def test_mutation_a_gate_that_engages_with_the_flag_off_is_caught(config, monkeypatch):
    monkeypatch.setattr(gate.compat_config, "settings_of", lambda _: gate.Settings(enabled=True))
    with pytest.raises(AssertionError, match="the gate has engaged"):
        test_flag_off_changes_no_field(config, None)


@pytest.mark.parametrize("how", SPELLINGS)
def test_changed_sources_change_the_cache_key(config, how, monkeypatch, tmp_path):
    """I9: an engine whose plugin has changed never starts from an artifact of before."""
    monkeypatch.setattr(packages, "fingerprint", lambda: packages.fingerprint_of(tmp_path, "0.1.0"))
    before = config(**how).compute_hash()
    assert config(**how).compute_hash() == before
    (tmp_path / "changed.py").write_text("x = 1\n")
    assert config(**how).compute_hash() != before


@pytest.mark.mutation("I9")
@pytest.mark.parametrize(
    ("owner", "name", "plant", "how"),
    [
        *((packages, "fingerprint_of", lambda root, version: version, how) for how in SPELLINGS),
        # This spelling does not touch PassConfig, whose own key holds the fingerprint too.
        (AiterMLAPipeline, "uuid", lambda self: f"{self.limit} {self.settings}", {"additional_config": ON}),
    ],
)
def test_mutation_a_key_without_the_sources_is_caught(config, monkeypatch, tmp_path, owner, name, plant, how):
    monkeypatch.setattr(owner, name, plant)
    with pytest.raises(AssertionError, match=r"^assert '(\w+)' != '\1'"):
        test_changed_sources_change_the_cache_key(config, how, monkeypatch, tmp_path)


def test_the_limit_every_option_and_the_kernels_are_in_the_cache_key(config):
    options = [
        {}, {"max_token_num": 8}, {"kernel": "triton"}, {"debug": {"rounding": "two"}}, {"integration": "module"},
    ]  # fmt: skip
    variants = [{"additional_config": {"aiter_mla": {"enabled": True} | one}} for one in options]
    built = [config(**how) for how in ({}, *variants, limited(8))]
    assert len({one.compute_hash() for one in built}) == len(built)
    # Else a run before AITER was mended leaves an untouched graph to the runs after it.
    before = built[1].compute_hash()
    pass_of(built[1]).key = ("16 heads: None; unavailable: AITER is not installed",)
    assert built[1].compute_hash() != before


MODULE = {"aiter_mla": {"enabled": True, "integration": "module"}}
USERS_PASS_IN_VLLM_MODE = {"compilation_config": {"mode": 1, **USERS_PASS}}
WITHOUT_PASSES = [
    ({"enforce_eager": True}, "enforce_eager"),
    ({"optimization_level": 0}, "compilation_mode"),
    ({"compilation_config": {"mode": 2}}, "compilation_mode"),
    ({"compilation_config": {"mode": 0}}, "breakable_cudagraph"),
    ({"compilation_config": {"backend": "eager"}}, "backend"),
    ({}, "graph_partition"),
    ({"compilation_config": {"use_inductor_graph_partition": False}}, "graph_partition"),
    ({"compilation_config": {"splitting_ops": [MLA_ATTENTION_OP, KV_UPDATE_OP]}}, "graph_partition"),
    ({"compilation_config": {"splitting_ops": [f"{MLA_ATTENTION_OP}.default"]}}, "graph_partition"),
    ({"compilation_config": {"splitting_ops": [KV_UPDATE_OP]}}, "graph_partition"),
]
WITH_PASSES = {
    "partition": WHOLE,
    "partition, attention splits": {**WHOLE, "splitting_ops": [MLA_ATTENTION_OP]},
    "nothing splits": {"splitting_ops": []},
    "something else splits": {"splitting_ops": ["own::op"]},
    # vLLM empties the splitting ops itself.
    "output quantised": {"pass_config": {"fuse_attn_quant": True}},
}


@pytest.mark.parametrize("given", WITH_PASSES.values(), ids=WITH_PASSES)
def test_auto_is_the_passes_where_vllm_will_keep_a_layer_in_one_graph(config, given):
    built = config(additional_config=ON, compilation_config=copy.deepcopy(given))
    assert pass_of(built).integration == "passes"
    assert bool(built.compilation_config.use_inductor_graph_partition) is ("partition" in str(given))


@pytest.mark.parametrize(("options", "code"), WITHOUT_PASSES)
def test_auto_is_the_module_where_no_graph_holds_a_layer_and_the_passes_by_name_are_skipped(
    config, said, monkeypatch, options, code
):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", str(int(code == "breakable_cudagraph")))
    built, vllm_own = config(additional_config=ON, **options), config(**options)
    assert pass_of(built).integration == "module"
    compiled, bare = built.compilation_config, vllm_own.compilation_config
    ours = list(ATTENTION_OPS) if any("mla" in op for op in bare.splitting_ops) else []
    assert compiled.splitting_ops == [*bare.splitting_ops, *ours], "vLLM's own, and ours next to attention"
    told = [line for line in said.at(logging.INFO) if "the passes would run with" in line]
    assert bool(told) is (code == "graph_partition")
    assert said.at(logging.WARNING) == []
    knob = {"graph_partition": "-cc.use_inductor_graph_partition=true"}.get(code, code)
    assert_skipped(said, config(additional_config=PASSES, **options), code, knob)


def test_the_module_can_be_asked_for_where_the_passes_would_run(config):
    built = config(additional_config=MODULE, compilation_config=WHOLE)
    assert pass_of(built).integration == "module"


def test_unknown_forwards_skip_the_module_and_leave_the_passes_alone(config, said, monkeypatch):
    unknown = Skip("unknown_forward", "the source of MLAAttention.forward is not known (abc)")
    monkeypatch.setattr(wrapper, "why_forwards_unknown", lambda: unknown)
    assert pass_of(config(additional_config=ON, compilation_config=WHOLE)).integration == "passes"
    assert_skipped(said, config(additional_config=ON), "unknown_forward", "-cc.use_inductor_graph_partition=true")


def test_a_users_pass_still_runs_where_torch_compiles_without_vllm(config, monkeypatch):
    """Then no compile range is known; Inductor calls what stands in the slot."""
    seen = []
    ours = pass_of(config(additional_config=MODULE, **USERS_PASS_IN_VLLM_MODE))
    monkeypatch.setattr(type(ours.chained), "__call__", lambda _, graph: seen.append(graph))
    ours("the graph")
    assert seen == ["the graph"]

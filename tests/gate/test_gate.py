"""Claims about the gate on real configs: what it changes when on, that it touches nothing when off, the cache key."""

import copy
import logging
import pickle

import pytest
import torch
from vllm.compilation.passes.inductor_pass import CallableInductorPass
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.config.utils import replace

from tests.gate import gate_support
from tests.gate.gate_support import ON, PASSES, SLOT, USERS_PASS, assert_skipped, pass_of, ranges_of
from vllm_aiter_mla import files, gate
from vllm_aiter_mla.admission import ATTENTION_OPS, KV_UPDATE_OP, MLA_ATTENTION_OP
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import patches
from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD

FLAG = {"compilation_config": {"pass_config": {FLAG_FIELD: True}}}
SPELLINGS = [{"additional_config": ON}, FLAG]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


def limited(tokens):
    return {"compilation_config": {"pass_config": {FLAG_FIELD: True, LIMIT_FIELD: tokens}}}


@pytest.mark.parametrize(
    ("options", "limit", "ranges"),
    [
        ({"additional_config": ON}, 16, [(1, 16), (17, 2048)]),
        (FLAG, 16, [(1, 16), (17, 2048)]),
        (limited(64), 64, [(1, 64), (65, 2048)]),
        ({"additional_config": ON, "speculative_config": DRAFTS}, 64, [(1, 64), (65, 2048)]),
        # vLLM drops an endpoint of 1.
        ({"additional_config": ON, "max_num_seqs": 1}, 2, [(1, 2), (3, 2048)]),
        # Wider than any batch: no range is added, and the only one lies inside.
        (limited(99999), 99999, [(1, 2048)]),
        ({"additional_config": ON, "compilation_config": {"compile_ranges_endpoints": [100]}}, 16,
         [(1, 16), (17, 100), (101, 2048)]),
    ],
)  # fmt: skip
def test_the_limit_ends_a_compile_range(config, options, limit, ranges):
    built = config(**options)
    assert isinstance(pass_of(built), AiterMLAPipeline)
    assert pass_of(built).limit == limit
    assert ranges_of(built) == ranges
    assert built.compilation_config.use_inductor_graph_partition is True
    ops = built.compilation_config.splitting_ops
    assert ops == [*CompilationConfig._attention_ops, *ATTENTION_OPS], "ours split next to vLLM's"
    assert KV_UPDATE_OP not in ops


def test_full_and_piecewise_graphs_are_kept(config, monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", classmethod(lambda cls: True))
    for built in (config(), config(additional_config=ON)):
        assert built.compilation_config.splitting_ops_contain_attention()
        assert built.compilation_config.is_attention_compiled_piecewise()
        assert built.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE


ATTENTION = [MLA_ATTENTION_OP, "vllm::other_attention"]
UPDATES = ["vllm::unified_kv_cache_update", KV_UPDATE_OP]


@pytest.mark.parametrize(
    ("integration", "by_the_user", "ops", "partition", "quantises", "wanted"),
    [
        ("passes", False, None, False, False, [*ATTENTION, *ATTENTION_OPS]),
        ("passes", False, None, False, True, [*ATTENTION, *ATTENTION_OPS]),
        ("passes", False, list(ATTENTION_OPS), False, False, list(ATTENTION_OPS)),
        ("passes", False, [*ATTENTION_OPS, "own::op"], False, False, [*ATTENTION_OPS, "own::op"]),
        ("passes", True, [KV_UPDATE_OP], False, False, [KV_UPDATE_OP]),
        ("passes", True, [f"{MLA_ATTENTION_OP}.default"], False, False,
         [f"{MLA_ATTENTION_OP}.default", *ATTENTION_OPS]),
        ("module", False, None, True, False, [*ATTENTION, *ATTENTION_OPS]),
        ("module", False, None, False, False, [*ATTENTION, *UPDATES, *ATTENTION_OPS]),
        ("module", False, None, False, True, None),
        ("module", False, None, True, True, [*ATTENTION, *ATTENTION_OPS]),
        ("module", False, ["own::op"], False, False, ["own::op"]),
        ("module", False, [MLA_ATTENTION_OP], False, False, [MLA_ATTENTION_OP, *ATTENTION_OPS]),
        ("module", True, [KV_UPDATE_OP], False, False, [KV_UPDATE_OP, *ATTENTION_OPS]),
    ],
)  # fmt: skip
def test_our_ops_split_the_graph_where_vllm_will_split_it_at_attention(
    integration, by_the_user, ops, partition, quantises, wanted
):
    compilation = CompilationConfig()  # not yet a part of an engine's config, so that vLLM has filled in nothing
    compilation.mode, compilation.splitting_ops = CompilationMode.VLLM_COMPILE, ops
    compilation.use_inductor_graph_partition = partition
    compilation.pass_config.fuse_attn_quant = quantises
    compilation._attention_ops = ATTENTION
    patches.note(compilation, patches.Given(None, tuple(ops) if by_the_user else None, None))
    assert gate.splitting_ops(compilation, integration) == wanted
    compilation.mode = CompilationMode.NONE
    assert gate.splitting_ops(compilation, integration) == ops


def test_a_gate_that_runs_again_tells_the_ends_of_the_user_and_its_own_alone(config):
    """vLLM has added its own ends since the first run."""
    built = config(additional_config=ON, compilation_config={"compile_ranges_endpoints": [100]})
    for tokens, ends in ((None, [16, 100]), (64, [64, 100])):
        built.additional_config = {"aiter_mla": {"enabled": True, "max_token_num": tokens}}
        gate.apply(built)
        assert compat_config.added_options(built)["compile_ranges_endpoints"] == ends


@pytest.mark.parametrize(
    ("given", "splitting_ops", "partition"),
    [
        ({"use_inductor_graph_partition": True, "splitting_ops": [MLA_ATTENTION_OP]},
         [MLA_ATTENTION_OP, *ATTENTION_OPS], True),
        ({"splitting_ops": []}, [], False),
    ],
)  # fmt: skip
def test_explicit_splitting_ops_stay(config, given, splitting_ops, partition):
    built = config(additional_config=ON, compilation_config=given)
    assert pass_of(built).integration == "passes"
    assert built.compilation_config.splitting_ops == splitting_ops
    assert built.compilation_config.use_inductor_graph_partition is partition


def test_the_log_shows_the_decode_limit_and_the_partition_once(config, said):
    config(additional_config=ON)
    config(additional_config=ON)
    for told in ("decode limit 16 tokens (max_num_seqs 16", "-cc.use_inductor_graph_partition=true"):
        assert len([line for line in said.at(logging.INFO) if told in line]) == 1
    assert said.at(logging.WARNING) == []


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
    built = config(additional_config=ON, compilation_config=USERS_PASS)
    first, endpoints = pass_of(built), built.compilation_config.compile_ranges_endpoints
    again = replace(built)
    assert pass_of(again) is first
    assert again.compilation_config.compile_ranges_endpoints == endpoints
    assert all(again.compilation_config.splitting_ops.count(op) == 1 for op in ATTENTION_OPS)
    assert gate.apply(again) == 16
    rebuilt = replace(built, compilation_config=replace(built.compilation_config))
    assert isinstance(pass_of(rebuilt), AiterMLAPipeline)
    assert type(pass_of(rebuilt).chained) is CallableInductorPass, "the user's pass is wrapped once"


def test_a_dense_draft_next_to_an_mla_target_leaves_the_targets_pass_in_place(config, dense_model, said):
    built = config(additional_config={"aiter_mla": {"enabled": True, "strict": True}})
    shared = replace(built, model_config=dense_model)
    assert shared.compilation_config is built.compilation_config
    assert isinstance(pass_of(built), AiterMLAPipeline)
    assert said.at(logging.WARNING) == []


def test_a_config_with_the_pass_survives_pickling_and_copying(config):
    built = config(additional_config=ON, compilation_config=USERS_PASS)
    for arrived in (pickle.loads(pickle.dumps(built)), copy.deepcopy(built)):
        assert pass_of(arrived).limit == 16
        assert pass_of(arrived).uuid() == pass_of(built).uuid()
        assert arrived.compute_hash() == built.compute_hash()
        assert gate.apply(arrived) == 16
        assert arrived.compilation_config.splitting_ops == built.compilation_config.splitting_ops


def test_a_copy_of_a_config_that_was_off_is_switched_on_without_changing_its_partition(config):
    """vLLM's default False cannot be told from the user's in a copy, so the graph stays cut."""
    copied = copy.deepcopy(config())
    copied.additional_config = ON
    assert gate.apply(copied) == 16
    assert pass_of(copied).integration == "module"
    assert copied.compilation_config.use_inductor_graph_partition is False


def test_flag_off_changes_no_field(config, registered):
    built = config()
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
    split = gate.splitting_ops
    spoilt = lambda one, how: (one._attention_ops.append(ATTENTION_OPS[1]), split(one, how))[1]  # noqa: E731
    monkeypatch.setattr(gate, "splitting_ops", spoilt)
    with pytest.raises(AssertionError, match="ttention_ops"):  # pytest shortens the list
        test_flag_off_after_a_flag_on_config_in_the_same_process_is_still_vllm(config)


@pytest.mark.mutation("I5")
def test_mutation_a_gate_that_engages_with_the_flag_off_is_caught(config, monkeypatch):
    monkeypatch.setattr(gate.compat_config, "settings_of", lambda _: gate.Settings(enabled=True))
    with pytest.raises(AssertionError, match=r"^assert 16 is None"):
        test_flag_off_changes_no_field(config, None)


@pytest.mark.parametrize("how", SPELLINGS)
def test_changed_sources_change_the_cache_key(config, how, monkeypatch, tmp_path):
    """I9: an engine whose plugin has changed never starts from an artifact of before."""
    monkeypatch.setattr(files, "fingerprint", lambda: files.fingerprint_of(tmp_path, "0.1.0"))
    before = config(**how).compute_hash()
    assert config(**how).compute_hash() == before
    (tmp_path / "changed.py").write_text("x = 1\n")
    assert config(**how).compute_hash() != before


@pytest.mark.mutation("I9")
@pytest.mark.parametrize(
    ("owner", "name", "plant", "how"),
    [
        *((files, "fingerprint_of", lambda root, version: version, how) for how in SPELLINGS),
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
    ({"compilation_config": {"use_inductor_graph_partition": False}}, "graph_partition"),
    ({"compilation_config": {"splitting_ops": [MLA_ATTENTION_OP, KV_UPDATE_OP]}}, "splitting_ops"),
    ({"compilation_config": {"splitting_ops": [f"{MLA_ATTENTION_OP}.default"]}}, "splitting_ops"),
    ({"compilation_config": {"splitting_ops": [KV_UPDATE_OP]}}, "splitting_ops"),
]


def build_with_the_module(config, asked, options):
    """Build a config, and check what the module integration changes in vLLM's own."""
    built, vllm_own = config(additional_config=asked, **options), config(**options)
    assert pass_of(built).integration == "module"
    assert ranges_of(built) == ranges_of(vllm_own), "no compile range more"
    compiled, bare = built.compilation_config, vllm_own.compilation_config
    assert compiled.use_inductor_graph_partition == bare.use_inductor_graph_partition
    ours = list(ATTENTION_OPS) if any("mla" in op for op in bare.splitting_ops) else []
    assert compiled.splitting_ops == [*bare.splitting_ops, *ours], "vLLM's own, and ours next to attention"


@pytest.mark.parametrize(("options", "code"), WITHOUT_PASSES)
def test_auto_engages_where_the_passes_cannot_run(config, said, monkeypatch, options, code):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", str(int(code == "breakable_cudagraph")))
    build_with_the_module(config, ON, options)
    assert any("module integration" in line and f"cannot run: {code})" in line for line in said.at(logging.INFO))
    assert said.at(logging.WARNING) == []
    assert_skipped(said, config(additional_config=PASSES, **options), code, code)


def test_the_module_can_be_asked_for_where_the_passes_would_run(config):
    build_with_the_module(config, MODULE, {})
    assert pass_of(config(additional_config=ON)).integration == "passes"


def test_a_users_pass_still_runs_where_torch_compiles_without_vllm(config, monkeypatch):
    """Then no compile range is known; Inductor calls what stands in the slot."""
    seen = []
    ours = pass_of(config(additional_config=MODULE, **USERS_PASS_IN_VLLM_MODE))
    monkeypatch.setattr(type(ours.chained), "__call__", lambda _, graph: seen.append(graph))
    ours("the graph")
    assert seen == ["the graph"]

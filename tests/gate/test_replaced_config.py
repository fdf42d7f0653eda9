"""Claims about ``replace()``: the gate runs again and takes back what it had added, and near misses are told."""

import copy
import logging

import pytest
from vllm.compilation.backends import VllmBackend
from vllm.config.utils import replace
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.gate import gate_support
from tests.gate.gate_support import ATTENTION_OPS, ON, PASSES, SLOT, USERS_PASS, added_to, pass_of, ranges_of
from tests.support.planted import raising
from vllm_aiter_mla import gate
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import patches
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD

OFF = {"aiter_mla": {"enabled": False}}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
CONFIGS = [
    {},
    {"splitting_ops": []},
    {"splitting_ops": ["vllm::unified_mla_attention_with_output"], "use_inductor_graph_partition": True},
    {"use_inductor_graph_partition": False},
    {"use_inductor_graph_partition": True},
    {"compile_ranges_endpoints": [16, 100]},
    USERS_PASS,
    {"inductor_compile_config": {SLOT: gate_support.users_pass}},
    {"pass_config": {"fuse_rope_kvcache_cat_mla": False}},
]


@pytest.fixture
def fused(monkeypatch):
    """vLLM's default of its own fusion as on a GPU."""
    monkeypatch.setattr(compat_config, "default_of_fusion", lambda vllm_config: True)


def shown(config):
    """What the gate may have added; the user's pass by its function, because vLLM wraps it anew."""
    found = added_to(config)
    return found | {"pass": getattr(found["pass"], "callable", found["pass"])}


def scheduled(config, max_num_seqs):
    scheduler = copy.copy(config.scheduler_config)
    scheduler.max_num_seqs = max_num_seqs
    return replace(config, scheduler_config=scheduler)


def copied(config):
    return replace(config, compilation_config=replace(config.compilation_config))


@pytest.mark.parametrize("rebuild", [lambda config: config, copied, copy.deepcopy], ids=["same", "replaced", "copied"])
@pytest.mark.parametrize("given", CONFIGS)
def test_replaced_config_that_is_off_holds_nothing_of_ours(config, fused, given, rebuild):
    off = config(compilation_config=given)
    again = replace(rebuild(config(additional_config=ON, compilation_config=given)), additional_config={})
    assert gate_support.differing(shown(again), shown(off)) == []
    if not given:
        assert again.compute_hash() == off.compute_hash()


def test_replaced_config_that_is_switched_off_in_pass_config_holds_nothing_of_ours(config, fused):
    off = config()
    built = config(compilation_config={"pass_config": {FLAG_FIELD: True, LIMIT_FIELD: 64}})
    pass_config = copy.copy(built.compilation_config.pass_config)
    setattr(pass_config, FLAG_FIELD, False)
    setattr(pass_config, LIMIT_FIELD, None)
    again = replace(built, compilation_config=replace(built.compilation_config, pass_config=pass_config))
    assert added_to(again) == added_to(off)
    assert again.compute_hash() == off.compute_hash()


def test_replaced_config_that_is_off_and_on_again_is_as_the_first(config, fused):
    built = config(additional_config=ON)
    first = shown(built) | {"pass": None}
    again = replace(replace(copied(built), additional_config=OFF), additional_config=ON)
    assert shown(again) | {"pass": None} == first
    assert pass_of(again).changes.given == pass_of(config(additional_config=ON)).changes.given


def test_replaced_config_keeps_what_the_user_changed_since(config):
    built = config(additional_config=ON)
    other = replace(built.compilation_config, splitting_ops=[], compile_ranges_endpoints=[16, 300])
    again = replace(built, compilation_config=other, additional_config={})
    assert again.compilation_config.splitting_ops == []
    assert (1, 300) in ranges_of(again)


@pytest.mark.parametrize("max_num_seqs", [8, 32])
def test_replaced_config_moves_the_limit_and_its_range(config, max_num_seqs):
    again = scheduled(config(additional_config=ON), max_num_seqs)
    assert pass_of(again).limit == max_num_seqs
    assert ranges_of(again) == [(1, max_num_seqs), (max_num_seqs + 1, 2048)]


def test_replaced_config_of_a_target_with_drafts_counts_them_after_its_draft_was_built(config):
    built = config(additional_config=ON, speculative_config=DRAFTS)
    draft = replace(built, speculative_config=None)
    assert pass_of(draft).limit == 64
    assert pass_of(scheduled(built, 8)).limit == 32


def test_replaced_config_that_keeps_its_limit_keeps_its_pass(config):
    """A worker's pass knows which kernels were checked."""
    built = config(additional_config=ON)
    pass_of(built).key = ("checked",)
    assert pass_of(copied(replace(built))).key == ("checked",)


def test_replaced_config_that_is_skipped_now_holds_nothing_of_ours(config, said, fused):
    off, built = config(), config(additional_config=ON)
    cache = copy.copy(built.cache_config)
    cache.cache_dtype = "fp8_e5m2"
    again = copy.copy(built)
    again.cache_config = cache
    assert gate.apply(again).code == "kv_cache_dtype"
    assert pass_of(again) is None
    assert again.compilation_config.use_inductor_graph_partition is off.compilation_config.use_inductor_graph_partition
    assert again.compilation_config.pass_config == off.compilation_config.pass_config
    assert len(said.at(logging.WARNING)) == 1


def test_replaced_config_of_a_draft_that_is_skipped_leaves_the_targets_pass(config, said):
    built = config(additional_config=ON)
    draft = copy.copy(built)
    draft.model_config, draft.cache_config = copy.copy(built.model_config), copy.copy(built.cache_config)
    draft.model_config.runner_type, draft.cache_config.cache_dtype = "draft", "fp8_e5m2"
    assert gate.apply(draft).code == "kv_cache_dtype"
    assert pass_of(built).limit == 16
    assert said.at(logging.WARNING) == []


STRICT = {"aiter_mla": {"enabled": True, "strict": True}}


@pytest.mark.parametrize(
    ("flag", "target", "draft"),
    [
        (ON, "ROCM_AITER_MLA", "TRITON_MLA"),
        (STRICT, "ROCM_AITER_MLA", "TRITON_MLA"),
        (ON, "TRITON_MLA", "ROCM_AITER_MLA"),
    ],
    ids=["skipped", "skipped in strict mode", "admitted next to a skipped target"],
)
def test_replaced_config_of_a_draft_changes_nothing_once_the_target_is_built(
    config, said, monkeypatch, flag, target, draft
):
    """vLLM's compiler holds a copy of the options, and the draft's config keeps the target's model."""
    monkeypatch.setattr(compat_config, "platform_facts", lambda one: {"attention": one.attention_config.backend.name})
    # vLLM's own fusion exists on GPUs only.
    built = config(additional_config=flag, attention_backend=target, compilation_config=CONFIGS[-1])
    had, lines, compiler = added_to(built), list(said), VllmBackend(built)
    built.compilation_config.static_forward_context["layers.0"] = object()
    replace(built, attention_config=replace(built.attention_config, backend=AttentionBackendEnum[draft]))
    assert added_to(built) == had
    assert said == lines
    compiler.configure_post_pass()
    assert (had["pass"] in compiler.pass_manager.passes) is (target == "ROCM_AITER_MLA")


@pytest.mark.mutation("I5")
@pytest.mark.parametrize(("target", "draft"), [("ROCM_AITER_MLA", "TRITON_MLA"), ("TRITON_MLA", "ROCM_AITER_MLA")])
def test_mutation_replaced_config_of_a_draft_that_decides_again_is_caught(config, said, monkeypatch, target, draft):
    monkeypatch.setattr(compat_config, "has_layers", lambda vllm_config: False)
    with pytest.raises(AssertionError, match="'pass': "):
        test_replaced_config_of_a_draft_changes_nothing_once_the_target_is_built(
            config, said, monkeypatch, ON, target, draft
        )


@pytest.mark.mutation("I5")
@pytest.mark.parametrize(
    ("forgotten", "left"),
    [(gate.CHANGED[0], "partition"), (gate.CHANGED[1], "splitting_ops"), (patches.FUSION_FIELD, "fusion")],
)
def test_mutation_replaced_config_with_a_field_left_is_caught(config, fused, monkeypatch, forgotten, left):
    monkeypatch.setattr(gate, "CHANGED", tuple(name for name in gate.CHANGED if name != forgotten))
    with pytest.raises(AssertionError, match=f"item: '{left}'"):
        test_replaced_config_that_is_off_holds_nothing_of_ours(config, fused, {}, copied)


@pytest.mark.mutation("I5")
def test_mutation_replaced_config_that_takes_nothing_back_is_caught(config, fused, monkeypatch):
    monkeypatch.setattr(gate, "_take_back", lambda compilation, engaged: None)
    with pytest.raises(AssertionError, match="item: 'pass'"):
        test_replaced_config_that_is_off_holds_nothing_of_ours(config, fused, {}, lambda built: built)
    with pytest.raises(AssertionError, match=r"\(9, 16\)"):
        test_replaced_config_moves_the_limit_and_its_range(config, 8)


@pytest.mark.mutation
def test_mutation_replaced_config_that_forgets_the_drafts_is_caught(config, monkeypatch):
    inner = gate.Changes
    monkeypatch.setattr(gate, "Changes", lambda given, drafts, *others: inner(given, 0, *others))
    with pytest.raises(AssertionError, match=r"^assert 16 == 64"):
        test_replaced_config_of_a_target_with_drafts_counts_them_after_its_draft_was_built(config)


# The prerequisite, on a platform where vLLM has a kernel for it. test_gate_gpu_platforms.py has vLLM's own platforms.


def test_prerequisite_comes_with_the_partition_that_the_gate_adds(config, fused, said):
    assert config(additional_config=ON).compilation_config.pass_config.fuse_rope_kvcache_cat_mla is True
    assert [line for line in said.at(logging.INFO) if "-cc.pass_config.fuse_rope_kvcache_cat_mla=true" in line]


@pytest.mark.parametrize(
    "options",
    [
        {"compilation_config": {"pass_config": {"fuse_rope_kvcache_cat_mla": False}}},
        {"compilation_config": {"splitting_ops": []}, "optimization_level": 1},
        {"additional_config": {"aiter_mla": {"enabled": True, "integration": "module"}}},
    ],
    ids=["the user's False", "no partition", "module"],
)
def test_prerequisite_stays_where_the_user_chose_or_the_gate_adds_no_partition(config, fused, options):
    built = config(**{"additional_config": ON} | options)
    assert pass_of(built) is not None
    assert built.compilation_config.pass_config.fuse_rope_kvcache_cat_mla is False


def test_prerequisite_is_what_vllm_gives_a_user_who_sets_partition(config):
    theirs = config(compilation_config={"use_inductor_graph_partition": True})
    ours = config(additional_config=ON)
    fused = [one.compilation_config.pass_config.fuse_rope_kvcache_cat_mla for one in (theirs, ours)]
    assert fused == [True, True]


def test_prerequisite_that_cannot_be_asked_costs_a_warning_and_no_engine(config, said, monkeypatch):
    monkeypatch.setattr(compat_config, "default_of_fusion", raising(KeyError("planted")))
    assert pass_of(config(additional_config=ON)) is not None
    assert len([line for line in said.at(logging.WARNING) if "planted" in line]) == 1


@pytest.mark.mutation
def test_mutation_prerequisite_that_ignores_the_user_is_caught(config, fused, monkeypatch):
    inner = patches._read
    monkeypatch.setattr(patches, "_read", lambda compilation: inner(compilation)._replace(fusion=None))
    with pytest.raises(AssertionError, match=r"^assert True is False"):
        test_prerequisite_stays_where_the_user_chose_or_the_gate_adds_no_partition(
            config, fused, {"compilation_config": {"pass_config": {"fuse_rope_kvcache_cat_mla": False}}}
        )


# Options that are off, and options under another name.


@pytest.mark.parametrize("options", [OFF, {"aiter_mla": {"enabled": False, "kernel": "triton"}}])
def test_replaced_config_with_options_that_say_off_shares_the_cache_key(config, options):
    off = config()
    built = config(additional_config=options)
    assert built.compute_hash() == off.compute_hash()
    assert replace(config(additional_config=ON), additional_config=options).compute_hash() == off.compute_hash()
    assert "aiter_mla" in options, "the user's own mapping stays"
    other = {"another": 1}
    assert config(additional_config=options | other).compute_hash() == config(additional_config=other).compute_hash()


@pytest.mark.mutation("I5")
def test_mutation_replaced_config_whose_off_is_hashed_is_caught(config, monkeypatch):
    monkeypatch.setattr(compat_config, "drop_options", lambda vllm_config: None)
    with pytest.raises(AssertionError, match=r"^assert '\w+' == '\w+'"):
        test_replaced_config_with_options_that_say_off_shares_the_cache_key(config, OFF)


@pytest.mark.parametrize("value", [ON["aiter_mla"], True])
@pytest.mark.parametrize("key", ["aiter-mla", "AITER_MLA", "vllm_aiter_mla", FLAG_FIELD])
def test_near_miss_is_a_warning_and_changes_nothing(config, said, key, value):
    built = config(additional_config={key: value})
    (line,) = said.at(logging.WARNING)
    assert f"additional_config.{key} " in line
    assert "additional_config.aiter_mla" in line
    assert pass_of(built) is None
    assert not set(ATTENTION_OPS) & set(built.compilation_config.splitting_ops)


def test_near_miss_next_to_the_real_name_is_told_too(config, said):
    assert pass_of(config(additional_config=PASSES | {"aiter-mla": {"strict": True}})) is not None
    assert len([line for line in said.at(logging.WARNING) if "additional_config.aiter-mla " in line]) == 1


@pytest.mark.mutation
def test_mutation_near_miss_that_is_not_told_is_caught(config, said, monkeypatch):
    monkeypatch.setattr(gate, "near_misses", lambda additional_config: ())
    with pytest.raises(ValueError, match="not enough values"):
        test_near_miss_is_a_warning_and_changes_nothing(config, said, "aiter-mla", True)

"""Claims about the gate on real configs: what it changes when on, that it touches nothing when off, why it declines."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.compilation.passes.inductor_pass import CallableInductorPass, InductorPass
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.config.utils import replace

from tests.gate import gate_support as support
from tests.gate.gate_support import ON, STRICT, Lines
from vllm_aiter_mla import fingerprint, gate
from vllm_aiter_mla.admission import ATTENTION_OPS, KV_UPDATE_OP, MLA_ATTENTION_OP
from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD

Build = Callable[..., Any]
SLOT = "post_grad_custom_post_pass"
USERS_PASS = {"inductor_passes": {SLOT: "tests.gate.gate_support.users_pass"}}


def pass_of(config: Any) -> Any:
    return config.compilation_config.inductor_compile_config.get(SLOT)


def ranges_of(config: Any) -> list[tuple[int, int]]:
    return [(one.start, one.end) for one in config.compilation_config.get_compile_ranges()]


# -- on


def test_both_spellings_engage_the_same_way(config: Build) -> None:
    through_pass_config = config(compilation_config={"pass_config": {FLAG_FIELD: True}})
    through_additional = config(additional_config=ON)
    for built in (through_pass_config, through_additional):
        assert isinstance(pass_of(built), AiterMLAPipeline)
        assert pass_of(built).limit == 16
        assert built.compilation_config.use_inductor_graph_partition is True


def test_the_limit_is_a_compile_range_endpoint(config: Build) -> None:
    assert ranges_of(config(additional_config=ON)) == [(1, 16), (17, 2048)]


def test_an_override_moves_the_endpoint_and_the_limit(config: Build) -> None:
    built = config(compilation_config={"pass_config": {FLAG_FIELD: True, LIMIT_FIELD: 64}})
    assert ranges_of(built) == [(1, 64), (65, 2048)]
    assert pass_of(built).limit == 64


def test_speculative_tokens_widen_the_decode_limit(config: Build) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    assert ranges_of(config(additional_config=ON, speculative_config=speculative))[0] == (1, 64)


def test_a_server_for_one_request_gets_a_range_that_vllm_keeps(config: Build) -> None:
    built = config(max_num_seqs=1, additional_config=ON)
    assert pass_of(built).limit == 2
    assert ranges_of(built)[0] == (1, 2)


def test_a_decode_limit_wider_than_any_batch_adds_no_range_and_contains_the_only_one(config: Build) -> None:
    built = config(compilation_config={"pass_config": {FLAG_FIELD: True, LIMIT_FIELD: 99999}})
    assert ranges_of(built) == [(1, 2048)]
    assert pass_of(built).limit >= 2048


def test_endpoints_of_the_user_stay(config: Build) -> None:
    built = config(additional_config=ON, compilation_config={"compile_ranges_endpoints": [100]})
    assert ranges_of(built) == [(1, 16), (17, 100), (101, 2048)]


def test_our_attention_ops_split_beside_vllms_and_the_kv_update_does_not(config: Build) -> None:
    ops = config(additional_config=ON).compilation_config.splitting_ops
    assert ops == [*CompilationConfig._attention_ops, *ATTENTION_OPS]
    assert KV_UPDATE_OP not in ops


def test_the_list_that_every_config_shares_is_not_touched(config: Build) -> None:
    config(additional_config=ON)
    for ops in (CompilationConfig._attention_ops, config().compilation_config.splitting_ops):
        assert not set(ATTENTION_OPS) & set(ops)


def test_piecewise_graphs_are_kept(config: Build) -> None:
    from vllm.platforms import current_platform

    built = config(additional_config=ON)
    assert built.compilation_config.splitting_ops_contain_attention()
    assert built.compilation_config.is_attention_compiled_piecewise()
    if current_platform.support_static_graph_mode():
        assert built.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE


def test_a_users_explicit_splitting_list_gains_our_ops_under_graph_partition(config: Build) -> None:
    options = {"use_inductor_graph_partition": True, "splitting_ops": [MLA_ATTENTION_OP]}
    built = config(additional_config=ON, compilation_config=options)
    assert built.compilation_config.splitting_ops == [MLA_ATTENTION_OP, *ATTENTION_OPS]


def test_empty_splitting_ops_need_no_partition_and_stay_empty(config: Build) -> None:
    built = config(additional_config=ON, compilation_config={"splitting_ops": []})
    assert isinstance(pass_of(built), AiterMLAPipeline)
    assert built.compilation_config.splitting_ops == []
    assert built.compilation_config.use_inductor_graph_partition is False


def test_the_log_shows_the_decode_limit_and_the_partition_once(config: Build, lines: Lines) -> None:
    config(additional_config=ON)
    config(additional_config=ON)
    said = lines.at(logging.INFO)
    assert len([line for line in said if "decode limit 1..16" in line and "max_num_seqs 16" in line]) == 1
    assert len([line for line in said if "use_inductor_graph_partition=True" in line]) == 1
    assert lines.at(logging.WARNING) == []


def test_options_without_the_switch_are_said_to_have_no_effect(config: Build, lines: Lines) -> None:
    config(compilation_config={"pass_config": {LIMIT_FIELD: 64}})
    assert [line for line in lines.at(logging.WARNING) if LIMIT_FIELD in line and "no effect" in line]


# -- a custom pass of the user's


def test_a_users_inductor_pass_is_chained(config: Build) -> None:
    mine = CallableInductorPass(support.users_pass)
    built = config(additional_config=ON, compilation_config={"inductor_compile_config": {SLOT: mine}})
    assert isinstance(pass_of(built), AiterMLAPipeline)
    assert type(pass_of(built).chained) is CallableInductorPass
    assert pass_of(built).chained.callable is support.users_pass


def test_a_users_callable_is_wrapped_as_vllm_wraps_inductor_passes(config: Build) -> None:
    for options in (USERS_PASS, {"inductor_compile_config": {SLOT: support.users_pass}}):
        built = config(additional_config=ON, compilation_config=options)
        assert isinstance(pass_of(built).chained, CallableInductorPass)
        assert pass_of(built).chained.callable is support.users_pass


def test_something_that_is_no_pass_declines_and_names_the_slot(config: Build, lines: Lines) -> None:
    built = config(additional_config=ON, compilation_config={"inductor_compile_config": {SLOT: "my.module.fn"}})
    assert pass_of(built) == "my.module.fn"
    assert [line for line in lines.at(logging.WARNING) if "user_pass" in line and SLOT in line]


# -- again, copied, shipped


def test_replacing_a_config_installs_and_adds_nothing_twice(config: Build) -> None:
    built = config(additional_config=ON, compilation_config=USERS_PASS)
    first, endpoints = pass_of(built), built.compilation_config.compile_ranges_endpoints
    again = replace(built)
    assert pass_of(again) is first
    assert isinstance(first.chained, CallableInductorPass)
    assert again.compilation_config.compile_ranges_endpoints == endpoints
    assert all(again.compilation_config.splitting_ops.count(op) == 1 for op in ATTENTION_OPS)
    assert gate.apply(again) == gate.Decision(first.settings, limit=16)


def test_replacing_the_compilation_config_too_wraps_the_users_pass_once(config: Build) -> None:
    built = config(additional_config=ON, compilation_config=USERS_PASS)
    again = replace(built, compilation_config=replace(built.compilation_config))
    assert isinstance(pass_of(again), AiterMLAPipeline)
    assert isinstance(pass_of(again).chained, CallableInductorPass)


def test_a_larger_scheduler_moves_the_limit(config: Build) -> None:
    built = config(additional_config=ON)
    larger = copy.copy(built.scheduler_config)
    larger.max_num_seqs = 32
    again = replace(built, scheduler_config=larger)
    assert pass_of(again).limit == 32
    assert (1, 16) in ranges_of(again)
    assert 32 in again.compilation_config.compile_ranges_endpoints


def test_a_dense_draft_beside_an_mla_target_leaves_the_targets_pass_in_place(
    config: Build, dense_model: Any, lines: Lines
) -> None:
    built = config(additional_config=STRICT)
    shared = replace(built, model_config=dense_model)
    assert shared.compilation_config is built.compilation_config
    assert isinstance(pass_of(built), AiterMLAPipeline)
    assert lines.at(logging.WARNING) == []


def test_a_draft_without_speculation_of_its_own_does_not_shrink_the_targets_decode_limit(config: Build) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    built = config(additional_config=ON, speculative_config=speculative)
    draft = replace(built, speculative_config=None)
    assert draft.compilation_config is built.compilation_config
    assert draft.num_speculative_tokens == 0
    assert pass_of(built).limit == 64
    assert ranges_of(built)[0] == (1, 64)


def test_a_config_with_the_pass_survives_pickling_and_copying(config: Build) -> None:
    built = config(additional_config=ON)
    for arrived in (pickle.loads(pickle.dumps(built)), copy.deepcopy(built)):
        assert pass_of(arrived).limit == 16
        assert arrived.compute_hash() == built.compute_hash()
        assert gate.apply(arrived).limit == 16
        assert arrived.compilation_config.splitting_ops == built.compilation_config.splitting_ops


# -- I5: off is unmodified vLLM


def test_flag_off_changes_no_field(config: Build, registered: None) -> None:
    built = config()
    before = pickle.dumps(vars(built.compilation_config))
    assert gate.apply(built) == gate.Decision(gate.Settings())
    assert pickle.dumps(vars(built.compilation_config)) == before


def test_flag_off_after_a_flag_on_config_in_the_same_process_is_still_vllm(config: Build) -> None:
    before = support.observed(config())
    config(additional_config=ON)
    assert support.observed(config()) == before


@pytest.mark.mutation("I5")
def test_mutation_a_gate_that_edits_the_shared_op_list_is_caught(
    config: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompilationConfig, "_attention_ops", list(CompilationConfig._attention_ops))
    before = support.observed(config())
    config(additional_config=ON)
    CompilationConfig._attention_ops.append(ATTENTION_OPS[1])
    assert support.observed(config()) != before


@pytest.mark.mutation("I5")
def test_mutation_a_gate_that_engages_with_the_flag_off_is_caught(
    config: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = support.observed(config())
    monkeypatch.setattr(gate.compat_config, "settings_of", lambda _: gate.Settings(enabled=True))
    assert support.observed(config()) != before


# -- I9: a changed plugin has another cache key


def key(config: Build, how: dict[str, Any]) -> str:
    return str(config(**how).compute_hash())


SPELLINGS = [{"additional_config": ON}, {"compilation_config": {"pass_config": {FLAG_FIELD: True}}}]


def assert_changed_sources_change_the_key(
    config: Build, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    """I9: an engine whose plugin has changed never starts from an artifact of before."""
    monkeypatch.setattr(fingerprint, "fingerprint", lambda: fingerprint.fingerprint_of(root, "0.1.0"))
    before = key(config, how)
    assert key(config, how) == before
    (root / "changed.py").write_text("x = 1\n")
    assert key(config, how) != before


@pytest.mark.parametrize("how", SPELLINGS)
def test_changed_sources_change_the_cache_key(
    config: Build, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_changed_sources_change_the_key(config, how, monkeypatch, tmp_path)


@pytest.mark.mutation("I9")
@pytest.mark.parametrize("how", SPELLINGS)
def test_mutation_a_fingerprint_that_ignores_the_sources_is_caught(
    config: Build, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fingerprint, "sources", lambda root: [])
    with pytest.raises(AssertionError):
        assert_changed_sources_change_the_key(config, how, monkeypatch, tmp_path)


@pytest.mark.mutation("I9")
def test_mutation_a_pass_without_the_fingerprint_in_its_key_is_caught(
    config: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(AiterMLAPipeline, "uuid", lambda self: f"{self.limit} {self.settings}")
    with pytest.raises(AssertionError):
        # This spelling leaves PassConfig alone, whose own key holds the fingerprint too.
        assert_changed_sources_change_the_key(config, {"additional_config": ON}, monkeypatch, tmp_path)


def test_what_the_kernels_turned_out_to_be_is_in_the_cache_key(config: Build) -> None:
    """Else a run before AITER was mended leaves an untouched graph to the runs after it."""
    built = config(additional_config=ON)
    before = built.compute_hash()
    pass_of(built).kernels = ("16 heads: None; unavailable: AITER is not installed",)
    assert built.compute_hash() != before


def test_the_limit_and_every_option_are_in_the_cache_key(config: Build) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"additional_config": ON},
        {"additional_config": {"aiter_mla": {"enabled": True, "max_token_num": 8}}},
        {"additional_config": {"aiter_mla": {"enabled": True, "kernel": "triton"}}},
        {"additional_config": {"aiter_mla": {"enabled": True, "debug": {"rounding": "two"}}}},
        {"compilation_config": {"pass_config": {FLAG_FIELD: True, LIMIT_FIELD: 8}}},
    ]
    assert len({key(config, how) for how in variants}) == len(variants)


def test_the_pass_and_the_mode_are_what_vllm_will_compile_with(config: Build) -> None:
    built = config(additional_config=ON)
    assert built.compilation_config.mode == CompilationMode.VLLM_COMPILE
    assert isinstance(pass_of(built), InductorPass)


def test_the_real_pipeline_has_the_interface_the_gate_builds_on(config: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    built = config(additional_config=ON, compilation_config=USERS_PASS)
    assert isinstance(pass_of(built), InductorPass)
    assert (pass_of(built).limit, pass_of(built).settings.enabled) == (16, True)
    assert pass_of(built).chained.callable is support.users_pass
    assert pass_of(replace(built)) is pass_of(built)
    assert pass_of(pickle.loads(pickle.dumps(built))).uuid() == pass_of(built).uuid()
    before = pass_of(built).uuid()
    monkeypatch.setattr(fingerprint, "fingerprint", lambda: "0.1.0-changed")
    assert pass_of(config(additional_config=ON, compilation_config=USERS_PASS)).uuid() != before


@pytest.mark.parametrize("name", ATTENTION_OPS)
def test_the_ops_the_gate_splits_at_are_defined_and_cut_inductors_graphs_by_their_tag_too(name: str) -> None:
    import torch

    namespace, _, op = name.partition("::")
    assert torch.Tag.cudagraph_unsafe in getattr(getattr(torch.ops, namespace), op).default.tags

"""Claims about the two option lists: they differ in the plugin's options alone, and lose none of the user's."""

from __future__ import annotations

import json

import pytest

from tools.common import UsageError
from tools.serving import sides, small


def parts(side: sides.Side) -> tuple[list[str], dict, dict]:
    """Options of other names, compilation_config, additional_config."""
    rest, compilation = sides.take(side.options, sides.COMPILATION)
    rest, additional = sides.take(rest, sides.ADDITIONAL)
    return rest, compilation, additional


def test_sides_differ_in_the_flag_alone() -> None:
    off, on = sides.build(["-tp", "8", "--kv-cache-dtype", "fp8"], "vllm-fused")
    assert parts(off) == (["-tp", "8", "--kv-cache-dtype", "fp8"], parts(on)[1], {})
    assert parts(on)[0] == parts(off)[0]
    assert parts(on)[2] == {"aiter_mla": {"enabled": True}}


@pytest.mark.parametrize(
    "given",
    [
        ["--additional-config", '{"aiter_mla": {"kernel": "vllm"}, "other": 1}'],
        ['--additional_config={"aiter_mla": {"kernel": "vllm"}, "other": 1}'],
        ["--additional-config.aiter_mla.kernel", "vllm", "--additional-config.other=1"],
        ["--additional-config", '{"other": 1}', "--additional_config.aiter_mla.kernel=vllm"],
    ],
)
def test_additional_config_is_merged_in_every_spelling(given: list[str]) -> None:
    off, on = sides.build(given, "vllm")
    assert parts(on)[2] == {"aiter_mla": {"enabled": True, "kernel": "vllm"}, "other": 1}
    assert parts(off)[2] == {"other": 1}


def test_json_and_dotted_of_one_option_do_not_replace_each_other() -> None:
    given = ["-cc", '{"cudagraph_mode": "FULL", "pass_config": {"fuse_norm_quant": true}}', "-cc.pass_config.x=2"]
    _, compilation, _ = parts(sides.build([*given, "-cc.custom_ops+", "+rms_norm,-silu"], "vllm-fused")[0])
    assert compilation["cudagraph_mode"] == "FULL"
    assert compilation["custom_ops"] == ["+rms_norm", "-silu"]
    assert compilation["pass_config"] == {"fuse_norm_quant": True, "x": 2, sides.VLLM_PASS: True}


@pytest.mark.parametrize(("baseline", "fused"), [("vllm-fused", True), ("vllm", False)])
def test_baseline_is_the_same_on_both_sides_of_an_open_graph(baseline: str, fused: bool) -> None:
    for side in sides.build([], baseline):
        assert parts(side)[1] == {"use_inductor_graph_partition": True, "pass_config": {sides.VLLM_PASS: fused}}


def test_partitioning_that_the_user_chose_stays() -> None:
    given = ["-cc.use_inductor_graph_partition=false", "-cc.splitting_ops", "[]"]
    for side in sides.build(given, "vllm-fused"):
        assert parts(side)[1]["use_inductor_graph_partition"] is False
        assert parts(side)[1]["splitting_ops"] == []


def test_options_of_the_plugin_in_pass_config_leave_the_side_with_the_flag_off() -> None:
    given = [
        "-cc.pass_config.fuse_aiter_qk_rope_kvcache_mla=true",
        "-cc.pass_config.aiter_qk_rope_kvcache_fusion_max_token_num=64",
    ]
    off, on = (parts(side)[1]["pass_config"] for side in sides.build(given, "vllm"))
    assert off == {sides.VLLM_PASS: False}
    assert on["aiter_qk_rope_kvcache_fusion_max_token_num"] == 64


def test_later_options_of_the_user_win_over_those_of_the_small_model() -> None:
    given = [*small.options(), "--additional-config.aiter_mla.debug.rounding", "single"]
    assert parts(sides.build(given, "vllm")[1])[2]["aiter_mla"]["debug"] == {"rounding": "single"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--port", "8000"], "--port"),
        (["--host=0.0.0.0"], "--host"),
        (["--api_key", "x"], "--api_key"),
        (["--config", "serve.yaml"], "--config"),
        (["--additional-config"], "value is missing"),
        (["--additional-config", "{"], "not JSON"),
        (["-cc", "3"], "-cc 3"),
        (["-cc", '{"pass_config": 1}'], "pass_config=1"),
        (["-cc.pass_config.fuse_rope_kvcache_cat_mla=false"], "fuse_rope_kvcache_cat_mla=false"),
        (["-cc.pass_config.fuse_aiter_qk_rope_kvcache_mla=false"], "fuse_aiter_qk_rope_kvcache_mla=false"),
        (["--additional-config", '{"aiter_mla": {"enabled": false}}'], "enabled=false"),
        (["--additional-config", '{"aiter_mla": {"kernl": "vllm"}}'], "kernl"),
        (["--additional-config.aiter_mla.max_token_num", "-1"], "max_token_num"),
    ],
)
def test_wrong_option_is_named(given: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        sides.build(given, "vllm-fused")


@pytest.mark.mutation
def test_a_flag_that_stays_on_both_sides_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "_without_plugin", lambda additional: {"aiter_mla": {"enabled": True}})
    with pytest.raises(AssertionError):
        test_sides_differ_in_the_flag_alone()


@pytest.mark.mutation
def test_a_merge_that_replaces_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "merge", lambda low, high: {**low, **high})
    with pytest.raises((AssertionError, KeyError)):
        test_json_and_dotted_of_one_option_do_not_replace_each_other()


def test_options_come_back_as_json_that_vllm_reads() -> None:
    on = sides.build([], "vllm")[1]
    assert on.options[-2] == "--additional-config"
    assert json.loads(on.options[-1]) == {"aiter_mla": {"enabled": True}}

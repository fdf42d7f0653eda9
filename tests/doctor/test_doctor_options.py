"""Options of ``vllm serve`` given to doctor: every spelling is read, and a wrong or useless option is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_aiter_mla.commands.doctor import options
from vllm_aiter_mla.commands.doctor.check import Check

FLAG = "fuse_aiter_qk_rope_kvcache_mla"
DEAD = "fuse_rope_kvcache_cat_mla"
PASSES = ["--additional-config.aiter_mla.integration", "passes"]
SLOT = "post_grad_custom_post_pass"


def compiled(**config: Any) -> list[str]:
    return ["--compilation-config", json.dumps(config)]


def plugin(**config: Any) -> list[str]:
    return ["--additional-config", json.dumps(config)]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (compiled(pass_config={f"{FLAG[:-1]}al": True}), f"'{FLAG}'"),
        (compiled(pass_confg={FLAG: True}), "'pass_config'"),
        (compiled(pass_config={FLAG: "yes"}), f"pass_config.{FLAG}"),
        (compiled(splitting_ops=[1]), "splitting_ops.0"),
        (compiled(mode=7), "mode=7"),
        (compiled(inductor_passes={SLOT: "mine.pass"}), "'mine'"),
        (plugin(aiter_mla={"kernl": "triton"}), "kernel"),
        (plugin(aiter_mla={"kernel": "tritn"}), "aiter_mla.kernel"),
        (plugin(**{"aiter-mla": {"enabled": True}}), "aiter-mla"),
        (["--compilation-config", "{"], "--compilation-config"),
        (["--compilation-config", "{}", "-cc.mode=3"], "--compilation-config"),
        (["--additional_config={}", "--additional-config.x=3"], "--additional-config"),
        (["-cc..x=1"], "--compilation-config"),
        (["-cc.mode"], "vLLM's parser"),
        (["--no-such", "x"], "--no-such"),
        (["-tp", "eight"], "-tp"),
    ],
)
def test_a_wrong_option_is_a_problem_that_names_it(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    given = options.read(arguments)
    found = options.settings(given)
    assert (found.status, named in found.detail) == ("problem", True), found
    assert capsys.readouterr().out == ""
    # The checks that need these options say so instead of judging without them.
    assert {check(given).status for check in (options.graph, options.dead_flag, options.user_pass)} == {"unknown"}


def test_every_pass_option_of_the_installed_vllm_is_known() -> None:
    from vllm.config import PassConfig

    names = [name for name in PassConfig.__dataclass_fields__ if name.startswith("fuse_")]
    assert len(names) > 3
    assert options.settings(options.read(compiled(pass_config=dict.fromkeys(names, False)))).status == "ok"


@pytest.mark.parametrize(
    "arguments",
    [
        [f"-cc.pass_config.{FLAG}=true"],
        [f"-cc.pass_config.{FLAG}", "true"],
        [f"--compilation_config.pass_config.{FLAG}=true"],
        ["-cc.mode=3", "-cc.splitting_ops+=a,b", f"-cc.pass_config.{FLAG}=true"],
        compiled(pass_config={FLAG: True}),
        ["--additional_config.aiter_mla.enabled", "true"],
        plugin(aiter_mla={"enabled": True}),
    ],
)
def test_every_spelling_of_vllm_serve_switches_the_fast_path_on(arguments: list[str]) -> None:
    more = ["--additional-config.aiter_mla.kernel", "triton"] if "--additional-config" not in arguments else []
    found = options.settings(options.read([*arguments, *more]))
    assert (found.status, found.detail) == ("ok", f"on, kernel {'triton' if more else 'auto'}")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (plugin(aiter_mla={"strict": True}), "warning"),
        (plugin(**{"aiter-mla": {}, "aiter_mla": {"enabled": True}}), "warning"),
        (plugin(another_plugin={}), "ok"),
        ([], "ok"),
    ],
)
def test_an_option_without_effect_is_a_warning(arguments: list[str], status: str) -> None:
    assert options.settings(options.read(arguments)).status == status


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["--enforce-eager", *PASSES], "problem", "enforce_eager"),
        (["-dcp", "2"], "problem", "dcp"),
        (["--kv-cache-dtype", "fp8_e5m2"], "problem", "kv_cache_dtype"),
        (["-O0", *PASSES], "problem", "compilation_mode"),
        ([*compiled(mode=0), *PASSES], "problem", "compilation_mode"),
        ([*compiled(use_inductor_graph_partition=False), *PASSES], "problem", "graph_partition"),
        # The module integration serves these.
        (["--enforce-eager"], "ok", "enforce_eager"),
        (compiled(use_inductor_graph_partition="off"), "ok", "graph_partition"),
        (compiled(mode=True), "ok", "compilation_mode"),
        (compiled(splitting_ops=[], mode="vllm_compile"), "ok", ""),
        (["some/model", "-tp", "8", "--port", "8001"], "ok", ""),
        ([], "ok", ""),
    ],
)
def test_the_graph_is_judged_by_admission(arguments: list[str], status: str, code: str) -> None:
    found = options.graph(options.read(arguments))
    assert found.status == status, found
    assert not code or f"{code}: " in found.detail
    assert ("module integration" in found.detail) == (status == "ok" and bool(code))


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (compiled(pass_config={DEAD: True}), "problem"),
        ([], "ok"),
        (compiled(), "ok"),
        (compiled(pass_config={DEAD: True}, use_inductor_graph_partition=True), "ok"),
        (compiled(pass_config={DEAD: True}, splitting_ops=[]), "ok"),
        (compiled(pass_config={DEAD: True, FLAG: True}), "ok"),
    ],
)
def test_vllms_own_fusion_is_a_problem_in_a_graph_that_is_cut_at_its_op(arguments: list[str], status: str) -> None:
    assert options.dead_flag(options.read(arguments)).status == status


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (compiled(inductor_passes={SLOT: "shlex.quote"}), "warning"),
        (compiled(inductor_compile_config={SLOT: "x"}), "problem"),
        (compiled(), "ok"),
        ([], "ok"),
    ],
)
def test_another_pass_in_the_slot_is_named(arguments: list[str], status: str) -> None:
    found: Check = options.user_pass(options.read(arguments))
    assert found.status == status
    assert status != "warning" or "shlex.quote" in found.detail

"""Options of ``vllm serve`` given to doctor: every spelling is read, and a wrong or useless option is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_aiter_mla.commands.doctor import options
from vllm_aiter_mla.commands.doctor.check import CheckFunction, run

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
    others = run((options.graph, options.dead_flag, options.user_pass), given)
    assert {check.status for check in others} == {"unknown"}


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


GRAPH, SETTINGS, DEAD_FLAG, USER_PASS = options.graph, options.settings, options.dead_flag, options.user_pass


@pytest.mark.parametrize(
    ("check", "arguments", "status", "named"),
    [
        (SETTINGS, plugin(aiter_mla={"strict": True}), "warning", "strict"),
        (SETTINGS, plugin(**{"aiter-mla": {}, "aiter_mla": {"enabled": True}}), "warning", "aiter-mla"),
        (SETTINGS, plugin(another_plugin={}), "ok", ""),
        (SETTINGS, [], "ok", ""),
        (GRAPH, ["--enforce-eager", *PASSES], "problem", "enforce_eager: "),
        (GRAPH, ["-dcp", "2"], "problem", "dcp: "),
        (GRAPH, ["--kv-cache-dtype", "fp8_e5m2"], "problem", "kv_cache_dtype: "),
        (GRAPH, ["-O0", *PASSES], "problem", "compilation_mode: "),
        (GRAPH, [*compiled(mode=0), *PASSES], "problem", "compilation_mode: "),
        (GRAPH, [*compiled(use_inductor_graph_partition=False), *PASSES], "problem", "graph_partition: "),
        (GRAPH, ["--enforce-eager"], "ok", "the module integration runs; enforce_eager: "),
        (GRAPH, compiled(use_inductor_graph_partition="off"), "ok", "the module integration runs; graph_partition: "),
        (GRAPH, compiled(mode=True), "ok", "the module integration runs; compilation_mode: "),
        (GRAPH, compiled(splitting_ops=[], mode="vllm_compile"), "ok", "whole MLA layers"),
        (GRAPH, ["some/model", "-tp", "8", "--port", "8001"], "ok", "whole MLA layers"),
        (GRAPH, [], "ok", "no options given"),
        # vLLM's own fusion matches nothing in a graph that is cut at its op.
        (DEAD_FLAG, compiled(pass_config={DEAD: True}), "problem", DEAD),
        (DEAD_FLAG, [], "ok", ""),
        (DEAD_FLAG, compiled(), "ok", ""),
        (DEAD_FLAG, compiled(pass_config={DEAD: True}, use_inductor_graph_partition=True), "ok", ""),
        (DEAD_FLAG, compiled(pass_config={DEAD: True}, splitting_ops=[]), "ok", ""),
        (DEAD_FLAG, compiled(pass_config={DEAD: True, FLAG: True}), "ok", ""),
        (USER_PASS, compiled(inductor_passes={SLOT: "shlex.quote"}), "warning", "shlex.quote"),
        (USER_PASS, compiled(inductor_compile_config={SLOT: "x"}), "problem", ""),
        (USER_PASS, compiled(), "ok", ""),
        (USER_PASS, [], "ok", ""),
    ],
)
def test_what_the_options_lead_to_is_said(check: CheckFunction, arguments: list[str], status: str, named: str) -> None:
    found = check(options.read(arguments))
    assert (found.status, named in found.detail) == (status, True), found

"""Claims about what the gate changes in a config whose graph no pass can rewrite: it takes the module integration."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.gate.gate_support import ON, PASSES, USERS_PASS, Build, assert_skipped, pass_of, ranges_of
from tests.support.planted import Said
from vllm_aiter_mla.admission import ATTENTION_OPS, KV_UPDATE_OP, MLA_ATTENTION_OP

MODULE = {"aiter_mla": {"enabled": True, "integration": "module"}}
USERS_PASS_IN_VLLM_MODE = {"compilation_config": {"mode": 1, **USERS_PASS}}
WITHOUT_PASSES: list[tuple[dict[str, Any], str]] = [
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


def build_with_the_module(config: Build, asked: dict[str, Any], options: dict[str, Any]) -> None:
    """Build a config, and check what the module integration changes in vLLM's own."""
    built, vllm_own = config(additional_config=asked, **options), config(**options)
    assert pass_of(built).integration == "module"
    assert ranges_of(built) == ranges_of(vllm_own), "no compile range more"
    compiled, bare = built.compilation_config, vllm_own.compilation_config
    assert compiled.use_inductor_graph_partition == bare.use_inductor_graph_partition
    ours = list(ATTENTION_OPS) if any("mla" in op for op in bare.splitting_ops) else []
    assert compiled.splitting_ops == [*bare.splitting_ops, *ours], "vLLM's own, and ours next to attention"


@pytest.mark.parametrize(("options", "code"), WITHOUT_PASSES)
def test_auto_engages_where_the_passes_cannot_run(
    config: Build, said: Said, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], code: str
) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", str(int(code == "breakable_cudagraph")))
    build_with_the_module(config, ON, options)
    assert any("module integration" in line and f"cannot run: {code})" in line for line in said.at(logging.INFO))
    assert said.at(logging.WARNING) == []
    assert_skipped(said, config(additional_config=PASSES, **options), code, code)


def test_the_module_can_be_asked_for_where_the_passes_would_run(config: Build) -> None:
    build_with_the_module(config, MODULE, {})
    assert pass_of(config(additional_config=ON)).integration == "passes"


def test_a_users_pass_still_runs_where_torch_compiles_without_vllm(
    config: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then no compile range is known; Inductor calls what stands in the slot."""
    seen: list[Any] = []
    ours = pass_of(config(additional_config=MODULE, **USERS_PASS_IN_VLLM_MODE))
    monkeypatch.setattr(type(ours.chained), "__call__", lambda _, graph: seen.append(graph))
    ours("the graph")
    assert seen == ["the graph"]

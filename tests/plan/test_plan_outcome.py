"""Claims about which layers a plan says would engage, on which kernel, and why not: the reasons are admission's own."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.plan.plan_support import codes, planned
from vllm_aiter_mla import admission
from vllm_aiter_mla.commands.plan import kernels, outcome, printout
from vllm_aiter_mla.kernels import select
from vllm_aiter_mla.settings import Settings

PASSES = ("--additional-config", json.dumps({"aiter_mla": {"integration": "passes"}}))
TRITON = ("--additional-config", json.dumps({"aiter_mla": {"kernel": "triton"}}))
R1 = ("deepseek-r1", "-tp", "8", "--max-num-seqs", "256")
PLAIN = ("VLLM_ROCM_USE_AITER_FP8BMM=0", "VLLM_ROCM_USE_AITER_FP4BMM=0")


def test_a_supported_model_engages_over_weights_of_one_byte() -> None:
    plan = planned(*R1, "--kv-cache-dtype", "fp8")
    assert (plan["outcome"], codes(plan), plan["heads_per_rank"]) == ("engaged", [], 16)
    assert plan["layers"] == {"mla": 61, "drafts": 0, "total": 61, "engaged": 61}
    assert {span["kernel"] for span in plan["kernels"]} == {"aiter"}
    absorb = plan["figures"]["by_tokens"][1]["aiter"]["launches"][0]
    assert absorb["read"] == 16 * 128 * 512 + 2 * 16 * 128


def test_mxfp4_weights_are_counted_with_their_scales_and_taken_by_triton() -> None:
    plan = planned("deepseek-r1-mxfp4", *R1[1:], *TRITON)
    assert plan["absorb_weight"] == "mxfp4"
    assert {span["kernel"] for span in plan["kernels"]} == {"triton"}
    absorb = plan["figures"]["by_tokens"][1]["aiter"]["launches"][0]
    assert absorb["read"] == 16 * 128 * 512 * 17 / 32 + 2 * 16 * 128


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "env", "form", "expected"),
    [
        ("gfx942", (), "fp8", []),
        ("gfx942", PLAIN, "plain", []),
        ("gfx950", PLAIN, "plain", []),
        ("gfx950", PLAIN[1:], "fp8", []),
        ("gfx942", ("VLLM_ROCM_USE_AITER=0",), "plain", ["impl"]),
        ("gfx942", ("VLLM_ROCM_USE_AITER_MLA=0",), "fp8", ["impl"]),
        ("gfx942", ("VLLM_MLA_DISABLE=1",), None, ["not_mla"]),
        ("gfx942", ("VLLM_USE_BREAKABLE_CUDAGRAPH=1",), "fp8", []),
    ],
)
def test_the_variables_and_the_card_decide_as_in_the_server(
    arch: str, env: tuple[str, ...], form: str | None, expected: list[str]
) -> None:
    plan = planned("deepseek-v2-lite", "-tp", "4", arch=arch, env=env)
    assert (plan["absorb_weight"], codes(plan)) == (form, expected)
    assert plan["arch"] == arch
    assert plan["environment"][env[0].partition("=")[0] if env else "VLLM_BATCH_INVARIANT"][1] == (
        "--env" if env else "default"
    )


def test_a_variable_that_is_unset_is_planned_by_the_installed_vllms_default() -> None:
    plan = planned(*R1)
    value, origin = plan["environment"]["VLLM_ROCM_USE_AITER_FP8BMM"]
    assert origin == "default"
    assert any(f"--env VLLM_ROCM_USE_AITER_FP8BMM={1 - int(value)}" in note for note in plan["assumptions"])
    assert plan["absorb_weight"] == ("fp8" if value == "1" else "plain")


PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("### What a checkpoint needs")[2].partition("\n## ")[0]
ROWS = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if line.startswith("| `")]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:2]))
@pytest.mark.parametrize("default", [1, 0], ids=["0.32", "0.33"])
def test_the_table_of_checkpoints_says_what_plan_says_for_both_defaults_of_vllm(row: list[str], default: int) -> None:
    """One flag and VLLM_ROCM_USE_AITER=1 are enough everywhere: no row needs another variable."""
    name, arch, before, since, needed = row
    env = tuple(f"VLLM_ROCM_USE_AITER_{which}BMM={default}" for which in ("FP8", "FP4"))
    plan = planned(name, "--kv-cache-dtype", "fp8", arch=arch, env=env)
    assert (plan["outcome"], codes(plan), needed) == ("engaged", [], "nothing more")
    assert plan["absorb_weight"] == {"activation dtype": "plain"}.get(said := before if default else since, said)


def test_the_table_of_checkpoints_has_four_of_them_on_both_cards() -> None:
    names = ("deepseek-r1", "deepseek-r1-mxfp4", "deepseek-v2-lite", "kimi-k2.5")
    assert [row[:2] for row in ROWS] == [[name, arch] for name in names for arch in ("gfx942", "gfx950")]


@pytest.mark.parametrize(
    ("option", "code"),
    [
        ("-cc.use_inductor_graph_partition=false", "graph_partition"),
        pytest.param("-O0", "compilation_mode", marks=pytest.mark.slow),
        ("--enforce-eager", "enforce_eager"),
        pytest.param("-cc.splitting_ops=[]", None, marks=pytest.mark.slow),
    ],
)
def test_the_options_of_the_graph_decide_which_integration_runs(option: str, code: str | None) -> None:
    plan = planned("kimi-k2", "-tp", "8", option)
    assert codes(plan) == []
    assert plan["integration"] == ("passes" if code is None else "module")
    assert (plan["why_not_passes"] or {"code": None})["code"] == code
    assert bool(plan["compile_ranges"]["inside"]) is (code is None), "the module has no compile range"
    assert ("the passes cannot run: " + str(code) in printout.text(plan)) is (code is not None)


def test_two_heads_per_rank_leave_aiter_from_256_tokens_on() -> None:
    view = admission.LayerView(num_heads=2, model_dtype="bfloat16")
    small, large = kernels.spans("gfx942", Settings(), view, "plain", 16, 1024)
    assert (small.kernel, small.detail, small.last) == ("aiter", "its per-head kernel", 255)
    assert (large.kernel, large.first, large.skips[0][0]) == ("vllm", 256, "aiter")


def test_the_option_aiter_view_moves_the_border() -> None:
    view = admission.LayerView(num_heads=8, model_dtype="bfloat16", kv_cache_dtype="fp8")
    spans = kernels.spans("gfx942", Settings(aiter_view=100), view, "plain", 16, 256)
    assert [(span.last, span.detail) for span in spans] == [(99, "its per-head kernel"), (256, "its opt kernel")]


@pytest.mark.parametrize("kernel", ["auto", "aiter", "triton", "vllm"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_plan_asks_the_servers_candidates_in_the_servers_order(kernel: str, arch: str) -> None:
    chooser = kernels.PlannedSelector(arch, Settings(kernel=kernel))
    assert chooser.names == select.candidates(kernel, chooser.platform)
    assert not isinstance(chooser.backend(chooser.names[0]), str)


ENGINE = admission.ConfigView(
    version_supported=False, missing=("x",), op_schema=("x",), atom_active=True, is_mla=False, is_sparse=True,
    enforce_eager=True, breakable_cudagraph=True, mode="NONE", backend="eager", dcp=2, pcp=2, hisparse=True,
    kv_cache_dtype="fp8_e5m2", model_dtype="float16",
    use_inductor_graph_partition=False, integration="passes",
)  # fmt: skip
LAYER = admission.LayerView(
    impl="Other", is_sparse=True, q_pad_num_heads=64, has_absorbed_weight=False, missing=("x",), amx_bmm=True,
    has_rope_kernel=False,
    kv_cache_dtype="fp8_e5m2", kv_cache_ndim=4, dcp_world_size=2, pcp_world_size=2, dcp_q_replicate=True, hisparse=True,
    graph_dtype="float16", cos_sin_dtype_matches=False, sliding_window=True, num_heads=0, kv_lora_rank=0,
)  # fmt: skip


PLAN_ONLY = {"vllm_refuses", "not_known"}


@pytest.mark.parametrize(("view", "admit"), [(ENGINE, admission.admit_config), (LAYER, admission.admit_layer)])
def test_a_view_with_everything_wrong_gives_every_reason_of_admission(view: Any, admit: Any) -> None:
    found = [skip.code for skip in outcome.all_reasons(view, admit)]
    # A mode that breakable graphs did not set, and partition options given together, are each a view of their own.
    known = set(admission.ENGINE_REASONS) - {"compilation_mode", "splitting_ops", "user_pass"} - PLAN_ONLY
    shared = {"capability", "sparse_mla", "dcp", "pcp", "hisparse", "kv_cache_dtype"}
    assert set(found) == (known if admit is admission.admit_config else set(admission.LAYER_REASONS) | shared)
    assert all(found.count(code) == 1 for code in set(found) - {"dcp", "geometry"})


@pytest.mark.parametrize("ops", [(admission.KV_UPDATE_OP,), (admission.MLA_ATTENTION_OP, admission.KV_UPDATE_OP)])
def test_one_cause_is_taken_out_and_the_others_stay(ops: tuple[str, ...]) -> None:
    view = admission.ConfigView(mode="NONE", splitting_ops=ops, hisparse=True, integration="passes")
    found = [skip.code for skip in outcome.all_reasons(view, admission.admit_config)]
    assert found == ["hisparse", "compilation_mode", "splitting_ops"]


def test_views_survive_the_way_through_json() -> None:
    config, layer = json.loads(json.dumps(asdict(ENGINE))), asdict(LAYER) | {"known_impls": ["AiterMLAImpl"]}
    assert outcome.config_view({"view": config}) == ENGINE
    assert outcome.layer_view({"view": json.loads(json.dumps(layer))}) == LAYER

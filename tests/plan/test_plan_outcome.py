"""Claims about which layers a plan says would engage, and why not: the reasons are admission's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import vllm.envs

from tests.plan.plan_support import ENGAGING, NO_FP8_BMM, codes, planned
from vllm_aiter_mla import admission
from vllm_aiter_mla.commands.plan import model, outcome, printout, serve_options

DCP = ("-tp", "8", "-dcp", "2")
PASSES = ("--additional-config", json.dumps({"aiter_mla": {"integration": "passes"}}))


def test_a_supported_model_engages_on_both_cards() -> None:
    for arch in ("gfx942", "gfx950"):
        plan = planned("deepseek-r1", "-tp", "8", "--kv-cache-dtype", "fp8", arch=arch)
        assert plan["outcome"] == "engaged"
        assert plan["layers"] == {"mla": 61, "drafts": 0, "total": 61, "engaged": 61}
        assert plan["heads_per_rank"] == 16
        assert {span["kernel"] for span in plan["kernels"]} == {"aiter"}


TRITON = ("--additional-config", '{"aiter_mla": {"kernel": "triton"}}')


FP8_BMM = ("VLLM_ROCM_USE_AITER_FP8BMM=1",)


def test_the_default_of_fp8_bmm_is_the_installed_vllms() -> None:
    env = serve_options.environment([], {})
    other = int(not env.on("VLLM_ROCM_USE_AITER_FP8BMM"))
    notes = planned("deepseek-r1", "-tp", "8", env=())["assumptions"]
    assert any(f"--env VLLM_ROCM_USE_AITER_FP8BMM={other}" in note for note in notes)


def test_fp8_bmm_engages_with_aiter_over_weights_of_one_byte() -> None:
    plan = planned("deepseek-r1", "-tp", "8", env=FP8_BMM)
    assert (plan["outcome"], codes(plan)) == ("engaged", [])
    assert {span["kernel"] for span in plan["kernels"]} == {"aiter"}
    plain = planned("deepseek-r1", "-tp", "8")
    moved = [one["figures"]["by_tokens"][1]["aiter"]["bytes"] for one in (plan, plain)]
    assert moved[1] - moved[0] == 16 * 128 * 512


def test_fp8_bmm_engages_with_triton_over_weights_of_one_byte() -> None:
    plan, plain = planned("deepseek-r1", "-tp", "8", *TRITON, env=FP8_BMM), planned("deepseek-r1", "-tp", "8", *TRITON)
    assert (plan["outcome"], codes(plan)) == ("engaged", [])
    assert {span["kernel"] for span in plan["kernels"]} == {"triton"}
    assert plan["kernels"][-1]["detail"] == "tile 64x64/4w, static choice"
    moved = [one["figures"]["by_tokens"][1]["triton"]["bytes"] for one in (plan, plain)]
    assert moved[1] - moved[0] == 16 * 128 * 512


def test_dcp_2_is_refused_with_admissions_own_words() -> None:
    plan = planned("deepseek-v3", *DCP)
    assert codes(plan) == ["dcp"]
    assert plan["reasons"][0]["message"] == admission.admit_config(admission.ConfigView(dcp=2)).message  # type: ignore[union-attr]


def test_nope_layers_are_refused_by_the_matchers_code() -> None:
    plan = planned("kimi-k3", "-tp", "8")
    assert codes(plan) == ["no_rope"]
    assert (plan["layers"]["mla"], plan["layers"]["total"], plan["heads_per_rank"]) == (24, 93, 12)
    matcher = Path(admission.__file__).parent / "passes" / "match.py"
    assert f'"{outcome.NO_ROPE[0]}"' in matcher.read_text()


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5"])
def test_sparse_mla_is_refused(name: str) -> None:
    assert codes(planned(name, "-tp", "8")) == ["sparse_mla", "impl"]


def test_two_heads_per_rank_leave_aiter_from_256_tokens_on() -> None:
    plan = planned("deepseek-v2-lite", "-tp", "8")
    assert plan["heads_per_rank"] == 2
    small, large = plan["kernels"]
    assert (small["kernel"], small["detail"], small["last"]) == ("aiter", "its per-head kernel", 255)
    assert (large["kernel"], large["first"]) == ("vllm", 256)
    assert "2 heads and 256 tokens land on AITER's general kernel" in large["skips"][0][1]


def test_the_option_aiter_view_moves_the_border() -> None:
    view = ("--additional-config", json.dumps({"aiter_mla": {"aiter_view": 100}}))
    spans = planned("kimi-k2", "-tp", "8", "--kv-cache-dtype", "fp8", *view)["kernels"]
    assert [(span["last"], span["detail"]) for span in spans] == [(99, "its per-head kernel"), (256, "its opt kernel")]


@pytest.mark.parametrize(
    ("model", "arch", "bytes_per_value"),
    [("kimi-k2.5", "gfx950", 17 / 32), ("kimi-k2.5", "gfx942", 2), ("kimi-k2", "gfx950", 2)],
)
def test_mxfp4_weights_on_gfx950_beside_bf16_attention_engage_and_are_counted(model, arch, bytes_per_value) -> None:
    plan = planned(model, "-tp", "8", arch=arch, env=(NO_FP8_BMM, "VLLM_ROCM_USE_AITER_FP4BMM=1"))
    assert (codes(plan), plan["outcome"]) == ([], "engaged")
    absorb = plan["figures"]["by_tokens"][1]["aiter"]["launches"][0]
    heads = plan["heads_per_rank"]
    assert absorb["read"] == heads * 128 * 512 * bytes_per_value + 2 * heads * 128


def test_triton_by_name_is_planned_over_the_mxfp4_weights_of_gfx950() -> None:
    plan = planned("deepseek-r1-mxfp4", "-tp", "8", *TRITON, arch="gfx950", env=("VLLM_ROCM_USE_AITER_FP4BMM=1",))
    assert plan["absorb_weight"] == "mxfp4"
    assert {span["kernel"] for span in plan["kernels"]} == {"triton"}


PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("### What a checkpoint needs")[2].partition("\n## ")[0]
ROWS = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:2]))
@pytest.mark.parametrize(("release", "default"), [("0.32", True), ("0.33", False)])
def test_the_table_of_checkpoints_says_what_plan_says_for_both_defaults_of_vllm(row, release, default, monkeypatch):
    """One flag and VLLM_ROCM_USE_AITER=1 are enough everywhere: no row needs another variable."""
    name, arch, before, since, needed = row
    for variable in (serve_options.FP8_BMM, serve_options.FP4_BMM):
        unset = lambda variable=variable: bool(int(os.environ.get(variable, str(int(default)))))  # noqa: E731
        monkeypatch.setitem(vllm.envs.environment_variables, variable, unset)
    plan = planned(name, "--kv-cache-dtype", "fp8", arch=arch, env=())
    assert (plan["outcome"], codes(plan)) == ("engaged", [])
    assert plan["absorb_weight"] == {"activation dtype": "plain"}.get(said := before if default else since, said)
    assert needed == "nothing more"
    notes = [note for note in plan["assumptions"] if "BMM is unset: " in note]
    assert len(notes) == (2 if "mxfp4" in (before, since) else 1)
    assert all(f"is unset: {'on' if default else 'off'}, the default of vLLM " in note for note in notes)


def test_the_table_of_checkpoints_has_four_of_them_on_both_cards() -> None:
    names = ("deepseek-r1", "deepseek-r1-mxfp4", "deepseek-v2-lite", "kimi-k2.5")
    assert [row[:2] for row in ROWS] == [[name, arch] for name in names for arch in ("gfx942", "gfx950")]


def test_every_reason_is_named_not_only_the_first() -> None:
    given = (*DCP, "--enforce-eager", "--kv-cache-dtype", "fp8_e5m2", *PASSES)
    plan = planned("deepseek-v3", *given, arch="sm90", env=())
    assert codes(plan) == ["dcp", "kv_cache_dtype", "enforce_eager", "impl", "kernel_unavailable"]


def test_without_aiter_the_backend_is_the_reason() -> None:
    plan = planned("deepseek-r1", "-tp", "8", env=(*ENGAGING, "VLLM_ROCM_USE_AITER=0"))
    assert codes(plan) == ["impl"]
    assert "TritonMLAImpl" in plan["reasons"][0]["message"]
    assert codes(planned("deepseek-r1", "-tp", "8", "--attention-backend", "FLASHMLA")) == ["impl"]


@pytest.mark.parametrize(
    ("option", "code"),
    [
        ("-cc.use_inductor_graph_partition=false", "graph_partition"),
        ("-O0", "compilation_mode"),
        ("--enforce-eager", "enforce_eager"),
        ("-cc.splitting_ops=[]", None),
    ],
)
def test_the_options_of_the_graph_decide_who_emits(option: str, code: str | None) -> None:
    auto, passes = planned("kimi-k2", "-tp", "8", option), planned("kimi-k2", "-tp", "8", option, *PASSES)
    assert codes(auto) == []
    assert auto["integration"] == ("passes" if code is None else "module")
    assert (auto["why_not_passes"] or {"code": None})["code"] == code
    assert bool(auto["compile_ranges"]["inside"]) is (code is None), "the module has no compile range"
    assert codes(passes) == ([] if code is None else [code])
    said = printout.text(auto)
    assert "integration          " + (f"module (the passes cannot run: {code})" if code else "passes") in said


def test_triton_by_name_plans_for_the_named_card() -> None:
    kernel = ("--additional-config", json.dumps({"aiter_mla": {"kernel": "triton"}}))
    plan = planned("kimi-k2", "-tp", "8", "--kv-cache-dtype", "fp8", *kernel, arch="sm90")
    assert {span["kernel"] for span in plan["kernels"]} == {"triton"}
    assert codes(plan) == ["impl"]
    glm = planned("glm-5", "-tp", "8", *kernel)
    assert {span["kernel"] for span in glm["kernels"]} == {"triton"}, "a nope width of 192: blocks of 128 and 64"


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("auto", "auto knows no fused kernel for sm90; kernel=triton can be asked for by name"),
        ("aiter", "kernel=aiter: AITER's op is for gfx942 and gfx950; this card is sm90"),
        ("vllm", None),
    ],
)
def test_a_card_without_the_kernel_asked_for_is_a_reason(kernel: str, said: str | None) -> None:
    asked = ("--additional-config", json.dumps({"aiter_mla": {"kernel": kernel}}))
    plan = planned("deepseek-r1", "-tp", "8", *asked, arch="sm90")
    found = [reason["message"] for reason in plan["reasons"] if reason["code"] == "kernel_unavailable"]
    assert found == ([] if said is None else [said])
    assert {span["kernel"] for span in plan["kernels"]} == (set() if said else {"vllm"})


def test_a_model_without_mla_gets_a_plan_too(tmp_path: Path) -> None:
    dense = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    plan = planned(str(tmp_path))
    assert codes(plan) == ["not_mla"]
    assert plan["kernels"] is None


ENGINE = admission.ConfigView(
    version_supported=False, missing=("x",), op_schema=("x",), atom_active=True, is_mla=False, is_sparse=True,
    enforce_eager=True, breakable_cudagraph=True, mode="NONE", backend="eager", dcp=2, pcp=2, hisparse=True,
    kv_cache_dtype="fp8_e5m2", model_dtype="float16",
    use_inductor_graph_partition=False, integration="passes",
)  # fmt: skip
LAYER = admission.LayerView(
    impl="Other", is_sparse=True, q_pad_num_heads=64, has_absorbed_weight=False, missing=("x",), amx_bmm=True,
    has_rope_kernel=False,
    kv_cache_dtype="fp8_e5m2", kv_cache_ndim=4, dcp=2, pcp=2, dcp_q_replicate=True, hisparse=True,
    graph_dtype="float16", cos_sin_dtype_matches=False, sliding_window=True, num_heads=0, kv_lora_rank=0,
)  # fmt: skip


PLAN_ALONE = {"vllm_refuses", "not_known"}


@pytest.mark.parametrize(("view", "admit"), [(ENGINE, admission.admit_config), (LAYER, admission.admit_layer)])
def test_a_view_with_everything_wrong_gives_every_reason_of_admission(view: Any, admit: Any) -> None:
    found = [skip.code for skip in outcome._all(view, admit)]
    # A mode that breakable graphs did not set, and partition options given together, are each a view of their own.
    known = set(admission.ENGINE_REASONS) - {"compilation_mode", "splitting_ops", "user_pass"} - PLAN_ALONE
    shared = {"capability", "sparse_mla", "dcp", "pcp", "hisparse", "kv_cache_dtype"}
    assert set(found) == (known if admit is admission.admit_config else set(admission.LAYER_REASONS) | shared)
    assert all(found.count(code) == 1 for code in set(found) - {"dcp", "geometry"})


@pytest.mark.parametrize("ops", [(admission.KV_UPDATE_OP,), (admission.MLA_ATTENTION_OP, admission.KV_UPDATE_OP)])
def test_one_cause_is_taken_out_and_the_others_stay(ops: tuple[str, ...]) -> None:
    view = admission.ConfigView(mode="NONE", splitting_ops=ops, hisparse=True, integration="passes")
    codes = [skip.code for skip in outcome._all(view, admission.admit_config)]
    assert codes == ["hisparse", "compilation_mode", "splitting_ops"]


def test_examples_carry_what_they_rest_on() -> None:
    bundled = model.examples()
    wanted = {"deepseek-r1", "deepseek-v3", "deepseek-v2-lite", "kimi-k2", "kimi-k2.5", "kimi-k3", "glm-5"}
    assert wanted <= set(bundled)
    for name, entry in bundled.items():
        assert entry["example"]["basis"]
        assert isinstance(entry["example"]["assumed"], list)
        assert model.find(name).origin == "bundled example"
        assert model.find(entry["example"]["hub_name"]).config == model.find(name).config


def test_an_unknown_model_or_variable_is_named() -> None:
    with pytest.raises(model.ModelNotFoundError, match="kimi-k2"):
        model.find("no/such-model")
    with pytest.raises(serve_options.OptionError, match="VLLM_SOMETHING"):
        serve_options.environment(["VLLM_SOMETHING=1"], {})
    with pytest.raises(serve_options.OptionError, match="NAME=VALUE"):
        serve_options.environment(["VLLM_MLA_DISABLE"], {})

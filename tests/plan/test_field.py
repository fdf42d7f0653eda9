"""What people typed, and what they looked for: public recipes and an operator's first hour, row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from tests.support import plans
from vllm_aiter_mla.commands import options, outputs
from vllm_aiter_mla.commands.check.record import Step
from vllm_aiter_mla.commands.check.run import exit_status
from vllm_aiter_mla.commands.check.steps import STEPS
from vllm_aiter_mla.commands.compat import offline
from vllm_aiter_mla.commands.main import COMMANDS, app
from vllm_aiter_mla.commands.plan import issues, model
from vllm_aiter_mla.settings import FLAG_FIELD

slow = pytest.mark.slow
MTP = ("--speculative-config", '{"method":"mtp","num_speculative_tokens":3}')
OTHERS = ("fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache")
R1 = ("deepseek-r1", "-tp", "8")
LMCACHE = ("--kv-transfer-config.kv_connector=LMCacheConnectorV1", "--kv-transfer-config.kv_role=kv_both")
MISTRAL = {
    "dim": 7168, "n_layers": 61, "head_dim": 128, "hidden_dim": 16384, "n_heads": 128, "n_kv_heads": 128,
    "norm_eps": 1e-06, "vocab_size": 131072, "rope_theta": 10000.0, "tied_embeddings": False, "q_lora_rank": 1536,
    "max_position_embeddings": 294912, "max_seq_len": 294912, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "kv_lora_rank": 512, "v_head_dim": 128, "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
    "yarn": {"original_max_position_embeddings": 8192, "factor": 36, "apply_scale": False, "beta": 32, "alpha": 1},
    "moe": {"expert_parallel": 1, "expert_model_parallel": 1, "route_every_n": 1, "first_k_dense_replace": 3,
            "num_experts": 128, "num_experts_per_tok": 4, "num_expert_groups": 1, "num_expert_groups_per_tok": 1,
            "routed_scale": 1.0, "expert_hidden_dim": 4096, "num_shared_experts": 1},
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
}  # fmt: skip


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Types a command line on a machine without a card; one process answers for gfx942."""

    def ask(source: Any, asked: Any, *_: Any) -> Any:
        worker = plans.worker("gfx942", ())
        return tuple(issues.looked_up(worker.ask(source, tuple(arguments))[0]) for arguments in asked)

    monkeypatch.setattr(model, "ask", ask)

    def run(*line: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["check", line[0], "--only", "plan", *line[1:]])
        return done.exit_code, " ".join((done.stdout + done.stderr).split())

    return run


@slow
@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        pytest.param((*R1, "--kv-cache-dtype", "fp8", f"-cc.pass_config.{FLAG_FIELD}=true"), 0, ["61/61"], id="F1"),
        pytest.param((*R1, *MTP), 0, ["62/62", "1 in the draft"], id="F10"),
        pytest.param((*R1, "-dcp", "2", *MTP), 1, ["dcp: decode_context_parallel_size is 2"], id="F12"),
        pytest.param(
            (*R1, *(f"-cc.pass_config.{name}=true" for name in OTHERS)), 0,
            [f"pass_config.{name} matches nothing on MLA" for name in OTHERS], id="F13",
        ),
    ],
)  # fmt: skip
def test_field_a_recipe_is_planned_right(typed: Any, line: tuple[str, ...], status: int, said: list[str]) -> None:
    code, text = typed(*line)
    assert (code, [one for one in said if one not in text]) == (status, []), text
    assert [one for one in said if text.count(one) > 1 and " " in one] == [], "said once"


@slow
def test_field_f9_a_folder_with_params_json_only(typed: Any, tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(MISTRAL))
    mistral = ("--config_format", "mistral", "--tokenizer_mode", "mistral", "--load_format", "mistral")
    for arguments in (mistral, ()):
        code, text = typed(str(tmp_path), "-tp", "8", *arguments)
        assert (code, "query_scaled" in text, "128 / TP 8 = 16 per rank" in text) == (1, True, True), text


@slow
@pytest.mark.parametrize("line", [(*R1, "--kv-cache-dtype", "fp8"), (*R1, "-dcp", "2", *MTP), ("kimi-k2", "-tp", "8")])
def test_field_o8_a_plan_fits_into_80_columns(typed: Any, line: tuple[str, ...]) -> None:
    assert typed  # its process answers
    assert (
        max(map(len, CliRunner().invoke(app, ["check", line[0], "--only", "plan", *line[1:]]).stdout.splitlines()))
        <= outputs.WIDTH
    )


@slow
@pytest.mark.parametrize(
    ("line", "concerned", "remedy"),
    [
        (("deepseek-r1", "-tp", "2", "--kv-cache-dtype", "fp8"), "aiter#4363", "--kv-cache-dtype auto"),
        (R1, "aiter#4888", "VLLM_ROCM_USE_AITER_CUSTOM_AR=0"),
    ],
    ids=["F11", "F6"],
)
def test_field_known_issues_are_in_a_plan(typed: Any, line: tuple[str, ...], concerned: str, remedy: str) -> None:
    _, text = typed(*line)
    assert (concerned in text, remedy in text) == (True, True)


@slow
@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ((), False),
        (("-cc.cudagraph_mode=FULL_DECODE_ONLY",), False),
        (("-cc.cudagraph_mode=PIECEWISE",), True),
        ((*LMCACHE, "--kv-transfer-config.kv_connector_extra_config.use_layerwise=false"), False),
        ((*LMCACHE, "--kv-transfer-config.kv_connector_extra_config.use_layerwise=true"), True),
        (("-cc.cudagraph_mode=NONE",), True),
    ],
    ids=["default", "full", "piecewise", "connector", "layerwise connector", "none"],
)
def test_field_decode_without_full_graphs_is_a_known_issue(typed: Any, options: tuple[str, ...], listed: bool) -> None:
    code, text = typed(*R1, "--kv-cache-dtype", "fp8", *options)
    assert (code, "vllm#51171" in text) == (0, listed), text


@slow
def test_field_f6_vllm_plans_with_its_remedy() -> None:
    plan = plans.planned(*R1, arch="gfx942", env=(f"{offline.CUSTOM_AR}=0",))
    assert (plan["outcome"], plan["environment"][offline.CUSTOM_AR]) == ("engaged", ["0", "--env"])


def test_field_f6_its_remedy_ends_the_warning() -> None:
    variable = f"{offline.CUSTOM_AR}=0"
    for env in ((), (variable,)):
        found = [one.id for one in issues.looked_up(plans.made_up(*env)).known_issues]
        assert ("aiter#4888" in found) is (env == ())


def test_field_a_variable_that_no_plan_knows_is_passed_on_with_a_note() -> None:
    typed = ("VLLM_ROCM_USE_AITER_MHA=0", "VLLM_ROCM_USE_AITR=1")
    variables = model.environment(typed, {})
    assert [variables[one.partition("=")[0]] for one in typed] == [("0", "--env"), ("1", "--env")]
    notes = plans.made_up(*typed).assumptions
    passed = [note for note in notes if "passed on" in note]
    assert [note.partition(" ")[0] for note in passed] == list(typed)
    assert "did you mean VLLM_ROCM_USE_AITER?" in passed[1]


def test_field_o10_every_option_of_vllm_is_a_name_that_a_command_takes_at_once() -> None:
    groups = [set(action.option_strings) - {"-h"} for action in offline.serve_parser()._actions]
    assert [group for group in groups if group and not group & options.names()] == []
    for name in {name for group in groups for name in group}:
        options.check([name, name.replace("-", "_").replace("__", "--", 1), f"{name}=1"])


@pytest.mark.parametrize("word", ["--no-enable-expert-parallel", "--disable-expert-parallel", "--enable-log-stats"])
def test_field_o10_a_switch_is_turned_round_as_vllms_parser_does(word: str) -> None:
    """vLLM 0.33 takes ``--disable-X`` for each ``--enable-X``, and the other way round."""
    options.check([word])
    with pytest.raises(ValueError, match="did you mean"):
        options.check([word + "e"])


@pytest.mark.parametrize(
    ("word", "meant"),
    [("--tp", "-tp"), ("--kv-cach-dtype", "--kv-cache-dtype"), ("--kv_cach_dtype=fp8", "--kv-cache-dtype"),
     ("--max-num-seq5", "--max-num-seqs"), ("--no-async-schedulin", "--async-scheduling")],
)  # fmt: skip
def test_field_o10_a_misspelt_option_is_named_with_the_right_one_before_vllm_is_imported(word: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {meant}"):
        options.check(["-tp", "8", word])
    options.check(["--", word])


def test_field_o13_no_summary_is_cut() -> None:
    whole = CliRunner().invoke(app, ["--help"], terminal_width=outputs.WIDTH).stdout
    assert "..." not in whole.partition("Commands:")[2]
    assert [name for name in COMMANDS if f"\n  {name} " not in whole] == []


def test_field_exit_statuses_are_in_one_table() -> None:
    whole = CliRunner().invoke(app, ["--help"]).stdout
    table = [line.split()[0] for line in whole.partition("Exit status")[2].splitlines()[1:] if line.strip()]
    assert table == ["0", "1", "2", "3", "4", "128+n"]


@pytest.mark.parametrize(("skipped", "asked", "status"), [(True, True, 3), (True, False, 0), (False, True, 0)])
def test_field_o11_a_gate_can_ask_for_every_step(skipped: bool, asked: bool, status: int) -> None:
    found = [Step("passed", "", name=name) for name in STEPS]
    if skipped:
        found[-1] = Step("skipped", "no GPU", name=found[-1].name)
    assert exit_status(found, False, each=asked) == status
    parameters = typer.main.get_command(app).commands["check"].params  # type: ignore[attr-defined]
    assert "--require-all" in [name for one in parameters for name in one.opts]

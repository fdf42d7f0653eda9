"""Claims about wrong input: one line that names option or field and value, exit status 2, no traceback, no page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plan.plan_support import codes, planned
from vllm_aiter_mla.commands.plan import command, model, printout

R1 = "deepseek-r1"


pytestmark = pytest.mark.usefixtures("shared")


def refused(capsys: pytest.CaptureFixture[str], name: str, *arguments: str, env: tuple[str, ...] = ()) -> str:
    """The one line that the command prints."""
    capsys.readouterr()
    assert command.main(name, arguments, "gfx950", env) == command.WRONG
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines()), err.startswith("plan: ")) == ("", 1, True)
    return err


OURS = "--additional-config"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-tp", "0"], "--tensor-parallel-size 0"),
        (["-tp", "eight"], "--tensor-parallel-size/-tp"),
        pytest.param(["-pp", "-1"], "--pipeline-parallel-size -1", marks=pytest.mark.slow),
        pytest.param(["-dcp", "0"], "--decode-context-parallel-size 0", marks=pytest.mark.slow),
        (["--block-size", "0"], "--block-size 0"),
        (["--block-size", "10000000000000000"], "--block-size 10000000000000000"),
        pytest.param(["--max-num-seqs", "0"], "--max-num-seqs 0", marks=pytest.mark.slow),
        (["--max-num-seqs", "9" * 20, "--max-num-batched-tokens", "9" * 20], f"--max-num-seqs {'9' * 20}"),
        pytest.param(
            ["--speculative-config", '{"num_speculative_tokens":"two"}'],
            "num-speculative-tokens two",
            marks=pytest.mark.slow,
        ),
        (["--model", "X"], "--model X"),
        (["-tp", "8", "--model=X"], "--model X"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--config"], "config file"),
        (["--no-such-option", "1"], "--no-such-option"),
        (["--dtype", "floatx"], "--dtype"),
        (["-cc.pass_config.fuse_norm_qant=true"], "did you mean 'fuse_norm_quant'?"),
        ([OURS, '{"aiter_mla": {"max_token_num": 100000000000000000000}}'], "max-token-num 100000000000000000000"),
        ([OURS, '{"aiter_mla": {"kernl": "auto"}}'], "did you mean 'kernel'?"),
    ],
)
def test_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    assert named in refused(capsys, R1, *arguments)


@pytest.mark.parametrize(("name", "arguments"), [("-tp", ["8", R1]), ("--max-num-seqs=4", [R1]), ("--model", [R1])])
def test_options_before_the_model_are_told_where_the_model_belongs(
    capsys: pytest.CaptureFixture[str], name: str, arguments: list[str]
) -> None:
    assert "MODEL comes first" in refused(capsys, name, *arguments)


@pytest.mark.parametrize(
    ("entry", "named"), [("VLLM_SOMETHING=1", "VLLM_SOMETHING"), ("VLLM_MLA_DISABLE", "NAME=VALUE")]
)
def test_a_wrong_variable_is_named(capsys: pytest.CaptureFixture[str], entry: str, named: str) -> None:
    assert named in refused(capsys, R1, env=(entry,))


@pytest.mark.slow
def test_a_variable_that_vllm_cannot_read_is_named() -> None:
    with pytest.raises(model.NotAskedError, match="VLLM_BATCH_INVARIANT=maybe"):
        planned(R1, env=("VLLM_BATCH_INVARIANT=maybe",))


CONFIG = model.examples()[R1]["config"]


@pytest.mark.parametrize(
    "changed",
    [
        None,
        pytest.param({"num_hidden_layers": "61"}, marks=pytest.mark.slow),
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": -128},
        pytest.param({"qk_nope_head_dim": 10**30}, marks=pytest.mark.slow),
        pytest.param({"kv_lora_rank": 512.5}, marks=pytest.mark.slow),
        pytest.param({"max_position_embeddings": 10**12}, marks=pytest.mark.slow),
        {"torch_dtype": "floatx"},
        pytest.param({"quantization_config": ["fp8"]}, marks=pytest.mark.slow),
        pytest.param(
            {"quantization_config": {"quant_method": "compressed-tensors", "ignore": [1]}}, marks=pytest.mark.slow
        ),
        pytest.param({"text_config": "yes"}, marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_a_wrong_config_never_engages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any] | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({} if changed is None else CONFIG | changed))
    assert command.main(str(tmp_path), ["-tp", "8"], "gfx950", []) != command.ENGAGES
    out, err = capsys.readouterr()
    assert "would engage" not in out or "Status line: 0/" in out
    assert out or err.splitlines()[-1].startswith("plan: ")


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000, "{"])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "given.json"
    path.write_text(text)
    assert str(path) in refused(capsys, str(path))


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/x", "no/such-model"])
def test_a_name_that_is_no_model_names_the_examples(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert "kimi-k2.5" in refused(capsys, name)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-tp", "7"), "attention heads (128) must be divisible by tensor parallel size (7)"),
        (("-tp", "8", "--max-num-seqs", "256", "--max-num-batched-tokens", "128"), "max_num_batched_tokens (128) must"),
        (("-tp", "8", "--speculative-config", '{"method": "mtp"}'), "num_speculative_tokens must be provided"),
    ],
)
def test_what_vllm_refuses_to_start_is_a_plan_with_vllms_reason(arguments: tuple[str, ...], said: str) -> None:
    plan = planned(R1, *arguments)
    assert (plan["outcome"], codes(plan), plan["layers"]["engaged"]) == ("skipped", ["vllm_refuses"], 0)
    assert plan["kernels"] is plan["figures"] is None
    assert said in printout.text(plan)


def test_the_largest_options_that_are_let_through_give_a_plan() -> None:
    most = ("--max-num-seqs", str(2**20), "--block-size", str(2**16), "--max-num-batched-tokens", str(2**30))
    spec = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1023}')
    assert planned(R1, *most, *spec)["limit"] == 2**30


def test_control_characters_of_a_config_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": {"quant_method": "x\x1b[31m\u202e"}})
    )
    said = refused(capsys, str(tmp_path)).rstrip("\n")
    assert said.isprintable()
    assert "\\x1b[31m" in said

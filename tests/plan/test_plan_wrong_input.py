"""Claims about wrong input: one line that names option or field and value, exit status 2, no traceback, no page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plan.plan_support import codes, planned
from vllm_aiter_mla.commands.plan import command, model

R1 = "deepseek-r1"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-tp", "0"], "--tensor-parallel-size 0: a whole number from 1"),
        (["-tp", "-1"], "--tensor-parallel-size -1: a whole number from 1"),
        (["-pp", "0"], "--pipeline-parallel-size 0: a whole number from 1"),
        (["-dcp", "0"], "--decode-context-parallel-size 0: a whole number from 1"),
        (["--block-size", "0"], "--block-size 0: a whole number from 1 to 65536"),
        (["--block-size", "-16"], "--block-size -16: a whole number from 1"),
        (["--block-size", "10000000000000000"], "--block-size 10000000000000000: a whole number from 1"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0: a whole number from 1"),
        (["--max-num-seqs", "9" * 20], f"--max-num-seqs {'9' * 20}: a whole number from 1"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens 0: a whole number from 1"),
        (["--speculative-config", "[1]"], "--speculative-config [1]: a JSON object expected"),
        (
            ["--speculative-config", '{"num_speculative_tokens":"two"}'],
            "--speculative-config num_speculative_tokens two: a whole number from 1",
        ),
        (["--additional-config", json.dumps({"aiter_mla": {"max_token_num": 10**20}})], f"{10**20}: a whole number"),
        (["--model", "X"], "--model X beside MODEL deepseek-r1: give the model once, as MODEL"),
        (["-tp", "8", "--model=X"], "--model X beside MODEL deepseek-r1"),
        (["--config", "none.yaml"], "vLLM's parser of options: FileNotFoundError"),
        (["--config"], "vLLM's parser of options: ValueError: No config file specified"),
        (["-cc.mode"], "vLLM's parser of options: IndexError"),
    ],
)
def test_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert command.main(R1, arguments, "gfx942", []) == command.WRONG
    out, err = capsys.readouterr()
    # vLLM may log of its own accord before.
    assert (out, err.splitlines()[-1].startswith("plan: ")) == ("", True)
    assert said in err.splitlines()[-1]


@pytest.mark.parametrize(("name", "arguments"), [("-tp", ["8", R1]), ("--max-num-seqs=4", [R1]), ("--model", [R1])])
def test_options_before_the_model_are_told_where_the_model_belongs(
    capsys: pytest.CaptureFixture[str], name: str, arguments: list[str]
) -> None:
    assert command.main(name, arguments, "gfx942", []) == command.WRONG
    assert capsys.readouterr().err == (
        f"plan: {name} in the place of MODEL: MODEL comes first, then the options of `vllm serve`\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-such-option", "1"], "plan: unrecognized arguments: --no-such-option 1"),
        (["-tp", "eight"], "plan: argument --tensor-parallel-size/-tp: invalid"),
        (["--dtype", "floatx"], "plan: argument --dtype: invalid choice: 'floatx'"),
        (
            ["-cc.pass_config.fuse_norm_qant=true"],
            "plan: argument --compilation-config/-cc: pass_config.fuse_norm_qant=True: Unexpected keyword argument; "
            "did you mean 'fuse_norm_quant'?",
        ),
    ],
)
def test_vllms_own_error_is_one_line_that_names_option_and_value(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert command.main(R1, arguments, "gfx942", []) == command.WRONG
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1].startswith(said)) == ("", True), err


def config(**changed: Any) -> dict[str, Any]:
    """DeepSeek-R1's config with fields of another kind; None leaves a field out."""
    whole = model.examples()[R1]["config"] | changed
    return {key: value for key, value in whole.items() if value is not None}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        config(num_hidden_layers="61"),
        config(num_hidden_layers=10**9),
        config(num_attention_heads=-128),
        config(qk_nope_head_dim=10**30),
        config(kv_lora_rank=512.5),
        config(max_position_embeddings=10**12),
        config(torch_dtype="floatx"),
        config(quantization_config=["fp8"]),
        config(quantization_config={"quant_method": "compressed-tensors", "ignore": [1]}),
        config(text_config="yes"),
    ],
    ids=repr,
)
def test_a_wrong_config_never_gives_a_outcome(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    assert command.main(str(tmp_path), ["-tp", "8"], "gfx942", []) != command.ENGAGES
    out, err = capsys.readouterr()
    assert "would engage" not in out or "Status line: 0/" in out
    assert out or err.splitlines()[-1].startswith("plan: ")


def test_a_list_is_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps([config()]))
    assert command.main(str(tmp_path), [], "gfx942", []) == command.WRONG
    assert "a JSON object expected" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "said"), [("[" * 100_000, "not a readable config"), ("{", "not a readable config")])
def test_a_file_that_is_no_json_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert command.main(str(tmp_path / "config.json"), [], "gfx942", []) == command.WRONG
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/x", ""])
def test_a_name_that_is_no_path_is_an_unknown_model(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert command.main(name, [], "gfx942", []) == command.WRONG
    assert capsys.readouterr().err.startswith("plan: ")


@pytest.mark.parametrize("tp", ["7", "256"])
def test_heads_that_the_ranks_do_not_divide_are_a_skip(tp: str) -> None:
    from vllm_aiter_mla.commands.plan import printout

    plan = planned(R1, "-tp", tp)
    assert (plan["outcome"], codes(plan), plan["layers"]["engaged"]) == ("skipped", ["vllm_refuses"], 0)
    assert plan["kernels"] is plan["figures"] is None
    assert f"attention heads (128) must be divisible by tensor parallel size ({tp})" in printout.text(plan)


def test_the_largest_options_that_are_let_through_give_a_plan() -> None:
    most = ("--max-num-seqs", str(2**20), "--block-size", str(2**16), "--max-num-batched-tokens", str(2**30))
    spec = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1023}')
    assert planned(R1, *most, *spec)["limit"] == 2**30


def test_half_is_float16() -> None:
    assert planned(R1, "-tp", "8", "--dtype", "half", "--kv-cache-dtype", "float16")["options"]["dtype"] == "float16"


def test_control_characters_of_a_config_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(quantization_config={"quant_method": "x\x1b[31m\u202e"})))
    assert command.main(str(tmp_path), [], "gfx942", []) == command.WRONG
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.isprintable()
    assert "\\x1b[31m" in said


def test_the_schedulers_own_check_is_a_skip() -> None:
    plan = planned(R1, "-tp", "8", "--max-num-batched-tokens", "128")
    assert codes(plan) == ["vllm_refuses"]
    assert (
        "max_num_batched_tokens (128) must be greater than or equal to max_num_seqs (256)"
        in plan["reasons"][0]["message"]
    )

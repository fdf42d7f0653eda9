"""Claims about options given to doctor: a mistyped or malformed one is told, and every spelling of vLLM's is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vllm_aiter_mla.commands.doctor import arguments, command, installed, knobs, machine, options
from vllm_aiter_mla.commands.doctor import parser as cli
from vllm_aiter_mla.commands.doctor.check import Given

FLAG = "fuse_aiter_qk_rope_kvcache_mla"
ON = {"pass_config": {FLAG: True}}


def given(compilation: dict[str, Any] | None = None, additional: dict[str, Any] | None = None, **env: str) -> Given:
    return Given(env=env, compilation=compilation, additional=additional)


@pytest.mark.parametrize(
    ("compilation", "said"),
    [
        ({"pass_config": {f"{FLAG[:-1]}al": True}}, f"vLLM has no such option; did you mean '{FLAG}'?"),
        ({"pass_config": {"fuse_norm_qant": True}}, "did you mean 'fuse_norm_quant'?"),
        ({"pass_confg": {FLAG: True}}, "did you mean 'pass_config'?"),
        ({"pass_config": 5}, "pass_config is 5: an object expected"),
        ({"pass_config": {FLAG: "yes"}}, "expected true or false, got 'yes'"),
    ],
)
def test_a_mistyped_flag_is_a_problem_with_the_closest_name(compilation: dict[str, Any], said: str) -> None:
    found = options.settings(given(compilation))
    assert found.status == "problem"
    assert said in found.detail


def test_a_mistyped_flag_is_told_without_vllm_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "_vllms_names", lambda: None)
    assert f"did you mean '{FLAG}'?" in options.settings(given({"pass_config": {f"{FLAG}l": True}})).detail
    # Names of vLLM's own, which nobody knows there, are let through.
    own = {"pass_config": {"fuse_rope_kvcache_cat_mla": True, "fuse_norm_quant": True, FLAG: True}, "mode": 3}
    assert options.settings(given(own)).status == "ok"


def test_every_option_of_vllms_own_is_known() -> None:
    from vllm.config import CompilationConfig, PassConfig

    assert {"pass_config", "splitting_ops", "mode"} <= set(CompilationConfig.__dataclass_fields__)
    for name in PassConfig.__dataclass_fields__:
        knobs.check_names({"pass_config": {name: True}})


def test_a_key_that_looks_like_the_plugins_is_a_warning() -> None:
    found = options.settings(given(additional={"aiter-mla": {"enabled": True}}))
    assert (found.status, "its key is aiter_mla" in found.detail) == ("warning", True)
    assert options.settings(given(additional={"another_plugin": {}})).status == "ok"


@pytest.mark.parametrize(
    ("compilation", "said"),
    [
        ({"splitting_ops": 5}, "splitting_ops=5: a list of names of ops expected"),
        ({"splitting_ops": "vllm::x"}, "splitting_ops='vllm::x': a list of names"),
        ({"splitting_ops": [1]}, "splitting_ops=[1]: a list of names"),
        ({"use_inductor_graph_partition": "maybe"}, "use_inductor_graph_partition='maybe': true or false"),
        ({"mode": 7}, "mode=7: 0 to 3 or one of NONE"),
        ({"mode": True}, "mode=True: 0 to 3 or one of NONE"),
        ({"backend": ["inductor"]}, "backend=['inductor']: a name expected"),
    ],
)
def test_a_malformed_knob_of_the_graph_is_a_problem(compilation: dict[str, Any], said: str) -> None:
    found = options.graph(given(compilation))
    assert (found.status, found.detail.startswith(said)) == ("problem", True), found


@pytest.mark.parametrize(
    "compilation",
    [{"splitting_ops": 5}, {"pass_config": "x"}, {"inductor_passes": 5}, {"use_inductor_graph_partition": []}],
)
def test_no_check_of_the_options_breaks_over_a_malformed_one(compilation: dict[str, Any]) -> None:
    for _, check in options.CHECKS:
        check(given(compilation))


def test_knobs_are_read_as_vllm_reads_them() -> None:
    assert options.graph(given({"mode": "vllm_compile", "use_inductor_graph_partition": "True"})).status == "ok"
    assert options.graph(given({"use_inductor_graph_partition": "off"})).detail.startswith("graph_partition")


def test_kernel_triton_beside_the_fp8_bmm_of_rocm_is_declined_as_the_server_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = {"aiter_mla": {"kernel": "triton", "enabled": True}}
    monkeypatch.setattr(machine, "rocm_version", lambda: "7.0.2")
    found = options.graph(given(None, triton, VLLM_ROCM_USE_AITER="1"))
    assert (found.status, found.detail.partition(":")[0]) == ("problem", "fp8_bmm")
    off = options.graph(given(None, triton, VLLM_ROCM_USE_AITER="1", VLLM_ROCM_USE_AITER_FP8BMM="0"))
    assert off.status == options.graph(given(None, triton)).status == "ok"
    assert options.graph(given(None, None, VLLM_ROCM_USE_AITER="1")).status == "ok"
    monkeypatch.setattr(machine, "rocm_version", lambda: None)
    assert options.graph(given(None, triton, VLLM_ROCM_USE_AITER="1")).status == "ok"


@pytest.mark.parametrize(
    "more",
    [
        [f"-cc.pass_config.{FLAG}=true"],
        [f"-cc.pass_config.{FLAG}", "true"],
        [f"--compilation-config.pass_config.{FLAG}=true"],
        [f"--compilation_config.pass_config.{FLAG}=true"],
    ],
)
def test_the_dotted_spellings_of_vllm_serve_are_read(more: list[str]) -> None:
    assert arguments.read(None, None, more) == (ON, None)


def test_dotted_values_of_one_option_are_merged() -> None:
    more = [
        "-cc.mode=3",
        "-cc.splitting_ops+=a,b",
        f"-cc.pass_config.{FLAG}=true",
        "--additional-config.aiter_mla.kernel",
    ]
    assert arguments.read(None, None, [*more, "triton"]) == (
        {**ON, "mode": 3, "splitting_ops": ["a", "b"]},
        {"aiter_mla": {"kernel": "triton"}},
    )


def test_vllms_parser_reads_the_same() -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    more = ["-cc.mode=3", "-cc.splitting_ops+=a,b", f"-cc.pass_config.{FLAG}", "true", "-cc.backend=inductor"]
    parser = FlexibleArgumentParser()
    parser.add_argument("--compilation-config", "-cc", type=json.loads)
    assert arguments.read(None, None, more)[0] == parser.parse_args(more).compilation_config


@pytest.mark.parametrize(
    ("compilation", "more", "said"),
    [
        ("{", [], "--compilation-config {: not JSON"),
        ("true", [], "--compilation-config true: a JSON object expected"),
        ("{}", ["-cc.mode=3"], "--compilation-config: given as JSON and as --compilation-config.NAME=VALUE"),
        (None, ["-cc.mode"], "-cc.mode: a value is missing"),
        (None, ["-cc=5"], "-cc=5: as for `vllm serve`: --compilation-config '{...}' or -cc.NAME=VALUE"),
        (None, ["-cc..x=1"], "-cc..x=1: as for `vllm serve`"),
        (None, ["--tensor-parallel-size", "8"], "--tensor-parallel-size: doctor takes --compilation-config"),
        (None, ["deepseek-r1"], "deepseek-r1: doctor takes"),
    ],
)
def test_an_argument_that_cannot_be_read_is_one_line(
    capsys: pytest.CaptureFixture[str], compilation: str | None, more: list[str], said: str
) -> None:
    assert command.main(compilation, None, more) == command.WRONG
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"doctor: {said}")


def test_the_command_takes_the_readmes_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CHECKS", (("settings", options.settings),))
    app = typer.Typer()
    app.command("doctor", **cli.COMMAND)(cli.doctor)
    done = CliRunner().invoke(app, [f"-cc.pass_config.{FLAG}=true", "--additional-config.aiter_mla.kernel", "triton"])
    assert (done.exit_code, "on, kernel triton" in done.stdout) == (0, True), done.output
    wrong = CliRunner().invoke(app, ["--no-such", "x"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("doctor: --no-such: doctor takes")


def test_a_remedy_that_points_to_another_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "vllm_version", lambda: None)
    monkeypatch.setattr(machine, "gpu_arch", lambda: "sm90")
    assert installed.surface(given()).remedy == "see the line `vllm` above"
    assert machine.gpu(given()).remedy == "see the line `torch` above"
    names = [name for name, _ in command.CHECKS]
    assert names.index("vllm") < names.index("surface")
    assert names.index("torch") < names.index("gpu")


def test_the_dead_flag_that_is_not_set_is_short() -> None:
    assert options.dead_flag(given()).detail == "fuse_rope_kvcache_cat_mla: not set"

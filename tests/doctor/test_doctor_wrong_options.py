"""Claims about options given to doctor: a mistyped or malformed one is told, and every spelling of vLLM's is read."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.doctor.doctor_support import with_config
from vllm_aiter_mla.commands.doctor import command, conflicts, given, installed, machine
from vllm_aiter_mla.commands.doctor.given import Given

FLAG = "fuse_aiter_qk_rope_kvcache_mla"
PASSES = ["--additional-config.aiter_mla.integration", "passes"]


@pytest.mark.parametrize(
    ("compilation", "said"),
    [
        (
            {"pass_config": {f"{FLAG[:-1]}al": True}},
            f"pass_config.{FLAG[:-1]}al=True: Unexpected keyword argument; did ",
        ),
        ({"pass_config": {f"{FLAG[:-1]}al": True}}, f"did you mean '{FLAG}'?"),
        ({"pass_config": {"fuse_norm_qant": True}}, "did you mean 'fuse_norm_quant'?"),
        ({"pass_confg": {FLAG: True}}, "did you mean 'pass_config'?"),
        ({"pass_config": 5}, "pass_config=5: Input should be an object"),
        ({"pass_config": {FLAG: "yes"}}, f"pass_config.{FLAG}='yes': Input should be a valid boolean"),
    ],
)
def test_a_mistyped_flag_is_a_problem_with_the_closest_name(compilation: dict[str, Any], said: str) -> None:
    found = conflicts.settings(with_config(compilation))
    assert found.status == "problem"
    assert said in found.detail


def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.utils.argparse_utils", None)


def test_a_mistyped_flag_is_told_without_vllm_too(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    assert f"did you mean '{FLAG}'?" in conflicts.settings(with_config({"pass_config": {f"{FLAG}l": True}})).detail
    # Names of vLLM's own, which nobody knows there, are let through, and the line says what was not checked.
    own = {"pass_config": {"fuse_rope_kvcache_cat_mla": True, "fuse_norm_quant": True, FLAG: True}, "mode": 3}
    found = conflicts.settings(with_config(own))
    assert (found.status, "read by vLLM's own parser" in found.detail) == ("unknown", True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([f"-cc.pass_config.{FLAG}l=true"], f"pass_config.{FLAG}l=True: did you mean '{FLAG}'?"),
        ([f"-cc.pass_config.{FLAG}l", "true"], f"did you mean '{FLAG}'?"),
        ([f"--compilation_config.pass_config.{FLAG}l=true"], f"did you mean '{FLAG}'?"),
        (["--additional-config.aiter_mla.kernel", "tritn"], "aiter_mla.kernel: expected 'auto', 'aiter'"),
        (["--additional_config.aiter_mla.kernl=triton"], "did you mean 'kernel'?"),
        (["-cc.pass_config=5"], "pass_config=5: an object expected"),
        (["-cc.pass_config=5", f"-cc.pass_config.{FLAG}=true"], "pass_config was given a value before"),
        (["-cc.mode"], "-cc.mode: a value expected"),
    ],
)
def test_a_dotted_spelling_is_read_without_vllm_too(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    without_vllm(monkeypatch)
    found = conflicts.settings(given.read(arguments))
    assert (found.status, said in found.detail) == ("problem", True), found


def test_dotted_values_of_one_option_are_merged_without_vllm_too(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    more = ["-cc.splitting_ops+=a,b", f"-cc.pass_config.{FLAG}=true", "-cc.mode=3", "-tp", "8"]
    found = given.read([*more, "--additional-config.aiter_mla.kernel", "triton"])
    assert vars(found.served.compilation_config.pass_config) == {FLAG: True}
    assert found.served.additional_config == {"aiter_mla": {"kernel": "triton"}}
    assert found.unread.endswith("not read: -tp 8")


@pytest.mark.parametrize(
    ("additional", "said"),
    [
        ({"aiter_mla": {"kernel": "tritn"}}, "aiter_mla.kernel: expected 'auto', 'aiter'"),
        ({"aiter_mla": {"kernl": "triton"}}, "did you mean 'kernel'?"),
        ({"aiter_mla": 5}, "additional_config.aiter_mla"),
    ],
)
def test_a_wrong_option_of_the_plugins_own_is_told_without_vllm_too(
    monkeypatch: pytest.MonkeyPatch, additional: dict[str, Any], said: str
) -> None:
    with_vllm = conflicts.settings(with_config(additional=additional))
    without_vllm(monkeypatch)
    assert conflicts.settings(with_config(additional=additional)) == with_vllm
    assert (with_vllm.status, said in with_vllm.detail) == ("problem", True), with_vllm


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_text_that_is_no_json_object_is_told_without_vllm_too(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    without_vllm(monkeypatch)
    found = conflicts.settings(given.read(["-cc", text]))
    assert found.status == "problem"
    assert "--compilation-config" in found.detail


def test_every_option_of_vllms_own_is_known() -> None:
    from vllm.config import CompilationConfig, PassConfig

    assert {"pass_config", "splitting_ops", "mode"} <= set(CompilationConfig.__dataclass_fields__)
    passes = {name: None for name in PassConfig.__dataclass_fields__ if not name.startswith(("fuse_aiter", "aiter"))}
    assert "Unexpected keyword" not in conflicts.settings(with_config({"pass_config": passes})).detail


def test_a_key_that_looks_like_the_plugins_is_a_problem_where_nothing_else_switches_it_on() -> None:
    found = conflicts.settings(with_config(additional={"aiter-mla": {"enabled": True}}))
    assert (found.status, "whose key is aiter_mla: the fast path stays off" in found.detail) == ("problem", True)
    both = {"aiter-mla": {"strict": True}, "aiter_mla": {"enabled": True}}
    assert conflicts.settings(with_config(additional=both)).status == "warning"
    assert conflicts.settings(with_config(additional={"another_plugin": {}})).status == "ok"


@pytest.mark.parametrize(
    ("compilation", "said"),
    [
        ({"splitting_ops": 5}, "splitting_ops=5: Input should be a valid array"),
        ({"splitting_ops": "vllm::x"}, "splitting_ops='vllm::x': Input should be a valid array"),
        ({"splitting_ops": [1]}, "splitting_ops.0=1: Input should be a valid string"),
        (
            {"use_inductor_graph_partition": "maybe"},
            "use_inductor_graph_partition='maybe': Input should be a valid bool",
        ),
        ({"mode": 7}, "mode=7: Input should be 0, 1, 2 or 3"),
        ({"backend": ["inductor"]}, "backend=['inductor']: Input should be a valid string"),
        ({"inductor_passes": 5}, "inductor_passes=5: Input should be an object"),
    ],
)
def test_a_malformed_option_of_the_graph_is_a_problem(compilation: dict[str, Any], said: str) -> None:
    wrong = with_config(compilation)
    found = conflicts.settings(wrong)
    assert (found.status, said in found.detail) == ("problem", True), found
    # The checks that need these options say so instead of judging without them.
    for _, check in conflicts.CHECKS[1:]:
        assert (check(wrong).status, check(wrong).remedy) == ("unknown", "see the line `settings` above")


def test_options_of_the_graph_are_read_as_vllm_reads_them() -> None:
    right = with_config({"mode": "vllm_compile", "use_inductor_graph_partition": "True"})
    assert conflicts.graph(right).status == "ok"
    cut = with_config({"use_inductor_graph_partition": "off"})
    assert conflicts.graph(cut).detail.startswith("the module integration is taken; graph_partition")
    # vLLM takes true for the number 1.
    assert "; compilation_mode" in conflicts.graph(with_config({"mode": True})).detail


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--enforce-eager", *PASSES], "enforce_eager"),
        (["--enforce-eager"], None),
        (["-dcp", "2"], "dcp"),
        (["--kv-cache-dtype", "fp8_e5m2"], "kv_cache_dtype"),
        (["-O0", *PASSES], "compilation_mode"),
        (["some/model", "-tp", "8", "--port", "8001"], None),
    ],
)
def test_every_option_of_vllm_serve_is_read(arguments: list[str], code: str | None) -> None:
    found = conflicts.graph(replace(given.read(arguments), env={}))
    assert found.status == ("ok" if code is None else "problem")
    assert code is None or found.detail.startswith(code)


@pytest.mark.parametrize(
    "arguments",
    [
        [f"-cc.pass_config.{FLAG}=true"],
        [f"-cc.pass_config.{FLAG}", "true"],
        [f"--compilation-config.pass_config.{FLAG}=true"],
        [f"--compilation_config.pass_config.{FLAG}=true"],
        ["--additional_config.aiter_mla.enabled", "true"],
    ],
)
def test_the_dotted_spellings_of_vllm_serve_are_read(arguments: list[str]) -> None:
    assert conflicts.settings(given.read(arguments)).detail == "on, kernel auto"


def test_dotted_values_of_one_option_are_merged() -> None:
    more = ["-cc.mode=3", "-cc.splitting_ops+=a,b", f"-cc.pass_config.{FLAG}=true"]
    found = given.read([*more, "--additional-config.aiter_mla.kernel", "triton"])
    assert found.served.compilation_config.splitting_ops == ["a", "b"]
    assert conflicts.settings(found).detail == "on, kernel triton"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compilation-config", "{"], "--compilation-config/-cc: '{': Invalid JSON"),
        (["-cc", "true"], "--compilation-config/-cc: True: Input should be an object"),
        (["--compilation-config", "{}", "-cc.mode=3"], "--compilation-config: given as JSON and as "),
        (["--additional_config={}", "--additional-config.x=3"], "--additional-config: given as JSON and as "),
        (["-cc.mode"], "vLLM's parser of options: IndexError"),
        (["-cc=5"], "--compilation-config/-cc: 5: Input should be an object"),
        (["-cc..x=1"], "Unexpected keyword argument"),
        (["--no-such", "x"], "unrecognized arguments: --no-such"),
        (["-tp", "eight"], "--tensor-parallel-size/-tp: invalid"),
    ],
)
def test_an_argument_that_cannot_be_read_is_a_problem_that_names_it(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    found = conflicts.settings(given.read(arguments))
    assert (found.status, said in found.detail) == ("problem", True), found
    assert capsys.readouterr().out == ""


def test_the_command_takes_the_readmes_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CHECKS", (("settings", conflicts.settings),))
    app = typer.Typer()
    app.command("doctor", **command.COMMAND)(command.doctor)
    done = CliRunner().invoke(app, [f"-cc.pass_config.{FLAG}=true", "--additional-config.aiter_mla.kernel", "triton"])
    assert (done.exit_code, "on, kernel triton" in done.stdout) == (0, True), done.output
    wrong = CliRunner().invoke(app, ["--no-such", "x"])
    assert wrong.exit_code == 1
    assert "problem  settings  unrecognized arguments: --no-such" in wrong.stdout


def test_a_remedy_that_points_to_another_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "vllm_version", lambda: None)
    monkeypatch.setattr(machine, "gpu_arch", lambda: "sm90")
    assert installed.surface(Given()).remedy == "see the line `vllm` above"
    assert machine.gpu(Given()).remedy == "see the line `torch` above"
    names = [name for name, _ in command.CHECKS]
    assert names.index("vllm") < names.index("surface")
    assert names.index("torch") < names.index("gpu")


def test_the_dead_flag_that_is_not_set_is_short() -> None:
    assert conflicts.dead_flag(Given()).detail == "fuse_rope_kvcache_cat_mla: not set"

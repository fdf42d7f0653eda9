"""The recipe of the examples: four files start one and the same engine, and each of its layers engages by plan."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import plans
from vllm_aiter_mla.commands.plan import config_source

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SERVE = EXAMPLES / "serve.yaml"
COMMAND = Path(sys.executable).with_name("vllm-aiter-mla")
FLAG = "fuse_aiter_qk_rope_kvcache_mla"


def manifests() -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()) if one]


def container(name: str) -> dict[str, Any]:
    """The server's container of a Deployment."""
    (deployment,) = [one for one in manifests() if (one["kind"], one["metadata"]["name"]) == ("Deployment", name)]
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return found


def composed() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]["r1"]


def command_of_compose() -> list[str]:
    """Its command, with the file on this machine that a volume puts into the container."""
    (there,) = [volume.split(":") for volume in composed()["volumes"] if volume.startswith("./")]
    return [str(EXAMPLES / there[0]) if word == there[1] else word for word in composed()["command"]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM makes of each file's options."""
    asked = [["--config", str(SERVE)], command_of_compose(), container("r1")["args"], container("r1-canary")["args"]]
    folder = str(tmp_path_factory.mktemp("cache"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.examples.recipe_child", json.dumps(asked)], cwd=ROOT, text=True,
        capture_output=True, env={**os.environ, "VLLM_CACHE_ROOT": folder}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


RECIPE = {"model": "'deepseek-ai/DeepSeek-R1'", "tensor_parallel_size": "8", "kv_cache_dtype": "'fp8'",
          "trust_remote_code": "True"}  # fmt: skip


@pytest.mark.slow
def test_vllm_serve_takes_the_file_and_the_flag_is_on(told: dict[str, Any]) -> None:
    serve = dict(told["servers"][0])
    assert f"'{FLAG}': True" in serve.pop("compilation_config")
    assert serve == RECIPE


@pytest.mark.slow
def test_compose_and_kubernetes_start_the_same_engine_and_the_canary_is_strict(told: dict[str, Any]) -> None:
    serve, composed, stable, canary = told["servers"]
    assert composed == stable == serve
    assert canary == serve | {"additional_config": repr({"aiter_mla": {"strict": True}})}


def test_the_entry_point_of_compose_hands_the_command_on_behind_the_locks_of_a_killed_build(tmp_path: Path) -> None:
    """Over a shell, with a `vllm` that says its words. Compose makes one dollar sign of two."""
    jit, entry = "/usr/local/lib/python3.12/dist-packages/aiter/jit", composed()["entrypoint"]
    assert [volume for volume in composed()["volumes"] if volume.endswith(f":{jit}")]
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "lock_module_rope").touch()
    (tmp_path / "vllm").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "vllm").chmod(0o755)
    line = [word.replace("$$", "$").replace(jit, str(tmp_path)) for word in entry]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [*line, *composed()["command"]], env={"PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["serve", *composed()["command"]]
    assert not [*(tmp_path / "build").iterdir()]


@pytest.mark.slow
def test_offline_starts_the_same_engine_with_the_other_spelling_of_the_flag(told: dict[str, Any]) -> None:
    assert told["offline"] == RECIPE | {"additional_config": repr({"aiter_mla": {"enabled": True}})}


@pytest.mark.slow
def test_every_variable_of_vllm_in_the_files_is_one_that_vllm_reads(told: dict[str, Any]) -> None:
    named = {variable["name"] for one in ("r1", "r1-canary") for variable in container(one)["env"]}
    of_vllm = {name for name in named | {*composed()["environment"]} if name.startswith("VLLM_")}
    assert of_vllm
    assert of_vllm - {*told["variables"]} == set()


def options_of(arguments: dict[str, Any]) -> list[str]:
    """Arguments of ``LLM(...)`` as ``vllm serve`` has them; the model comes first."""
    spelt = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    model = spelt.pop("model")
    words = [(f"--{name.replace('_', '-')}", *((value,) * (value != "true"))) for name, value in spelt.items()]
    return [model, *(word for pair in words for word in pair)]


@pytest.fixture
def variables() -> dict[str, str]:
    """AITER's switches of ``compose.yaml``."""
    return {name: value for name, value in composed()["environment"].items() if name.startswith("VLLM_ROCM")}


@pytest.mark.slow
def test_every_layer_of_the_served_file_would_engage_by_plan(variables: dict[str, str], tmp_path: Path) -> None:
    environment = {**os.environ, **variables, "VLLM_CACHE_ROOT": str(tmp_path)}
    command = [str(COMMAND), "check", "deepseek-ai/DeepSeek-R1", "--config", str(SERVE), "--only", "plan"]
    command += ["--json", str(tmp_path / "plan.json")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (step,) = json.loads((tmp_path / "plan.json").read_text())["steps"]
    assert step["detail"] == "61/61 MLA layers would engage on gfx942"
    assert step["data"]["options"]["settings"]["enabled"]


@pytest.mark.slow
@pytest.mark.wide  # its options are those of the served file, whose plan is above
def test_every_layer_of_the_offline_script_would_engage_by_plan(variables: dict[str, str]) -> None:
    name, *options = options_of(runpy.run_path(str(EXAMPLES / "offline.py"))["ARGUMENTS"])
    switches = tuple(f"{switch}={value}" for switch, value in variables.items())
    plan, _ = plans.plan_of("gfx942", switches, config_source.find_config(name), tuple(options))
    assert (plan.outcome, plan.reasons, plan.layers.engaged, plan.layers.mla) == ("engaged", (), 61, 61)
    assert plan.options.settings.enabled

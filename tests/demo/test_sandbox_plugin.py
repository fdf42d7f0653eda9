"""The sandbox's own vLLM plugin: only its own processes see it, and it may be loaded before or after the plugin."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.metadata import distributions, entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import CompilationMode

import vllm_aiter_mla
from tests.sandbox import engine, platform, plugin, ray_platform
from tests.sandbox.spec import EngineSpec
from vllm_aiter_mla.compat import patches

GROUP = "vllm.general_plugins"


class Config(SimpleNamespace):
    """A namespace that the hook can refer to weakly."""


def test_no_installed_package_lists_the_sandbox():
    assert plugin.NAME not in entry_points(group=GROUP).names


@pytest.mark.parametrize("spec", [EngineSpec(), EngineSpec(device="gpu"), EngineSpec(plugin=False)])
def test_an_engine_of_the_sandbox_finds_its_plugin_on_its_path_and_keeps_that_path(spec, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "given")
    environment = engine.environment_for(spec, tmp_path, tmp_path)
    first, *rest = environment["PYTHONPATH"].split(os.pathsep)
    assert rest == ["given"]
    (found,) = distributions(path=[first])
    loaded = {entry.group: entry.load() for entry in found.entry_points if entry.name == plugin.NAME}
    assert loaded == {GROUP: plugin.activate, "vllm.platform_plugins": ray_platform.find}
    assert environment["VLLM_PLUGINS"].split(",") == ["aiter_mla", plugin.NAME][not spec.plugin :]


@pytest.mark.parametrize("sandbox_first", [True, False])
def test_the_gate_sees_the_compile_mode_that_the_sandbox_keeps_in_either_order(sandbox_first):
    class Platform:
        @classmethod
        def apply_config_platform_defaults(cls, vllm_config):
            pass

        @classmethod
        def check_and_update_config(cls, vllm_config):
            vllm_config.compilation_config.mode = CompilationMode.DYNAMO_TRACE_ONCE

    seen = []
    steps = [
        lambda: platform.wrap(Platform),
        lambda: patches.hook_platform(lambda config: seen.append(config.compilation_config.mode), Platform),
    ]
    for step in steps if sandbox_first else reversed(steps):
        step()
    compilation = Config(mode=CompilationMode.VLLM_COMPILE, ir_enable_torch_wrap=False, backend="")
    config = Config(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(enable_chunked_prefill=False, max_num_batched_tokens=1),
        attention_config=SimpleNamespace(backend=None),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=False),
    )
    Platform.apply_config_platform_defaults(config)
    Platform.check_and_update_config(config)
    assert seen == [CompilationMode.VLLM_COMPILE]


def test_a_platform_that_ray_can_count_is_there_for_engines_on_ray_alone(monkeypatch, tmp_path):
    monkeypatch.delenv(ray_platform.SWITCH, raising=False)
    assert ray_platform.find() is None
    assert ray_platform.SWITCH not in engine.environment_for(EngineSpec(), tmp_path, tmp_path)
    on_ray = EngineSpec(llm={"distributed_executor_backend": "ray"})
    assert engine.environment_for(on_ray, tmp_path, tmp_path)[ray_platform.SWITCH] == "1"
    monkeypatch.setenv(ray_platform.SWITCH, "1")
    assert ray_platform.find() == "tests.sandbox.ray_platform.RayCpuPlatform"


def knows_the_sandbox(source: str) -> bool:
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return any("sandbox" in ast.unparse(node) for node in names)


def test_only_the_demo_command_imports_the_sandbox():
    root = Path(vllm_aiter_mla.__file__).parent
    files = [path.relative_to(root) for path in root.rglob("*.py") if knows_the_sandbox(path.read_text())]
    assert [str(path) for path in files if path.parts[0] != "sandbox"] == ["commands/demo.py"]


def test_an_interrupted_run_leaves_no_engine_behind():
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    sleeps = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"]
    process = subprocess.Popen(sleeps, stdout=subprocess.PIPE, text=True)
    with pytest.raises(KeyboardInterrupt):
        engine._read(process, interrupt)
    assert process.poll() is not None

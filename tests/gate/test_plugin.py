"""Claims about registration: found by vLLM, harmless twice, never raises, cheap, and in any order with a sandbox."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from tests.gate import gate_support as support
from tests.gate.gate_support import ON, Lines
from vllm_aiter_mla import gate, plugin
from vllm_aiter_mla.admission import ATTENTION_OPS
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import log, patches, surface
from vllm_aiter_mla.compat.patches import platform_hook


def test_vllm_finds_the_plugin_under_its_name() -> None:
    (found,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "aiter_mla"]
    assert found.load() is plugin.register


def test_registering_imports_nothing_but_the_plugin_and_the_standard_library(without_plugin: dict[str, Any]) -> None:
    """A server whose flag is off pays for registration too: no module of vLLM's, torch's or anyone's may be loaded."""
    foreign = [name for name in without_plugin["imported"] if name.partition(".")[0] not in sys.stdlib_module_names]
    assert foreign == []


def test_registering_again_wraps_nothing_again() -> None:
    from vllm.platforms import current_platform

    platform = type(current_platform)
    names = ("check_and_update_config", "apply_config_platform_defaults")
    before = [platform.__dict__[name] for name in names]
    plugin.register()
    patches.apply_all(plugin.CALLS)
    assert [platform.__dict__[name] for name in names] == before


def test_a_step_that_fails_is_said_once_and_never_raised(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("no such op")

    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(plugin, "_register_ops", fail)
    monkeypatch.setattr(patches, "_failed", {})
    plugin.register()
    plugin.register()
    assert [
        line
        for line in lines.at(logging.WARNING)
        if "torch ops failed, vLLM runs unmodified" in line and "no such op" in line
    ]
    assert len(lines.at(logging.WARNING)) == len(set(lines.at(logging.WARNING)))
    assert patches.failed_requirements() == ("torch ops: ImportError: no such op",)


@pytest.mark.mutation
def test_mutation_a_registration_that_lets_errors_out_is_caught(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.patches, "run", lambda name, step, required=True: step())
    with pytest.raises(ImportError):
        test_a_step_that_fails_is_said_once_and_never_raised(lines, monkeypatch)


@pytest.mark.parametrize(("call", "module"), [("gate", "gate"), ("attach", "worker")])
def test_a_module_that_does_not_load_ends_no_process(
    lines: Lines, monkeypatch: pytest.MonkeyPatch, call: str, module: str
) -> None:
    """Each worker calls these, with the flag off too."""
    monkeypatch.setitem(sys.modules, f"vllm_aiter_mla.{module}", None)
    getattr(plugin.CALLS, call)(None)
    assert any("the plugin does not load, vLLM runs unmodified: " in line for line in lines.at(logging.ERROR))


def test_a_failed_pass_config_patch_points_to_the_other_spelling(lines: Lines) -> None:
    plugin._report({"patch pass_config": patches.Failure("RuntimeError: changed", required=False)})
    assert "additional_config.aiter_mla" in lines.at(logging.WARNING)[0]


def test_the_log_goes_through_vllms_own_logger() -> None:
    assert log.logger.name.startswith("vllm.")
    assert log.logger.getEffectiveLevel() == logging.getLogger("vllm").getEffectiveLevel()


def test_every_patch_says_what_why_how_and_when_it_can_go() -> None:
    for patch in patches.PATCHES:
        for field in ("name", "what", "why", "how", "link", "probe", "remove_when"):
            assert getattr(patch, field), f"{patch.name} lacks {field}"
        assert patch.link.startswith("https://")


# -- the hook and other people's wrappers


def test_a_wrapper_put_around_the_hook_later_is_still_seen_by_the_gate(
    registered: None, mla_model: Path, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    support.keep_compile_mode(monkeypatch)
    ops = support.vllm_config(mla_model, additional_config=ON).compilation_config.splitting_ops
    assert set(ATTENTION_OPS) <= set(ops)
    assert lines.at(logging.WARNING) == []


def test_the_gate_runs_once_per_config_however_often_it_is_wrapped(
    compiling: None, mla_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(gate, "apply", seen.append)
    built = support.vllm_config(mla_model)
    assert seen == [built]


def test_a_hook_that_raises_does_not_disable_the_next_one(compiling: None, mla_model: Path) -> None:
    with pytest.raises(ValueError, match="enabled"):
        support.vllm_config(mla_model, additional_config={"aiter_mla": {"enabled": 3}})
    assert support.vllm_config(mla_model, additional_config=ON).compilation_config.use_inductor_graph_partition is True


class _Plain:
    calls: list[type]

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        cls.calls.append(cls)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        cls.calls.append(cls)


class _Derived(_Plain):
    """An out-of-tree platform that inherits both methods."""


def test_an_inheriting_platform_is_hooked_without_touching_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(gate, "apply", seen.append)
    monkeypatch.setattr(_Plain, "calls", [], raising=False)
    platform_hook.install(plugin.CALLS.gate, _Derived)
    _Plain.check_and_update_config("base")
    assert seen == []
    _Derived.check_and_update_config("derived")
    assert seen == ["derived"]
    assert _Plain.calls == [_Plain, _Derived]


def test_knobs_are_noted_before_defaults_hide_them(compiling: None, mla_model: Path) -> None:
    unset = support.vllm_config(mla_model).compilation_config
    explicit = support.vllm_config(mla_model, compilation_config={"use_inductor_graph_partition": False})
    assert unset.use_inductor_graph_partition is False
    assert platform_hook.knobs_of(unset).use_inductor_graph_partition is None
    assert platform_hook.knobs_of(explicit.compilation_config).use_inductor_graph_partition is False


def test_noted_knobs_go_with_their_config(compiling: None, mla_model: Path) -> None:
    import gc

    gc.collect()
    before = len(platform_hook._noted)
    built = support.vllm_config(mla_model)
    assert len(platform_hook._noted) > before
    del built
    gc.collect()
    assert len(platform_hook._noted) <= before


# -- versions


@pytest.mark.parametrize("version", ["0.30.0", "0.32.0+cpu", "0.33.1rc2.dev7+gabc", "v0.31.0", "0.33"])
def test_versions_inside_the_window(version: str) -> None:
    assert compat_config.in_window(version)


@pytest.mark.parametrize("version", ["0.29.3", "0.34.0", "0.34.0rc1", "1.0.0", "0.1.dev1+gabc", "dev", ""])
def test_versions_outside_the_window(version: str) -> None:
    assert not compat_config.in_window(version)


def test_the_installed_vllm_lacks_nothing() -> None:
    assert surface.missing_capabilities() == ()


def test_a_missing_capability_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CompilationConfig

    monkeypatch.delattr(CompilationConfig, "_attention_ops")
    assert surface.missing_capabilities() == ("CompilationConfig._attention_ops",)

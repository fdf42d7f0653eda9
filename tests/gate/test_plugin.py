"""Claims about registration: found by vLLM, harmless twice, never raises, cheap; and about the hooks it installs."""

import importlib
import logging
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

import vllm_aiter_mla
from tests.gate import gate_support
from tests.gate.gate_support import ON
from tests.support.planted import raising
from vllm_aiter_mla import gate, plugin
from vllm_aiter_mla.admission import ATTENTION_OPS
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import log, patches
from vllm_aiter_mla.settings import SettingsError

NEEDED = ("compat", "compat.log", "compat.patches", "packages", "plugin")
"""Our modules that registration imports, but for the settings, which this process has imported before."""


def test_vllm_finds_the_plugin_under_its_name():
    (found,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "aiter_mla"]
    assert found.load() is plugin.register


@pytest.mark.slow
def test_registering_imports_nothing_but_the_plugin_and_the_standard_library(without_plugin):
    """A server whose flag is off pays for registration too: no module of vLLM, torch or others may be loaded.

    Nor may what only a server with the flag on needs: the ops and the layers.
    """
    foreign = {name for name in without_plugin["imported"] if name.partition(".")[0] not in sys.stdlib_module_names}
    assert foreign == {f"vllm_aiter_mla.{name}" for name in NEEDED}


def test_registering_again_wraps_nothing_again():
    from vllm.config import PassConfig, VllmConfig
    from vllm.v1.worker.worker_base import WorkerBase

    patches.hook_workers()
    wrapped = {
        VllmConfig: ("__post_init__",),
        PassConfig: ("__eq__", "__repr__", "compute_hash", "__init__", "__dataclass_fields__"),
        WorkerBase: ("__init__",),
    }
    before = {(cls, name): cls.__dict__[name] for cls, names in wrapped.items() for name in names}
    plugin.register()
    patches.apply_all(plugin.apply_gate, plugin.attach)
    patches.hook_workers()
    assert {(cls, name): cls.__dict__[name] for cls, name in before} == before
    assert patches.failures() == {}


def test_a_step_that_fails_is_said_once_and_never_raised(said, monkeypatch):
    fail = raising(ImportError("planted"))
    monkeypatch.setattr(plugin, "_registered", False)
    for name in ("config_hook", "pass_config"):
        monkeypatch.setitem(patches.PATCHES, name, fail)
    monkeypatch.setattr(patches, "_failed", {})
    plugin.register()
    plugin.register()
    optional, required = said.at(logging.WARNING)
    assert "config_hook failed" in required
    assert "planted" in required
    assert "pass_config" in optional
    assert "additional_config.aiter_mla" in optional
    assert patches.failures(needed=True) == {"patch config_hook": "ImportError: planted"}


@pytest.mark.mutation
def test_mutation_a_registration_that_lets_errors_out_is_caught(said, monkeypatch):
    monkeypatch.setattr(patches, "keep_failure", lambda name, step: step())
    with pytest.raises(ImportError, match="planted"):
        test_a_step_that_fails_is_said_once_and_never_raised(said, monkeypatch)


@pytest.mark.parametrize(("call", "module"), [(plugin.apply_gate, "gate"), (plugin.attach, "engine")])
def test_a_module_that_does_not_load_ends_no_process(said, monkeypatch, call, module):
    """Each worker calls these, with the flag off too."""
    monkeypatch.delattr(vllm_aiter_mla, module, raising=False)
    monkeypatch.setitem(sys.modules, f"vllm_aiter_mla.{module}", None)
    call(None)
    (line,) = said.at(logging.ERROR)
    assert "vLLM runs unmodified" in line


CALLED = {"gate": (plugin.apply_gate, "apply", "is_decided"), "engine": (plugin.attach, "attach", "engaged_pass")}
"""What vLLM calls, by module: the call, our function, and a question to vLLM that our function begins with."""


@pytest.mark.parametrize("module", CALLED)
def test_a_vllm_that_cannot_be_asked_ends_no_process(said, monkeypatch, module):
    """With the flag off too: a release may have no slots for passes, or others."""
    call, _, question = CALLED[module]
    monkeypatch.setattr(compat_config, question, raising(AttributeError("planted")))
    for _ in range(2):
        call(SimpleNamespace(vllm_config=None))
    (line,) = said.at(logging.ERROR)
    assert "vLLM runs unmodified: AttributeError: planted" in line


@pytest.mark.parametrize("module", CALLED)
def test_what_is_meant_for_the_user_ends_the_start(monkeypatch, module):
    call, function, _ = CALLED[module]
    monkeypatch.setattr(importlib.import_module(f"vllm_aiter_mla.{module}"), function, raising(SettingsError("strict")))
    with pytest.raises(SettingsError, match="strict"):
        call(None)


@pytest.mark.mutation
@pytest.mark.parametrize("module", CALLED)
def test_mutation_calls_that_are_made_without_a_guard_are_caught(said, monkeypatch, module):
    _, function, question = CALLED[module]
    bare = getattr(importlib.import_module(f"vllm_aiter_mla.{module}"), function)
    monkeypatch.setitem(CALLED, module, (bare, function, question))
    with pytest.raises(AttributeError, match="planted"):
        test_a_vllm_that_cannot_be_asked_ends_no_process(said, monkeypatch, module)


def test_the_log_goes_through_vllms_own_logger_once_and_names_the_caller(monkeypatch):
    seen = []
    handler = logging.Handler()
    handler.emit = seen.append
    monkeypatch.setattr(log.logger, "handlers", [handler])
    log._said.clear()
    for _ in range(2):
        log.say_once(logging.WARNING, "planted")
    (record,) = seen
    assert (record.levelname, record.getMessage()) == ("WARNING", "aiter-mla: planted")
    assert record.filename == Path(__file__).name
    assert log.logger.name.startswith("vllm.")
    assert log.logger.getEffectiveLevel() == logging.getLogger("vllm").getEffectiveLevel()


def test_the_gate_runs_once_for_each_config_after_vllm_has_finished_it(compiling, mla_model, monkeypatch, said):
    ops = gate_support.vllm_config(mla_model, additional_config=ON).compilation_config.splitting_ops
    assert set(ATTENTION_OPS) <= set(ops), "it sees vLLM's splitting ops and the mode that a wrapper has left"
    assert said.at(logging.WARNING) == []
    seen = []
    monkeypatch.setattr(gate, "apply", seen.append)
    built = gate_support.vllm_config(mla_model)
    assert seen == [built]


def test_a_hook_that_raises_does_not_disable_the_next_one(compiling, mla_model):
    with pytest.raises(ValueError, match="enabled"):
        gate_support.vllm_config(mla_model, additional_config={"aiter_mla": {"enabled": 3}})
    built = gate_support.vllm_config(mla_model, additional_config=ON)
    assert gate_support.pass_of(built) is not None

"""Build real ``VllmConfig`` objects without an engine, and look at what the gate made of them.

Also a script: it reports what a process sees before it loads the plugin.
"""

import base64
import dataclasses
import json
import logging
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm.engine.arg_utils  # noqa: F401  what vLLM has imported by the time it loads plugins

from tests.support.planted import Said
from vllm_aiter_mla.settings import FLAG_FIELD

ATTENTION_OPS = ("vllm_aiter_mla::mla_attention_with_prepared_q", "vllm_aiter_mla::mla_attention_with_rope")

Build = Callable[..., Any]
ON = {"aiter_mla": {"enabled": True}}
PASSES = {"aiter_mla": {"enabled": True, "integration": "passes"}}
WHOLE = {"use_inductor_graph_partition": True}
"""The option of ``compilation_config`` with which one graph holds whole layers."""
SLOT = "post_grad_custom_post_pass"
USERS_PASS = {"inductor_passes": {SLOT: "aiter_mla_users_pass.users_pass"}}
# vLLM resolves the name by __import__(module), which gives the top package of a dotted one.
sys.modules["aiter_mla_users_pass"] = sys.modules[__name__]


def vllm_config(model: Path, max_num_seqs: int = 16, **options: Any) -> Any:
    """The config an engine would start from, through ``EngineArgs`` as ``LLM(...)`` builds it."""
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, Any] = {"skip_tokenizer_init": True, "load_format": "dummy", "max_model_len": 256}
    return EngineArgs(model=str(model), max_num_seqs=max_num_seqs, **arguments, **options).create_engine_config()


def users_pass(graph: Any) -> None:
    """The user's own custom pass, which ``USERS_PASS`` names."""


def pass_of(config: Any) -> Any:
    return config.compilation_config.inductor_compile_config.get(SLOT)


def ranges_of(config: Any) -> list[tuple[int, int]]:
    return [(one.start, one.end) for one in config.compilation_config.get_compile_ranges()]


def assert_skipped(said: Said, built: Any, code: str, knob: str) -> None:
    """Nothing of ours is in the config, and one warning says the code and the knob."""
    assert pass_of(built) is None, "the gate has engaged"
    assert not set(ATTENTION_OPS) & set(built.compilation_config.splitting_ops or ())
    (line,) = said.at(logging.WARNING)
    assert code in line
    assert knob in line
    assert "\n" not in line


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [name for name in found if found[name] != wanted[name]]


def compile_options(config: Any) -> dict[str, Any]:
    """Every option of a finished config that decides what vLLM compiles, by name."""
    compilation = config.compilation_config
    found = {field.name: getattr(compilation, field.name) for field in dataclasses.fields(compilation)}
    found |= {f"pass_config.{field.name}": value for field, value in _fields(found.pop("pass_config"))}
    found["slot"] = found["inductor_compile_config"].get(SLOT)
    found["inductor_compile_config"] = {k: v for k, v in found["inductor_compile_config"].items() if k != SLOT}
    # The flag itself, and what is no option: measured times, and the layers of a model.
    for name in (f"pass_config.{FLAG_FIELD}", "compilation_time", "encoder_compilation_time", "static_forward_context"):
        found.pop(name, None)
    return found


def _fields(record: Any) -> list[tuple[Any, Any]]:
    return [(field, getattr(record, field.name)) for field in dataclasses.fields(record)]


def wrongly_changed(off: dict[str, Any], on: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What the flag has changed of ``compile_options`` besides what the gate may change.

    That is its slot, its own splitting ops, and for the passes one end of a compile range.
    """
    found = {name: (off[name], on[name]) for name in off if off[name] != on[name] and name != "slot"}
    passes = getattr(on["slot"], "integration", None) == "passes"
    ops = [op for op in on["splitting_ops"] or () if op not in ATTENTION_OPS]
    if ops == (off["splitting_ops"] or []):
        found.pop("splitting_ops", None)
    ends = {*(on["compile_ranges_endpoints"] or ())} ^ {*(off["compile_ranges_endpoints"] or ())}
    if passes and ends == {on["slot"].limit}:
        found.pop("compile_ranges_endpoints", None)
    return found


def modelless_config(compilation: dict[str, Any] | None = None) -> Any:
    """A config without a model: what the plugin could change of it does not depend on one."""
    from vllm.config import CompilationConfig, VllmConfig

    return VllmConfig(compilation_config=CompilationConfig(**(compilation or {})))


def observed(config: Any) -> dict[str, Any]:
    """What must be the same whether or not the plugin is there."""
    compilation = config.compilation_config
    return {
        "hash": config.compute_hash(),
        "compilation_hash": compilation.compute_hash(),
        "pass_hash": compilation.pass_config.compute_hash(),
        "compilation_repr": repr(compilation),
        "pass_repr": repr(compilation.pass_config),
        "attention_ops": list(compilation._attention_ops),
    }


def keep_compile_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    platform = type(current_platform)
    inner = platform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        before = (compilation.mode, compilation.backend)
        inner(vllm_config)
        if before[0] == CompilationMode.VLLM_COMPILE:
            compilation.mode, compilation.backend = before[0], before[1] or "inductor"
            compilation.compile_sizes = []

    monkeypatch.setattr(platform, "check_and_update_config", staticmethod(check_and_update_config))


def imported_by_registering() -> list[str]:
    """Modules that registration imports where vLLM is imported and nothing was built yet.

    What registration costs is what it imports; seconds would depend on the machine and its load. In a fork, so that
    this process stays without the plugin.
    """
    reading, writing = os.pipe()
    if os.fork() == 0:
        before = set(sys.modules)
        from vllm_aiter_mla import plugin

        plugin.register()
        os.write(writing, json.dumps(sorted(set(sys.modules) - before)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        modules: list[str] = json.load(answer)
    os.wait()
    return modules


def main(pickled: str) -> None:
    """Print ``observed`` of a flag-off config, a ``PassConfig`` unpickled here, and what registration imports."""
    from vllm.plugins import load_general_plugins

    imported = imported_by_registering()
    load_general_plugins()
    arrived = pickle.loads(base64.b64decode(pickled))
    report = {
        "plugin": "vllm_aiter_mla.plugin" in sys.modules,
        "observed": observed(modelless_config()),
        "arrived_type": f"{type(arrived).__module__}.{type(arrived).__qualname__}",
        "arrived": vars(arrived),
        "imported": imported,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])

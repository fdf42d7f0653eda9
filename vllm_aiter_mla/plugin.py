"""The entry point of ``vllm.general_plugins``: vLLM calls ``register()`` in every process, before any config exists."""

from __future__ import annotations

import logging
from typing import Any

from vllm_aiter_mla import __version__
from vllm_aiter_mla.compat import log, patches
from vllm_aiter_mla.compat.patches.patch import Calls

_registered = False


def register() -> None:
    """Make the flag known, hook the platform, define the torch ops. Idempotent, and never raises.

    The ops are defined whether or not the flag is on: a spawned worker that starts from a compiled artifact meets
    them in the artifact without ever configuring a pass. vLLM does not catch what a plugin raises, so a step that
    fails is reported once and vLLM runs unmodified.
    """
    global _registered
    if _registered:
        return
    _registered = True
    patches.run("torch ops", _register_ops)
    patches.apply_all(CALLS)
    _report(patches.failures())


def _gate(vllm_config: Any) -> None:
    try:
        from vllm_aiter_mla import gate
    except Exception as error:
        return _does_not_load(error)
    gate.apply(vllm_config)


def _attach(worker: Any) -> None:
    try:
        from vllm_aiter_mla import startup
    except Exception as error:
        return _does_not_load(error)
    startup.attach(worker)


def _does_not_load(error: Exception) -> None:
    """Say it. With the flag off it must not cost a server its start; with it on no kernel is checked, so none runs."""
    log.say_once(logging.ERROR, f"the plugin does not load, vLLM runs unmodified: {type(error).__name__}: {error}")


CALLS = Calls(gate=_gate, attach=_attach)
"""Imported at the call: a process that builds neither a config nor a worker needs neither module."""


def _register_ops() -> None:
    from vllm_aiter_mla.ops import register as define_ops

    define_ops()


def _report(failures: dict[str, patches.Failure]) -> None:
    if not failures:
        log.say_once(logging.DEBUG, f"{__version__} registered; off until it is switched on")
    for name, failure in failures.items():
        effect = "vLLM runs unmodified" if failure.required else "use additional_config.aiter_mla instead"
        log.say_once(logging.WARNING, f"{name} failed, {effect}: {failure.error}")

# SPDX-License-Identifier: Apache-2.0
"""The entry point of ``vllm.general_plugins``: vLLM calls ``register()`` in every process, before any config exists."""

import logging
from typing import Any

from vllm_aiter_mla import __version__
from vllm_aiter_mla.compat import log, patches

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
    patches.apply_all(apply_gate, attach)
    for name, error in patches.failures().items():
        optional = name in patches.OPTIONAL
        effect = "use additional_config.aiter_mla instead" if optional else "vLLM runs unmodified"
        log.say_once(logging.WARNING, f"{name} failed, {effect}: {error}")
    if not patches.failures():
        log.say_once(logging.DEBUG, f"{__version__} registered; off until it is switched on")


def apply_gate(vllm_config: Any) -> None:
    """Run the gate on a config. It is imported here, because not every process builds a config."""
    try:
        from vllm_aiter_mla import gate
    except Exception as error:
        return _does_not_load(error)
    gate.apply(vllm_config)


def attach(worker: Any) -> None:
    """Hand a new worker to the start-up code. It is imported here, because not every process builds a worker."""
    try:
        from vllm_aiter_mla import startup
    except Exception as error:
        return _does_not_load(error)
    startup.attach(worker)


def _does_not_load(error: Exception) -> None:
    """Log it. With the flag off this must not end a server; with the flag on no kernel is checked, so none runs."""
    log.say_once(logging.ERROR, f"the plugin does not load, vLLM runs unmodified: {type(error).__name__}: {error}")


def _register_ops() -> None:
    from vllm_aiter_mla.ops import register as define_ops

    define_ops()

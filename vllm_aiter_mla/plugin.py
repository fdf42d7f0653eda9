# SPDX-License-Identifier: Apache-2.0
"""The entry point of ``vllm.general_plugins``: vLLM calls ``register()`` in every process, before any config exists."""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from vllm_aiter_mla import __version__
from vllm_aiter_mla.compat import log, patches
from vllm_aiter_mla.settings import SettingsError

_registered = False  # of the process, as what is registered is: vLLM calls every time it loads plugins


def register() -> None:
    """Make the flag known and hook vLLM's configs and workers. Idempotent, and never raises.

    Every process of every server pays for this, so nothing else is imported or done. The gate and each worker's engine
    define the torch ops, where the flag is on. vLLM does not catch what a plugin raises, so a step that fails is
    reported once and vLLM runs unmodified.
    """
    global _registered
    if _registered:
        return
    _registered = True
    patches.apply_all(apply_gate, attach)
    for name, error in patches.failures().items():
        needed = name in patches.failures(needed=True)
        effect = "vLLM runs unmodified" if needed else "use additional_config.aiter_mla instead"
        log.say_once(logging.WARNING, f"{name} failed, {effect}: {error}")
    if not patches.failures():
        log.say_once(logging.DEBUG, f"{__version__} registered; off until it is switched on")


def _late(module: str, function: str) -> Callable[[Any], None]:
    """Return a function of ours whose module is imported when it is called: not every process needs it.

    It raises only what is meant for the user. vLLM calls it with the flag off too, so a module that does not load, or a
    vLLM that cannot be read, must not end a server. Where the flag is on, no kernel is checked then, so none runs.
    """

    def call(subject: Any) -> None:
        try:
            getattr(import_module(f"vllm_aiter_mla.{module}"), function)(subject)
        except SettingsError:  # an option is wrong, or strict mode ends the start
            raise
        except Exception as error:
            log.say_once(logging.ERROR, f"{module} failed, vLLM runs unmodified: {type(error).__name__}: {error}")

    return call


apply_gate, attach = _late("gate", "apply"), _late("engine", "attach")
"""Run the gate on a ``VllmConfig``; make the engine of a new worker."""

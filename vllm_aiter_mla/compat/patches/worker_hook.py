"""Two moments in a worker's life: after its weights are loaded, and after its warm-up.

vLLM tells plugins of neither. This file only calls; ``vllm_aiter_mla.worker`` decides what is done then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from vllm_aiter_mla.compat.patches.patch import Patch

_MARK = "_aiter_mla_worker_hook"

Attach = Callable[[Any], None]


def install_if_loaded(attach: Attach) -> None:
    """Install where vLLM's worker module is imported already; importing it for a run that is off would cost 0.6 s.

    vLLM loads plugins in the engine core and in each worker after that import; a process that holds both the front
    end and the engine loads them before it, and there the gate installs the hook when it engages.
    """
    if "vllm.v1.worker.worker_base" in sys.modules:
        install(attach)


def install(attach: Attach) -> None:
    """Wrap ``WorkerBase.__init__``: spawned workers load plugins when their wrapper is half built. Idempotent.

    Args:
        attach: called with each worker that is built from now on.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    inner = WorkerBase.__init__
    if getattr(inner, _MARK, False):
        return

    @wraps(inner)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        attach(self)

    setattr(init, _MARK, True)
    WorkerBase.__init__ = init  # type: ignore[method-assign]


def within(worker: Any, method: str, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Run each call of a method of this one worker inside ``context()``."""
    inner = getattr(worker, method)

    @wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return inner(*args, **kwargs)

    setattr(worker, method, call)


def after(worker: Any, method: str, then: Callable[[Any], None], failed: Callable[[Any], None] | None = None) -> None:
    """Call ``then(worker)`` after each call of a method of this one worker; what the method returns is returned.

    What ``then`` raises passes: a guard here could not know whether the fast path may go on without it. Where the
    method itself raises, ``failed(worker)`` is called instead, which must not raise.
    """
    inner = getattr(worker, method)

    @wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = inner(*args, **kwargs)
        except Exception:
            if failed is not None:
                failed(worker)
            raise
        then(worker)
        return result

    setattr(worker, method, call)


PATCH = Patch(
    name="worker_hook",
    what="WorkerBase.__init__, and load_model and compile_or_warm_up_model of workers whose fast path is on",
    why="kernels must be checked before the first capture and counted after warm-up; vLLM tells plugins of neither",
    how="the two methods of the instance are wrapped; with the flag off the worker is left as it is",
    link="https://docs.vllm.ai/en/latest/design/plugin_system/",
    probe="the status file line after warm-up; its absence shows",
    remove_when="vLLM calls plugins after a worker has loaded its weights and after its warm-up",
    apply=lambda calls: install_if_loaded(calls.attach),
    # Without it no kernel is checked, and no graph is rewritten.
    required=True,
)

"""Everything that this plugin changes in vLLM: one file per patch, listed here.

``apply_all`` is idempotent and never raises; what failed is kept, and the gate declines because of it. Importing this
package imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vllm_aiter_mla.compat.patches import gauge, pass_config, platform_hook, worker_hook
from vllm_aiter_mla.compat.patches.patch import Calls, Patch

PATCHES: tuple[Patch, ...] = (pass_config.PATCH, platform_hook.PATCH, worker_hook.PATCH, gauge.PATCH)


@dataclass(frozen=True)
class Failure:
    """A step of registration that raised: ``required`` ones make the gate decline."""

    error: str
    required: bool


_failed: dict[str, Failure] = {}


def apply_all(calls: Calls) -> None:
    """Apply every patch of the table. Twice is harmless."""
    for patch in PATCHES:
        run(f"patch {patch.name}", partial(patch.apply, calls), required=patch.required)


def run(name: str, step: Callable[[], None], required: bool = True) -> None:
    """Run one step of registration; an exception is kept under ``name`` instead of reaching vLLM."""
    _failed.pop(name, None)
    try:
        step()
    except Exception as error:
        _failed[name] = Failure(f"{type(error).__name__}: {error}", required)


def failures() -> dict[str, Failure]:
    """Every step that failed, by name."""
    return dict(_failed)


def failed_requirements() -> tuple[str, ...]:
    """The required steps that failed, each with its error."""
    return tuple(f"{name}: {failure.error}" for name, failure in _failed.items() if failure.required)

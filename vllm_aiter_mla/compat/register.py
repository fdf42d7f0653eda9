"""The register of patches: everything this plugin changes in vLLM, why, and when it can go.

``apply_all`` is idempotent and never raises; what failed is kept, and the gate declines because of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Patch:
    """One change to vLLM.

    Attributes:
        name: short, for logs.
        what: the thing changed.
        why: the symptom without it.
        how: the technique.
        link: upstream's code or issue.
        probe: what is checked before the patch counts as applied.
        remove_when: the condition under which it can be deleted.
        apply: does it; idempotent; raises on failure with vLLM as it was.
        required: without it the fast path cannot be switched on safely, and the gate declines.
    """

    name: str
    what: str
    why: str
    how: str
    link: str
    probe: str
    remove_when: str
    apply: Callable[[Calls], None]
    required: bool


@dataclass(frozen=True)
class Calls:
    """Whom the hooks call: given from above, because nothing in this room may know who decides.

    Attributes:
        gate: takes each ``VllmConfig`` that is built.
        attach: takes each worker that is built.
    """

    gate: Callable[[Any], None]
    attach: Callable[[Any], None]


def _extend_pass_config(calls: Calls) -> None:
    from vllm_aiter_mla.compat import pass_config

    pass_config.extend()


def _hook_platform(calls: Calls) -> None:
    from vllm_aiter_mla.compat import platform_hook

    platform_hook.install(calls.gate)


def _hook_worker(calls: Calls) -> None:
    from vllm_aiter_mla.compat import worker_hook

    worker_hook.install_if_loaded(calls.attach)


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="pass_config",
        what="vllm.config.PassConfig gains fuse_aiter_qk_rope_kvcache_mla and "
        "aiter_qk_rope_kvcache_fusion_max_token_num",
        why="PassConfig forbids unknown fields, so --compilation-config and -cc.pass_config.* reject the flag",
        how="fields added in place, validators rebuilt, __eq__, __repr__ and compute_hash wrapped",
        link="https://github.com/vllm-project/vllm/pull/41839",
        probe="a self-test right after: values, repr, ==, hash, wrong values; undone when it fails",
        remove_when="upstream has the fields (they are then left alone), or offers pass options to plugins",
        apply=_extend_pass_config,
        # additional_config still works without it.
        required=False,
    ),
    Patch(
        name="platform_hook",
        what="apply_config_platform_defaults and check_and_update_config of the current platform's class",
        why="vLLM has no plugin hook between its defaults and the compile ranges",
        how="classmethods wrapped; nested wrappers run the gate once, outermost",
        link="https://docs.vllm.ai/en/latest/design/plugin_system/",
        probe="surface.missing_capabilities() looks for both methods",
        remove_when="vLLM calls plugins while it builds a VllmConfig",
        apply=_hook_platform,
        required=True,
    ),
    Patch(
        name="worker_hook",
        what="WorkerBase.__init__, and load_model and compile_or_warm_up_model of workers whose fast path is on",
        why="kernels must be checked before the first capture and counted after warm-up; vLLM tells plugins of neither",
        how="the two methods of the instance are wrapped; with the flag off the worker is left as it is",
        link="https://docs.vllm.ai/en/latest/design/plugin_system/",
        probe="the census line after warm-up; its absence shows",
        remove_when="vLLM calls plugins after a worker has loaded its weights and after its warm-up",
        apply=_hook_worker,
        # Without it the fast path is right but unchecked and unannounced.
        required=True,
    ),
    Patch(
        name="gauge",
        what="PrometheusStatLogger.__init__, in front ends whose fast path is on",
        why="the gauge vllm:aiter_mla_layers has to live in vLLM's own registry, and vLLM offers plugins none",
        how="wrapped when vLLM imports the module; the gate installs it, never registration",
        link="https://docs.vllm.ai/en/latest/design/metrics/",
        probe="test_gauge_hook_fits_the_installed_vllm",
        remove_when="vLLM lets plugins add metrics",
        apply=lambda calls: None,
        required=False,
    ),
)


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
    """Names of the required steps that failed."""
    return tuple(name for name, failure in _failed.items() if failure.required)

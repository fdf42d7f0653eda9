# SPDX-License-Identifier: Apache-2.0
"""Known issues of other code in the server: AITER's kernels and collectives, vLLM's graphs, sleep mode and connectors.

A plan lists those that concern its shape and its versions.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from vllm_aiter_mla import files
from vllm_aiter_mla.commands.compat.vllm_options import USE_AITER
from vllm_aiter_mla.commands.plan.record import KnownIssue, Plan

KNOWN_ISSUES = Path(__file__).parent / "known_issues.json"


def with_known_issues(plan: Plan) -> Plan:
    """Return the plan with the known issues that concern it."""
    entries = json.loads(KNOWN_ISSUES.read_text(encoding="utf-8")) if no_shape_reason(plan) is None else ()
    matching = (issue for issue in entries if applies(issue, plan))
    return replace(plan, known_issues=tuple(
        KnownIssue(**{name: issue[name] for name in ("id", "effect", "state", "remedy", "link")}) for issue in matching
    ))  # fmt: skip


def no_shape_reason(plan: Plan) -> str | None:
    """Return why the plan has no layer shape, or None if it has one. Known issues are looked up by shape."""
    if plan.model.kinds:
        return None if plan.absorb_weight else "the format of the absorb weights is not known"
    is_without_mla = not plan.layers.mla and plan.outcome != "unknown"
    return "the model has no MLA layer" if is_without_mla else "the plan is not known"


def applies(issue: Mapping[str, Any], plan: Plan) -> bool:
    """Return whether a known issue concerns a plan. A condition on an unknown fact counts as met.

    AITER's release is unknown if AITER is not installed here, or if its release cannot be read.
    """
    if any(not issue[name][0] <= value <= issue[name][1] for name, value in _numbers(plan).items() if name in issue):
        return False
    releases = {"vllm": plan.vllm, "aiter": files.stamp("plan").aiter}
    if any(not _is_within(issue[name], release) for name, release in releases.items() if name in issue):
        return False
    return all(CONDITIONS[name](issue[name], plan) for name in issue if name in CONDITIONS)


def _is_on(name: str, plan: Plan) -> bool:
    return plan.environment[name][0].lower() in ("1", "true")


def _numbers(plan: Plan) -> dict[str, int]:
    """Return what an issue may bound: the heads of a rank, a request's rows in a decode step, and the ranks."""
    return {"heads": plan.heads_per_rank, "rows": 1 + plan.options.num_drafts, "tp": plan.options.tp}


CONDITIONS: dict[str, Callable[[Any, Plan], bool]] = {
    "except": lambda numbers, plan: not numbers.items() <= _numbers(plan).items(),
    "arch": lambda cards, plan: plan.arch in cards,
    "cache": lambda cache, plan: cache in ("any", "fp8" if plan.has_fp8_cache else "16 bits"),
    "switch": lambda name, plan: all(_is_on(each, plan) for each in (USE_AITER, name)),
    "graphs": lambda _, plan: not plan.captures.full,
    "absorb": lambda formats, plan: any(weight in formats for weight in plan.absorb_weights or (plan.absorb_weight,)),
    "nope": lambda _, plan: any(kind.nope & (kind.nope - 1) for kind in plan.model.kinds),
    "v": lambda bounds, plan: any(bounds[0] <= kind.v <= bounds[1] for kind in plan.model.kinds),
    "dtype": lambda dtype, plan: plan.options.dtype == dtype,
    "backend": lambda names, plan: plan.options.attention in ("", *names),
    "connector": lambda name, plan: name in plan.options.connectors,
    "layerwise": lambda expected, plan: plan.options.layerwise is expected,
    "sleep": lambda _, plan: plan.options.sleep,
}
"""Conditions of an issue besides its bounds, by key. "except": a shape within the bounds that does not have the issue.
"switch": one of vLLM's for a part of AITER, which counts where AITER is on. "nope": a width that is not a power of two.
"graphs": no full graphs. "backend": vLLM's attention back ends that call the kernel. "layerwise": whether a connector
prevents full graphs."""


def _is_within(bounds: tuple[str | None, str | None], release: str | None) -> bool:
    """Return whether a release is at or after the first bound, and before the second. An unknown release is.

    A build before a release has that release's faults, and perhaps not yet its fixes.
    """
    version = _release_version(release)
    if version is None:
        return True
    start, end = map(_release_version, bounds)
    latest = version
    if version.is_prerelease:
        post = "" if version.post is None else f".post{version.post}"
        latest = max(version, Version(f"{version.base_version}{post}"))
    return (start is None or start <= latest) and (end is None or version < end)


def _release_version(release: str | None) -> Version | None:
    """Return a release without its local part, or None. A build from a shallow checkout has no release, for example."""
    try:
        version = Version((release or "").partition("+")[0])
    except InvalidVersion:
        return None
    return None if version.is_devrelease and version.release <= (0, 1) else version

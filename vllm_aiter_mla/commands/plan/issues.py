# SPDX-License-Identifier: Apache-2.0
"""Known faults of what runs beside the plugin: AITER's kernels and collectives, vLLM's graphs, sleep and connectors.
``check`` says which ones concern a shape.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from vllm_aiter_mla import files
from vllm_aiter_mla.commands.plan.record import KnownIssue, Plan

KNOWN_ISSUES = Path(__file__).parent / "known_issues.json"


def with_known_issues(plan: Plan) -> Plan:
    """Return the plan with the known issues that concern it."""
    known = json.loads(KNOWN_ISSUES.read_text(encoding="utf-8")) if why_no_shape(plan) is None else ()
    concerned = (issue for issue in known if applies(issue, plan))
    return replace(plan, known_issues=tuple(
        KnownIssue(**{name: issue[name] for name in ("id", "effect", "state", "remedy", "link")}) for issue in concerned
    ))  # fmt: skip


def why_no_shape(plan: Plan) -> str | None:
    """Return why no layer's shape was planned, or None if one was: without it known issues cannot be looked up."""
    if plan.model.kinds:
        return None if plan.absorb_weight else "the format of the absorb weights is not known"
    is_without_mla = not plan.layers.mla and plan.outcome != "unknown"
    return "the model has no MLA layer" if is_without_mla else "the plan is not known"


def applies(issue: Mapping[str, Any], plan: Plan) -> bool:
    """Return whether a known issue is of the shape that was planned; what is not known counts as concerned.

    So does an AITER that is not installed here, or does not tell its release.
    """
    options = plan.options
    numbers = {"heads": plan.heads_per_rank, "rows": 1 + (options.num_drafts or 0), "tp": options.tp}
    if any(not issue[name][0] <= value <= issue[name][1] for name, value in numbers.items() if name in issue):
        return False
    releases = {"vllm": plan.vllm, "aiter": files.stamp("plan").aiter}
    if any(not _within(issue[name], release) for name, release in releases.items() if name in issue):
        return False
    return all(FIELDS[name](issue[name], plan) for name in issue if name in FIELDS)


FIELDS: dict[str, Callable[[Any, Plan], bool]] = {
    "arch": lambda cards, plan: plan.arch in cards,
    "cache": lambda cache, plan: cache in ("any", "fp8" if plan.has_fp8_cache else "16 bits"),
    "switch": lambda name, plan: plan.environment[name][0].lower() in ("1", "true"),
    "graphs": lambda _, plan: not plan.captures.full,
    "absorb": lambda formats, plan: any(weight in formats for weight in plan.absorb_weights or (plan.absorb_weight,)),
    "nope": lambda _, plan: any(kind.nope & (kind.nope - 1) for kind in plan.model.kinds),
    "v": lambda bounds, plan: any(bounds[0] <= kind.v <= bounds[1] for kind in plan.model.kinds),
    "dtype": lambda dtype, plan: plan.options.dtype == dtype,
    "backend": lambda names, plan: plan.options.attention in ("", *names),
    "connector": lambda name, plan: name in plan.options.connectors,
    "layerwise": lambda wanted, plan: plan.options.layerwise is wanted,
    "sleep": lambda _, plan: plan.options.sleep,
}
"""What an entry may say besides its bounds. "nope": a width that is no power of two. "graphs": no full graphs.
"backend": vLLM's attention back ends that call the kernel. "layerwise": whether a connector takes them."""


def _within(bounds: tuple[str | None, str | None], release: str | None) -> bool:
    """Return whether a release lies from the first bound to before the second; an unknown one does.

    A build before a release has that release's faults, and perhaps not yet its fixes.
    """
    version = _version(release)
    if version is None:
        return True
    first, before = map(_version, bounds)
    latest = version
    if version.is_prerelease:
        post = "" if version.post is None else f".post{version.post}"
        latest = max(version, Version(f"{version.base_version}{post}"))
    return (first is None or first <= latest) and (before is None or version < before)


def _version(release: str | None) -> Version | None:
    """Return a release without its local part, None if it is not known, as of a build from a shallow checkout."""
    try:
        version = Version((release or "").partition("+")[0])
    except InvalidVersion:
        return None
    return None if version.is_devrelease and version.release <= (0, 1) else version

"""The known issues outside the plugin: each is found for its shapes and versions, and for no others."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import plans
from vllm_aiter_mla.commands.compat.vllm_options import CUSTOM_AR, USE_AITER
from vllm_aiter_mla.commands.plan import issues
from vllm_aiter_mla.commands.plan.record import Plan

ISSUES = {issue["id"]: issue for issue in json.loads(issues.KNOWN_ISSUES.read_text(encoding="utf-8"))}
made_up = functools.cache(plans.made_up)
BOUNDS = ("heads", "rows", "tp", "v", "vllm", "aiter")
"""Fields with a first and a last value, or a first release and the one that mends it."""


def of(
    heads: int = 16, rows: int = 1, cache: str = "auto", arch: str = "gfx942", vllm: str = "0.33.0", tp: int = 4,
    nope: int = 128, v: int = 128, absorb: str = "plain", graphs: tuple[int, ...] = (1, 2), switch: str = "1",
    **options: Any,
) -> Plan:  # fmt: skip
    """A plan of 61 layers alike, of which no known issue is one, but for what is given."""
    plan = made_up(f"{CUSTOM_AR}={switch}")
    (kind,) = plan.model.kinds
    return replace(
        plan, arch=arch, vllm=vllm, heads_per_rank=heads, absorb_weight=absorb, absorb_weights={absorb: 61},
        model=replace(plan.model, kinds=(replace(kind, nope=nope, v=v),)),
        options=replace(
            plan.options, tp=tp, num_drafts=rows - 1, kv_cache_dtype=cache, attention="ROCM_AITER_MLA", **options
        ),
        captures=replace(plan.captures, within_limit=(1, 2), full=graphs),
    )  # fmt: skip


def an_issues_own(issue: dict[str, Any]) -> dict[str, Any]:
    """What ``of`` takes to be of the issue, without the issue's bounds."""
    named = {
        "cache": {"fp8": "fp8", "16 bits": "auto", "any": "auto"}.get, "arch": lambda cards: cards[0],
        "absorb": lambda formats: formats[0], "dtype": str, "sleep": bool, "layerwise": bool,
    }  # fmt: skip
    found = {name: make(issue[name]) for name, make in named.items() if name in issue}
    found |= {"nope": 192} if "nope" in issue else {}
    found |= {"graphs": ()} if "graphs" in issue else {}
    return found | ({"connectors": (issue["connector"],)} if "connector" in issue else {})


OTHERWISE: dict[str, dict[str, Any]] = {
    "absorb": {"absorb": "plain"}, "nope": {"nope": 256}, "dtype": {"dtype": "bfloat16"}, "sleep": {"sleep": False},
    "connector": {"connectors": ("NixlConnector",)}, "graphs": {"graphs": (1, 2)}, "switch": {"switch": "0"},
    "backend": {"attention": "TRITON_MLA"},
}  # fmt: skip
"""By field of an issue, what is not of it."""


def otherwise(issue: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By field of the issue, what changes a plan of it into one that is not."""
    found = {name: change for name, change in OTHERWISE.items() if name in issue}
    found |= {"layerwise": {"layerwise": not issue["layerwise"]}} if "layerwise" in issue else {}
    found |= {"except": issue["except"]} if "except" in issue else {}
    found |= {"cache": {"cache": "auto" if issue["cache"] == "fp8" else "fp8"}} if issue["cache"] != "any" else {}
    cards = {"gfx942", "gfx950"} - set(issue["arch"])
    return found | ({"arch": {"arch": cards.pop()}} if cards else {})


def applies(issue: dict[str, Any], aiter: str | None = None, **shape: Any) -> bool:
    attention = shape.pop("attention", "ROCM_AITER_MLA")
    plan = of(**shape)
    plan = replace(plan, options=replace(plan.options, attention=attention))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(issues.files, "stamp", lambda *_: SimpleNamespace(aiter=aiter))
        return issues.applies(issue, plan)


@pytest.mark.parametrize("issue", ISSUES.values(), ids=ISSUES)
def test_field_known_issues_each_is_met_by_a_shape_and_missed_by_one_for_each_field(issue: dict[str, Any]) -> None:
    inside = an_issues_own(issue) | {name: issue[name][0] for name in ("heads", "rows", "tp", "v") if name in issue}
    inside["vllm"] = "dev"
    assert applies(issue, **inside), "of no known release"
    missed = {name: applies(issue, **inside | change) for name, change in otherwise(issue).items()}
    for name in ("heads", "rows", "tp", "v"):
        first, last = issue.get(name, (1, None))
        assert last is None or applies(issue, **inside | {name: last}), name
        missed |= {
            f"{name} {one}": applies(issue, **inside | {name: one})
            for one in (first - 1, (last or 0) + 1)
            if last and one
        }
    assert [name for name, found in missed.items() if found] == []
    known = {*issues.CONDITIONS, *BOUNDS, "id", "link", "effect", "state", "remedy"}
    assert set(issue) <= known, "a field that nobody reads"


@pytest.mark.parametrize(
    ("name", "release", "concerned"),
    [
        ("vllm#46997", "0.1.16.post2", True), ("vllm#46997", "0.1.24.post1", False), ("vllm#46997", None, True),
        ("aiter#4181", "0.1.20.post1", True), ("aiter#4181", "0.1.23", False), ("aiter#4181", None, True),
        ("aiter#3737", "0.1.14.post1", True), ("aiter#3737", "0.1.15", False),
        ("aiter#4452", "0.1.19.post1", True), ("aiter#4452", "0.1.19.post2", False),
        ("aiter#4363", "0.1.17", False), ("aiter#4363", "0.1.18", True),
    ],
)  # fmt: skip
def test_field_known_issues_of_some_aiters_are_found_by_the_installed_one(
    name: str, release: str | None, concerned: bool
) -> None:
    issue = ISSUES[name]
    shape = an_issues_own(issue) | {one: issue[one][0] for one in ("heads", "rows", "v") if one in issue}
    assert applies(issue, release, **shape) is concerned


@pytest.mark.parametrize(("release", "concerned"), [("0.31.0", True), ("0.32.0+cpu", False), ("dev", True)])
def test_field_known_issues_of_some_vllms_are_found_by_the_planned_one(release: str, concerned: bool) -> None:
    assert applies(ISSUES["vllm#51011"], heads=8, cache="fp8", vllm=release) is concerned


@pytest.mark.parametrize(
    ("shape", "concerned"),
    [
        ({}, set()),
        ({"rows": 5}, {"vllm#55609"}),
        ({"rows": 8, "cache": "bfloat16"}, {"vllm#55609", "aiter#5679"}),
        ({"heads": 64, "cache": "fp8"}, {"aiter#4363"}),
        ({"tp": 8}, {"aiter#4888"}),
        ({"arch": "gfx950", "rows": 2, "cache": "fp8"}, {"aiter#3013", "aiter#4452"}),
        ({"arch": "gfx950"}, {"aiter#5765"}),
        ({"arch": "gfx950", "heads": 64}, set()),
        ({"arch": "gfx950", "heads": 64, "rows": 2}, {"aiter#5765"}),
        ({"arch": "gfx950", "nope": 192, "v": 256, "absorb": "mxfp4", "cache": "fp8"},
         {"aiter#4452", "aiter#4181", "aiter#3737"}),
        ({"absorb": "fp8", "dtype": "float16"}, {"vllm#22759"}),
        ({"rows": 2, "sleep": True}, {"vllm#52479"}),
        ({"connectors": ("MultiConnector", "MoRIIOConnector")}, {"vllm#45749"}),
        ({"graphs": ()}, {"vllm#51171"}),
        ({"graphs": (), "layerwise": True, "connectors": ("LMCacheConnectorV1",)}, {"vllm#31057"}),
    ],
)  # fmt: skip
def test_field_known_issues_of_a_shape_are_these(shape: dict[str, Any], concerned: set[str]) -> None:
    assert {name for name, issue in ISSUES.items() if applies(issue, **shape)} == concerned


def test_a_part_of_aiters_is_no_issue_where_aiter_is_off() -> None:
    """vLLM's switch for its all-reduce counts only where AITER is on."""
    (issue,) = (issue for issue in ISSUES.values() if issue.get("switch") == CUSTOM_AR)
    plan = of(tp=8)
    assert issues.applies(issue, plan)
    off = replace(plan, environment=plan.environment | {USE_AITER: ("0", "--env")})
    assert not issues.applies(issue, off)


@pytest.mark.mutation
@pytest.mark.parametrize("field", issues.CONDITIONS)
def test_mutation_known_issues_whose_field_nobody_reads_are_caught(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    concerned = next(
        issue for issue in ISSUES.values() if field in (*otherwise(issue), *(("v",) if "v" in issue else ()))
    )
    monkeypatch.setitem(issues.CONDITIONS, field, lambda *_: True)
    with pytest.raises(AssertionError, match=field):
        test_field_known_issues_each_is_met_by_a_shape_and_missed_by_one_for_each_field(concerned)


DEV_BUILDS: dict[str, dict[tuple[str | None, str | None], bool]] = {
    "0.32.0rc1": {(None, "0.32"): True, ("0.32", None): True, (None, "0.31"): False, ("0.33", None): False},
    "0.32.0.dev7+g1234abc": {(None, "0.32"): True, ("0.32.0", "0.33"): True},
    "0.1.17.dev3": {("0.1.16.post2", "0.1.17"): True, ("0.1.18", None): False},
    "0.1.16.post2.dev3+gabc": {("0.1.16.post2", "0.1.17"): True, ("0.1.17", None): False},
    "0.1.16.post2": {("0.1.16.post2", "0.1.17"): True, (None, "0.1.16"): False},
    "0.1.dev1+g1234abc": {("0.1.18", None): True, (None, "0.32"): True},
    "0.32.1+rocm700": {(None, "0.32.1"): False, ("0.32.1", None): True},
}
"""Whether a known issue that has these bounds is one of the build."""


@pytest.mark.parametrize("build", DEV_BUILDS)
def test_dev_builds_have_the_known_issues_of_their_release_until_it_is_out(build: str) -> None:
    assert {bounds: issues._is_within(bounds, build) for bounds in DEV_BUILDS[build]} == DEV_BUILDS[build]


@pytest.mark.mutation
def test_mutation_dev_builds_ordered_by_their_numbers_alone_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second number of a candidate put it after the release that mends the fault."""

    def within(bounds: tuple[str | None, str | None], release: str) -> bool:
        (first, before), found = map(numbers, bounds), numbers(release)
        return (not first or first <= found) and (not before or found < before)

    def numbers(release: str | None) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", (release or "").partition("+")[0])))

    monkeypatch.setattr(issues, "_is_within", within)
    for candidate in ("0.32.0rc1", "0.32.0.dev7+g1234abc", "0.1.dev1+g1234abc"):
        with pytest.raises(AssertionError, match="False"):
            test_dev_builds_have_the_known_issues_of_their_release_until_it_is_out(candidate)

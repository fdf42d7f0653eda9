"""Every reason against the fast path, from the views that vLLM's finished objects gave.

Admission answers with its first reason. A user wants all of them, so each is noted, taken out of the view, and the
question is put again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from vllm_aiter_mla.admission import LEVELS, ConfigView, LayerView, Skip, admit_config, admit_layer

# What the matcher says of a layer without RoPE (passes/match.py): it reads graphs, and a plan has none.
NO_ROPE = ("no_rope", "no rotary embedding is applied to q (a NoPE layer, or outside this graph)")
ENGAGED, SOME, SKIPPED, UNKNOWN = "engaged", "some", "skipped", "unknown"


def engine_reasons(answer: dict[str, Any]) -> list[Skip]:
    """Return every reason for which no layer would engage, in the order in which they would stop the fast path."""
    found, engine = [], answer.get("engine")
    failed = answer.get("failed")
    if failed:
        found.append(Skip("vllm_refuses" if failed["wrong"] else "not_known", failed["said"]))
    if engine:
        found += all_reasons(config_view(engine), admit_config)
        found += [Skip("user_pass", engine["user_pass"])] if engine["user_pass"] else []
        if not engine["gate"] and not found:
            found.append(Skip("not_known", "the gate switched the fast path off; -v shows its line"))
    return found


def layer_reasons(layer: dict[str, Any]) -> list[Skip]:
    """Return every reason against one layer."""
    found = all_reasons(layer_view(layer), admit_layer)
    return found if layer["has_rope"] else [*found, Skip(*NO_ROPE)]


def config_view(engine: dict[str, Any]) -> ConfigView:
    """Return what the gate read of the finished config."""
    return ConfigView(**_hashable(engine["view"]))


def layer_view(layer: dict[str, Any]) -> LayerView:
    """Return what the plugin reads of a layer."""
    view = _hashable(layer["view"])
    return LayerView(**view | {"known_impls": frozenset(view["known_impls"])})


def level(code: str) -> str:
    """Return who skips: "engine", "layer", "graph" or "kernel"."""
    return next(name for name, codes in LEVELS.items() if code in codes)


def of(reasons: list[Skip], engaged: int, total: int) -> str:
    """Return the outcome of a plan in one word."""
    codes = {reason.code for reason in reasons}
    if total and engaged == total:
        return ENGAGED
    if "not_known" in codes and not any(level(code) == "engine" for code in codes - {"not_known"}):
        return UNKNOWN
    return SOME if engaged else SKIPPED


def all_reasons(view: Any, admit: Callable[[Any], Skip | None]) -> list[Skip]:
    """Return every skip of the view: each cause is put back to its default, and the question is asked again."""
    found = []
    while (skip := admit(view)) is not None:
        found.append(skip)
        view = replace(view, **_cause(view, admit, skip.code))
    return found


def _cause(view: Any, admit: Callable[[Any], Skip | None], code: str) -> dict[str, Any]:
    """Return the field that a skip comes from, with its default: the defaults describe what is admitted.

    It is the last of the fields that must go, in their order, before the answer is another one.
    """
    for item in fields(view):
        view = replace(view, **{item.name: item.default})
        skip = admit(view)
        if skip is None or skip.code != code:
            # Whichever of the two goes last set the mode, which would be one more reason.
            breakable = item.name == "breakable_cudagraph"
            sets_mode = breakable or (item.name == "enforce_eager" and not view.breakable_cudagraph)
            return {item.name: item.default} | ({"mode": ConfigView.mode} if sets_mode else {})
    raise AssertionError(f"a view of defaults is skipped: {code}")


def _hashable(view: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in view.items()}

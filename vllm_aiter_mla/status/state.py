"""The status file of this process: each MLA layer's status line, counted by the ops themselves.

A warm start loads a compiled artifact and never runs a pass, so a pass cannot be what counts. Skips are known to
the passes only; they are noted when a graph is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Status:
    """Status lines by layer name.

    Attributes:
        engaged: layers whose fused op has run, with the kernel that ran.
        refused: layers that the passes left alone, with (code, reason).
        partial: layers that keep a part of the passes, with (code, reason).
        measured: per layer shape what was timed at start-up and chosen: "shape" in words, "layers" by name, "chosen" as
            [first, last, kernel] in tokens, "us" a layer by token count and candidate.
        compiled: what the passes did in each compile range, over all graphs of it, as "start-end" -> counts by pass.
    """

    engaged: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, tuple[str, str]] = field(default_factory=dict)
    partial: dict[str, tuple[str, str]] = field(default_factory=dict)
    compiled: dict[str, dict[str, int]] = field(default_factory=dict)
    measured: list[dict[str, Any]] = field(default_factory=list)


_status = Status()


def current() -> Status:
    """The status file of this process."""
    return _status


def engage(layer_name: str, kernel: str) -> None:
    """Note that the fused op of a layer ran with ``kernel``. Cheap enough for every call."""
    if _status.engaged.get(layer_name) != kernel:
        _status.engaged[layer_name] = kernel


def refuse(layer_name: str, code: str, reason: str) -> None:
    """Note that a layer is left to vLLM."""
    _status.skipped[layer_name] = (code, reason)


def keep_partial(layer_name: str, code: str, reason: str) -> None:
    """Note that a layer keeps a part of the passes: the first, or with ``debug.stop_after`` two."""
    _status.partial[layer_name] = (code, reason)


def measure(shape: dict[str, Any]) -> None:
    """Note what was timed and chosen for one layer shape."""
    _status.measured.append(shape)


def count(compile_range: str, counts: dict[str, int]) -> None:
    """Note what the passes did to one graph of a range; a draft model brings a second graph for the same range."""
    known = _status.compiled.setdefault(compile_range, {})
    for name, number in counts.items():
        known[name] = known.get(name, 0) + number


def reset() -> None:
    """Forget everything: one process may build several engines, one after the other."""
    for outcomes in (_status.engaged, _status.skipped, _status.partial, _status.compiled, _status.measured):
        outcomes.clear()

#!/usr/bin/env python
"""Count the kernels of MLA query preparation and KV write, per layer and decode step, in recorded traces.

Reads Chrome traces (JSON, also gzipped) of torch.profiler and of rocprof's ``--hip-trace``. Give one trace, or one with
the fast path off and one with it on to see both side by side:

    python tools/trace_census.py off.json.gz on.json.gz
    python tools/trace_census.py on.json --steps 6 --json
    python tools/trace_census.py on.json --step-marker 'execute_model' --pattern 'concat=my_concat_kernel'

In a decode step every MLA layer writes its KV rows exactly once, so the KV writes count layers times steps: nothing
else has to be known. Take the trace of decode steps alone; a prefill in it counts as one more step. The absorb BMM is
not counted, because its kernels carry a GEMM's name. Concat, quantisation and RoPE kernels of other parts of the model
may carry the same names as these: compare two traces of the same run. Durations are the profiler's.

Exit status 0; 1 when a trace holds no KV write, which is said; 2 when a file is no trace or an argument is wrong.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import common
from tools.common import Parser, UsageError, guarded, visible

# Role -> kernel names, first match wins. AITER's op "fused_..." launches kernels "fuse_...". Others as PRs
# vllm-project/vllm#57452, #57640 and #55230 show them in traces, and this plugin's own; a CPU trace has the ops' names.
ROLES = {
    "fused": r"fused?_qk_rope_concat_and_cache_mla|decode_prep_kernel",
    "rope + kv": r"concat_and_cache_mla_rope_fused|rope_kv_kernel",
    "kv write": r"concat_and_cache_mla|unified_mla_kv_cache_update",
    "concat + quant": r"triton_\w*fused\w*_cat\w*(clamp|quant|fp8|reciprocal)|concat_quant",
    "concat": r"CatArrayBatchedCopy|triton_\w*fused\w*_cat|aten::cat$",
    "quant": r"scaled_quant_kernel|static_scaled_fp8_quant|scaled_fp8_quant",
    "rope": r"rotary_embedding|\brope|_rope_",
}
WRITES = ("fused", "rope + kv", "kv write")
GPU_PROCESS = re.compile(r"\bGPU")
COPIES = re.compile(r"mem(cpy|set)|^Copy(Host|Device)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Event:
    """One kernel or op: its name, start and duration in microseconds, and the row of the trace it stands in."""

    name: str
    start: float
    duration: float
    row: tuple[Any, Any]

    @property
    def end(self) -> float:
        """When it ended."""
        return self.start + self.duration


@dataclass
class Census:
    """What a trace holds.

    Attributes:
        trace: file name.
        kind: "kernels" or, in a trace without a GPU, "CPU ops".
        counts: by role.
        microseconds: summed durations by role.
        steps: as given or marked, else None.
        others: kernels or ops without a role.
    """

    trace: str
    kind: str
    counts: dict[str, int] = field(default_factory=dict)
    microseconds: dict[str, float] = field(default_factory=dict)
    steps: int | None = None
    others: int = 0

    @property
    def writes(self) -> int:
        """KV writes: layers times steps."""
        return sum(self.counts.get(role, 0) for role in WRITES)

    @property
    def layers(self) -> float | None:
        """MLA layers, where the number of steps is known."""
        return self.writes / self.steps if self.steps else None

    def as_record(self) -> dict[str, Any]:
        """For ``--json``: the fields, and each role's figures per layer and step."""
        per = self.writes or 1
        return {
            **asdict(self),
            "kv_writes": self.writes,
            "layers": self.layers,
            "per_layer_and_step": {role: round(count / per, 4) for role, count in self.counts.items()},
            "microseconds_per_layer_and_step": {role: round(t / per, 3) for role, t in self.microseconds.items()},
            "launches_per_layer_and_step": round(sum(self.counts.values()) / per, 4),
            "fused_share": round(self.counts.get("fused", 0) / per, 4),
        }


def read(path: Path) -> list[dict[str, Any]]:
    """The complete events of a Chrome trace, and its metadata events.

    Raises:
        UsageError: unreadable, not JSON, or without ``traceEvents``.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        content = json.loads(raw)
    # zlib's error is none of the others, and JSON may be nested deeper than Python goes.
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise UsageError(f"{path}: not a readable JSON trace: {error}") from error
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise UsageError(f"{path}: no traceEvents; a Chrome trace is expected (rocprofv3's own JSON is none)")
    return [event for event in events if isinstance(event, dict) and event.get("ph") in ("X", "M")]


def kernels(events: list[dict[str, Any]]) -> tuple[str, list[Event]]:
    """The GPU's kernels; in a trace without a GPU the CPU's ops."""
    complete = [event for event in events if event["ph"] == "X"]
    found = [event for event in complete if event.get("cat") == "kernel"]
    if not found:
        gpus = {str(event.get("pid")) for event in events if event["ph"] == "M" and _names_gpu(event)}
        found = [event for event in complete if str(event.get("pid")) in gpus and not COPIES.search(_name(event))]
    if found:
        return "kernels", [_event(event) for event in found]
    return "CPU ops", [_event(event) for event in complete if event.get("cat") == "cpu_op"]


def steps_marked(events: list[dict[str, Any]], marker: str) -> list[Event]:
    """Annotations whose name matches; those on the GPU's timeline where there are any."""
    pattern = re.compile(marker)
    named = [event for event in events if event["ph"] == "X" and pattern.search(_name(event))]
    for category in ("gpu_user_annotation", "user_annotation"):
        found = [_event(event) for event in named if event.get("cat") == category]
        if found:
            return found
    return []


def count(path: Path, patterns: dict[str, str] = ROLES, steps: int | None = None, marker: str | None = None) -> Census:
    """The census of one trace; with ``marker`` only what starts inside a marked step counts.

    Raises:
        UsageError: no trace, an event without a usable time, or none that the marker matches.
    """
    events = read(path)
    try:
        kind, found = kernels(events)
        marks = None if marker is None else steps_marked(events, marker)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    if marks is not None:
        if not marks:
            raise UsageError(f"{path}: no annotation matches --step-marker {marker!r}")
        steps = len(marks)
        found = [event for event in found if any(mark.start <= event.start < mark.end for mark in marks)]
    census = Census(path.name, kind, steps=steps)
    compiled = {role: re.compile(pattern) for role, pattern in patterns.items()}
    for role, event in _with_roles(found, compiled):
        if role is None:
            census.others += 1
            continue
        census.counts[role] = census.counts.get(role, 0) + 1
        census.microseconds[role] = census.microseconds.get(role, 0.0) + event.duration
    return census


def _with_roles(events: Iterable[Event], patterns: dict[str, re.Pattern[str]]) -> Iterator[tuple[str | None, Event]]:
    """Each event with its role; an op inside another op that has a role is part of that one and left out."""
    covered: dict[tuple[Any, Any], float] = {}
    for event in sorted(events, key=lambda event: (event.start, -event.duration)):
        if event.end <= covered.get(event.row, float("-inf")):
            continue
        role = next((role for role, pattern in patterns.items() if pattern.search(event.name)), None)
        if role is not None:
            covered[event.row] = event.end
        yield role, event


def _event(event: dict[str, Any]) -> Event:
    start, duration = _time(event, "ts"), _time(event, "dur")
    return Event(_name(event), start, duration, (str(event.get("pid")), str(event.get("tid"))))


def _name(event: dict[str, Any]) -> str:
    return str(event.get("name", ""))


def _time(event: dict[str, Any], key: str) -> float:
    value = event.get(key, 0)
    try:
        # rocprof writes its numbers as text.
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"the event {_name(event)!r} has {key}={value!r}: a number of microseconds expected")
    return number


def _names_gpu(event: dict[str, Any]) -> bool:
    named = event.get("name") == "process_name"
    given = event.get("args")
    return named and isinstance(given, dict) and bool(GPU_PROCESS.search(str(given.get("name", ""))))


def table(found: list[Census]) -> str:
    """Markdown: kernels, and microseconds, per layer and step."""
    roles = [role for role in ROLES if any(census.counts.get(role) for census in found)]
    rows = [[role, *(_cell(census, role) for census in found)] for role in roles]
    rows.append(["**launches**", *(f"{census.as_record()['launches_per_layer_and_step']:.2f}" for census in found)])
    rows.append(["**fused**", *(f"{census.counts.get('fused', 0)} of {census.writes} writes" for census in found)])
    lines = common.table(["per layer and step", *(census.trace for census in found)], rows, "---")
    return "\n".join([*lines, "", *(visible(_about(census)) for census in found)])


def _cell(census: Census, role: str) -> str:
    record = census.as_record()
    if role not in census.counts:
        return "0"
    return f"{record['per_layer_and_step'][role]:.2f} ({record['microseconds_per_layer_and_step'][role]:.2f} us)"


def _about(census: Census) -> str:
    layers = "" if census.layers is None else f" = {census.layers:g} layers x {census.steps} steps"
    return f"{census.trace}: {census.kind}, {census.writes} KV writes{layers}, {census.others} others not counted"


def run(argv: Sequence[str]) -> int:
    """Count, print, and return the exit status."""
    given = read_options(argv)
    found = [count(path, given.patterns, given.steps, given.step_marker) for path in given.traces]
    record = {"tool": "trace_census", "traces": [census.as_record() for census in found]}
    print(json.dumps(record | _stamp(), indent=1) if given.json else table(found))
    for path, census in zip(given.traces, found, strict=True):
        if not census.writes:
            print(visible(f"trace_census: {path}: {_no_write(census)}"), file=sys.stderr)
    return 0 if all(census.writes for census in found) else 1


def _no_write(census: Census) -> str:
    events = sum(census.counts.values()) + census.others
    if not events:
        return "no KV write: the trace holds no kernel and no CPU op, or none inside a marked step"
    return (
        f"no KV write among {events} {census.kind}: not an MLA model's decode steps, or kernels of other names "
        "(--pattern 'kv write=REGEX')"
    )


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    """The options, checked; adds ``patterns``. Raises UsageError."""
    parser = Parser(__doc__, "%(prog)s TRACE [TRACE ...] [options]")
    parser.add_argument("traces", nargs="+", type=Path, help="Chrome traces, .json or .json.gz")
    parser.add_argument("--steps", type=int, help="decode steps in each trace")
    parser.add_argument("--step-marker", help="regular expression of the annotation around a decode step")
    parser.add_argument("--pattern", action="append", default=[], help="ROLE=REGEX in place of a role's own")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(argv)
    if given.steps is not None and given.step_marker:
        raise UsageError(f"--steps {given.steps}: --step-marker counts the steps; give one of the two")
    if given.steps is not None and given.steps < 1:
        raise UsageError(f"--steps {given.steps}: must be 1 or more")
    if given.step_marker is not None:
        _check_regex("--step-marker ", given.step_marker)
    given.patterns = dict(ROLES)
    for entry in given.pattern:
        role, equals, pattern = entry.partition("=")
        if not equals or role not in ROLES:
            raise UsageError(f"--pattern {entry}: ROLE=REGEX expected, with a role of {', '.join(ROLES)}")
        _check_regex(f"--pattern {role}=", pattern)
        given.patterns[role] = pattern
    return given


def _check_regex(option: str, text: str) -> None:
    if not text:
        raise UsageError(f"{option.rstrip()}: an empty pattern matches everything")
    try:
        re.compile(text)
    except re.error as error:
        raise UsageError(f"{option}{text}: not a regular expression: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return guarded("trace_census", lambda: run(sys.argv[1:] if argv is None else argv))


def _stamp() -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from vllm_aiter_mla import evidence

    return evidence.stamp("trace", 1)


if __name__ == "__main__":
    sys.exit(main())

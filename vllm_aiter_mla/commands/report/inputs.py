"""Recognise what was given: a kept demo, a JSON of one of the commands or tools, a census, one engine's result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

EXPECTED = (
    "a folder of `demo --keep`, the JSON of `demo --json`, `verify --json`, `bench --json` or `plan --json`, "
    "the JSON of tools/trace_census.py, serve_bench.py or accuracy.py, a census of a served run, or one engine's result"
)


class InputError(ValueError):
    """An input that the report cannot show; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class Record:
    """One thing read: ``name`` for the reader (never a full path), the JSON as it was written, and its file."""

    name: str
    data: dict[str, Any]
    path: Path


@dataclass(slots=True)
class Inputs:
    """Everything read, by kind.

    Attributes:
        demos: ``demo --json``; likewise ``verifies``, ``benches``, ``plans``.
        verifies: see ``demos``.
        benches: see ``demos``.
        plans: see ``demos``.
        censuses: one per rank of a served run.
        traces: ``tools/trace_census.py --json``.
        servings: ``tools/serve_bench.py --json``.
        accuracies: ``tools/accuracy.py --json``.
        engines: single engine runs with their graphs, named "run0-off" and so on in a kept demo.
    """

    demos: list[Record] = field(default_factory=list)
    verifies: list[Record] = field(default_factory=list)
    benches: list[Record] = field(default_factory=list)
    plans: list[Record] = field(default_factory=list)
    censuses: list[Record] = field(default_factory=list)
    traces: list[Record] = field(default_factory=list)
    servings: list[Record] = field(default_factory=list)
    accuracies: list[Record] = field(default_factory=list)
    engines: list[Record] = field(default_factory=list)

    def one_by_one(self) -> Iterator[tuple[Record, Inputs]]:
        """Every record, and inputs that hold it alone."""
        for kind in (entry.name for entry in fields(self)):
            for record in getattr(self, kind):
                alone = Inputs()
                getattr(alone, kind).append(record)
                yield record, alone


# (kind, keys that tell it, of which types): the first that fits.
_KINDS: tuple[tuple[str, dict[str, type | tuple[type, ...]]], ...] = (
    ("engines", {"scenarios": dict, "graphs": dict, "ranges": list, "census": list}),
    ("demos", {"runs": list, "versions": dict}),
    ("verifies", {"machine": dict, "engine": str, "results": list}),
    ("benches", {"machine": dict, "copy_gbps": (int, float), "rows": list}),
    ("plans", {"compile_ranges": dict, "captures": dict, "verdict": str}),
    ("traces", {"tool": str, "traces": list}),
    ("servings", {"tool": str, "about": dict, "rows": list}),
    ("accuracies", {"tool": str, "about": dict, "answers": dict}),
    ("censuses", {"engaged": dict, "refused": dict, "total": int, "decode_bucket": list}),
)


def read(paths: Sequence[Path]) -> Inputs:
    """Read every path.

    Raises:
        InputError: one is missing, no JSON, or nothing that the report knows.
    """
    found = Inputs()
    for path in paths:
        if path.is_dir():
            _read_folder(path, found)
        else:
            _read_file(path, path.name, found)
    return found


def _read_folder(folder: Path, found: Inputs) -> None:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InputError(f"{folder}: no JSON file in this folder; expected {EXPECTED}")
    for path in files:
        # What a worker keeps beside its census for warm starts.
        if not path.name.startswith("refusals-"):
            _read_file(path, f"{folder.name}/{path.stem}", found)


def _read_file(path: Path, name: str, found: Inputs) -> None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: no JSON: {error}; expected {EXPECTED}") from error
    kind = kind_of(data)
    if kind is None:
        keys = ", ".join(sorted(data)[:6]) if isinstance(data, dict) else type(data).__name__
        raise InputError(f"{path}: not recognised (found: {keys or 'nothing'}); expected {EXPECTED}")
    getattr(found, kind).append(Record(name, data, path))


def kind_of(data: object) -> str | None:
    """The field of ``Inputs`` that a file's content belongs to, or None."""
    if not isinstance(data, dict):
        return None
    for kind, keys in _KINDS:
        if all(isinstance(data.get(key), wanted) for key, wanted in keys.items()):
            return kind
    return None

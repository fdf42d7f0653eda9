"""Recognise what was given: a kept demo, a JSON of one of the commands or tools, a status file, one engine's result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from vllm_aiter_mla.commands.printable import line
from vllm_aiter_mla.commands.report.shapes import Given, Map, Maybe, ShapeError, take

EXPECTED = (
    "a folder of `demo --keep`, the JSON of `demo --json`, `verify --json`, `bench --json` or `plan --json`, "
    "the JSON of tools/serve_bench.py or accuracy.py, a status file of a served run, or one engine's result"
)


class InputError(ValueError):
    """An input that the report cannot show; the message names the file and the reason, without control characters."""

    def __init__(self, message: str) -> None:
        super().__init__(line(message))


@dataclass(frozen=True, slots=True)
class Record:
    """One thing read: ``name`` for the reader (never a full path), what its kind's shape names, and its file."""

    name: str
    data: dict[str, Any]
    path: Path


# Everything read, by kind; the kinds are those of _KINDS below.
Inputs = dict[str, list[Record]]

_RANGE = (int, int)
_REASONS = Map((str, str))
_BY_RANGE = {"key": r"[0-9]{1,15}-[0-9]{1,15}", "words": "a range, START-END,"}
_MEASURED_SHAPE = {
    "shape": str,
    "layers": [str],
    "chosen": [(int, int, str)],
    "us": Map(Map(float), r"[0-9]{1,9}", "a number of tokens"),
}
_STATUS = {
    "rank": Given(int, 0),
    "total": int,
    "engaged": Map(str),
    "skipped": _REASONS,
    "partial": Given(_REASONS, {}),
    "compiled": Given(Map({}, **_BY_RANGE), {}),
    "measured": Given([_MEASURED_SHAPE], []),
    "capture_sizes": Given([int], []),
    "decode_limit": _RANGE,
    "kv_cache_dtype": Given(str, "-"),
}
_ENGINE = {"graphs": Map(str, **_BY_RANGE), "ranges": [_RANGE], "status": [_STATUS], "versions": Map(str)}
_FIGURES = {"tokens": int, "tokens_equal": int, "top1_agreement": float, "max_abs_dlogprob": float}
_DEMO_RUN = {
    "name": str,
    "flag": bool,
    "bound": Given(Maybe(str), None),
    "decode_limit": Maybe(_RANGE),
    "ranges": [_RANGE],
    "layers": {"engaged": int, "total": int, "skipped": _REASONS},
    "kernels": [str],
    "kv_cache_dtype": str,
    "ops_per_layer": Maybe((float, float)),
    "scenarios": Map(_FIGURES),
}
_RESULT = {
    **dict.fromkeys(("backend", "case", "variant", "reason", "command"), str),
    "status": frozenset({"passed", "failed", "skipped"}),
    "findings": [{"oracle": str, "message": str, "step": str}],
    "replays": int,
    "checks": int,
    "launches": Map(str, r"[0-9]{1,15}", "a number of tokens"),
}
_VERIFY = {"machine": Map(str), "engine": str, "missing": Map(str), "results": [_RESULT]}
_BENCH_ROW = {
    "point": {"tokens": int, "heads": int, "quantised": bool},
    "timings": Map({"launches": int}),
    "missing": Map(str),
    "wrong": Map(str),
    "ratio": Maybe(float),
}
_BENCH = {
    "machine": Map(str),
    "copy_gbps": float,
    "rounds": int,
    "rows": [_BENCH_ROW],
    "bounds": Given([{"text": str, "measured": Maybe(float), "holds": Maybe(bool)}], []),
    "caps": Given([str], []),
}
_PATH = {"launches": [{}], "launches_per_step": int, "bytes": int}
_PLAN = {
    "plugin": str,
    "vllm": Maybe(str),
    "model": {"name": str},
    "limit": int,
    "compile_ranges": {"ranges": [_RANGE]},
    "captures": {"inside": [int], "outside": [int], "note": str},
    "outcome": str,
    "layers": {"mla": int, "engaged": int},
    "reasons": [{"scope": str, "code": str, "message": str}],
    "kernels": Maybe([{"kernel": Maybe(str)}]),
    "figures": Maybe({"by_tokens": Map(Map(_PATH))}),
    "options": {"kv_cache_dtype": str},
}
_TRACE = {
    "trace": str,
    "kind": str,
    "counts": Map(int),
    "kv_writes": int,
    "per_layer_and_step": Map(float),
    "launches_per_layer_and_step": float,
}
_ESTIMATE = {"mean": float, "stderr": float}
_METRIC = Given((_ESTIMATE, _ESTIMATE), None)
_SERVING_ROW = {
    "point": {"input": int, "prefix": int, "output": int, "rate": float},
    "estimates": {"ttft": _METRIC, "tpot": _METRIC},
    "invalid": Maybe(str),
}
_SCORES = Map({"figures": Map({"value": float, "stderr": float})}, r"[0-9]{1,9}", "the number of a run")
_MEASURED = {"tool": str, "about": Map(str), "status": str, "baseline": str}

# (kind, keys that tell it, what is taken of it): the first that has all its keys. "status files" are one per rank of a
# served run; "engines" single runs with their graphs, named "run0-off" and so on in a kept demo.
_KINDS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("engines", ("scenarios", "graphs", "ranges", "status"), _ENGINE),
    ("demos", ("runs", "versions"), {"runs": [_DEMO_RUN], "versions": Map(str)}),
    ("verifies", ("machine", "engine", "results"), _VERIFY),
    ("benches", ("machine", "copy_gbps", "rows"), _BENCH),
    ("plans", ("compile_ranges", "captures", "outcome"), _PLAN),
    ("traces", ("tool", "traces"), {"traces": [_TRACE]}),
    ("servings", ("tool", "about", "rows"), _MEASURED | {"rows": [_SERVING_ROW]}),
    ("accuracies", ("tool", "about", "answers"), _MEASURED | {"answers": {"off": _SCORES, "on": _SCORES}}),
    ("status files", ("engaged", "skipped", "total", "decode_limit"), _STATUS),
)


def read(paths: Sequence[Path]) -> Inputs:
    """Read every path; each kind has its list, which may be empty.

    Raises:
        InputError: one is missing, no JSON, nothing that the report knows, or holds a value of a wrong type.
    """
    found: Inputs = {kind: [] for kind, *_ in _KINDS}
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
        # What a worker keeps beside its status for the next start.
        if not path.name.startswith(("skips-", "measured-")):
            _read_file(path, f"{folder.name}/{path.stem}", found)


def _read_file(path: Path, name: str, found: Inputs) -> None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
        kind, shape = _kind_of(data)
        found[kind].append(Record(line(name), take(data, shape), path))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except ShapeError as error:
        raise InputError(f"{path}: {error}") from error
    # A JSON nested thousands of levels deep ends in a RecursionError.
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: no JSON: {error}; expected {EXPECTED}") from error


def _kind_of(data: object) -> tuple[str, dict[str, Any]]:
    """The kind that a file's content is of, and what is taken of it."""
    if isinstance(data, dict):
        for kind, keys, shape in _KINDS:
            if all(key in data for key in keys):
                return kind, shape
    listed = ", ".join(key[:40] for key in sorted(data)[:6]) if isinstance(data, dict) else type(data).__name__
    raise ShapeError(f"not recognised (found: {listed or 'nothing'}); expected {EXPECTED}")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")

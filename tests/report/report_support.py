"""Recorded data of the report's tests, and a bench file whose figures are made up and say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
KEPT_KEYS: dict[str, Any] = {"scenarios": {}, "log": [], "seconds": 1.0}


def engine_result(graphs: dict[str, str], census: list[Any]) -> dict[str, Any]:
    ranges = [[int(part) for part in key.split("-")] for key in graphs]
    versions = json.loads((DATA / "demo.json").read_text())["versions"]
    return KEPT_KEYS | {"graphs": graphs, "census": census, "ranges": ranges, "versions": versions}


def made_up_bench() -> dict[str, Any]:
    rows = []
    for quantised in (True, False):
        for heads in (16, 128):
            for tokens in (1, 8, 64, 256, 512):
                ratio = None if tokens == 512 and heads == 128 else max(3.4 - tokens / 90 - heads / 200, 0.7)
                rows.append(_bench_row(tokens, heads, quantised, ratio))
    return {
        "machine": {"card": "made up for a test", "torch": "0"},
        "arch": "sm90",
        "copy_gbps": 1000.0,
        "rounds": 3,
        "rows": rows,
        "bounds": [
            {"text": "ratio >= 2.0 for T <= 64", "measured": 1.9, "holds": False},
            {"text": "share of the copy bandwidth", "measured": None, "holds": None},
        ],
        "caps": ['Cap("sm90", 16, True, 256, "made up")'],
    }


def _bench_row(tokens: int, heads: int, quantised: bool, ratio: float | None) -> dict[str, Any]:
    timing = {"median_us": 5.0, "min_us": 4.0, "max_us": 6.0}
    timings = {"unfused": timing | {"launches": 4}, "one launch": timing | {"launches": 1}} if ratio else {}
    return {
        "point": {"tokens": tokens, "heads": heads, "quantised": quantised},
        "sets": 8,
        "timings": timings,
        "missing": {"aiter": "no ROCm here"},
        "wrong": {},
        "ratio": ratio,
        "gbps": None,
        "bytes_once": 1,
    }

"""Recorded data of the report's tests, and files whose figures are made up and say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
KEPT_KEYS: dict[str, Any] = {"scenarios": {}, "log": [], "seconds": 1.0}


def engine_result(graphs: dict[str, str], status: list[Any]) -> dict[str, Any]:
    ranges = [[int(part) for part in key.split("-")] for key in graphs]
    versions = json.loads((DATA / "demo.json").read_text())["versions"]
    return KEPT_KEYS | {"graphs": graphs, "status": status, "ranges": ranges, "versions": versions}


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


def made_up_measurements() -> dict[str, dict[str, Any]]:
    """What the three tools write, by file name."""
    about = {"card": "made up for a test", "vllm": "0", "torch": "0"}
    both = {"about": about, "status": "61/61 MLA layers engaged (aiter)", "baseline": "vllm-fused"}
    point = {"input": 1024, "prefix": 0, "output": 256, "rate": 2.5}
    figures = {"mean": 20.0, "stderr": 0.5, "n": 3}
    estimates = {"ttft": [figures, figures | {"mean": 10.0}], "tpot": [figures, figures]}
    rows = [
        {"point": point, "estimates": estimates, "invalid": None},
        {"point": point | {"rate": 50.0}, "estimates": {}, "invalid": "on, run 2: 3 of 200 requests failed"},
    ]
    scores = {name: {"value": 0.9, "stderr": 0.01} for name in ("strict-match", "flexible-extract")}
    answers = {side: {str(run): {"figures": scores, "answers": {}} for run in range(3)} for side in ("off", "on")}
    return {
        "serving.json": {"tool": "serve_bench", **both, "rows": rows, "results": {}},
        "gsm8k.json": {"tool": "accuracy", **both, "answers": answers},
        "traces.json": {"tool": "trace_status", "traces": [_trace("off.json", UNFUSED), _trace("on.json", FUSED)]},
    }


UNFUSED = {"rope + kv": 122, "concat + quant": 122}
FUSED = {"fused": 122}


def _trace(name: str, counts: dict[str, int]) -> dict[str, Any]:
    per = {role: count / 122 for role, count in counts.items()}
    shared = {"kind": "kernels", "kv_writes": 122, "microseconds_per_layer_and_step": {}}
    launches = {"per_layer_and_step": per, "launches_per_layer_and_step": sum(per.values())}
    return shared | launches | {"trace": name, "counts": counts}


def measured_shape() -> dict[str, Any]:
    """What a status file holds of one layer shape that was timed; the figures are made up."""
    counts = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    us = {str(t): {"aiter": 3.2 + t / 60, "vllm": 5.4 + t / 55, "triton": 2.2 + t / 90 + t * t / 30000} for t in counts}
    chosen = [[1, 128, "triton"], [129, 1024, "aiter"]]
    shape = "16 heads, widths 128+64 and 512, bfloat16, plain weight, made up for a test"
    return {"shape": shape, "layers": [f"model.layers.{n}.attn" for n in range(61)], "chosen": chosen, "us": us}


def made_up_plan() -> dict[str, Any]:
    """What ``plan --json`` prints, cut to what the report reads."""
    path = {"launches": [{"name": "absorb BMM"}], "launches_per_step": 61, "bytes": 1000}
    return {
        "plugin": "0",
        "vllm": "0",
        "model": {"name": "made up"},
        "limit": 8,
        "compile_ranges": {"ranges": [[1, 8], [9, 64]], "inside": 1, "note": ""},
        "captures": {"inside": [1, 8], "outside": [16], "note": ""},
        "outcome": "skipped",
        "layers": {"mla": 61, "total": 61, "engaged": 0},
        "reasons": [{"scope": "engine", "code": "platform", "message": "made up"}],
        "kernels": [{"first": 1, "last": 8, "kernel": "aiter", "detail": "", "skips": []}],
        "figures": {"by_tokens": {"1": {"vllm": path, "aiter": path}}},
        "options": {"kv_cache_dtype": "auto"},
    }


def every_kind() -> dict[str, dict[str, Any]]:
    """One file of every kind that the report reads, by kind."""
    recorded = {name: json.loads((DATA / f"{name}.json").read_text()) for name in ("status", "demo", "verify")}
    tools = made_up_measurements()
    graphs = {"1-16": (DATA / "vllm.fx.txt").read_text()}
    bench = made_up_bench()
    bench["rows"] = bench["rows"][:2]
    bench["rows"][0]["wrong"] = {"vllm": "query: 20 % of the values differ"}
    recorded["verify"]["missing"] = {"aiter": "no ROCm here"}
    recorded["verify"]["results"] = recorded["verify"]["results"][:2]
    recorded["verify"]["results"][0] |= {
        "status": "failed",
        "findings": [{"oracle": "runs", "message": "broke", "step": "replay 2"}],
    }
    recorded["verify"]["results"][1] |= {"status": "skipped", "reason": "no ROCm here"}
    status = recorded["status"]
    status["skipped"] = {"model.layers.9.self_attn.attn": ["sparse", "sparse MLA"]}
    status["partial"] = {"model.layers.8.self_attn.attn": ["kernel_shape", "no kernel"]}
    status["capture_sizes"] = [1, 16]
    status["measured"] = [measured_shape()]
    recorded["demo"]["runs"][0]["layers"]["skipped"] = {"model.layers.3": ["sparse", "sparse MLA"]}
    return {
        "engines": engine_result(graphs, [status]),
        "demos": recorded["demo"],
        "verifies": recorded["verify"],
        "benches": bench,
        "plans": made_up_plan(),
        "traces": tools["traces.json"],
        "servings": tools["serving.json"],
        "accuracies": tools["gsm8k.json"],
        "status files": status,
    }

"""What the project's tools measured on a running server: launches in traces, serving times, accuracy."""

from __future__ import annotations

from typing import Any

from vllm_aiter_mla.commands.report.inputs import Inputs, Record

METRICS = ("ttft", "tpot")


def traces(inputs: Inputs) -> list[dict[str, Any]]:
    """Kernels per layer and step by role, one column per trace: ``tools/trace_census.py --json``."""
    return [_traces(record) for record in inputs.traces]


def _traces(record: Record) -> dict[str, Any]:
    found = record.data["traces"]
    roles = list(dict.fromkeys(role for one in found for role in one["per_layer_and_step"]))
    rows = [{"role": role, "cells": [one["per_layer_and_step"].get(role, 0) for one in found]} for role in roles]
    return {
        "name": record.name,
        "traces": [f"{one['trace']} ({one['kind']})" for one in found],
        "rows": rows,
        "launches": [one["launches_per_layer_and_step"] for one in found],
        "fused": [f"{one['counts'].get('fused', 0)} of {one['kv_writes']}" for one in found],
        "on_cpu": any(one["kind"] != "kernels" for one in found),
    }


def servings(inputs: Inputs) -> list[dict[str, Any]]:
    """Times of every point with the flag off and on: ``tools/serve_bench.py --json``."""
    return [_about(record) | {"rows": [_row(row) for row in record.data["rows"]]} for record in inputs.servings]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    point = row["point"]
    shown = {"lengths": f"{point['input']}/{point['prefix']}/{point['output']}", "rate": f"{point['rate']:g}"}
    if row["invalid"]:
        return shown | {"invalid": row["invalid"]}
    cells = []
    for metric in METRICS:
        off, on = row["estimates"][metric]
        cells += [f"{one['mean']:.2f} ± {one['stderr']:.2f}" for one in (off, on)]
        cells.append(f"{off['mean'] / on['mean']:.3f}")
    return shown | {"invalid": None, "cells": cells}


def accuracies(inputs: Inputs) -> list[dict[str, Any]]:
    """Exact match of every run with the flag off and on: ``tools/accuracy.py --json``."""
    return [_about(record) | {"rows": _answers(record.data["answers"])} for record in inputs.accuracies]


def _answers(answers: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for run, off in sorted(answers["off"].items(), key=lambda item: int(item[0])):
        on = answers["on"][run]
        for name, figure in off["figures"].items():
            other = on["figures"][name]
            shown = [f"{one['value']:.4f} ± {one['stderr']:.4f}" for one in (figure, other)]
            rows.append({"run": str(int(run) + 1), "filter": name, "off": shown[0], "on": shown[1]})
    return rows


def _about(record: Record) -> dict[str, Any]:
    data = record.data
    versions = ", ".join(f"{name} {data['about'][name]}" for name in ("card", "vllm", "torch") if name in data["about"])
    return {"name": record.name, "versions": versions, "census": data["census"], "baseline": data["baseline"]}

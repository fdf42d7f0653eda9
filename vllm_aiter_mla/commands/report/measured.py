"""What was measured on a server: kernels at start-up, launches in traces, serving times, accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_aiter_mla.commands.report import charts
from vllm_aiter_mla.commands.report.inputs import Record

NOT_GIVEN = "-"


def choices(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Time over tokens of every layer shape that was timed at start-up, one line per candidate, and what runs where.

    The ranks of an engine agree on the figures, so equal ones are drawn once.
    """
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        for shape in record.data["measured"]:
            known = found.setdefault(str((shape["shape"], shape["chosen"], shape["us"])), _choice(shape, len(found)))
            known["names"].append(f"{record.name}, rank {record.data['rank']}: {len(shape['layers'])} layers")
    return list(found.values())


def _choice(shape: dict[str, Any], number: int) -> dict[str, Any]:
    by_tokens = {int(tokens): figures for tokens, figures in sorted(shape["us"].items(), key=lambda one: int(one[0]))}
    names = sorted({name for figures in by_tokens.values() for name in figures})
    series = {name: [figures.get(name) for figures in by_tokens.values()] for name in names}
    rows = []
    for tokens, figures in by_tokens.items():
        runs = next((name for first, last, name in shape["chosen"] if first <= tokens <= last), NOT_GIVEN)
        cells = [f"{figures[name]:.2f}" if name in figures else NOT_GIVEN for name in names]
        rows.append((tokens, *cells, runs))
    title = f"Microseconds a layer by tokens in the step, {shape['shape']}"
    where = ", ".join(f"{name} {first}..{last}" for first, last, name in shape["chosen"])
    chart = charts.lines(f"m{number}", title, list(by_tokens), series)
    drawn = {"chart": chart, "heads": ("T", *names, "runs"), "rows": rows}
    return drawn | {"shape": shape["shape"], "where": where, "names": []}


def trace(record: Record) -> dict[str, Any]:
    """Kernels per layer and step by role, one column per trace: ``tools/trace_status.py --json``."""
    found = record.data["traces"]
    roles = dict.fromkeys(role for one in found for role in one["per_layer_and_step"])
    return {
        "name": record.name,
        "traces": [f"{one['trace']} ({one['kind']})" for one in found],
        "rows": {role: [one["per_layer_and_step"].get(role, 0) for one in found] for role in roles},
        "launches": [one["launches_per_layer_and_step"] for one in found],
        "fused": [f"{one['counts'].get('fused', 0)} of {one['kv_writes']}" for one in found],
        "on_cpu": any(one["kind"] != "kernels" for one in found),
    }


def serving(record: Record) -> dict[str, Any]:
    """Times of every point with the flag off and on: ``tools/serve_bench.py --json``."""
    return _about(record) | {"rows": [_point(row) for row in record.data["rows"]]}


def _point(row: dict[str, Any]) -> dict[str, Any]:
    point, cells = row["point"], []
    for off, on in (row["estimates"][metric] or (None, None) for metric in ("ttft", "tpot")):
        cells += [_figure(one, "mean", 2) for one in (off, on)]
        cells.append(f"{off['mean'] / on['mean']:.3f}" if off and on and on["mean"] else NOT_GIVEN)
    shown = {"lengths": f"{point['input']}/{point['prefix']}/{point['output']}", "rate": f"{point['rate']:g}"}
    return shown | {"invalid": row["invalid"], "cells": cells}


def accuracy(record: Record) -> dict[str, Any]:
    """Exact match of every run with the flag off and on: ``tools/accuracy.py --json``."""
    off, on = record.data["answers"]["off"], record.data["answers"]["on"]
    rows = []
    for run in sorted(off, key=int):
        others = on.get(run, {"figures": {}})["figures"]
        for name, figure in off[run]["figures"].items():
            cells = [_figure(one, "value", 4) for one in (figure, others.get(name))]
            rows.append((int(run) + 1, name, *cells))
    return _about(record) | {"rows": rows}


def _figure(one: dict[str, float] | None, key: str, digits: int) -> str:
    return NOT_GIVEN if one is None else f"{one[key]:.{digits}f} ± {one['stderr']:.{digits}f}"


def _about(record: Record) -> dict[str, Any]:
    data = record.data
    versions = ", ".join(f"{name} {data['about'][name]}" for name in ("card", "vllm", "torch") if name in data["about"])
    return {"name": record.name, "versions": versions, "status": data["status"], "baseline": data["baseline"]}

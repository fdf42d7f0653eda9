"""From records as they were written to what the template shows: census, ranges, launches, bench, verify, versions."""

from __future__ import annotations

from typing import Any

from vllm_aiter_mla import __version__
from vllm_aiter_mla.report.page import graphs, measured, svg
from vllm_aiter_mla.report.page.inputs import Inputs, Record

CPU = "CPU, reference kernels"
NOT_MEASURED = "not measured"


def build(inputs: Inputs) -> dict[str, Any]:
    """Everything the template needs."""
    return {
        "census": census(inputs),
        "scenarios": scenarios(inputs),
        "axes": axes(inputs),
        "graphs": graphs.sections(inputs),
        "ops": ops(inputs),
        "planned": planned(inputs),
        "benches": [bench(record, f"b{number}") for number, record in enumerate(inputs.benches)],
        "verifies": [verify(record, f"v{number}") for number, record in enumerate(inputs.verifies)],
        "traces": measured.traces(inputs),
        "servings": measured.servings(inputs),
        "accuracies": measured.accuracies(inputs),
        "versions": versions(inputs),
        "plugin": __version__,
        "not_measured": NOT_MEASURED,
    }


def census(inputs: Inputs) -> list[dict[str, Any]]:
    """One row per run: how many layers engaged, with what, and why the others did not."""
    rows = []
    for record in inputs.demos:
        for run in record.data["runs"]:
            layers = run["layers"]
            row = _verdict(run["name"], layers["engaged"], layers["total"], layers["refused"], run["kernels"])
            row["state"] = row["state"] if run["flag"] else "off"
            rows.append(
                row | {"where": _where(run["kernels"]), "bucket": run["bucket"], "cache": run["kv_cache_dtype"]}
            )
    for record in inputs.censuses:
        rows.append(_rank(record.name, record.data))
    if not inputs.demos:
        rows += [_rank(record.name, one) for record in inputs.engines for one in record.data["census"]]
    for record in inputs.plans:
        plan = record.data
        refused = {reason["scope"]: (reason["code"], reason["message"]) for reason in plan["reasons"]}
        kernels = sorted({k["kernel"] for k in plan["kernels"] if k["kernel"]})
        row = _verdict(plan["model"]["name"], plan["layers"]["engaged"], plan["layers"]["mla"], refused, kernels)
        row |= {"where": "plan, static: nothing was run", "bucket": [1, plan["limit"]]}
        rows.append(row | {"cache": plan["options"]["kv_cache_dtype"]})
    return rows


def _rank(name: str, data: dict[str, Any]) -> dict[str, Any]:
    kernels = sorted(set(data["engaged"].values()))
    partial = {k: ("partial " + v[0], v[1]) for k, v in data.get("partial", {}).items()}
    refused = data["refused"] | partial
    row = _verdict(f"{name}, rank {data.get('rank', 0)}", len(data["engaged"]), data["total"], refused, kernels)
    return row | {"where": _where(kernels), "bucket": data["decode_bucket"], "cache": data.get("kv_cache_dtype", "-")}


def _where(kernels: list[str]) -> str:
    return CPU if kernels == ["reference"] else "counted at run time by the ops"


def _verdict(name: str, engaged: int, total: int, refused: dict[str, Any], kernels: list[str]) -> dict[str, Any]:
    reasons: dict[str, list[str]] = {}
    for layer, (code, text) in refused.items():
        reasons.setdefault(f"{code}: {text}", []).append(layer)
    state = "none" if not engaged else "all" if engaged == total else "some"
    return {
        "name": name,
        "engaged": engaged,
        "total": total,
        "state": state,
        "kernels": ", ".join(kernels) or "-",
        "reasons": [{"text": text, "layers": sorted(layers)} for text, layers in reasons.items()],
    }


def scenarios(inputs: Inputs) -> list[dict[str, Any]]:
    """One row per run and scenario of the demos: tokens and log-probabilities against stock."""
    return [
        {"run": run["name"], "bound": run.get("bound"), "name": name, **figures}
        for record in inputs.demos
        for run in record.data["runs"]
        for name, figures in run["scenarios"].items()
    ]


def axes(inputs: Inputs) -> list[dict[str, Any]]:
    """Compile ranges and capture sizes, one axis per distinct set."""
    wanted: list[tuple[str, list[Any], int | None, list[int], str]] = []
    for record in inputs.demos:
        for run in record.data["runs"]:
            limit = run["bucket"][1] if run["bucket"] else None
            wanted.append((run["name"], run["ranges"], limit, [], "none: the sandbox captures no graphs on a CPU"))
    for record in inputs.plans:
        plan = record.data
        sizes = plan["captures"]["inside"] + plan["captures"]["outside"]
        note = plan["captures"]["note"] or ("planned, static" if sizes else "none")
        wanted.append((plan["model"]["name"], plan["compile_ranges"]["ranges"], plan["limit"], sizes, note))
    for record in inputs.censuses:
        keys = sorted([int(part) for part in key.split("-")] for key in record.data.get("compiled", {}))
        if keys:
            sizes = record.data.get("capture_sizes", [])
            note = "" if sizes else "not recorded in a census"
            wanted.append((record.name, keys, record.data["decode_bucket"][1], sizes, note))
    found: dict[str, dict[str, Any]] = {}
    for name, ranges, limit, sizes, note in wanted:
        key = f"{ranges} {limit} {sizes}"
        if key in found:
            found[key]["name"] += f"; {name}"
            continue
        pairs = [(int(a), int(b)) for a, b in ranges]
        drawn = svg.token_axis(pairs, limit, sizes, f"r{len(found)}", f"Compile ranges of {name}")
        rows = [_range_row(a, b, limit, sizes, note) for a, b in pairs]
        found[key] = {"name": name, "svg": drawn, "note": note, "rows": rows}
    return list(found.values())


def _range_row(start: int, end: int, limit: int | None, sizes: list[int], note: str) -> dict[str, str]:
    inside = [str(size) for size in sizes if start <= size <= end]
    graph = "rewritten: decode bucket" if limit is not None and end <= limit else "stock"
    return {"range": f"{start}-{end}", "graph": graph, "sizes": ", ".join(inside) or (note if not sizes else "none")}


def ops(inputs: Inputs) -> dict[str, Any] | None:
    """Computing nodes of the bucket's graph per layer, stock and fused: static, and no count of launches."""
    rows = [
        {"run": run["name"], "stock": run["ops_per_layer"][0], "fused": run["ops_per_layer"][1]}
        for record in inputs.demos
        for run in record.data["runs"]
        if run["ops_per_layer"]
    ]
    if not rows:
        return None
    first = rows[0]
    bars = [("stock", first["stock"]), ("after the last pass", first["fused"])]
    return {"rows": rows, "svg": svg.op_bars(bars, "graph ops per layer", "o0", f"Graph ops per layer, {first['run']}")}


def planned(inputs: Inputs) -> list[dict[str, Any]]:
    """Launches per layer and step by formula, from plans: static."""
    found = []
    for number, record in enumerate(inputs.plans):
        by_tokens = record.data["figures"]["by_tokens"]
        rows = [
            {
                "tokens": t,
                "path": path,
                "layer": len(f["launches"]),
                "step": f["launches_per_step"],
                "bytes": f["bytes"],
            }
            for t, paths in by_tokens.items()
            for path, f in paths.items()
        ]
        smallest = next(iter(by_tokens), None)
        bars = [(row["path"], row["layer"]) for row in rows if row["tokens"] == smallest]
        name = record.data["model"]["name"]
        title = f"Launches per layer by formula, {name}"
        found.append({"name": name, "rows": rows, "svg": svg.op_bars(bars, "launches per layer", f"p{number}", title)})
    return found


def bench(record: Record, ident: str) -> dict[str, Any]:
    """Ratios by T and N, one chart per N and type, with the bounds and the caps the run called for."""
    data = record.data
    cells = {(row["point"]["quantised"], row["point"]["heads"], row["point"]["tokens"]): row for row in data["rows"]}
    top = max([1.2, *(row["ratio"] for row in data["rows"] if row["ratio"] is not None)]) * 1.12
    kinds = []
    for quantised in sorted({key[0] for key in cells}, reverse=True):
        heads = sorted({key[1] for key in cells if key[0] == quantised})
        tokens = sorted({key[2] for key in cells if key[0] == quantised})
        name = "fp8" if quantised else "bf16"
        charts = []
        for n in heads:
            points = [(t, _ratio(cells.get((quantised, n, t)))) for t in tokens]
            title = f"Ratio to the best unfused sequence, N = {n}, {name}"
            charts.append({"heads": n, "svg": svg.ratio_bars(points, top, f"{ident}{name}{n}", title)})
        rows = [{"tokens": t, "cells": [_bench_cell(cells.get((quantised, n, t))) for n in heads]} for t in tokens]
        kinds.append({"name": name, "heads": heads, "charts": charts, "rows": rows})
    missing = {name: why for row in data["rows"] for name, why in row["missing"].items()}
    wrong = [
        f"{name} at T={row['point']['tokens']} N={row['point']['heads']}: {why}"
        for row in data["rows"]
        for name, why in row["wrong"].items()
    ]
    head = (
        f"{', '.join(data['machine'].values())}; copy {data['copy_gbps']:.0f} GB/s; medians of {data['rounds']} replays"
    )
    return {
        "name": record.name,
        "head": head,
        "kinds": kinds,
        "missing": missing,
        "wrong": wrong,
        "bounds": data.get("bounds", []),
        "caps": data.get("caps", []),
        "slower": sum(1 for row in data["rows"] if row["ratio"] is not None and row["ratio"] < 1),
    }


def _ratio(row: dict[str, Any] | None) -> float | None:
    return None if row is None else row["ratio"]


def _bench_cell(row: dict[str, Any] | None) -> dict[str, Any]:
    if row is None or row["ratio"] is None:
        return {"text": NOT_MEASURED, "launches": "", "slow": False}
    timings = row["timings"]
    launches = "/".join(str(timings[name]["launches"]) for name in ("one launch", "unfused") if name in timings)
    return {"text": f"{row['ratio']:.2f}", "launches": launches, "slow": row["ratio"] < 1}


def verify(record: Record, ident: str) -> dict[str, Any]:
    """Counts by back end, failures with the command that repeats them, and what was launched."""
    data = record.data
    counts: dict[str, dict[str, int]] = {}
    for result in data["results"]:
        one = counts.setdefault(result["backend"], {"passed": 0, "failed": 0, "skipped": 0})
        one[result["status"]] += 1
    on_cpu = "eager" in data["engine"]
    title = f"Verify results by back end, {data['engine']}"
    return {
        "name": record.name,
        "engine": data["engine"],
        "machine": ", ".join(f"{key} {value}" for key, value in data["machine"].items()),
        "svg": svg.stacked(list(counts.items()), ident, title),
        "counts": counts,
        "missing": data["missing"],
        "failed": [result for result in data["results"] if result["status"] == "failed"],
        "skipped": sorted({result["reason"] for result in data["results"] if result["status"] == "skipped"}),
        "results": data["results"],
        "launches": _launches(data["results"], on_cpu),
        "on_cpu": on_cpu,
    }


def _launches(results: list[dict[str, Any]], on_cpu: bool) -> list[dict[str, str]]:
    """What a step was made of, one row per back end, variant and distinct answer, with the sizes that gave it."""
    sizes: dict[tuple[str, str, str], set[int]] = {}
    for result in results:
        for size, words in result["launches"].items():
            # ``verify`` counts launches; where it replayed eagerly these are calls of PyTorch ops.
            said = words.replace("launches:", "ops:") if on_cpu else words
            sizes.setdefault((result["backend"], result["variant"], said), set()).add(int(size))
    return [
        {"backend": b, "variant": v, "size": ", ".join(map(str, sorted(found))), "words": words}
        for (b, v, words), found in sizes.items()
    ]


def versions(inputs: Inputs) -> list[dict[str, str]]:
    """What each input was made with."""
    rows = []
    for record in (*inputs.demos, *([] if inputs.demos else inputs.engines)):
        rows += [{"input": record.name, "what": k, "version": v} for k, v in record.data["versions"].items()]
    for record in (*inputs.benches, *inputs.verifies):
        rows += [{"input": record.name, "what": k, "version": v} for k, v in record.data["machine"].items()]
    for record in (*inputs.servings, *inputs.accuracies):
        rows += [{"input": record.name, "what": k, "version": v} for k, v in record.data["about"].items()]
    for record in inputs.plans:
        rows += [
            {"input": record.name, "what": "vllm-aiter-mla", "version": record.data["plugin"]},
            {"input": record.name, "what": "vllm", "version": record.data["vllm"] or "not installed"},
        ]
    return rows

"""From records to what the template shows: status, ranges, launches, bench, verify, versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_aiter_mla import __version__
from vllm_aiter_mla.commands.report import charts, graphs, measured
from vllm_aiter_mla.commands.report.inputs import Inputs, Record

CPU = "CPU, reference kernels"
NOT_MEASURED = "not measured"
# How the charts colour a run's states.
STATES = ("passed", "failed", "skipped")


def build(inputs: Inputs) -> dict[str, Any]:
    """Everything the template needs."""
    return {
        "status": status(inputs),
        "choices": measured.choices(inputs["status files"]),
        "demo_runs": _runs(inputs),
        "axes": axes(inputs),
        "graphs": graphs.sections(inputs),
        "ops": ops(inputs),
        "planned": [planned(record, f"p{number}") for number, record in enumerate(inputs["plans"])],
        "benches": [bench(record, f"b{number}") for number, record in enumerate(inputs["benches"])],
        "verifies": [verify(record, f"v{number}") for number, record in enumerate(inputs["verifies"])],
        "traces": [measured.trace(record) for record in inputs["traces"]],
        "servings": [measured.serving(record) for record in inputs["servings"]],
        "accuracies": [measured.accuracy(record) for record in inputs["accuracies"]],
        "versions": versions(inputs),
        "plugin": __version__,
        "not_measured": NOT_MEASURED,
    }


def _runs(inputs: Inputs) -> list[dict[str, Any]]:
    return [run for record in inputs["demos"] for run in record.data["runs"]]


def status(inputs: Inputs) -> list[dict[str, Any]]:
    """One row per run: how many layers engaged, with what, and why the others did not."""
    rows = []
    for run in _runs(inputs):
        row = _outcome(run["name"], run["layers"], run["layers"]["skipped"], run["kernels"])
        row |= {"state": row["state"] if run["flag"] else "off", "where": _where(run["kernels"])}
        rows.append(row | {"decode_limit": run["decode_limit"], "cache": run["kv_cache_dtype"]})
    rows += [_rank(record.name, record.data) for record in inputs["status files"]]
    if not inputs["demos"]:
        rows += [_rank(record.name, one) for record in inputs["engines"] for one in record.data["status"]]
    for record in inputs["plans"]:
        plan = record.data
        kernels = sorted({span["kernel"] for span in plan["kernels"] or [] if span["kernel"]})
        layers = {"engaged": plan["layers"]["engaged"], "total": plan["layers"]["mla"]}
        row = _outcome(plan["model"]["name"], layers, {}, kernels)
        for reason in plan["reasons"]:
            row["reasons"].setdefault(f"{reason['code']}: {reason['message']}", []).append(reason["scope"])
        row |= {"where": "plan, static: nothing was run", "decode_limit": [1, plan["limit"]]}
        rows.append(row | {"cache": plan["options"]["kv_cache_dtype"]})
    return rows


def _rank(name: str, data: dict[str, Any]) -> dict[str, Any]:
    kernels = sorted(set(data["engaged"].values()))
    partial = {layer: (f"partial {code}", text) for layer, (code, text) in data["partial"].items()}
    layers = {"engaged": len(data["engaged"]), "total": data["total"]}
    row = _outcome(f"{name}, rank {data['rank']}", layers, data["skipped"] | partial, kernels)
    return row | {"where": _where(kernels), "decode_limit": data["decode_limit"], "cache": data["kv_cache_dtype"]}


def _where(kernels: list[str]) -> str:
    return CPU if kernels == ["reference"] else "counted at run time by the ops"


def _outcome(name: str, layers: dict[str, Any], skipped: dict[str, Any], kernels: list[str]) -> dict[str, Any]:
    engaged, total = layers["engaged"], layers["total"]
    reasons: dict[str, list[str]] = {}
    for layer, (code, text) in skipped.items():
        reasons.setdefault(f"{code}: {text}", []).append(layer)
    state = "none" if not engaged else "all" if engaged == total else "some"
    row = {"name": name, "engaged": engaged, "total": total, "state": state, "kernels": ", ".join(kernels) or "-"}
    return row | {"reasons": {text: sorted(names) for text, names in reasons.items()}}


def axes(inputs: Inputs) -> list[dict[str, Any]]:
    """Compile ranges and capture sizes, one axis per distinct set."""
    wanted: list[tuple[str, list[Any], int | None, list[int], str]] = []
    for run in _runs(inputs):
        limit = run["decode_limit"][1] if run["decode_limit"] else None
        wanted.append((run["name"], run["ranges"], limit, [], "none: the sandbox captures no graphs on a CPU"))
    for record in inputs["plans"]:
        plan = record.data
        sizes = plan["captures"]["inside"] + plan["captures"]["outside"]
        note = plan["captures"]["note"] or ("planned, static" if sizes else "none")
        wanted.append((plan["model"]["name"], plan["compile_ranges"]["ranges"], plan["limit"], sizes, note))
    for record in inputs["status files"]:
        ranges = sorted([int(part) for part in key.split("-")] for key in record.data["compiled"])
        sizes = record.data["capture_sizes"]
        note = "" if sizes else "not recorded in a status file"
        wanted += [(record.name, ranges, record.data["decode_limit"][1], sizes, note)] if ranges else []
    found: dict[str, dict[str, Any]] = {}
    for name, ranges, limit, sizes, note in wanted:
        key = f"{ranges} {limit} {sizes}"
        if key in found:
            found[key]["name"] += f"; {name}"
            continue
        chart = charts.token_axis(f"r{len(found)}", f"Compile ranges of {name}", ranges, limit, sizes)
        rows = [_range_row(start, end, limit, sizes, note) for start, end in ranges]
        found[key] = {"name": name, "chart": chart, "note": note, "rows": rows}
    return list(found.values())


def _range_row(start: int, end: int, limit: int | None, sizes: list[int], note: str) -> tuple[str, str, str]:
    inside = ", ".join(str(size) for size in sizes if start <= size <= end)
    graph = "rewritten: decode limit" if limit is not None and end <= limit else "vllm"
    return f"{start}-{end}", graph, inside or ("none" if sizes else note)


def ops(inputs: Inputs) -> dict[str, Any] | None:
    """Computing nodes of the limit's graph per layer, vLLM and fused: static, and no count of launches."""
    rows = [(run["name"], *run["ops_per_layer"]) for run in _runs(inputs) if run["ops_per_layer"]]
    if not rows:
        return None
    name, vllm_own, fused = rows[0]
    pairs = [("vllm", vllm_own), ("after the last pass", fused)]
    return {"rows": rows, "chart": _plain_bars("o0", f"Graph ops per layer, {name}", pairs, "graph ops per layer")}


def _plain_bars(ident: str, title: str, pairs: Sequence[tuple[str, float]], unit: str) -> charts.Chart:
    """One bar per name; the first, what the others are compared with, in grey."""
    rows = [
        (f"{name}: {value:g}", [("bar" if n else "range", value, f"{name}: {value:g} {unit}")])
        for n, (name, value) in enumerate(pairs)
    ]
    return charts.bars(ident, title, rows)


def planned(record: Record, ident: str) -> dict[str, Any]:
    """Launches per layer and step by formula, from a plan: static."""
    by_tokens = (record.data["figures"] or {"by_tokens": {}})["by_tokens"]
    rows = [
        (tokens, path, len(figures["launches"]), figures["launches_per_step"], f"{figures['bytes']:,}")
        for tokens, paths in by_tokens.items()
        for path, figures in paths.items()
    ]
    pairs = [(path, launches) for tokens, path, launches, *_ in rows if tokens == rows[0][0]]
    name = record.data["model"]["name"]
    chart = _plain_bars(ident, f"Launches per layer by formula, {name}", pairs, "launches per layer")
    return {"name": name, "rows": rows, "chart": chart}


def bench(record: Record, ident: str) -> dict[str, Any]:
    """Ratios by T and N, one chart per N and type, with the bounds and the caps the run called for."""
    data = record.data
    rows = data["rows"]
    cells = {(row["point"]["quantised"], row["point"]["heads"], row["point"]["tokens"]): row for row in rows}
    ratios = {key: row["ratio"] for key, row in cells.items()}
    top = max([1.2, *(ratio for ratio in ratios.values() if ratio is not None)]) * 1.12
    over = " over fp8 weights" if rows and rows[0]["point"].get("fp8_weight") else ""
    kinds = []
    for quantised in sorted({key[0] for key in cells}, reverse=True):
        heads, tokens = (sorted({key[part] for key in cells if key[0] == quantised}) for part in (1, 2))
        name = "fp8" if quantised else "bf16"
        drawn = []
        for number, n in enumerate(heads):
            points = [(t, ratios.get((quantised, n, t))) for t in tokens]
            title = f"Ratio to the best unfused sequence, N = {n}, {name}{over}"
            drawn.append((n, charts.ratio_bars(f"{ident}{name}{number}", title, points, top)))
        table = [(t, [_bench_cell(cells.get((quantised, n, t))) for n in heads]) for t in tokens]
        kinds.append({"name": name + over, "charts": drawn, "rows": table})
    return data | {
        "name": record.name,
        "kinds": kinds,
        "missing": {name: why for row in rows for name, why in row["missing"].items()},
        "slower": sum(ratio is not None and ratio < 1 for ratio in ratios.values()),
    }


def _bench_cell(row: dict[str, Any] | None) -> dict[str, Any]:
    if row is None or row["ratio"] is None:
        return {"text": NOT_MEASURED, "slow": False}
    timings = row["timings"]
    counts = "/".join(str(timings[name]["launches"]) for name in ("one launch", "unfused") if name in timings)
    return {"text": f"{row['ratio']:.2f}" + (f" ({counts})" if counts else ""), "slow": row["ratio"] < 1}


def verify(record: Record, ident: str) -> dict[str, Any]:
    """Counts by back end, failures with the command that repeats them, and what was launched."""
    data = record.data
    counts: dict[str, dict[str, int]] = {}
    for result in data["results"]:
        counts.setdefault(result["backend"], dict.fromkeys(STATES, 0))[result["status"]] += 1
    rows = []
    for name, one in counts.items():
        parts = [(f"state {state}", count, f"{name}: {count} {state}") for state, count in one.items() if count]
        rows.append((f"{name}: " + ", ".join(f"{count} {state}" for state, count in one.items() if count), parts))
    on_cpu = "eager" in data["engine"]
    return data | {
        "name": record.name,
        "chart": charts.bars(ident, f"Verify results by back end, {data['engine']}", rows),
        "counts": counts,
        "skipped": sorted({result["reason"] for result in data["results"] if result["status"] == "skipped"}),
        "launches": _launches(data["results"], on_cpu),
        "on_cpu": on_cpu,
    }


def _launches(results: list[dict[str, Any]], on_cpu: bool) -> list[tuple[str, str, str, str]]:
    """What a step was made of, one row per back end, variant and distinct answer, with the sizes that gave it."""
    sizes: dict[tuple[str, str, str], set[int]] = {}
    for result in results:
        for size, words in result["launches"].items():
            # verify counts launches; in eager replay it counts PyTorch ops.
            said = words.replace("launches:", "ops:") if on_cpu else words
            sizes.setdefault((result["backend"], result["variant"], said), set()).add(int(size))
    return [(b, v, ", ".join(map(str, sorted(found))), words) for (b, v, words), found in sizes.items()]


def versions(inputs: Inputs) -> list[tuple[str, str, str]]:
    """What each input was made with: (input, what, version)."""
    known = [(record.name, record.data["versions"]) for record in inputs["demos"] or inputs["engines"]]
    known += [(record.name, record.data["machine"]) for record in (*inputs["benches"], *inputs["verifies"])]
    known += [(record.name, record.data["about"]) for record in (*inputs["servings"], *inputs["accuracies"])]
    for record in inputs["plans"]:
        known.append(
            (record.name, {"vllm-aiter-mla": record.data["plugin"], "vllm": record.data["vllm"] or "not installed"})
        )
    return [(name, what, version) for name, found in known for what, version in found.items()]

"""The section of graphs: an MLA layer before and after each pass in a fixed drawing, and what differs in the texts.

The chain of a layer is known (vLLM, and after pass 1, 2 and 3), so every box has its place; a graph's text says which
of them are there. A text is what ``str(graph)`` gives; torch is not needed to read it.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import Any

from vllm_aiter_mla.commands.report.charts import CHARACTER, Chart
from vllm_aiter_mla.commands.report.inputs import InputError, Inputs, Record

# The op called, and the first argument: for ``auto_functionalized`` the op inside it.
_CALL = re.compile(r"^ *%\w+ :.*?= call_function\[target=([^\]]+)\](?:\(args = \(([\w.]+))?", re.MULTILINE)
# Neither computes anything: views and the unpacking of results.
_FREE = re.compile(
    r"aten\.(reshape|view|slice|split|split_with_sizes|unsqueeze|squeeze|expand|permute|transpose|alias|select)\b"
    r"|operator\.getitem|aten\.sym_size"
)
_ATTENTION = re.compile(r"unified_mla_attention|mla_attention_with_(prepared_q|rope)")
KV_WRITE = "unified_mla_kv_cache_update"
# The furthest pass that a graph shows, by the op that it puts in; first match wins.
STAGES = {
    "mla_attention_with_rope": "after pass 3: AITER fusion",
    "mla_decode_q_prep": "after pass 2: q_prep lift",
    "fused_rope_unified_mla_kv_cache_update": "after pass 1: RoPE + KV write",
}
VLLM = "vllm"
_ORDER = (VLLM, *reversed(STAGES.values()))
# What the attention op does by itself, where no node shows it.
INSIDE = {
    "unified": "split, absorb BMM, concat, fp8 quant where asked for, attention, v-up projection",
    "prepared": "attention, v-up projection; a prefill row takes the unmodified vLLM path inside the op",
    "rope": "decode rows: absorb BMM, one launch that rotates, assembles, quantises and writes, attention, v-up "
    "projection; with a prefill row: RoPE and KV write in one launch, then the unmodified vLLM path",
}

GEMM, NORM, ROPE = "GEMM", "RMS norm", "RoPE, op by op"
COLUMNS, ROW, HEIGHT, WIDE, GAP = ("q", "k_pe", "kv_c"), 58.0, 32.0, 150.0, 14.0
# By box: first and last column, and the row.
PLACES = {
    GEMM: (0, 2, 0),
    ROPE: (0, 1, 1),
    NORM: (2, 2, 1),
    KV_WRITE: (1, 2, 2),
    "fused_rope_unified_mla_kv_cache_update": (0, 2, 2),
    "mla_decode_q_prep": (0, 0, 3),
    "attention": (0, 2, 4),
}


def ops(text: str) -> Counter[str]:
    """Calls of a graph that compute something, by op: ``aten.mul``, ``mla_decode_q_prep``; as `demo` counts them."""
    calls = (inner if inner and "auto_functionalized" in target else target for target, inner in _CALL.findall(text))
    return Counter(_short(target) for target in calls if not _FREE.search(target))


def _short(target: str) -> str:
    parts = target.removeprefix("torch.ops.").removesuffix(".default").split(".")
    return ".".join(parts[:2]) if parts[0] in ("aten", "prims") else parts[1] if len(parts) > 1 else parts[0]


def stage_of(found: Counter[str]) -> str:
    """How far the passes came, told by the ops that they put in."""
    return next((stage for op, stage in STAGES.items() if op in found), VLLM)


def boxes(found: Counter[str]) -> dict[str, str]:
    """Labels of a layer's boxes by place. The GEMMs and the norm are in every layer; vLLM rotates op by op."""
    labels = {place: place for place in PLACES if place in (GEMM, NORM) or place in found}
    if stage_of(found) == VLLM:
        labels[ROPE] = ROPE
    attention = [op for op, _ in found.most_common() if _ATTENTION.search(op)]
    return labels | {"attention": attention[0]}


def sections(inputs: Inputs) -> list[dict[str, Any]]:
    """One comparison per kept run; runs that stop after a pass join the comparison whose vLLM graph is theirs."""
    by_name = {record.name: record for record in inputs["engines"]}
    pairs, alone = [], dict(by_name)
    for name, record in by_name.items():
        off = by_name.get(name.removesuffix("-on") + "-off")
        if name.endswith("-on") and off is not None:
            pairs.append((name.removesuffix("-on"), off, record))
            del alone[name], alone[off.name]
    runs = inputs["demos"][0].data["runs"] if inputs["demos"] else []
    found = []
    for number, (name, off, on) in enumerate(pairs):
        title = runs[number]["name"] if number < len(runs) else name
        found.append(_comparison(f"g{number}", title, [off, on, *([] if number else alone.values())]))
        found[-1]["ranges"] = _ranges(off, on)
    if not pairs:
        found = [_comparison(f"g{number}", one.name, [one]) for number, one in enumerate(alone.values())]
    return [section for section in found if section["stages"]]


def _comparison(ident: str, title: str, records: list[Record]) -> dict[str, Any]:
    stages: dict[str, dict[str, Any]] = {}
    for record in records:
        stage = _stage(record)
        if stage is not None:
            stages.setdefault(stage["name"], stage)
    ordered = sorted(stages.values(), key=lambda stage: _ORDER.index(stage["name"]))
    for number, stage in enumerate(ordered):
        # Mark in the first graph what the last one lacks, and in the others what the first lacks.
        other = ordered[0 if number else -1]
        words = f"{title}: one MLA layer, {stage['name']}"
        stage["chart"] = draw(boxes(stage["ops"]), boxes(other["ops"]), f"{ident}s{number}", words)
    names = sorted({op for stage in ordered for op in stage["ops"]})
    counts = [(op, *(stage["ops"][op] for stage in ordered)) for op in names]
    different = [row for row in counts if len(ordered) == 1 or len(set(row[1:])) > 1]
    return {"title": title, "stages": ordered, "counts": different, "ranges": []}


def _stage(record: Record) -> dict[str, Any] | None:
    """The graph of a run's decode limit; None where it was not kept or has no MLA layer."""
    name = "{}-{}".format(*(record.data["ranges"] or [(0, 0)])[0])
    if name not in record.data["graphs"]:
        return None
    found = ops(record.data["graphs"][name])
    if not found:
        raise InputError(
            f"{record.path}: graph of {name}: no node found; lines of %name : ... = op[target=...] expected"
        )
    attention = {op: count for op, count in found.items() if _ATTENTION.search(op)}
    if not attention:
        return None
    inside = INSIDE[next(kind for kind in reversed(INSIDE) if any(kind in op for op in attention))]
    shown = {"name": stage_of(found), "source": record.name, "range": name, "ops": found, "inside": inside}
    return shown | {"attention": attention, "per_layer": found.total() / sum(attention.values())}


def _ranges(off: Record, on: Record) -> list[tuple[str, str, str]]:
    """Per compile range whether the graph's text is that of the run with the flag off: (range, status line, lines)."""
    rows = []
    for start, end in on.data["ranges"]:
        key = f"{start}-{end}"
        before, after = off.data["graphs"].get(key), on.data["graphs"].get(key)
        if before is None or after is None:
            rows.append((key, "not recorded", ""))
            continue
        outcome = "identical to unmodified vLLM, byte for byte" if before == after else "rewritten"
        rows.append((key, outcome, f"{len(before.splitlines())} -> {len(after.splitlines())}"))
    return rows


def draw(labels: dict[str, str], others: dict[str, str], ident: str, title: str) -> Chart:
    """A layer's boxes in their places; those that ``others`` lacks are marked by more than colour."""
    changed = {place for place, label in labels.items() if others.get(place) != label}
    words = "; ".join(label + (" (differs)" if place in changed else "") for place, label in labels.items())
    height = 20 + ROW * max(row for *_, row in PLACES.values()) + HEIGHT + 4
    chart = Chart(ident, WIDE * len(COLUMNS), height, title, f"Operations from inputs to attention: {words}.")
    for column, name in enumerate(COLUMNS):
        x = WIDE * (column + 0.5)
        chart.text((x, 12), name, css="note")
        rows = sorted(PLACES[place][2] for place in labels if PLACES[place][0] <= column <= PLACES[place][1])
        for above, below in pairwise(rows):
            end = 20 + below * ROW
            chart.line("edge", (x, 20 + above * ROW + HEIGHT), (x, end))
            chart.line("tip", (x - 4, end - 8), (x + 4, end - 8), (x, end))
    for place, label in labels.items():
        first, last, row = PLACES[place]
        x, y, wide = first * WIDE + GAP / 2, 20 + row * ROW, (last - first + 1) * WIDE - GAP
        css = "box changed" if place in changed else "box gemm" if place == GEMM else "box"
        chart.rect(css, (x, y, wide, HEIGHT), label, 6)
        shown = label if len(label) * CHARACTER <= wide else label[: int(wide / CHARACTER) - 1] + "…"
        chart.text((x + wide / 2, y + 20), shown, css="strong" if place in changed else "")
    return chart

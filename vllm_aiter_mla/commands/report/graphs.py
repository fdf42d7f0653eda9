"""The section of graphs: per engine run a layer before and after each pass, and proof that nothing else changed."""

from __future__ import annotations

from typing import Any

from vllm_aiter_mla.commands.report import fx, layers, svg
from vllm_aiter_mla.commands.report.inputs import InputError, Inputs, Record

_ORDER = (layers.STOCK, *(stage for _, stage in reversed(layers.STAGES)))


def sections(inputs: Inputs) -> list[dict[str, Any]]:
    """One comparison per kept run; runs that stop after a pass join the comparison whose stock graph is theirs."""
    pairs, single = _pairs(inputs.engines)
    found = []
    for number, (name, off, on) in enumerate(pairs):
        extra = single if number == 0 else []
        found.append(_comparison(f"g{number}", _title(inputs, name, number), off, [on, *extra]))
    if not pairs:
        found += [_comparison(f"g{n}", one.name, None, [one]) for n, one in enumerate(single)]
    return [section for section in found if section["stages"]]


def _pairs(engines: list[Record]) -> tuple[list[tuple[str, Record, Record]], list[Record]]:
    """(name, off, on) of the runs that a demo kept in pairs, and the runs that stand alone."""
    by_name = {record.name: record for record in engines}
    pairs, used = [], set()
    for name, record in by_name.items():
        off = by_name.get(name.removesuffix("-on") + "-off")
        if name.endswith("-on") and off is not None:
            pairs.append((name.removesuffix("-on"), off, record))
            used |= {name, off.name}
    return pairs, [record for name, record in by_name.items() if name not in used]


def _title(inputs: Inputs, name: str, number: int) -> str:
    runs = inputs.demos[0].data["runs"] if inputs.demos else []
    return str(runs[number]["name"]) if number < len(runs) else name


def _comparison(ident: str, title: str, off: Record | None, others: list[Record]) -> dict[str, Any]:
    records = [record for record in [off, *others] if record is not None and record.data["graphs"]]
    stages: dict[str, dict[str, Any]] = {}
    for record in records:
        stage = _stage(record)
        if stage is not None:
            stages.setdefault(stage["name"], stage)
    ordered = sorted(stages.values(), key=lambda stage: _ORDER.index(stage["name"]))
    if len(ordered) > 1:
        first = ordered[0]["layer"]
        for stage in ordered[1:]:
            layers.mark(first, stage["layer"])
        # The stock side shows what is gone in the end.
        layers.mark(first, ordered[-1]["layer"])
    for number, stage in enumerate(ordered):
        _draw(stage, f"{ident}s{number}", title)
    return {"title": title, "stages": ordered, "ranges": _ranges(off, others[0]) if off is not None else []}


def _stage(record: Record) -> dict[str, Any] | None:
    """The first MLA layer of a run's decode bucket."""
    ranges, texts = record.data["ranges"], record.data["graphs"]
    start, end = ranges[0] if ranges else (0, 0)
    text = texts.get(f"{start}-{end}")
    if text is None:
        return None
    try:
        nodes = fx.parse(text)
    except fx.GraphTextError as error:
        raise InputError(f"{record.path}: graph of {start}-{end}: {error}") from error
    found = layers.attentions(nodes)
    if not found:
        return None
    layer = layers.cut(nodes, found[0])
    return {
        "name": layer.stage,
        "source": record.name,
        "layer": layer,
        "range": f"{start}-{end}",
        "count": len(found),
        "per_layer": fx.computing(nodes) / len(found),
    }


def _draw(stage: dict[str, Any], ident: str, title: str) -> None:
    layer: layers.Layer = stage["layer"]
    stage["svg"] = svg.layer_graph(layer, ident, f"{title}: one MLA layer's FX graph, {stage['name']}")
    stage["inside"] = layers.INSIDE[layer.stage]
    stage["ops"], stage["changed"] = layer.ops, layer.changed
    labels = {box.key: box.label + (f" ({box.note})" if box.note else "") for box in layer.boxes.values()}
    stage["rows"] = [
        {
            "op": labels[box.key],
            "node": box.key,
            "reads": ", ".join(labels[name] for name in box.inputs if name in labels) or "another layer's part",
            "changed": box.changed,
        }
        for box in layer.boxes.values()
    ]


def _ranges(off: Record, on: Record) -> list[dict[str, Any]]:
    """Per compile range whether the graph's text is that of the run with the flag off."""
    rows = []
    for start, end in on.data["ranges"]:
        key = f"{start}-{end}"
        before, after = off.data["graphs"].get(key), on.data["graphs"].get(key)
        if before is None or after is None:
            rows.append({"range": key, "verdict": "not recorded", "lines": ""})
            continue
        lines = f"{len(before.splitlines())} -> {len(after.splitlines())}"
        verdict = "identical to stock, byte for byte" if before == after else "rewritten"
        rows.append({"range": key, "verdict": verdict, "lines": lines})
    return rows

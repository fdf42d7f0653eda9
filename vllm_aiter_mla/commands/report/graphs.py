"""The section of graphs: per engine run a layer before and after each pass, and proof that nothing else changed."""

from __future__ import annotations

from typing import Any

from vllm_aiter_mla.commands.report import fx, layers
from vllm_aiter_mla.commands.report.inputs import InputError, Inputs, Record

_ORDER = (layers.STOCK, *(stage for _, stage in reversed(layers.STAGES)))


def sections(inputs: Inputs) -> list[dict[str, Any]]:
    """One comparison per kept run; runs that stop after a pass join the comparison whose stock graph is theirs."""
    by_name = {record.name: record for record in inputs.engines}
    pairs, alone = [], dict(by_name)
    for name, record in by_name.items():
        off = by_name.get(name.removesuffix("-on") + "-off")
        if name.endswith("-on") and off is not None:
            pairs.append((name.removesuffix("-on"), off, record))
            del alone[name], alone[off.name]
    runs = inputs.demos[0].data["runs"] if inputs.demos else []
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
    # The last one is compared last: the stock side shows what is gone in the end.
    for stage in ordered[1:]:
        layers.mark(ordered[0]["layer"], stage["layer"])
    for number, stage in enumerate(ordered):
        words = f"{title}: one MLA layer's FX graph, {stage['name']}"
        stage["chart"] = layers.draw(stage["layer"], f"{ident}s{number}", words)
    return {"title": title, "stages": ordered, "ranges": []}


def _stage(record: Record) -> dict[str, Any] | None:
    """The first MLA layer of a run's decode bucket."""
    if not record.data["ranges"]:
        return None
    name = "{}-{}".format(*record.data["ranges"][0])
    text = record.data["graphs"].get(name)
    if text is None:
        return None
    try:
        nodes = fx.parse(text)
    except fx.GraphTextError as error:
        raise InputError(f"{record.path}: graph of {name}: {error}") from error
    found = layers.attentions(nodes)
    if not found:
        return None
    layer = layers.cut(nodes, found[0])
    shown = {"name": layer.stage, "source": record.name, "layer": layer, "range": name, "count": len(found)}
    return shown | {"inside": layers.INSIDE[layer.stage]}


def _ranges(off: Record, on: Record) -> list[tuple[str, str, str]]:
    """Per compile range whether the graph's text is that of the run with the flag off: (range, verdict, lines)."""
    rows = []
    for start, end in on.data["ranges"]:
        key = f"{start}-{end}"
        before, after = off.data["graphs"].get(key), on.data["graphs"].get(key)
        if before is None or after is None:
            rows.append((key, "not recorded", ""))
            continue
        verdict = "identical to stock, byte for byte" if before == after else "rewritten"
        rows.append((key, verdict, f"{len(before.splitlines())} -> {len(after.splitlines())}"))
    return rows

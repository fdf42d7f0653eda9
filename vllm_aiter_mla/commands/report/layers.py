"""One layer of a graph, in a fixed drawing: from its GEMMs to its attention, with the boxes that this graph has.

The chain of a layer is known (stock, and after pass 1, 2 and 3), so every box has its place;
a box that the graph lacks is left out. Views, allocations and graph inputs are no part of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from vllm_aiter_mla.commands.report.charts import CHARACTER, Chart
from vllm_aiter_mla.commands.report.fx import Node

_ATTENTION = re.compile(r"(unified_mla_attention|mla_attention_with_prepared_q)")
_NORM = re.compile(r"rsqrt|rms_norm")
# The furthest pass that a layer shows, by the op that it puts in; first match wins.
STAGES = (
    ("fused_qk_rope_kv_cache_q_prep", "after pass 3: AITER fusion"),
    ("mla_decode_q_prep", "after pass 2: q_prep lift"),
    ("fused_rope_unified_mla_kv_cache_update", "after pass 1: RoPE + KV write"),
)
STOCK = "stock"
# What the attention op does by itself, where no node shows it.
_WITH_ABSORB = "split, absorb BMM, concat, fp8 quant where asked for, attention, v-up projection"
_WITHOUT = "attention, v-up projection; a prefill row takes the stock path inside the op"
INSIDE = {STOCK: _WITH_ABSORB, STAGES[2][1]: _WITH_ABSORB, STAGES[1][1]: _WITHOUT, STAGES[0][1]: _WITHOUT}

GEMM, NORM, OTHERS = "GEMM", "RMS norm", "RoPE and other ops"
# Columns q, k_pe, kv_c: where each box begins and ends, and its row. An op that is not named here is one of OTHERS.
COLUMNS, ROW, HEIGHT, WIDE, GAP = ("q", "k_pe", "kv_c"), 66.0, 38.0, 150.0, 14.0
PLACES = {
    GEMM: (0, 3, 0),
    OTHERS: (0, 2, 1),
    NORM: (2, 3, 1),
    "unified_mla_kv_cache_update": (1, 3, 2),
    STAGES[2][0]: (0, 3, 2),
    STAGES[0][0]: (0, 3, 2),
    STAGES[1][0]: (0, 1, 3),
    "attention": (0, 3, 4),
}


@dataclass(slots=True)
class Box:
    """One box of the drawing.

    Attributes:
        label: what stands in it.
        ops: computing nodes in it by op, each with its constants: equal in two graphs that compute the same here.
        changed: whether the other graph has another box in this place, or none.
    """

    label: str
    ops: Counter[tuple[str, str]] = field(default_factory=Counter)
    changed: bool = False

    @property
    def words(self) -> str:
        """Its ops by name, with their number."""
        names = Counter(name for name, _ in self.ops.elements())
        return ", ".join(f"{name} x {count}" if count > 1 else name for name, count in names.most_common())


@dataclass(slots=True)
class Layer:
    """One layer's boxes by place, from the top, and how far the passes have come."""

    boxes: dict[str, Box]
    stage: str

    @property
    def ops(self) -> int:
        """Computing nodes from the GEMMs (not counted) to the attention (counted)."""
        return sum(box.ops.total() for place, box in self.boxes.items() if place != GEMM)

    @property
    def changed(self) -> int:
        """Computing nodes in marked boxes."""
        return sum(box.ops.total() for box in self.boxes.values() if box.changed)


def attentions(nodes: dict[str, Node]) -> list[str]:
    """Names of the attention nodes, one per MLA layer, in order."""
    return [name for name, node in nodes.items() if _ATTENTION.search(node.target)]


def cut(nodes: dict[str, Node], attention: str) -> Layer:
    """The layer of an attention node: its ancestors up to the nearest GEMMs."""
    above = _reach(nodes, [attention], attention)
    found = {name: nodes[name] for name in above if not nodes[name].is_free and not nodes[name].is_input}
    norm = _norm(nodes, found, attention)
    boxes: dict[str, Box] = {}
    for name, node in found.items():
        place = _place(node, name in norm)
        box = boxes.setdefault(place, Box(place if place in (GEMM, NORM, OTHERS) else node.short))
        box.ops[(node.short, "" if node.is_gemm else re.sub(r"%\w+", "%", node.text))] += 1
    return Layer({place: boxes[place] for place in PLACES if place in boxes}, stage_of(found.values()))


def stage_of(nodes: Iterable[Node]) -> str:
    """How far the passes came, told by the ops that they put in."""
    found = {node.short for node in nodes}
    return next((stage for op, stage in STAGES if op in found), STOCK)


def mark(before: Layer, after: Layer) -> None:
    """Mark the boxes of each layer that the other does not have, or that hold other ops or constants there."""
    for one, other in ((before, after), (after, before)):
        for place, box in one.boxes.items():
            box.changed = place not in other.boxes or other.boxes[place].ops != box.ops


def _reach(nodes: dict[str, Node], starts: list[str], attention: str) -> dict[str, None]:
    """These nodes and what they are computed from; a GEMM and another layer's attention are the border."""
    seen: dict[str, None] = {}
    todo = list(starts)
    while todo:
        name = todo.pop()
        if name in nodes and name not in seen:
            seen[name] = None
            node = nodes[name]
            if not node.is_gemm and (name == attention or not _ATTENTION.search(node.target)):
                todo += node.operands
    return seen


def _norm(nodes: dict[str, Node], found: dict[str, Node], attention: str) -> set[str]:
    """The nodes of an RMS norm: what its root is computed from, and the ATen ops that its result goes through."""
    roots = [name for name, node in found.items() if _NORM.search(node.target)]
    readers: dict[str, list[str]] = {}
    for name, node in nodes.items():
        for operand in node.operands:
            readers.setdefault(operand, []).append(name)
    norm, todo = set(_reach(nodes, roots, attention)), list(roots)
    while todo:
        for name in readers.get(todo.pop(), ()):
            if name not in norm and (nodes[name].is_free or nodes[name].short.startswith(("aten.", "prims."))):
                norm.add(name)
                todo.append(name)
    return norm


def _place(node: Node, in_norm: bool) -> str:
    if node.is_gemm:
        return GEMM
    if _ATTENTION.search(node.target):
        return "attention"
    return node.short if node.short in PLACES else NORM if in_norm else OTHERS


def draw(layer: Layer, ident: str, title: str) -> Chart:
    """The layer's boxes in their places; those that the other graph lacks are marked by more than colour."""
    described = "; ".join(f"{box.label}{' (differs)' if box.changed else ''}" for box in layer.boxes.values())
    height = ROW * max(row for *_, row in PLACES.values()) + HEIGHT + 24
    chart = Chart(ident, WIDE * len(COLUMNS), height, title, f"Operations from inputs to attention: {described}.")
    for column, name in enumerate(COLUMNS):
        x = WIDE * (column + 0.5)
        chart.text((x, 12), name, css="note")
        passed = [PLACES[place][2] for place in layer.boxes if PLACES[place][0] <= column < PLACES[place][1]]
        for above, below in pairwise(sorted(set(passed))):
            end = 20 + below * ROW
            chart.line("edge", (x, 20 + above * ROW + HEIGHT), (x, end))
            chart.line("tip", (x - 4, end - 8), (x + 4, end - 8), (x, end))
    for place, box in layer.boxes.items():
        first, last, row = PLACES[place]
        x, y, wide = first * WIDE + GAP / 2, 20 + row * ROW, (last - first) * WIDE - GAP
        css = "box changed" if box.changed else "box gemm" if place == GEMM else "box"
        chart.rect(css, (x, y, wide, HEIGHT), f"{box.label}: {box.words}", 6)
        label = box.label if len(box.label) * CHARACTER < wide else box.label[: int(wide / CHARACTER) - 1] + "…"
        css = "strong" if box.changed else ""
        chart.text((x + wide / 2, y + (17 if box.ops.total() > 1 else 23)), label, css=css)
        if box.ops.total() > 1:
            chart.text((x + wide / 2, y + 31), f"{box.ops.total()} ops", css="note")
    return chart

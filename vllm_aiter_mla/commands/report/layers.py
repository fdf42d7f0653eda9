"""One layer out of a graph: from its attention node upwards to the GEMMs, and what differs between two of them.

Views, allocations and graph inputs are folded away; a norm is one box. What is left is what costs a launch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_aiter_mla.commands.report.fx import Node

_ATTENTION = re.compile(r"(unified_mla_attention|mla_attention_with_prepared_q)")
# The furthest pass that a layer shows, by the op that it puts in; first match wins.
STAGES = (
    ("fused_qk_rope_kv_cache_q_prep", "after pass 3: AITER fusion"),
    ("mla_decode_q_prep", "after pass 2: q_prep lift"),
    ("fused_rope_unified_mla_kv_cache_update", "after pass 1: RoPE + KV write"),
)
STOCK = "stock"
# What the attention op does by itself, where no node shows it.
INSIDE = {
    STOCK: "split, absorb BMM, concat, fp8 quant where asked for, attention, v-up projection",
    STAGES[2][1]: "split, absorb BMM, concat, fp8 quant where asked for, attention, v-up projection",
    STAGES[1][1]: "attention, v-up projection; a prefill row takes the stock path inside the op",
    STAGES[0][1]: "attention, v-up projection; a prefill row takes the stock path inside the op",
}


@dataclass(slots=True)
class Box:
    """What is drawn: one node, or several that belong together.

    Attributes:
        key: name of the (last) node.
        label: its op in short.
        note: a second line, or "".
        inputs: keys of the boxes it reads.
        count: nodes in it.
        signature: equal in two graphs where the same thing is computed from the same inputs.
        changed: whether the other graph has no such box.
    """

    key: str
    label: str
    note: str = ""
    inputs: list[str] = field(default_factory=list)
    count: int = 1
    signature: str = ""
    changed: bool = False


@dataclass(slots=True)
class Layer:
    """One layer's boxes in topological order, and how far the passes have come."""

    boxes: dict[str, Box]
    stage: str

    @property
    def ops(self) -> int:
        """Computing nodes from the GEMMs (not counted) to the attention (counted)."""
        return sum(box.count for box in self.boxes.values() if box.inputs or box.label != "GEMM")

    @property
    def changed(self) -> int:
        """Computing nodes that the other graph does not have."""
        return sum(box.count for box in self.boxes.values() if box.changed)


def attentions(nodes: dict[str, Node]) -> list[str]:
    """Names of the attention nodes, one per MLA layer, in order."""
    return [name for name, node in nodes.items() if _ATTENTION.search(node.target)]


def cut(nodes: dict[str, Node], attention: str) -> Layer:
    """The layer of an attention node: its ancestors up to the nearest GEMMs."""
    wanted = _ancestors(nodes, attention)
    boxes: dict[str, Box] = {}
    for name in _sorted(nodes, wanted):
        node = nodes[name]
        if not node.is_free and not node.is_input:
            boxes[name] = Box(name, _label(node), inputs=[] if node.is_gemm else _sources(nodes, node))
            boxes[name].signature = _signature(nodes, node, boxes)
    _name_gemms(nodes, nodes[attention], boxes)
    _fold_norms(boxes)
    return Layer(boxes, stage_of(nodes[name] for name in wanted))


def stage_of(nodes: Iterable[Node]) -> str:
    """How far the passes came, told by the ops that they put in."""
    found = {node.short for node in nodes}
    for op, stage in STAGES:
        if op in found:
            return stage
    return STOCK


def mark(before: Layer, after: Layer) -> None:
    """Mark the boxes of each layer that the other does not have."""
    for one, other in ((before, after), (after, before)):
        known = {box.signature for box in other.boxes.values()}
        for box in one.boxes.values():
            box.changed = box.signature not in known


def _ancestors(nodes: dict[str, Node], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        if name in seen or name not in nodes:
            continue
        seen.add(name)
        node = nodes[name]
        # Another layer's attention is as good a border as a GEMM.
        if not node.is_gemm and (name == start or not _ATTENTION.search(node.target)):
            todo += node.operands
    return seen


def _sorted(nodes: dict[str, Node], wanted: set[str]) -> list[str]:
    """Operands first: the text of a graph need not be in topological order."""
    order: dict[str, None] = {}
    todo = [(name, False) for name in reversed(list(nodes)) if name in wanted]
    while todo:
        name, ready = todo.pop()
        if name in order:
            continue
        if ready:
            order[name] = None
            continue
        todo.append((name, True))
        if not nodes[name].is_gemm:
            todo += [(operand, False) for operand in nodes[name].operands if operand in wanted and operand not in order]
    return list(order)


def _sources(nodes: dict[str, Node], node: Node) -> list[str]:
    """The computing nodes behind a node's operands, through views."""
    found: dict[str, None] = {}
    for operand in node.operands:
        source = nodes.get(operand)
        if source is None or source.is_input:
            continue
        for name in _sources(nodes, source) if source.is_free else [operand]:
            found[name] = None
    return list(found)


def _signature(nodes: dict[str, Node], node: Node, boxes: dict[str, Box]) -> str:
    """Target and operands down to GEMMs and inputs, as one hash that does not depend on node names."""
    described = _describe(nodes, node, boxes)
    return f"{hash(described):x}"


def _describe(nodes: dict[str, Node], node: Node, boxes: dict[str, Box]) -> str:
    if node.is_gemm:
        # Its weight says which one it is; what feeds it belongs to another layer.
        weights = [name for name in node.operands if name in nodes and nodes[name].is_input]
        return f"{node.target}({','.join(weights)})"

    def operand(match: re.Match[str]) -> str:
        name = match[1]
        if name in boxes:
            return boxes[name].signature
        source = nodes.get(name)
        if source is None or source.is_input:
            return name
        return "(" + _describe(nodes, source, boxes) + ")"

    return node.target + re.sub(r"%(\w+)", operand, node.text)


def _label(node: Node) -> str:
    return "GEMM" if node.is_gemm else node.short


def _name_gemms(nodes: dict[str, Node], attention: Node, boxes: dict[str, Box]) -> None:
    query = _upstream(boxes, _behind(nodes, attention, "q"))
    latent = _upstream(boxes, _behind(nodes, attention, "kv_c_normed") | _behind(nodes, attention, "k_pe"))
    for key, box in boxes.items():
        if box.label == "GEMM":
            only_query = key in query and key not in latent
            box.note = "q" if only_query else "kv_c and k_pe" if key in latent and key not in query else ""


def _behind(nodes: dict[str, Node], attention: Node, argument: str) -> set[str]:
    name = attention.named.get(argument)
    node = nodes.get(name or "")
    if node is None or node.is_input:
        return set()
    return set(_sources(nodes, node)) if node.is_free else {node.name}


def _upstream(boxes: dict[str, Box], keys: set[str]) -> set[str]:
    seen: set[str] = set()
    todo = list(keys)
    while todo:
        key = todo.pop()
        if key in boxes and key not in seen:
            seen.add(key)
            todo += boxes[key].inputs
    return seen


def _fold_norms(boxes: dict[str, Box]) -> None:
    """One box for an RMS norm: from ``rsqrt`` up to the value that it scales, down to its last multiplication."""
    for key in [key for key, box in boxes.items() if box.label == "aten.rsqrt"]:
        inner = _norm(boxes, key)
        if inner is None:
            continue
        last = inner[-1]
        members = set(inner)
        outside = [name for name in dict.fromkeys(i for k in inner for i in boxes[k].inputs) if name not in members]
        norm = boxes[last]
        norm.label, norm.note, norm.count, norm.inputs = "RMS norm", f"{len(inner)} ops", len(inner), outside
        for name in inner[:-1]:
            del boxes[name]


def _norm(boxes: dict[str, Box], rsqrt: str) -> list[str] | None:
    """Members of the norm around an ``rsqrt`` in order, or None where something inside is read from outside."""
    order = list(boxes)
    members = {rsqrt}
    todo = [rsqrt]
    while todo:
        for name in boxes[todo.pop()].inputs:
            if boxes[name].label in ("aten.add", "aten.mean", "aten.pow", "prims.convert_element_type"):
                members.add(name)
                todo.append(name)
    tail = rsqrt
    while True:
        readers = [key for key, box in boxes.items() if tail in box.inputs]
        if len(readers) != 1 or boxes[readers[0]].label not in ("aten.mul", "prims.convert_element_type"):
            break
        tail = readers[0]
        members.add(tail)
    for key, box in boxes.items():
        if key not in members and any(name in members and name != tail for name in box.inputs):
            return None
    return sorted(members, key=order.index)

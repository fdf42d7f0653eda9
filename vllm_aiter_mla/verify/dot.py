"""Read the DOT dump of a captured graph: CUDA's and HIP's, verbose or plain.

CUDA writes it by ``cudaGraphDebugDotPrint``, HIP by ``hipGraphDebugDotPrint``. Both name the nodes
``graph_<i>_node_<j>`` and put what matters into a label:

====================  ================================================================================
CUDA, verbose         ``{KERNEL\\n| {ID | 0 (topoId: 3) | name\\<\\<\\<1,128,0\\>\\>\\>}\\n| ...}``
HIP, verbose          ``{\\nKERNEL\\n| {ID | 0 | name\\<\\<\\<(1,1,1),(256,1,1),0\\>\\>\\>}\\n| ...}``
both, plain           ``0\\nname\\n`` in a bold octagon for a kernel, ``3\\nMEMCPY\\n(DtoD,64)`` and the like else
====================  ================================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KERNEL = "KERNEL"
# Nodes that order others and do nothing.
BARRIERS = frozenset({"EMPTY", "EVENT_RECORD", "EVENT_WAIT", "EVENTRECORD", "EVENTWAIT"})

# A label holds newlines and escaped signs, and no plain quotation mark.
_NODE = re.compile(r'^\s*"(?P<id>[^"]+)"\s*\[(?P<attributes>(?:[^"\]]|"(?:[^"\\]|\\.)*")*)\]', re.MULTILINE)
_ATTRIBUTE = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
# HIP forgets the closing quotation mark of `style` under some flags.
_UNCLOSED_STYLE = re.compile(r'style="(\w+)\s+shape=')
_VERBOSE_KERNEL = re.compile(r"\{\s*ID\s*\|\s*\d+[^|]*\|\s*(?P<name>.+?)(?:\\<\\<\\<(?P<launch>.*?)\\>|\})", re.DOTALL)
_KIND = re.compile(r"[A-Z][A-Z_]*")


class DotError(ValueError):
    """The text is no dump of a graph with nodes in it; the message says what was found."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node.

    Attributes:
        id: ``graph_1_node_0``.
        kind: "KERNEL", "MEMCPY", "MEMSET", "CHILD GRAPH", another of the runtime's names, or "UNKNOWN".
        name: of a kernel, mangled as the runtime has it; empty for others.
        launch: grid, block and shared memory as printed, where the dump has them.
    """

    id: str
    kind: str
    name: str = ""
    launch: str = ""


def parse(text: str) -> list[Node]:
    """The nodes of a dump in the order they are written; edges and clusters are left out.

    Raises:
        DotError: no ``digraph`` at all, or one without a node: an empty census would look like a graph without work.
    """
    if "digraph" not in text:
        raise DotError(f"no DOT text: it starts with {text[:40]!r}")
    text = _UNCLOSED_STYLE.sub(r'style="\1" shape=', text)
    nodes = []
    for match in _NODE.finditer(text):
        attributes = dict(_ATTRIBUTE.findall(match["attributes"]))
        nodes.append(_node(match["id"], attributes))
    if not nodes:
        raise DotError("the DOT text has no node: the graph is empty, or its format is a new one")
    return nodes


def _node(identifier: str, attributes: dict[str, str]) -> Node:
    label = attributes.get("label", "")
    if label.lstrip().startswith("{"):
        return _verbose(identifier, label)
    return _plain(identifier, label, attributes.get("shape", ""))


def _verbose(identifier: str, label: str) -> Node:
    kind = _KIND.match(label.lstrip("{ \n\r\t"))
    if kind is None:
        return Node(identifier, "UNKNOWN")
    if kind[0] != KERNEL:
        return Node(identifier, kind[0])
    kernel = _VERBOSE_KERNEL.search(label)
    if kernel is None:
        return Node(identifier, KERNEL)
    return Node(identifier, KERNEL, kernel["name"].strip(), kernel["launch"] or "")


def _plain(identifier: str, label: str, shape: str) -> Node:
    lines = [line.strip() for line in label.splitlines() if line.strip()]
    what = lines[1] if len(lines) > 1 else ""
    launched = len(lines) > 2 and lines[2].startswith("\\<")
    if shape == "octagon" or launched:
        launch = lines[2].replace("\\", "").strip("<>") if launched else ""
        return Node(identifier, KERNEL, what, launch)
    if what.startswith("graph_"):
        return Node(identifier, "CHILD GRAPH")
    kind = _KIND.match(what)
    return Node(identifier, kind[0] if kind else "UNKNOWN")

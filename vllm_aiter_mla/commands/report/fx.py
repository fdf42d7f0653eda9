"""The text of an FX graph, as ``str(graph)`` gives it, back as nodes and edges. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(
    r"^\s*%(?P<name>\w+)\s*:.*?=\s*(?P<op>placeholder|get_attr|call_\w+)\[target=(?P<target>[^\]]+)\](?P<rest>.*)$"
)
_OPERAND = re.compile(r"%(\w+)")
_WRAPPED = re.compile(r"args = \(([\w.]+)")
# Neither computes anything: views, the unpacking of results, and memory that is only reserved.
_FREE = re.compile(
    r"aten\.(reshape|view|slice|split|split_with_sizes|unsqueeze|squeeze|expand|permute|transpose|alias|select|empty)\b"
    r"|operator\.getitem|aten\.sym_size"
)
_GEMM = re.compile(r"(?:^|[._])(?:mm|addmm|bmm|linear|matmul|scaled_mm|gemm)(?:\.|$)")


class GraphTextError(ValueError):
    """A text that is not an FX graph; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Node:
    """One line of the graph.

    Attributes:
        name: as in the text, without the percent sign.
        op: "placeholder", "call_function", ...
        target: what is called; for ``auto_functionalized`` the op inside it.
        operands: names of the nodes it reads, in order, without repetition.
        text: the rest of the line, for comparing constants.
    """

    name: str
    op: str
    target: str
    operands: tuple[str, ...]
    text: str

    @property
    def is_free(self) -> bool:
        """Whether it computes nothing: a view, an unpacked result, an allocation."""
        return _FREE.search(self.target) is not None

    @property
    def is_input(self) -> bool:
        """Whether it comes from outside of the graph."""
        return self.op in ("placeholder", "get_attr")

    @property
    def is_gemm(self) -> bool:
        """Whether it is a linear layer's matrix product."""
        return _GEMM.search(self.target) is not None

    @property
    def short(self) -> str:
        """The target without its namespace and overload: ``aten.mul``, ``fused_qk_rope_kv_cache_q_prep``."""
        parts = self.target.removeprefix("torch.ops.").split(".")
        if len(parts) > 2:
            parts = parts[:-1]
        if parts[-1] == "default":
            parts = parts[:-1]
        return ".".join(parts) if parts[0] in ("aten", "prims") else parts[-1]


def parse(text: str) -> dict[str, Node]:
    """Nodes by name, in the order of the text.

    Raises:
        GraphTextError: no line of the text is a node.
    """
    nodes = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match:
            nodes[match["name"]] = _node(match)
    if not nodes:
        raise GraphTextError(
            "no node found: the text of an FX graph was expected, lines of %name : ... = op[target=...]"
        )
    return nodes


def _node(match: re.Match[str]) -> Node:
    target, rest = match["target"], match["rest"]
    wrapped = _WRAPPED.search(rest) if "auto_functionalized" in target else None
    operands = tuple(dict.fromkeys(_OPERAND.findall(rest)))
    return Node(match["name"], match["op"], wrapped[1] if wrapped else target, operands, rest)

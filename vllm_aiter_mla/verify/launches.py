"""How many launches a captured step holds, which, and how many it may hold.

Read from the DOT dump of a captured graph: CUDA's verbose one, HIP's plain one. Both put what matters into a label:

==============  ====================================================================================
CUDA, verbose   ``{KERNEL\\n| {ID | 0 (topoId: 3) | name\\<\\<\\<1,128,0\\>\\>\\>}\\n| ...}``
HIP, plain      ``0\\nname\\n`` in an octagon for a kernel, ``3\\nMEMCPY\\n(DtoD,64)`` and the like else
==============  ====================================================================================
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

KERNEL = "KERNEL"
# Nodes that order others and do nothing.
BARRIERS = frozenset({"EMPTY", "EVENT_RECORD", "EVENT_WAIT", "EVENTRECORD", "EVENTWAIT"})
# A label holds newlines and escaped signs, and no plain quotation mark.
_NODE = re.compile(r'^\s*"[^"]+"\s*\[((?:[^"\]]|"(?:[^"\\]|\\.)*")*)\]', re.MULTILINE)
_ATTRIBUTE = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
_CUDA_KERNEL = re.compile(r"\{\s*ID\s*\|\s*\d+[^|]*\|\s*(.+?)(?:\\<|\})", re.DOTALL)
_KIND = re.compile(r"[A-Z][A-Z_]*")

# Kinds of launches that a line names; a fused step has one or two.
NAMED = 6


class DotError(ValueError):
    """The text is no dump of a graph with nodes in it; the message says what was found."""


def of_dot(text: str) -> tuple[str, ...]:
    """What the graph of a DOT dump launches: names of kernels ("?" without one), kinds of other work. Raises DotError.

    An unknown kind counts: only what orders others does not.
    """
    return tuple((name or "?") if kind == KERNEL else kind for kind, name in nodes(text) if kind not in BARRIERS)


def in_words(names: Sequence[str]) -> str:
    """One line: "2 launches: 1 x Cijk_..., 1 x fuse_qk_rope..."."""
    counted = Counter(map(short, names)).most_common()
    words = [f"{count} x {name}" for name, count in counted[:NAMED]]
    if len(counted) > NAMED:
        words.append(f"{len(counted) - NAMED} other kinds")
    return f"{len(names)} launch{'es' * (len(names) != 1)}: {', '.join(words)}"


def nodes(text: str) -> list[tuple[str, str]]:
    """(kind, name) of the nodes of a dump in the order they are written; the name is a kernel's, as the runtime has it.

    Raises:
        DotError: no ``digraph`` at all, or one without a node: an empty list would look like a graph without work.
    """
    if "digraph" not in text:
        raise DotError(f"no DOT text: it starts with {text[:40]!r}")
    found = [_node(dict(_ATTRIBUTE.findall(attributes))) for attributes in _NODE.findall(text)]
    if not found:
        raise DotError("the DOT text has no node: the graph is empty, or its format is a new one")
    return found


def _node(attributes: dict[str, str]) -> tuple[str, str]:
    label = attributes.get("label", "")
    if label.lstrip().startswith("{"):
        kind, kernel = _KIND.match(label.lstrip("{ \n\r\t")), _CUDA_KERNEL.search(label)
        return kind[0] if kind else "UNKNOWN", kernel[1].strip() if kernel else ""
    what = [*(line.strip() for line in label.splitlines() if line.strip()), "", ""][1]
    if attributes.get("shape") == "octagon":
        return KERNEL, what
    kind = _KIND.match(what)
    return kind[0] if kind else "UNKNOWN", ""


class Allowed(NamedTuple):
    """Launches of one kind that a layer may make: names that match ``pattern``, from ``least`` to ``most`` of them."""

    what: str
    pattern: str
    least: int
    most: int


# The absorb BMM may be followed by the reduction of its split-K form; nothing else may stand beside AITER's op.
# The narrow pattern first: a kernel's name may hold "gemm" among its template arguments.
_BMM = r"gemm|bmm|matmul|cijk|tensile|hipblaslt|cublas|nvjet|cutlass|xmma|splitk|postgsu|dot_kernel"
EXPECTED: dict[str, tuple[Allowed, ...]] = {
    "triton": (Allowed("the one launch", r"decode_prep_kernel", 1, 1),),
    "aiter": (Allowed("AITER's op", r"rope.*(cache|concat|cat)", 1, 1), Allowed("absorb BMM", _BMM, 1, 2)),
}


def violation(backend: str, names: Sequence[str], layers: int, budget: int | None = None) -> str | None:
    """Why ``layers`` calls of a back end must not launch this, or None.

    Args:
        backend: its name; ``EXPECTED`` says what its calls are made of.
        names: of the captured graph's launches.
        layers: calls in it.
        budget: launches a call may make, for a back end without an entry; without one it passes.
    """
    allowed = EXPECTED.get(backend)
    if allowed is None:
        if budget is None or len(names) <= budget * layers:
            return None
        return f"{budget} launches per layer expected, {len(names)} found in {layers} layer(s); {in_words(names)}"
    counted = Counter(_classify(name, allowed) for name in names)
    for kind in allowed:
        found = counted.pop(kind.what, 0)
        if not kind.least * layers <= found <= kind.most * layers:
            wanted = f"{kind.least}" if kind.least == kind.most else f"{kind.least} to {kind.most}"
            return f"{kind.what}: {wanted} per layer expected, {found} found in {layers} layer(s); {in_words(names)}"
    if counted:
        most = sum(kind.most for kind in allowed) * layers
        return f"at most {most} launches of {layers} layer(s) expected, with no others; {in_words(names)}"
    return None


def _classify(name: str, allowed: tuple[Allowed, ...]) -> str:
    matching = (kind.what for kind in allowed if re.search(kind.pattern, name, re.IGNORECASE))
    return next(matching, "others")


def short(name: str) -> str:
    """A kernel's name without its mangled arguments, at most 60 characters.

    ``_ZN2at6native3fooE...``, an Itanium-mangled symbol, gives ``at::native::foo``.
    """
    mangled = re.match(r"_ZN?[KVr]*(?=\d)", name)
    rest, parts = name[mangled.end() :] if mangled else "", []
    while length := re.match(r"\d+", rest):
        end = length.end() + int(length[0])
        parts.append(rest[length.end() : end])
        rest = rest[end:]
    name = "::".join(part for part in parts if part != "_GLOBAL__N_1") or name
    return name if len(name) <= 60 else name[:57] + "..."

"""How many launches a captured step holds, which, and how many it may hold."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from vllm_aiter_mla.verify import dot

# Kinds of kernels that a line names; a fused step has one or two.
SPOKEN = 6


@dataclass(frozen=True, slots=True)
class Census:
    """The work in a captured graph.

    Attributes:
        kernels: names in order.
        others: kinds of the other nodes that do work, for instance "MEMSET".
    """

    kernels: tuple[str, ...]
    others: tuple[str, ...] = ()

    @classmethod
    def of_names(cls, names: list[str]) -> Census:
        """Launches that are known by name."""
        return cls(tuple(names))

    @classmethod
    def of_dot(cls, text: str) -> Census:
        """The census of a DOT dump. Raises DotError."""
        nodes = dot.parse(text)
        kernels = tuple(node.name or "?" for node in nodes if node.kind == dot.KERNEL)
        others = tuple(node.kind for node in nodes if node.kind != dot.KERNEL and node.kind not in dot.BARRIERS)
        return cls(kernels, others)

    @property
    def launches(self) -> int:
        """Kernels, copies and fills."""
        return len(self.kernels) + len(self.others)

    def text(self) -> str:
        """One line: "2 launches: 1 x Cijk_..., 1 x fuse_qk_rope..."."""
        counted = Counter((*map(short, self.kernels), *self.others)).most_common()
        words = [f"{count} x {name}" for name, count in counted[:SPOKEN]]
        if len(counted) > SPOKEN:
            words.append(f"{len(counted) - SPOKEN} other kinds")
        return f"{self.launches} launch{'es' * (self.launches != 1)}: {', '.join(words)}"


@dataclass(frozen=True, slots=True)
class Allowed:
    """Launches of one kind that a layer may make: names that match ``pattern``, from ``least`` to ``most`` of them."""

    what: str
    pattern: str
    least: int
    most: int


# The absorb BMM may be followed by the reduction of its split-K form; nothing else may stand beside AITER's op.
_BMM = Allowed(
    "absorb BMM", r"gemm|bmm|matmul|cijk|tensile|hipblaslt|cublas|nvjet|cutlass|xmma|splitk|postgsu|dot_kernel", 1, 2
)
EXPECTED: dict[str, tuple[Allowed, ...]] = {
    "triton": (Allowed("the one launch", r"decode_prep_kernel", 1, 1),),
    "aiter": (_BMM, Allowed("AITER's op", r"rope.*(cache|concat|cat)", 1, 1)),
}


def violation(backend: str, census: Census, layers: int, budget: int | None = None) -> str | None:
    """Why ``layers`` calls of a back end must not launch this, or None.

    Args:
        backend: its name; ``EXPECTED`` says what its calls are made of.
        census: of the captured graph.
        layers: calls in it.
        budget: launches a call may make, for a back end without an entry; without one it passes.
    """
    allowed = EXPECTED.get(backend)
    if allowed is None:
        if budget is None or census.launches <= budget * layers:
            return None
        return f"{budget} launches per layer expected, {census.launches} found in {layers} layer(s); {census.text()}"
    most = sum(kind.most for kind in allowed) * layers
    counted = Counter(_classify(name, allowed) for name in (*census.kernels, *census.others))
    for kind in allowed:
        found = counted.pop(kind.what, 0)
        if not kind.least * layers <= found <= kind.most * layers:
            wanted = f"{kind.least}" if kind.least == kind.most else f"{kind.least} to {kind.most}"
            return f"{kind.what}: {wanted} per layer expected, {found} found in {layers} layer(s); {census.text()}"
    if counted:
        return f"at most {most} launches of {layers} layer(s) expected, with no others; {census.text()}"
    return None


def _classify(name: str, allowed: tuple[Allowed, ...]) -> str:
    # The narrow pattern first: a kernel's name may hold "gemm" among its template arguments.
    for kind in reversed(allowed):
        if re.search(kind.pattern, name, re.IGNORECASE):
            return kind.what
    return "others"


def short(name: str) -> str:
    """A kernel's name without its mangled arguments, at most 60 characters."""
    plain = re.match(r"_ZN?(?:[KVr]*)((?:\d+[A-Za-z_]\w*)+)", name)
    if plain:
        name = _unmangle(name) or name
    return name if len(name) <= 60 else name[:57] + "..."


def _unmangle(name: str) -> str:
    """The nested name of an Itanium-mangled symbol: ``_ZN2at6native3fooE...`` gives ``at::native::foo``."""
    rest = re.sub(r"^_ZN?[KVr]*", "", name)
    parts = []
    while (match := re.match(r"(\d+)", rest)) is not None:
        length, rest = int(match[1]), rest[match.end() :]
        parts.append(rest[:length])
        rest = rest[length:]
    return "::".join(part for part in parts if part != "_GLOBAL__N_1")

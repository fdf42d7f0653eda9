"""Random edits of a layer's graph: an operand, a number, an order, an operator, a flag, a factor, a reader."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from tests.passes.graphs import Builder, Spelling, infer

aten = torch.ops.aten
Draw = Callable[[int], int]
"""Draws a number below its argument."""
ATTEMPTS = 6


class InvalidEditError(Exception):
    """The edit has no place in this graph, or the result is no program."""


class Base:
    """Two layers in one spelling that are edited, checked and restored: building them anew costs more than a check."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self._build()

    def _build(self) -> None:
        self.builder = Builder(self.spelling)
        for _ in range(2):
            self.builder.layer()
        self._pristine = _snapshot(self.builder)
        self._symbol = str(self.builder.t.meta["val"])

    @contextlib.contextmanager
    def editing(self) -> Iterator[Builder]:
        try:
            yield self.builder
        finally:
            # Whatever happened: the next example must not start from this one's ruins.
            _restore(self.builder, self._pristine)
            self.builder.extra.clear()
        if str(self.builder.t.meta["val"]) != self._symbol:
            self._build()  # an edit has fixed the number of tokens for good


def perturb(b: Builder, draw: Draw) -> str:
    """Edit ``b.graph``, which is not finished yet, and infer its fake values again; returns what was done."""
    for _ in range(ATTEMPTS):
        before, extra = _snapshot(b), list(b.extra)
        edit = EDITS[draw(len(EDITS))]
        try:
            done = edit(b, draw)
            _refresh(b, before)
            return f"{edit.__name__}: {done}"
        except Exception:  # what torch does not accept is no edit: no pass has run yet
            b.extra[:] = extra
            _restore(b, before)
    raise InvalidEditError


Snapshot = dict[fx.Node, tuple[Any, ...]]


def _snapshot(b: Builder) -> Snapshot:
    return {node: (node.target, node.args, node.kwargs, node.meta["val"]) for node in b.graph.nodes}


def _restore(b: Builder, before: Snapshot) -> None:
    for node, (target, args, kwargs, value) in before.items():
        node.target, node.args, node.kwargs, node.meta["val"] = target, args, kwargs, value
    for node in reversed(list(b.graph.nodes)):
        if node not in before:
            b.graph.erase_node(node)


def operand(b: Builder, draw: Draw) -> str:
    """Another earlier node of the same shape and dtype."""
    node = _pick(_calls(b), draw)
    old = _pick(node.all_input_nodes, draw)
    nodes = list(b.graph.nodes)
    alike = [other for other in nodes[: nodes.index(node)] if other is not old and _alike(other, old)]
    # Memory that nobody has written: two runs of one graph differ by it.
    new = _pick([other for other in alike if other.target is not aten.empty.memory_format], draw)
    node.replace_input_with(old, new)
    return f"{node}: {old} -> {new}"


def number(b: Builder, draw: Draw) -> str:
    """Another integer: a bound, a step, a dimension, a size or an index."""
    places = [(n, i) for n in _calls(b) for i, arg in enumerate(n.args) if type(arg) is int]
    node, index = _pick(places, draw)
    old: int = node.args[index]
    r, p = b.spelling.sizes.r, b.spelling.sizes.p
    new = _pick([v for v in (0, 1, 2, -1, old + 1, old - 1, p, r, r // 2, p + r) if v != old], draw)
    node.update_arg(index, new)
    return f"{node}: {old} -> {new}"


def order(b: Builder, draw: Draw) -> str:
    """A list the other way round: parts of a cat, sizes of a split or reshape."""
    places = [(n, i) for n in _calls(b) for i, a in enumerate(n.args) if isinstance(a, list | tuple) and len(a) > 1]
    node, index = _pick(places, draw)
    node.update_arg(index, list(reversed(node.args[index])))
    return f"{node}: reversed"


def operator_(b: Builder, draw: Draw) -> str:
    swaps = {aten.add.Tensor: aten.sub.Tensor, aten.sub.Tensor: aten.add.Tensor, aten.mul.Tensor: aten.add.Tensor}
    swaps[aten.neg.default] = aten.clone.default
    node = _pick([node for node in _calls(b) if node.target in swaps], draw)
    node.target = swaps[node.target]
    return f"{node}: {node.target}"


def flag(b: Builder, draw: Draw) -> str:
    """The other pairing of a rotary op, or another width of its heads."""
    node = _pick([node for node in _calls(b) if "is_neox" in node.kwargs], draw)
    changes: list[dict[str, Any]] = [{"is_neox": not node.kwargs["is_neox"]}]
    if "head_size" in node.kwargs:
        changes.append({"head_size": 2 * b.spelling.sizes.r})
    node.kwargs = {**node.kwargs, **_pick(changes, draw)}
    return f"{node}: {node.kwargs['is_neox']}"


def factor(b: Builder, draw: Draw) -> str:
    """A factor, a sign or a copy between a node and one or all of its readers."""
    node = _pick([node for node in _calls(b) if isinstance(node.meta["val"], torch.Tensor) and node.users], draw)
    reader = _pick([None, *sorted(node.users)], draw)
    factors = [(aten.mul.Tensor, 2.0), (aten.neg.default,), (aten.clone.default,), (aten.mul.Tensor, 1.0)]
    target, *more = _pick(factors, draw)
    with b.graph.inserting_after(node):
        new = b(target, node, *more)
    if reader is None:
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    else:
        reader.replace_input_with(node, new)
    return f"{new.target} of {node} for {reader or 'all'}"


def reader(b: Builder, draw: Draw) -> str:
    """One more reader of a node: an output of the graph, of the value itself or of something made from it."""
    node = _pick([node for node in _calls(b) if isinstance(node.meta["val"], torch.Tensor)], draw)
    made = _pick([lambda: node, lambda: b(aten.tanh.default, node), lambda: b(aten.clone.default, node)], draw)()
    if made.meta["val"].numel() == 0:
        raise InvalidEditError
    b.extra.append(made)
    return f"{node}"


EDITS: list[Callable[[Builder, Draw], str]] = [operand, number, order, operator_, flag, factor, reader, operand, number]


def _pick(items: Any, draw: Draw) -> Any:
    items = list(items)
    if not items:
        raise InvalidEditError
    return items[draw(len(items))]


def _calls(b: Builder) -> list[fx.Node]:
    return [node for node in b.graph.nodes if node.op == "call_function"]


def _alike(a: fx.Node, c: fx.Node) -> bool:
    x, y = a.meta["val"], c.meta["val"]
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return type(x) is type(y) and not isinstance(x, (tuple, list, torch.SymInt))
    return x.dtype == y.dtype and tuple(map(str, x.shape)) == tuple(map(str, y.shape))


def _refresh(b: Builder, before: Snapshot) -> None:
    """Infer fake values again from the edit on; what the ops reject, or fixes the number of tokens, is no program."""
    # It logs a stack for each failure, which here is an answer.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    symbol = str(b.t.meta["val"])
    stale: set[fx.Node] = set()
    for node in _calls(b):
        same = node in before and (node.target, node.args, node.kwargs) == before[node][:3]
        if not same or not stale.isdisjoint(node.all_input_nodes):
            stale.add(node)
            infer(node, b.mode)
            _check_scatter(node)
    if str(b.t.meta["val"]) != symbol or not symbol.startswith("s"):
        raise InvalidEditError


def _check_scatter(node: fx.Node) -> None:
    """The fake of slice_scatter takes sizes that the real one rejects."""
    if node.target is aten.slice_scatter.default:
        target, source = (arg.meta["val"] for arg in node.args[:2])  # type: ignore[union-attr]
        piece = torch.ops.aten.slice.Tensor(target, *node.args[2:])
        if tuple(map(str, piece.shape)) != tuple(map(str, source.shape)):
            raise InvalidEditError

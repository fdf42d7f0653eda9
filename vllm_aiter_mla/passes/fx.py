"""Small helpers over FX graphs as Inductor hands them to post-grad passes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

aten = torch.ops.aten

# Ops that only re-address their first argument: the result aliases it, whatever the strides are.
VIEW_OPS = frozenset(
    {
        aten.reshape.default,
        aten.view.default,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.permute.default,
        aten.transpose.int,
        aten.select.int,
        aten.alias.default,
        operator.getitem,
    }
)


def is_call(node: Any, target: Any) -> bool:
    """Whether ``node`` is a call of ``target``."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def is_functionalized(node: Any, op: Any) -> bool:
    """Whether ``node`` is ``auto_functionalized(op, ...)``."""
    return is_call(node, auto_functionalized) and node.args[0] is op


def is_view(node: Any) -> bool:
    """Whether ``node`` only re-addresses its first argument."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target not in VIEW_OPS:
        return False
    # getitem takes a piece of a split, or one result of any other op: only the first is a view of a tensor.
    return node.target is not operator.getitem or is_view(node.args[0])


def view_root(node: fx.Node) -> fx.Node:
    """The node under a chain of views."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def same_value(a: Any, b: Any) -> bool:
    """Whether two arguments are the same node or equal views of one node, re-emitted."""
    if a is b:
        return True
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        return (
            is_view(a)
            and is_view(b)
            and a.target is b.target
            and same_value(a.args, b.args)
            and a.kwargs.keys() == b.kwargs.keys()
            and all(same_value(a.kwargs[key], b.kwargs[key]) for key in a.kwargs)
        )
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return False
    return type(a) is type(b) and bool(a == b)


def results(node: fx.Node) -> dict[int, fx.Node]:
    """The live ``getitem`` users of a multi-result node by index; dead ones are left out."""
    found: dict[int, fx.Node] = {}
    for user in node.users:
        if is_call(user, operator.getitem) and (user.users or user.args[1] not in found):
            found[user.args[1]] = user  # type: ignore[index]
    return found


def live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that dead-code elimination keeps; tracing in-place ops leaves chains of views that nobody reads."""
    stack = [node for node in graph.nodes if node.op == "output" or node.is_impure()]
    live: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(node.all_input_nodes)
    return live


def readers_through(root: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Readers of ``root`` that are no views themselves, each with the view through which it reads."""
    found, stack = [], [root]
    while stack:
        node = stack.pop()
        for user in node.users:
            if is_view(user) and user.args[0] is node:
                stack.append(user)
            else:
                found.append((user, node))
    return found


def val(node: Any) -> Any:
    """The fake value of a node, or None."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def width(node: Any) -> int | None:
    """The last dimension of a node's fake value where it is a plain integer."""
    value = val(node)
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return None
    size = value.shape[-1]
    return size if isinstance(size, int) else None


class Emitter:
    """Adds nodes before one node of a graph and gives each its fake value."""

    def __init__(self, graph: fx.Graph, before: fx.Node) -> None:
        self.graph = graph
        self.before = before

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert ``target(*args, **kwargs)``."""
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        self._infer(node)
        return node

    def functionalized(self, op: Any, **kwargs: Any) -> fx.Node:
        """Insert ``auto_functionalized(op, **kwargs)``: result i + 1 is the i-th mutated argument."""
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(auto_functionalized, (op,), kwargs)
        mutated = [arg.name for arg in op._schema.arguments if arg.alias_info and arg.alias_info.is_write]
        returns = self._fake_returns(op, kwargs)
        node.meta["val"] = (returns, *(val(kwargs[name]) for name in mutated))
        return node

    def result(self, node: fx.Node, index: int) -> fx.Node:
        """Insert ``getitem(node, index)``."""
        with self.graph.inserting_before(self.before):
            item = self.graph.call_function(operator.getitem, (node, index))
        values = val(node)
        if values is not None:
            item.meta["val"] = values[index]
        return item

    def _infer(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), val)
        mode = _fake_mode(args, kwargs)
        if mode is not None:
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]

    def _fake_returns(self, op: Any, kwargs: dict[str, Any]) -> Any:
        if not op._schema.returns:
            return None
        values = {name: val(value) if isinstance(value, fx.Node) else value for name, value in kwargs.items()}
        mode = _fake_mode((), values)
        if mode is None:
            return None
        with mode:
            return op(**values)


def _fake_mode(args: Any, kwargs: Any) -> Any:
    """The fake mode of the first fake tensor among the arguments."""
    stack = [args, kwargs]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            mode = getattr(item, "fake_mode", None)
            if mode is not None:
                return mode
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
    return None

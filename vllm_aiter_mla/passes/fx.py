"""Small helpers over FX graphs as Inductor hands them to post-grad passes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from vllm_aiter_mla import ops

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


# By identity: an OpOverload's hash is computed in Python, and these are asked for hundreds of times per layer.
_VIEW_IDS = frozenset(map(id, VIEW_OPS))


def is_view(node: Any) -> bool:
    """Whether ``node`` only re-addresses its first argument."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    # getitem takes a piece of a split, or one result of any other op: only the first is a view of a tensor.
    return is_view(node.args[0]) if node.target is operator.getitem else id(node.target) in _VIEW_IDS


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


class Liveness:
    """Nodes that dead-code elimination keeps; tracing in-place ops leaves chains of views that nobody reads.

    Looked at only where something reads what it must not, so it is computed when it is first asked for.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._live: set[fx.Node] | None = None

    def __contains__(self, node: fx.Node) -> bool:
        if self._live is None:
            self._live = set()
            stack = [node for node in self._graph.nodes if node.op == "output" or node.is_impure()]
            while stack:
                found = stack.pop()
                if found not in self._live:
                    self._live.add(found)
                    stack.extend(found.all_input_nodes)
        return node in self._live


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


class Inserter:
    """Adds nodes before one node of a graph and gives each its fake value.

    Args:
        graph: the graph.
        before: where the nodes go.
        lazy: leave the fake values to ``settle``. Most of what passes 1 and 2 emit is gone again after pass 3, and
            inferring a value with a symbolic size costs more than everything else that is done for a node.
    """

    def __init__(self, graph: fx.Graph, before: fx.Node, lazy: bool = False) -> None:
        self.graph = graph
        self.before = before
        self.lazy = lazy

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert ``target(*args, **kwargs)``."""
        return self._insert(target, args, kwargs)

    def functionalized(self, op: Any, **kwargs: Any) -> fx.Node:
        """Insert ``auto_functionalized(op, **kwargs)``: result i + 1 is the i-th mutated argument."""
        return self._insert(auto_functionalized, (op,), kwargs)

    def result(self, node: fx.Node, index: int) -> fx.Node:
        """Insert ``getitem(node, index)``."""
        return self._insert(operator.getitem, (node, index), {})

    def _insert(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        if self.lazy:
            node.meta[_PENDING] = True
            return node
        try:
            _infer(node)
        except Exception:
            # The layer is given up, and a node without a value would stop Inductor instead.
            self.graph.erase_node(node)
            raise
        return node


_PENDING = "aiter_mla_pending"


def settle(graph: fx.Graph) -> None:
    """Infer the fake values that lazy integrations left out; their nodes stand in the order of emission."""
    for node in graph.nodes:
        if node.meta.pop(_PENDING, False):
            _infer(node)


def _infer(node: fx.Node) -> None:
    """Set a node's fake value from its arguments'."""
    if node.target is operator.getitem:
        values = val(node.args[0])
        if values is not None:
            node.meta["val"] = values[node.args[1]]
        return
    if node.target is auto_functionalized:
        op: Any = node.args[0]
        mutated = [arg.name for arg in op._schema.arguments if arg.alias_info and arg.alias_info.is_write]
        returned = _fake_call(op, (), node.kwargs) if op._schema.returns else None
        node.meta["val"] = (returned, *(val(node.kwargs[name]) for name in mutated))
        return
    if isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns:
        node.meta["val"] = None
        return
    # Our own fakes are called as they are: the way through the dispatcher doubles the cost of a layer.
    value = _fake_call(ops.FAKES.get(_name(node.target), node.target), node.args, node.kwargs)
    if value is not None:
        node.meta["val"] = value


def _name(target: Any) -> str:
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def _fake_call(target: Any, args: Any, kwargs: Any) -> Any:
    """``target`` on the fake values of its arguments, or None where none of them is a fake tensor."""
    args, kwargs = fx.node.map_arg((args, kwargs), val)
    mode = _fake_mode(args, kwargs)
    if mode is None:
        return None
    with mode:
        return target(*args, **kwargs)


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

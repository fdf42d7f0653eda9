# SPDX-License-Identifier: Apache-2.0
"""Small helpers over FX graphs as Inductor hands them to post-grad passes: calls, views, readers, fake values."""

import operator
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

aten = torch.ops.aten

VIEW_OPS = frozenset({
    aten.reshape.default, aten.view.default, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.permute.default,
    aten.transpose.int, aten.select.int, aten.alias.default, operator.getitem,
})  # fmt: skip
"""Ops whose result aliases their first argument."""


def is_call(node: Any, target: Any) -> bool:
    """Return whether ``node`` is a call of ``target``."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def is_functionalized(node: Any, op: Any) -> bool:
    """Return whether ``node`` is ``auto_functionalized(op, ...)``."""
    return is_call(node, auto_functionalized) and node.args[0] is op


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an op's call, direct or functionalised, by their names in the op's schema.

    An argument given by position, given by name, or left to its default looks the same here.
    """
    op, positional = node.target, node.args
    if op is auto_functionalized:
        op, *positional = node.args  # type: ignore[assignment]
    declared = _declared(op)
    names = (*declared, *(f"argument number {i + 1}" for i in range(len(declared), len(positional))))
    return {**declared, **dict(zip(names, positional, strict=False)), **node.kwargs}


@lru_cache(maxsize=32)
def _declared(op: Any) -> dict[str, Any]:
    """Return the arguments of an op's schema in order, with their defaults, or None if they have none."""
    return {argument.name: argument.default_value for argument in op._schema.arguments}


def is_view(node: Any) -> bool:
    """Return whether ``node`` is a view of its first argument."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    # getitem takes a piece of a split, or one result of any other op. Only the piece is a view.
    return is_view(node.args[0]) if node.target is operator.getitem else node.target in VIEW_OPS


def view_root(node: fx.Node) -> fx.Node:
    """Return the node under a chain of views."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def same_value(a: Any, b: Any) -> bool:
    """Return whether two arguments are the same node, or equal views of one node: Inductor repeats views per reader."""
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


def readers_through(root: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return the readers of ``root`` and of its views that are not views, each with the node that it reads."""
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
    """Return the fake value of a node, or None."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def width(node: Any) -> int | None:
    """Return the last dimension of a node's fake tensor, or None if it has none or a symbolic one."""
    value = val(node)
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return None
    size = value.shape[-1]
    return size if isinstance(size, int) else None

"""The arguments of a call by name, and the skip of those that the rewritten call would drop."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from vllm_aiter_mla.admission import Skip


class NoMatchError(Exception):
    """A layer does not have the shape that the passes rewrite; ``skip`` says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.skip = Skip(code, message)


def arguments(node: fx.Node) -> dict[str, Any]:
    """What an op is called with, directly or functionalised, by the names of its schema.

    A call may give an argument by position, by name, or leave it to the schema's default: all three come out alike.
    """
    op, positional = node.target, node.args
    if op is auto_functionalized:
        op, *positional = node.args  # type: ignore[assignment]
    declared = _declared(op)
    names = (*declared, *(f"argument number {i + 1}" for i in range(len(declared), len(positional))))
    return {**declared, **dict(zip(names, positional, strict=False)), **node.kwargs}


def refuse_unknown(node: fx.Node, known: Collection[str]) -> dict[str, Any]:
    """The arguments of a call, each of which is known or None.

    Raises:
        NoMatchError: the call has an argument outside ``known`` that is not None.
    """
    given = arguments(node)
    for name, value in given.items():
        if name not in known and value is not None:
            op = node.args[0] if node.target is auto_functionalized else node.target
            raise NoMatchError("unknown_argument", f"{op} is given {name}, which this plugin does not know")
    return given


@lru_cache(maxsize=32)
def _declared(op: Any) -> dict[str, Any]:
    """The arguments of an op's schema in order, with their defaults; None where there is none."""
    return {argument.name: argument.default_value for argument in op._schema.arguments}

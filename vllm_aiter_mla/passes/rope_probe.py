# SPDX-License-Identifier: Apache-2.0
"""Recognise a RoPE, however it is written, by evaluating a few graph nodes on tiny float64 tensors.

A decomposed RoPE comes in many spellings: NeoX or GPT-J, chunk or slice, cat or stack, views repeated per consumer,
tables expanded before or after the lookup. A rewritten layer is wrong if one of them is misread. Each spelling is
multilinear in the data and in the table, so two expressions that agree on random real inputs are the same function
(Schwartz-Zippel; in float64 the probability of a false match is negligible). Evaluating about fifty operators on three
rows takes less than a millisecond per layer, and accepts nothing that computes something else.

Three rows speak for any number of them if each op makes row t of its result from row t of its operands, in the same way
for every t. ``check_rows`` and ``Probe`` raise where the graph does not prove that: where tokens are cut, picked or
mixed, or where their number is a bound, an index or a factor.
"""

import contextlib
import operator
import sys
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import sympy
import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from vllm_aiter_mla.kernels.reference import rotate
from vllm_aiter_mla.passes.fx import VIEW_OPS, arguments, is_call, is_view, val, width

aten = torch.ops.aten
ROWS = 3
"""The value of every symbolic size."""
MAX_CONE = 400

IDENTITY_OPS = frozenset({torch.ops.prims.convert_element_type.default, aten._to_copy.default})
"""Casts. The probe does not compare rounding: a cast between float types of 16 bits and more changes no value."""
MOVING_OPS = VIEW_OPS | IDENTITY_OPS | {
    aten.clone.default, aten.neg.default, aten.cat.default, aten.stack.default, aten.copy.default,
    aten.slice_scatter.default, aten.contiguous.default,
}  # fmt: skip
"""Ops that may come between the un-rotated and the rotated value."""
TRANSPARENT_OPS = MOVING_OPS | {aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor}
CUTS = (aten.slice.Tensor, aten.slice_scatter.default, aten.split.Tensor, aten.split_with_sizes.default)
"""Ops that may take some of the tokens and keep their dimension."""
SIZED_OPS = frozenset({aten.reshape.default, aten.view.default, aten.expand.default})
"""Ops whose symbolic arguments are the sizes of their result, which are checked."""
LOOKUP_OPS = frozenset({aten.index.Tensor, aten.index_select.default, aten.embedding.default})
ROTARY_OPS = {
    "_C::rotary_embedding": ("query", "key"),
    "vllm::flashinfer_rotary_embedding": ("query", "key"),
    "vllm::rocm_aiter_triton_rotary_embedding": ("query", "key"),
    "vllm::fused_rope_unified_mla_kv_cache_update": ("q_pe", "k_pe"),
}
"""The in-place rotary ops, each with the names of its query and key arguments."""
MODELLED = {"rope_dim_offset": 0, "inverse": False, "offsets": None}
"""The only values under which a rotary op is the rotation that ``rope`` computes."""
rope = partial(rotate, dtype=torch.float64)


class ConeTooLargeError(Exception):
    """An expression reaches further than any RoPE does."""


def lookup(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (table, positions) of a row lookup in a 2-D table, or None."""
    if node.op != "call_function" or node.target not in LOOKUP_OPS:
        return None
    table, positions = node.args[0], node.args[1]
    if node.target is aten.index.Tensor:
        positions = positions[0] if len(positions) == 1 else None  # type: ignore[index,arg-type]
    elif node.target is aten.index_select.default:
        positions = node.args[2] if positions == 0 else None
    value = val(table)
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or not isinstance(positions, fx.Node):
        return None
    return table, positions  # type: ignore[return-value]


def rotary_call(node: Any) -> tuple[str, str] | None:
    """Return the names of the query and key arguments of a functionalised rotary op, or None.

    None also where the call is not modelled: heads wider than the table, an offset in the head, the inverse rotation.
    """
    if not is_call(node, auto_functionalized):
        return None
    if (names := ROTARY_OPS.get(node.args[0]._schema.name)) is None:
        return None
    given = arguments(node)
    modelled = {"head_size": width(given["cos_sin_cache"]), **MODELLED}
    return names if all(given.get(name, wanted) == wanted for name, wanted in modelled.items()) else None


def rotated_operand(node: fx.Node) -> fx.Node | None:
    """Return the operand of a functionalised rotary op whose rotation is ``node``: result 1 is q, result 2 is k."""
    if not is_call(node, operator.getitem):
        return None
    if (names := rotary_call(node.args[0])) is None or node.args[1] not in (1, 2):
        return None
    operand = node.args[0].kwargs[names[node.args[1] - 1]]  # type: ignore[union-attr,operator,index]
    return operand if isinstance(operand, fx.Node) else None


class TableReaders:
    """Answers whether a rotary table takes part in the value of a node of one graph; each node is looked at once."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, bool] = {}

    def __call__(self, node: Any) -> bool:
        """Return the answer for one node, False for other values."""
        if not isinstance(node, fx.Node):
            return False
        if node not in self._known:
            if node.op == "call_function" and node.target in TRANSPARENT_OPS:
                self._known[node] = any(map(self, node.all_input_nodes))
            else:
                self._known[node] = bool(lookup(node) or rotary_call(node))
        return self._known[node]


class Cone:
    """The expression above one node, down to its roots, tables and positions.

    A root is the first node, going up, that neither moves data nor depends on a rotary table: a GEMM, a norm, an input.

    Args:
        target: the node.
        reads_table: answers whether a rotary table takes part in a node's value.

    Raises:
        ConeTooLargeError: more than ``MAX_CONE`` nodes.
    """

    def __init__(self, target: fx.Node, reads_table: TableReaders) -> None:
        self.inner: set[fx.Node] = set()
        self.roots: set[fx.Node] = set()
        self.tables: set[fx.Node] = set()
        self.positions: set[fx.Node] = set()
        self._reads_table = reads_table
        stack = [target]
        while stack:
            node = stack.pop()
            if node in self.inner or node in self.roots:
                continue
            if len(self.inner) > MAX_CONE:
                raise ConeTooLargeError(target.name)
            stack.extend(self._place(node))

    def _place(self, node: fx.Node) -> list[fx.Node]:
        """Give ``node`` its role; return the nodes above it that belong to the expression."""
        if self._is_inner(node):
            self.inner.add(node)
            return [parent for parent in node.all_input_nodes if not isinstance(val(parent), torch.SymInt)]
        if (found := lookup(node)) is not None:
            self.inner.add(node)
            self.tables.add(found[0])
            self.positions.add(found[1])
            return []
        if (operand := rotated_operand(node)) is None:
            self.roots.add(node)
            return []
        call: fx.Node = node.args[0]  # type: ignore[assignment]
        self.inner.update((node, call))
        self.tables.add(call.kwargs["cos_sin_cache"])  # type: ignore[arg-type]
        self.positions.add(call.kwargs["positions"])  # type: ignore[arg-type]
        return [operand]

    def _is_inner(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        if node.target is operator.getitem:
            return is_view(node)
        value = val(node)
        # A cast to anything but a float type of 16 bits or more is a quantisation.
        wide = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1
        if node.target in IDENTITY_OPS and not wide:
            return False
        return node.target in MOVING_OPS or (node.target in TRANSPARENT_OPS and self._reads_table(node))


class Probe:
    """Evaluates nodes that treat all tokens alike, given the values of the nodes at which evaluation stops.

    Args:
        values: the value of each of these nodes.
        counts: the sizes that are the number of tokens, symbolic or int.

    Raises:
        ValueError: a node may not treat all tokens alike.
    """

    def __init__(self, values: dict[fx.Node, Any], counts: tuple[Any, ...]) -> None:
        self._values = dict(values)
        self._counts = counts

    def __call__(self, node: Any) -> Any:
        """Return the value of an argument: nodes are evaluated, symbolic sizes become ``ROWS``."""
        if isinstance(node, fx.Node):
            if node not in self._values:
                self._values[node] = self._evaluate(node)
            return self._values[node]
        if isinstance(node, (list, tuple)):
            return type(node)(self(item) for item in node)
        return concrete(node) if isinstance(node, torch.SymInt) else node

    def _evaluate(self, node: fx.Node) -> Any:
        if isinstance(value := val(node), torch.SymInt):
            return concrete(value)
        if (names := rotary_call(node)) is not None:
            return self._rotate(node, *names)
        if not isinstance(value, (list, tuple)):  # the pieces of a split are nodes, too
            check_rows(value, self._counts)
        self._check_arguments(node)
        if node.target in IDENTITY_OPS:
            return self(node.args[0])
        kwargs = {key: self(arg) for key, arg in node.kwargs.items() if key not in ("dtype", "device", "layout")}
        return node.target(*(self(arg) for arg in node.args), **kwargs)  # type: ignore[operator]

    def _check_arguments(self, node: fx.Node) -> None:
        """Raise if tokens are cut, or if a bound, an index or a factor depends on their number.

        Shapes alone do not tell. Traced with 7 tokens, ``x[:1024]`` has the shape of ``x``, under a guard that vLLM
        drops.
        """
        if node.target in CUTS:
            given = arguments(node)
            size = size_of(val(given["self"]).shape[given["dim"]])
            if not isinstance(size, int):
                start, end, step = (size_of(given.get(name)) for name in ("start", "end", "step"))
                if start not in (None, 0) or end not in (None, sys.maxsize, size) or step != 1:
                    raise ValueError(f"{node.name} may cut the tokens")
                return
        given_sizes = () if node.target in SIZED_OPS else tree_leaves((node.args, node.kwargs))
        if any(isinstance(size_of(arg), sympy.Expr) for arg in given_sizes):
            raise ValueError(f"{node.name} depends on the number of tokens")

    def _rotate(self, node: fx.Node, *names: str) -> tuple[Any, ...]:
        cos, sin = self(node.kwargs["cos_sin_cache"])[self(node.kwargs["positions"])].unsqueeze(1).chunk(2, -1)
        rotated: list[torch.Tensor | None] = [None]
        for name in names:
            if (tensor := self(node.kwargs[name])) is not None:
                heads = tensor.reshape(tensor.shape[0], -1, 2 * cos.shape[-1])
                tensor = rope(heads, cos, sin, bool(node.kwargs["is_neox"])).view_as(tensor)
            rotated.append(tensor)
        return tuple(rotated)


def size_of(arg: Any) -> Any:
    """Return a size, or the size that a node holds, as an int or an expression; return any other argument as it is."""
    size = val(arg) if isinstance(val(arg), torch.SymInt) else arg
    if not isinstance(size, torch.SymInt):
        return size
    return int(size.node.expr) if size.node.expr.is_Integer else size.node.expr


def check_rows(value: Any, counts: tuple[Any, ...]) -> None:
    """Check that a fake tensor is [T, ...] or [1, ..., T, ...] with T among ``counts``, and its other sizes static.

    Raises:
        ValueError: it is not. If no count is symbolic, the tensor is evaluated as it is, and only has to be static.
    """
    sizes = [size_of(size) for size in value.shape]
    symbolic = [size for size in sizes if not isinstance(size, int)]
    rows = [size for size in sizes if size != 1][: len(symbolic)]
    allowed = [[count] for count in map(size_of, counts) if not isinstance(count, int)] or [[]]
    if symbolic != rows or symbolic not in allowed:
        raise ValueError(f"{sizes} is not one row per token")


def concrete(size: Any) -> int:
    """Return a size with ``ROWS`` for every symbol."""
    return size if isinstance(size, int) else _at_rows(size.node.expr)


@lru_cache(maxsize=1024)
def _at_rows(expr: Any) -> int:
    """Return a symbolic expression with ``ROWS`` for every symbol; a model has a handful of expressions."""
    return int(expr.subs({symbol: ROWS for symbol in expr.free_symbols}))


def random_like(node: fx.Node, generator: torch.Generator, rows: int | None = None) -> torch.Tensor:
    """Draw a float64 tensor of the probe's size for ``node``; ``rows`` replaces its first dimension."""
    shape = [concrete(size) for size in val(node).shape]
    if rows is not None:
        shape[0] = rows
    return torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Run on real CPU tensors although a compilation with fake ones is under way."""
    with unset_fake_temporarily(), torch._guards.tracing(None), torch.no_grad():
        yield

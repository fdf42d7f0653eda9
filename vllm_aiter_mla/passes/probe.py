"""Evaluate a few graph nodes on tiny float64 tensors: how the matcher recognises a RoPE however it is written.

A decomposed RoPE comes in many spellings (NeoX or GPT-J, chunk or slice, cat or stack, views re-emitted per consumer,
tables expanded before or after the lookup) and a rewritten layer is wrong if one of them is misread. Each spelling is
multilinear in the data and in the table, so two expressions that agree on random real inputs are the same function
(Schwartz-Zippel; in float64 a false match has negligible probability). Evaluating about fifty operators on three rows
takes well under a millisecond per layer and accepts nothing that computes something else.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._subclasses.fake_tensor import unset_fake_temporarily

from vllm_aiter_mla.passes.arguments import refuse_unknown
from vllm_aiter_mla.passes.fx import VIEW_OPS, is_call, is_view, val, width
from vllm_aiter_mla.passes.kv_update import FUSED_ARGS

aten = torch.ops.aten
ROWS = 3  # stands for the symbolic number of tokens
TABLE_ROWS = 5

# What may stand between the un-rotated and the rotated value, besides views.
MOVE_OPS = frozenset(
    {
        aten.clone.default,
        aten.neg.default,
        aten.cat.default,
        aten.stack.default,
        aten.copy.default,
        aten.slice_scatter.default,
        aten._to_copy.default,
        aten.contiguous.default,
        torch.ops.prims.convert_element_type.default,
    }
)
ARITHMETIC_OPS = frozenset({aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor})
LOOKUP_OPS = frozenset({aten.index.Tensor, aten.index_select.default, aten.embedding.default})
# Rounding is not what is compared here: a cast between float types of 16 bits and more is the identity.
IDENTITY_OPS = frozenset({torch.ops.prims.convert_element_type.default, aten._to_copy.default})
# By identity, as in ``fx.is_view``.
_MOVING_IDS = frozenset(map(id, VIEW_OPS | MOVE_OPS))
_TRANSPARENT_IDS = _MOVING_IDS | frozenset(map(id, ARITHMETIC_OPS))
_LOOKUP_IDS = frozenset(map(id, LOOKUP_OPS))
_IDENTITY_IDS = frozenset(map(id, IDENTITY_OPS))
MAX_CONE = 400


class ConeTooLargeError(Exception):
    """An expression reaches further than any RoPE does."""


def lookup(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(table, positions) of a row lookup in a 2-D table, or None."""
    if node.op != "call_function" or id(node.target) not in _LOOKUP_IDS:
        return None
    table = node.args[0]
    if node.target is aten.index.Tensor:
        indices = node.args[1]
        if len(indices) != 1:  # type: ignore[arg-type]
            return None
        positions = indices[0]  # type: ignore[index]
    elif node.target is aten.embedding.default:
        positions = node.args[1]
    else:
        if node.args[1] != 0:
            return None
        positions = node.args[2]
    value = val(table)
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or not isinstance(positions, fx.Node):
        return None
    return table, positions  # type: ignore[return-value]


@lru_cache(maxsize=1)
def rotary_ops() -> dict[Any, tuple[str, str]]:
    """The in-place rotary ops that exist in this process, each with the names of its query and key arguments.

    Kept until ``match_layers`` starts on a graph: ops may be registered between two, and looking for those that are
    missing costs more than all else that is done for a rotary node.
    """
    found: dict[Any, tuple[str, str]] = {}
    for namespace, name, query, key in (
        ("_C", "rotary_embedding", "query", "key"),
        ("vllm", "flashinfer_rotary_embedding", "query", "key"),
        ("vllm", "rocm_aiter_triton_rotary_embedding", "query", "key"),
        ("vllm", "fused_rope_unified_mla_kv_cache_update", "q_pe", "k_pe"),
    ):
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is not None:
            found[packet.default] = (query, key)
    return found


# The only values under which a rotary op is the rotation that ``rope`` computes; ``head_size`` is the table's width.
MODELLED = {"rope_dim_offset": 0, "inverse": False, "offsets": None}
ROTARY_ARGS = frozenset({"query", "key", "head_size", *MODELLED, *FUSED_ARGS})


def rotary_call(node: Any) -> tuple[str, str] | None:
    """Names of the query and key arguments of a functionalised rotary op, or None.

    A call that this module does not model (heads wider than the table, an offset inside the head, the inverse
    rotation) is none.

    Raises:
        NoMatchError: the call has an argument that is not known here.
    """
    if not is_call(node, auto_functionalized):
        return None
    names = rotary_ops().get(node.args[0])
    if names is None:
        return None
    given = refuse_unknown(node, ROTARY_ARGS)
    modelled = {"head_size": width(given["cos_sin_cache"]), **MODELLED}
    if any(given.get(name, wanted) != wanted for name, wanted in modelled.items()):
        return None
    return names


def rotated_operand(node: fx.Node) -> fx.Node | None:
    """The operand whose rotation ``node`` takes out of a functionalised rotary op: result 1 is q, result 2 is k."""
    if not is_call(node, operator.getitem):
        return None
    names = rotary_call(node.args[0])
    if names is None or node.args[1] not in (1, 2):
        return None
    operand = node.args[0].kwargs[names[node.args[1] - 1]]  # type: ignore[union-attr,operator,index]
    return operand if isinstance(operand, fx.Node) else None


class Cone:
    """The expression above one node, down to its data roots, tables and positions.

    A root is the first node, going up, that neither moves data nor depends on a rotary table: a GEMM, its bias add, a
    norm, a placeholder.
    """

    def __init__(self) -> None:
        self._table_cache: dict[fx.Node, bool] = {}

    def uses_table(self, node: Any) -> bool:
        """Whether a rotary table takes part in the value of ``node``."""
        if not isinstance(node, fx.Node):
            return False
        known = self._table_cache.get(node)
        if known is None:
            known = self._table_cache[node] = self._reaches_table(node)
        return known

    def _reaches_table(self, node: fx.Node) -> bool:
        self._table_cache[node] = False
        target = id(node.target)
        if target in _TRANSPARENT_IDS:
            return any(self.uses_table(parent) for parent in node.all_input_nodes)
        return lookup(node) is not None if target in _LOOKUP_IDS else rotary_call(node) is not None

    def collect(self, target: fx.Node) -> ConeNodes:
        """Walk up from ``target``.

        Raises:
            ConeTooLargeError: more than ``MAX_CONE`` nodes.
        """
        cone, stack = ConeNodes(), [target]
        while stack:
            node = stack.pop()
            if node in cone.inner or node in cone.roots:
                continue
            if len(cone.inner) > MAX_CONE:
                raise ConeTooLargeError(target.name)
            stack.extend(self._place(node, cone))
        return cone

    def _place(self, node: fx.Node, cone: ConeNodes) -> list[fx.Node]:
        """Give ``node`` its role in ``cone``; returns the nodes above it that the expression goes on to."""
        if self._inner(node):
            cone.inner.add(node)
            return [parent for parent in node.all_input_nodes if not isinstance(val(parent), torch.SymInt)]
        if (found := lookup(node)) is not None:
            cone.inner.add(node)
            cone.tables.add(found[0])
            cone.positions.add(found[1])
            return []
        operand = rotated_operand(node)
        if operand is None:
            cone.roots.add(node)
            return []
        call: fx.Node = node.args[0]  # type: ignore[assignment]
        cone.inner.update((node, call))
        cone.tables.add(call.kwargs["cos_sin_cache"])  # type: ignore[arg-type]
        cone.positions.add(call.kwargs["positions"])  # type: ignore[arg-type]
        return [operand]

    def _inner(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        if node.target is operator.getitem:
            return is_view(node)
        target = id(node.target)
        if target in _IDENTITY_IDS and not _is_wide_float(node):
            return False
        return target in _MOVING_IDS or (target in _TRANSPARENT_IDS and self.uses_table(node))


def _is_wide_float(node: fx.Node) -> bool:
    """Whether a value is of a float type with 16 bits or more: a cast to another is a quantisation."""
    value = val(node)
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1


class ConeNodes:
    """The nodes of one expression, by role."""

    def __init__(self) -> None:
        self.inner: set[fx.Node] = set()
        self.roots: set[fx.Node] = set()
        self.tables: set[fx.Node] = set()
        self.positions: set[fx.Node] = set()


class Probe:
    """Evaluates nodes, given the values of the nodes at which evaluation stops."""

    def __init__(self, values: dict[fx.Node, Any]) -> None:
        self._values = dict(values)

    def __call__(self, node: Any) -> Any:
        """The value of an argument: nodes are evaluated, symbolic sizes are replaced, the rest is itself."""
        if isinstance(node, fx.Node):
            if node not in self._values:
                self._values[node] = self._evaluate(node)
            return self._values[node]
        if isinstance(node, (list, tuple)):
            return type(node)(self(item) for item in node)
        return concrete(node) if isinstance(node, torch.SymInt) else node

    def _evaluate(self, node: fx.Node) -> Any:
        value = val(node)
        if isinstance(value, torch.SymInt):
            return concrete(value)
        if node.target is auto_functionalized and (names := rotary_call(node)) is not None:
            return self._rotate_call(node, *names)
        if id(node.target) in _IDENTITY_IDS:
            return self(node.args[0])
        if not node.kwargs:
            return node.target(*(self(arg) for arg in node.args))  # type: ignore[operator]
        kwargs = {key: self(arg) for key, arg in node.kwargs.items() if key not in ("dtype", "device", "layout")}
        return node.target(*(self(arg) for arg in node.args), **kwargs)  # type: ignore[operator]

    def _rotate_call(self, node: fx.Node, query: str, key: str) -> tuple[Any, ...]:
        cos, sin = self(node.kwargs["cos_sin_cache"])[self(node.kwargs["positions"])].chunk(2, -1)
        rotated: list[torch.Tensor | None] = []
        for name in (query, key):
            tensor = self(node.kwargs[name])
            if tensor is None:
                rotated.append(None)
                continue
            heads = tensor.reshape(tensor.shape[0], -1, 2 * cos.shape[-1])
            rotated.append(
                rope(heads, cos.unsqueeze(1), sin.unsqueeze(1), bool(node.kwargs["is_neox"])).view_as(tensor)
            )
        return (None, *rotated)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate pairs of the last dimension of ``x`` [..., R] by ``cos`` and ``sin`` [..., R/2], in their dtype."""
    first, second = x.chunk(2, -1) if is_neox else (x[..., 0::2], x[..., 1::2])
    pair = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)


def concrete(size: Any) -> int:
    """A size with every symbol replaced by ``ROWS``."""
    return size if isinstance(size, int) else _at_rows(size.node.expr)


@lru_cache(maxsize=1024)
def _at_rows(expr: Any) -> int:
    """A symbolic expression with ``ROWS`` for every symbol; a model has a handful of them."""
    return int(expr.subs({symbol: ROWS for symbol in expr.free_symbols}))


def random_like(node: fx.Node, generator: torch.Generator, rows: int | None = None) -> torch.Tensor:
    """A float64 tensor of the probe's size for ``node``; ``rows`` replaces its first dimension."""
    shape = [concrete(size) for size in val(node).shape]
    if rows is not None:
        shape[0] = rows
    return torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Run on real CPU tensors although a compilation with fake ones is under way."""
    with unset_fake_temporarily(), torch._guards.tracing(None), torch.no_grad():
        yield

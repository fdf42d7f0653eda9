"""Layers whose tokens are cut, picked, mixed or scaled by an expression of their number T, with every op that can."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import stable_topological_sort

from tests.passes.graphs import END, Builder, Spelling, infer
from tests.passes.near_misses import Edit, give

aten = torch.ops.aten
T = "T"
Expression = str | int | tuple[Any, ...]
"""T, a number, or (operator, expression, expression)."""
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "min": torch.sym_min, "max": torch.sym_max, "//": operator.floordiv, "%": operator.mod, "+": operator.add,
    "-": operator.sub,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is done to the query or the key of a layer, at which bounds, and how the graph is traced."""

    cut: str
    first: Expression
    second: Expression = T
    of: str = "q"
    rows: int = 7
    static: bool = False
    prefused: bool = False


@dataclass
class Cut:
    """A layer to be cut. ``rotated`` and ``raw`` are the same rows [T, heads, width] after and before the RoPE."""

    edit: Edit
    of: str
    rotated: fx.Node
    raw: fx.Node
    first: Any
    second: Any
    rest: Any  # T - first

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        """Emit a node before the layer's attention."""
        return self.edit.call(target, *args)

    def part(self, node: fx.Node, start: Any, end: Any = END, step: Any = 1, dim: int = 0) -> fx.Node:
        return self(aten.slice.Tensor, node, dim, start, end, step)

    def join(self, *parts: fx.Node, dim: int = 0) -> fx.Node:
        return self(aten.cat.default, list(parts), dim)

    def over(self, part: fx.Node, *bounds: Any) -> fx.Node:
        """Emit the raw rows with some of them replaced."""
        return self(aten.slice_scatter.default, self.raw, part, 0, *bounds)

    def sized(self, node: fx.Node, *sizes: Any) -> fx.Node:
        return self(aten.reshape.default, node, list(sizes))

    def infer_again(self) -> None:
        """Sort the graph, in which an early node may read a new one, and infer all values again."""
        stable_topological_sort(self.edit.b.graph)
        for node in self.edit.b.graph.nodes:
            if node.op == "call_function":
                infer(node, self.edit.b.mode)

    def numbers(self) -> fx.Node:
        return self.edit.tokens_by("numbers", dtype=torch.int64)

    def before(self) -> fx.Node:
        """Emit whether a token comes before the first bound, [T, 1, 1]."""
        return self.sized(self(aten.lt.Scalar, self.numbers(), self.first), self.edit.b.t, 1, 1)


def rows_of_all_heads(c: Cut) -> fx.Node:
    """Rows of T numbers, which mix tokens, are cut at a constant."""
    heads, width = c.raw.meta["val"].shape[1:]
    flat = [c.sized(node, heads * width, c.edit.b.t) for node in (c.rotated, c.raw)]
    return c.sized(c.join(c.part(flat[0], 0, 9), c.part(flat[1], 9)), c.edit.b.t, heads, width)


def masked(c: Cut) -> fx.Node:
    ones = c(torch.ops.prims.convert_element_type.default, c.before(), torch.float32)
    zeros = c(aten.add.Tensor, c(aten.neg.default, ones), 1.0)
    return c(aten.add.Tensor, c(aten.mul.Tensor, c.rotated, ones), c(aten.mul.Tensor, c.raw, zeros))


def weighted(c: Cut) -> fx.Node:
    """The difference that the RoPE makes is added so many times."""
    made = c(aten.add.Tensor, c.raw, c(aten.sub.Tensor, c.rotated, c.raw))
    give(made, alpha=c.first)
    return made


def heads_by_number(c: Cut) -> fx.Node:
    """The last head is picked by an expression."""
    count = c.raw.meta["val"].shape[1]
    picked = [c(aten.select.int, c.rotated, 1, index) for index in (*range(count - 1), c.first)]
    return c(aten.stack.default, picked, 1)


def positions(made: Callable[[Cut, fx.Node], fx.Node]) -> Callable[[Cut], fx.Node]:
    """Let both lookups read other positions."""

    def cut(c: Cut) -> fx.Node:
        (lookup,) = c.edit.calls_of(aten.index.Tensor)
        moved = made(c, c.edit.b.positions)
        lookup.update_arg(1, [moved])
        c.infer_again()
        return c.rotated

    return cut


def one_angle_twice(c: Cut) -> fx.Node:
    (lookup,) = c.edit.calls_of(aten.index.Tensor)
    (split,) = lookup.users
    split.update_arg(0, c(aten.slice_scatter.default, lookup, c.part(lookup, 0, 1), 0, c.first, c.second))
    c.infer_again()
    return c.rotated


def reader(made: Callable[[Cut, fx.Node], fx.Node]) -> Callable[[Cut], fx.Node]:
    """Let the graph return something of the KV projection, whose columns of k_pe are rotated in place."""

    def cut(c: Cut) -> fx.Node:
        c.edit.read(made(c, c.edit.layer.kv_gemm))
        return c.rotated

    return cut


def shorter_latent(c: Cut) -> fx.Node:
    kv_c = c.part(c.edit.layer.kv_c, 0, c.first)
    c.edit.attend(kv_c_normed=kv_c)
    c.edit.update(0, kv_c)
    return c.rotated


def first_piece(c: Cut, op: Any, size: Any, node: fx.Node) -> fx.Node:
    return c(operator.getitem, c(op, node, size, 0), 0)


def one_for_all(c: Cut, node: fx.Node) -> fx.Node:
    one = c(aten.unsqueeze.default, c(aten.select.int, node, 0, c.first), 0)
    return c(aten.expand.default, one, [c.edit.b.t, *node.meta["val"].shape[1:]])


def from_other_rows(c: Cut, op: Any) -> fx.Node:
    index = c(aten.clamp.default, c.numbers(), 0, c.first)
    return c(op, c.rotated, [index]) if op is aten.index.Tensor else c(op, c.rotated, 0, index)


CUTS: dict[str, Callable[[Cut], fx.Node]] = {
    # Slices.
    "rotated, then raw": lambda c: c.join(c.part(c.rotated, 0, c.first), c.part(c.raw, c.first)),
    "raw, then rotated": lambda c: c.join(c.part(c.raw, 0, c.first), c.part(c.rotated, c.first)),
    "rotated in two parts": lambda c: c.join(c.part(c.rotated, 0, c.first), c.part(c.rotated, c.first)),
    "the middle": lambda c: c.join(
        c.part(c.rotated, 0, c.first), c.part(c.raw, c.first, c.second), c.part(c.rotated, c.second)
    ),
    "from the start": lambda c: c.part(c.rotated, 0, c.first),
    "to the end": lambda c: c.part(c.rotated, c.first),
    "between": lambda c: c.part(c.rotated, c.first, c.second),
    "every nth": lambda c: c.part(c.rotated, 0, c.second, c.first),
    "narrowed": lambda c: c.join(
        c(aten.narrow.default, c.rotated, 0, 0, c.first), c(aten.narrow.default, c.raw, 0, c.first, c.rest)
    ),
    # Writes.
    "written between": lambda c: c.over(c.part(c.rotated, c.first, c.second), c.first, c.second),
    "written up to a bound": lambda c: c.over(c.part(c.rotated, 0, c.first), 0, c.first),
    "written behind a bound": lambda c: c.over(c.part(c.rotated, c.first), c.first, END),
    "every nth written": lambda c: c.over(c.part(c.rotated, 0, END, c.first), 0, END, c.first),
    "the last row repeated": lambda c: c(
        aten.slice_scatter.default, c.rotated, c(aten.copy.default, c.part(c.raw, c.first), c.part(c.rotated, -1)), 0,
        c.first, END,
    ),
    "one row written": lambda c: c(
        aten.select_scatter.default, c.raw, c(aten.select.int, c.rotated, 0, c.first), 0, c.first
    ),
    # Pieces.
    "split": lambda c: c.join(first_piece(c, aten.split.Tensor, c.first, c.rotated), c.part(c.raw, c.first)),
    "split with sizes": lambda c: c.join(
        first_piece(c, aten.split_with_sizes.default, [c.first, c.rest], c.rotated), c.part(c.raw, c.first)
    ),
    # Picks and masks.
    "one row for all": lambda c: one_for_all(c, c.rotated),
    "index": lambda c: from_other_rows(c, aten.index.Tensor),
    "index_select": lambda c: from_other_rows(c, aten.index_select.default),
    "roll": lambda c: c(aten.roll.default, c.rotated, [c.first], [0]),
    "where": lambda c: c(aten.where.self, c.before(), c.rotated, c.raw),
    "masks": masked,
    # Numbers of tokens as factors, and bounds of other dimensions.
    "a factor": lambda c: c(aten.mul.Tensor, c.rotated, c.first),
    "a summand": lambda c: c(aten.add.Tensor, c.rotated, c.first),
    "a weight": weighted,
    "heads by number": heads_by_number,
    "columns": lambda c: c.join(c.part(c.rotated, 0, c.first, 1, 2), c.part(c.raw, c.first, END, 1, 2), dim=2),
    "all columns": lambda c: c.part(c.rotated, 0, c.first, 1, 2),
    "rows of all heads": rows_of_all_heads,
    # What else a layer reads.
    "one angle twice": one_angle_twice,
    "one position for all": positions(one_for_all),
    "other positions": positions(
        lambda c, node: c.join(c.part(node, 0, c.first), c.part(c.numbers(), c.first))
    ),
    "positions from a bound": positions(lambda c, node: c.part(node, c.first)),
    "a shorter latent": shorter_latent,
    "a reader of some rows": reader(lambda c, kv: c.part(c.part(kv, c.first), 32, 48, 1, 1)),
    "a reader of some columns": reader(lambda c, kv: c.part(kv, 0, c.first, 1, 1)),
    "a reader of mixed rows": reader(lambda c, kv: c.part(c.sized(kv, 48, c.edit.b.t), 0, 1)),
}  # fmt: skip


def emit(edit: Edit, expression: Expression) -> Any:
    """Emit the nodes of an expression; what is static stays a number."""
    if not isinstance(expression, tuple):
        return edit.b.t if isinstance(expression, str) else expression
    name, *operands = expression
    first, second = (emit(edit, operand) for operand in operands)
    is_static = not isinstance(first, fx.Node) and not isinstance(second, fx.Node)
    return OPERATORS[name](first, second) if is_static else edit.call(OPERATORS[name], first, second)


def cut_layer(case: Case) -> tuple[Builder, Edit]:
    # Without q_lora the KV projection is contiguous: all views of it see what is written in place.
    builder = Builder(Spelling(q_lora=False, prefused=case.prefused), case.rows, case.static)
    edit = Edit(builder, builder.layer())
    layer = edit.layer
    sizes = layer.q.meta["val"].shape[1:]
    rows = (layer.q, edit.call(aten.reshape.default, layer.q_gemm, [-1, *sizes]))
    if case.of == "k":
        rows = (layer.k_pe, edit.raw_key())
    bounds = [emit(edit, bound) for bound in (case.first, case.second, ("-", T, case.first))]
    made = CUTS[case.cut](Cut(edit, case.of, *rows, *bounds))
    edit.attend(**{"q" if case.of == "q" else "k_pe": made})
    if case.of == "k" and not case.prefused:
        edit.update(1, made)
    if not case.prefused:
        layer.attention.prepend(layer.kv_update)
    return builder, edit

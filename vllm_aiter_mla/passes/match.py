# SPDX-License-Identifier: Apache-2.0
"""Read a whole MLA layer, starting at its attention node, into one record, or give the reason to skip it.

Nothing is rewritten here. Every check looks at what the nodes compute (see ``rope_probe``), at who else reads them, and
at the arguments of vLLM's ops, never at the order of nodes. Dead nodes must be gone: they count as readers.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.compat.layer import FUSED_ROPE, ROTARY_KERNEL
from vllm_aiter_mla.compat.release import OP_ARGUMENTS
from vllm_aiter_mla.passes import rope_probe
from vllm_aiter_mla.passes.fx import (
    arguments,
    is_call,
    is_functionalized,
    is_view,
    readers_through,
    same_value,
    val,
    view_root,
    width,
)

NONE_ARGS = dict.fromkeys(
    ("output_scale", "output_block_scale", "quant_group_size", "quant_scale_ue8m0", "quant_col_major",
     "quant_tma_aligned"), "fused_output_quant",
) | {"q_dcp_replicated": "dcp_q_replicated"}  # fmt: skip
"""Arguments of the attention op that must be None, each with the code of the skip if it is not."""
_ROTARY_ARGS = ("positions", "query", "key", "head_size", "cos_sin_cache", "is_neox", *rope_probe.MODELLED)
KNOWN_ARGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(rope_probe.ROTARY_OPS, _ROTARY_ARGS),
    **{f"vllm::{name}": tuple(known.replace("!", "").split()) for name, known in OP_ARGUMENTS.items()},
}
"""The arguments of each op that the passes replace. The rewritten call would drop any other argument."""


class NoMatchError(Exception):
    """A layer does not have the form that the passes rewrite; ``skip`` says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.skip = Skip(code, message)


@dataclass(slots=True)
class LayerMatch:
    """One MLA layer of a graph."""

    layer_name: str  # dotted name of the attention module
    layer_name_arg: Any  # how the graph names it: a placeholder node (torch >= 2.11) or a string
    attention: fx.Node  # the node that computes attention. Each pass puts its own node here.
    q: fx.Node  # un-rotated query [T, N, P+R]
    k_pe: fx.Node  # un-rotated rope key [T, R] or [T, 1, R]
    kv_c: fx.Node  # normed latent [T, L]
    positions: fx.Node  # [T] int64
    cos_sin_cache: fx.Node  # [max_position, R]
    k_scale: fx.Node  # dequantisation scale of the cache
    is_neox: bool  # pairing of the rotation
    kv_cache_dtype: str  # the layer's cache dtype as vLLM spells it
    num_heads: int  # N on this rank
    nope_dim: int  # P
    rope_dim: int  # R
    latent_dim: int  # L
    # The rotary op in the graph; ``ROTARY_KERNEL`` where Inductor generates the RoPE: both round once
    rotation: str
    # What the layer's decode kernel reads. The graph does not show it: admission sets it.
    out_dtype: torch.dtype | None = None

    @property
    def prefused(self) -> bool:
        """Whether vLLM's own RoPE + KV pass has rewritten the layer already."""
        return self.rotation == FUSED_ROPE


def match_layers(graph: fx.Graph) -> list[tuple[str, LayerMatch | Skip]]:
    """Match every MLA attention node of ``graph``, by layer name; the work is linear in the number of layers."""
    attention_op = torch.ops.vllm.unified_mla_attention_with_output.default
    reads_table = rope_probe.TableReaders()
    found: list[tuple[str, LayerMatch | Skip]] = []
    with rope_probe.real_tensors():
        for node in graph.nodes:
            if is_functionalized(node, attention_op):
                name = layer_name_of(node.kwargs.get("layer_name"))
                found.append((name, _match_or_skip(node, name, reads_table)))
    return found


def _match_or_skip(attention: fx.Node, name: str, reads_table: rope_probe.TableReaders) -> LayerMatch | Skip:
    """Match one layer. An exception skips this layer only."""
    try:
        return _Matcher(attention, name, reads_table).match()
    except NoMatchError as error:
        return error.skip
    except rope_probe.ConeTooLargeError:
        return Skip("graph_too_deep", "the query or key expression is too large for a RoPE")
    except Exception as error:
        return Skip("not_evaluated", f"its expressions could not be evaluated: {type(error).__name__}: {error}")


def layer_name_of(arg: Any) -> str:
    """Return the layer's name behind a string constant or a hoisted placeholder, or '?' if it cannot be read."""
    if isinstance(arg, str):
        return arg
    value = val(arg)
    holder = getattr(value, "real_obj", value)
    name = getattr(holder, "value", None)
    return name if isinstance(name, str) else "?"


def known_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an op's call by name.

    Raises:
        NoMatchError: an argument outside ``KNOWN_ARGS`` is not None.
    """
    op: Any = node.args[0] if node.target is auto_functionalized else node.target
    given = arguments(node)
    for name, value in given.items():
        if name not in KNOWN_ARGS[op._schema.name] and value is not None:
            raise NoMatchError("unknown_argument", f"{op} is given {name}, which this plugin does not know")
    return given


class _KVUpdate(NamedTuple):
    """The node that writes a layer's KV rows. ``k_rotated`` is None where the node rotates the key itself."""

    node: fx.Node
    kv_c: fx.Node
    k_rotated: fx.Node | None
    dtype: str
    k_scale: fx.Node


class _Matcher:
    """Matches one layer. Methods return what they found or raise ``NoMatchError``."""

    def __init__(self, attention: fx.Node, name: str, reads_table: rope_probe.TableReaders) -> None:
        self.attention = attention
        self.name = name
        self.reads_table = reads_table
        self.kw = attention.kwargs

    def match(self) -> LayerMatch:
        self._check_attention()
        kv = self._kv_update()
        q_cone, k_cone = self._rope_cone("q"), self._rope_cone("k_pe")
        table, positions = self._one_table(q_cone, k_cone)
        tokens, num_heads, head, rope_dim = self._sizes()
        roots = self._root("q", q_cone), self._root("k_pe", k_cone)
        if view_root(roots[0]) is view_root(roots[1]):
            raise NoMatchError("crossed_branches", "the rotated query and the rotated key come from the same tensor")
        # Positions that only an op reads have a symbol of their own. The op wants one of them per token, too.
        counts = tokens, val(view_root(positions)).numel()
        probe, rows = self._probe(counts, table, view_root(positions), roots, rope_dim)
        is_neox, q = self._find_q(probe, rows, q_cone, (head - rope_dim, rope_dim))
        k_pe = self._find_k(probe, rows, k_cone, is_neox)
        self._check_kv_key(kv, q_cone, k_cone)
        self._check_readers(q_cone.inner | k_cone.inner, roots, kv.node)
        self._check_columns(counts, roots[1], k_pe, k_cone)
        latent = width(kv.kv_c)
        if latent is None or val(kv.kv_c).dim() != 2:
            raise NoMatchError("latent_shape", "kv_c is not [tokens, kv_lora_rank] with a static width")
        rope_probe.check_rows(val(kv.kv_c), counts)
        return LayerMatch(
            layer_name=self.name,
            layer_name_arg=self.kw["layer_name"],
            attention=self.attention,
            q=q,
            k_pe=k_pe,
            kv_c=kv.kv_c,
            positions=self._plain_positions(positions),
            cos_sin_cache=table,
            k_scale=kv.k_scale,
            is_neox=is_neox,
            kv_cache_dtype=kv.dtype,
            num_heads=num_heads,
            nope_dim=head - rope_dim,
            rope_dim=rope_dim,
            latent_dim=latent,
            rotation=_rotation(q_cone, k_cone),
        )

    def _check_attention(self) -> None:
        known_arguments(self.attention)
        for arg, code in NONE_ARGS.items():
            if self.kw.get(arg) is not None:
                raise NoMatchError(code, f"the attention op is given {arg}")
        if self.name == "?":
            raise NoMatchError("layer_name_unreadable", "the layer's name cannot be read from the graph")
        output = self.kw["output"]
        if not isinstance(output, fx.Node) or set(output.users) != {self.attention}:
            raise NoMatchError("output_shared", "something else is given the attention op's output buffer")
        if any(not is_call(user, operator.getitem) or user.args[1] != 1 for user in self.attention.users):
            raise NoMatchError("attention_results", "something reads more of the attention op than its output")

    def _kv_update(self) -> _KVUpdate:
        """Find the node through the argument that orders it before attention."""
        dep: Any = self.kw.get("kv_cache_dummy_dep")
        fused_op = torch.ops.vllm.fused_rope_unified_mla_kv_cache_update.default
        if is_call(dep, torch.ops.vllm.unified_mla_kv_cache_update.default):
            node, kv_c, k_rotated, k_scale = dep, "kv_c_normed", "k_pe", "k_scale"
        elif is_call(dep, operator.getitem) and dep.args[1] == 0 and is_functionalized(dep.args[0], fused_op):
            node, kv_c, k_rotated, k_scale = dep.args[0], "kv_c", None, "kv_cache_scale"
        else:
            raise NoMatchError("no_kv_update", "no KV-cache update is tied to the attention op in this graph piece")
        given = known_arguments(node)
        if k_rotated is None and {user.args[1] for user in node.users} != {0, 1, 2}:
            raise NoMatchError("vllm_fusion_incomplete", "vLLM's own fused RoPE + KV op lacks one of its three results")
        if set(dep.users) != {self.attention}:
            raise NoMatchError("kv_update_shared", "something besides attention waits for the KV-cache update")
        if layer_name_of(given["layer_name"]) != self.name:
            raise NoMatchError("layer_name_mismatch", "the KV-cache update names another layer")
        if not same_value(given[kv_c], self.kw["kv_c_normed"]):
            raise NoMatchError("kv_c_mismatch", "the KV-cache update and attention read different latents")
        rotated = None if k_rotated is None else given[k_rotated]
        return _KVUpdate(node, given[kv_c], rotated, given["kv_cache_dtype"], given[k_scale])

    def _rope_cone(self, what: str) -> rope_probe.Cone:
        node = self.kw[what]
        if not isinstance(node, fx.Node) or not self.reads_table(node):
            if isinstance(node, fx.Node) and view_root(node).op == "placeholder":
                raise NoMatchError("rope_outside", f"{what} of attention comes from another graph piece")
            raise NoMatchError("no_rope", f"no rotary embedding is applied to {what}")
        cone = rope_probe.Cone(node, self.reads_table)
        for call in cone.inner:
            if call.target is auto_functionalized:
                known_arguments(call)
        return cone

    def _one_table(self, q_cone: rope_probe.Cone, k_cone: rope_probe.Cone) -> tuple[fx.Node, fx.Node]:
        tables = _distinct(q_cone.tables | k_cone.tables)
        positions = _distinct(view_root(node) for node in q_cone.positions | k_cone.positions)
        if len(tables) != 1 or len(positions) != 1:
            raise NoMatchError("two_tables", "query and key are rotated by different tables or positions")
        return tables[0], next(iter(q_cone.positions))

    def _sizes(self) -> tuple[Any, int, int, int]:
        """Return T, N, P+R and R."""
        q, k_pe = val(self.kw["q"]), val(self.kw["k_pe"])
        if q is None or k_pe is None or q.dim() != 3 or not all(isinstance(size, int) for size in q.shape[1:]):
            raise NoMatchError("query_shape", "the query is not [tokens, heads, width] with static heads and width")
        rope_dim, head = k_pe.shape[-1], q.shape[2]
        if not isinstance(rope_dim, int) or rope_dim % 2 or rope_dim >= head:
            raise NoMatchError("query_shape", f"a rope part of {rope_dim} does not fit a query head of {head}")
        return q.shape[0], q.shape[1], head, rope_dim

    def _root(self, what: str, cone: rope_probe.Cone) -> fx.Node:
        if len(cone.roots) != 1:
            raise NoMatchError(
                "rope_other_operand", f"the rotated {what} also depends on something else (scaled, or mixed)"
            )
        root = next(iter(cone.roots))
        if not isinstance(val(root), torch.Tensor):
            raise NoMatchError("rope_other_operand", f"the root of the rotated {what} is not a tensor")
        if root.op == "placeholder":
            raise NoMatchError("graph_input", f"the un-rotated {what} is an input of the graph")
        return root

    def _probe(
        self, counts: tuple[Any, ...], table: fx.Node, positions: fx.Node, roots: tuple[fx.Node, ...], rope_dim: int
    ) -> tuple[rope_probe.Probe, torch.Tensor]:
        """Return a probe with random data, and the rows of its table that the positions, all different, select."""
        if width(table) != rope_dim:
            raise NoMatchError("partial_rotary", f"the rotary table is {width(table)} wide, the rope part {rope_dim}")
        for stop in (*roots, positions):
            rope_probe.check_rows(val(stop), counts)
        generator = torch.Generator().manual_seed(0)
        index = torch.arange(rope_probe.concrete(counts[0]), device="cpu") * 2
        values: dict[fx.Node, Any] = {root: rope_probe.random_like(root, generator) for root in roots}
        values[table] = rope_probe.random_like(table, generator, rows=2 * len(index))
        values[positions] = index.view([rope_probe.concrete(size) for size in val(positions).shape])
        return rope_probe.Probe(values, counts), values[table][index]

    def _find_q(
        self, probe: rope_probe.Probe, rows: torch.Tensor, cone: rope_probe.Cone, widths: tuple[int, int]
    ) -> tuple[bool, fx.Node]:
        """Return the pairing under which attention's query is the rotation of a node, and that node."""
        want = probe(self.kw["q"])
        cos, sin = rows.unsqueeze(1).chunk(2, -1)
        for node in _raw_views(cone):
            raw = probe(node)
            if raw.shape != want.shape:
                continue
            nope, pe = raw.split(widths, -1)
            for is_neox in (False, True):
                if _equal(want, torch.cat([nope, rope_probe.rope(pe, cos, sin, is_neox)], -1)):
                    return is_neox, node
        raise NoMatchError("query_not_rope", "attention's query is not [q_nope | RoPE(q_pe)] of one tensor")

    def _find_k(self, probe: rope_probe.Probe, rows: torch.Tensor, cone: rope_probe.Cone, is_neox: bool) -> fx.Node:
        """Return the node whose rotation, with the query's pairing, is attention's k_pe."""
        want = probe(self.kw["k_pe"]).reshape(rows.shape)
        cos, sin = rows.chunk(2, -1)
        for node in _raw_views(cone):
            raw = probe(node)
            if raw.shape not in (want.shape, want.unsqueeze(1).shape):
                continue
            if _equal(want, rope_probe.rope(raw.reshape(want.shape), cos, sin, is_neox)):
                return node
        raise NoMatchError("key_not_rope", "attention's k_pe is not the RoPE of one tensor with the query's pairing")

    def _check_kv_key(self, kv: _KVUpdate, q_cone: rope_probe.Cone, k_cone: rope_probe.Cone) -> None:
        if kv.k_rotated is None:
            # vLLM's own fused op writes the key that it rotates: attention must read the results of this very call.
            same = kv.node in q_cone.inner and kv.node in k_cone.inner
        else:
            same = same_value(kv.k_rotated, self.kw["k_pe"])
        if not same:
            raise NoMatchError("kv_key_mismatch", "the KV-cache update and attention read different keys")

    def _check_readers(self, inner: set[fx.Node], roots: tuple[fx.Node, fx.Node], update: fx.Node) -> None:
        """Check that nothing outside the layer reads the query, or a value between the raw and the rotated q or k_pe.

        Nodes that hold nothing but the table, such as an expanded cos, may be shared by all layers.
        """
        allowed = inner | {update, *update.users, self.attention}
        data: set[fx.Node] = set()
        stack = [*roots]
        while stack:
            new = {user for user in stack.pop().users if user in inner} - data
            data |= new
            stack += new
        for node in data:
            for user in node.users:
                if self.reads_table(node) and user not in allowed:
                    raise NoMatchError("rotated_value_read_elsewhere", f"{user.name} also reads a rotated value")
        for reader, _ in readers_through(roots[0]):
            if reader not in allowed:
                raise NoMatchError("query_read_elsewhere", f"{reader.name} also reads the query projection")

    def _check_columns(self, counts: tuple[Any, ...], root: fx.Node, k_pe: fx.Node, cone: rope_probe.Cone) -> None:
        """Check that nothing outside the layer reads the columns of k_pe: the fused ops rotate them in place."""
        others = [pair for pair in readers_through(root) if pair[0] not in cone.inner]
        if not others:
            return
        shape = [rope_probe.concrete(size) for size in val(root).shape]
        numbers = rope_probe.Probe({root: torch.arange(shape[-1], device="cpu").expand(shape)}, counts)
        mine = set(numbers(k_pe).flatten().tolist())
        for reader, through in others:
            if mine & set(numbers(through).flatten().tolist()):
                raise NoMatchError("key_read_elsewhere", f"{reader.name} also reads the un-rotated k_pe")

    def _plain_positions(self, positions: fx.Node) -> fx.Node:
        root = view_root(positions)
        node = root if val(root) is not None and val(root).dim() == 1 else positions
        value = val(node)
        if value is None or value.dim() != 1 or value.dtype != torch.int64:
            raise NoMatchError("positions", "positions are not one int64 per token")
        return node


def _rotation(q_cone: rope_probe.Cone, k_cone: rope_probe.Cone) -> str:
    """Return the rotary op that both the query and the key go through, or ``ROTARY_KERNEL`` if neither does."""
    of_q, of_k = (
        {str(op._schema.name) for node in cone.inner if rope_probe.rotary_call(node) for op in node.args[:1]}  # type: ignore[union-attr]
        for cone in (q_cone, k_cone)
    )
    if of_q != of_k or len(of_q) > 1:
        raise NoMatchError("rope_other_operand", "query and key are not rotated by the same op")
    return next(iter(of_q), ROTARY_KERNEL)


def _distinct(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    found: list[fx.Node] = []
    for node in nodes:
        if not any(same_value(node, other) for other in found):
            found.append(node)
    return found


def _raw_views(cone: rope_probe.Cone) -> list[fx.Node]:
    """Return the cone's roots and the views of them that the graph holds, in graph order."""
    views = [node for node in cone.inner if is_view(node) and view_root(node) in cone.roots]
    return [node for node in [*cone.roots, *sorted(views)] if isinstance(val(node), torch.Tensor)]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)

"""Read a whole MLA layer, anchored on its attention node, into one frozen record, or refuse it with a reason.

Nothing is rewritten here. Every check looks at what the nodes compute (see ``probe``), at who else reads them, and at
the arguments of the two vLLM ops, never at the order of nodes: the graph need not be topologically sorted.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.passes import probe as pr
from vllm_aiter_mla.passes.arguments import NoMatchError, refuse_unknown
from vllm_aiter_mla.passes.fx import (
    Liveness,
    is_call,
    is_functionalized,
    is_view,
    readers_through,
    results,
    same_value,
    val,
    view_root,
    width,
)
from vllm_aiter_mla.passes.kv_update import KVUpdate

aten = torch.ops.aten

# Arguments of the attention op that the rewritten call carries over.
READ_ARGS = ("q", "kv_c_normed", "k_pe", "output", "layer_name", "kv_cache_dummy_dep")
# Those that must be absent or None, with the reason for which a layer that gives one is refused. Any other is unknown.
NONE_ARGS = {
    "output_scale": "fused_output_quant",
    "output_block_scale": "fused_output_quant",
    "quant_group_size": "fused_output_quant",
    "quant_scale_ue8m0": "fused_output_quant",
    "quant_col_major": "fused_output_quant",
    "quant_tma_aligned": "fused_output_quant",
    "q_dcp_replicated": "dcp_q_replicated",
}


@dataclass(frozen=True, slots=True)
class LayerMatch:
    """One MLA layer of a graph.

    Attributes:
        layer_name: dotted name of the attention module.
        layer_name_arg: how the graph names it: a placeholder node (torch >= 2.11) or a string.
        attention: the functionalised ``unified_mla_attention_with_output``.
        kv_update: the node whose result orders the KV write before attention: ``unified_mla_kv_cache_update``, or
            the functionalised unmodified vLLM fused op where ``prefused``.
        q: un-rotated query [T, N, P+R].
        k_pe: un-rotated rope key [T, R] or [T, 1, R].
        kv_c: normed latent [T, L].
        positions: [T] int64.
        cos_sin_cache: [max_position, R].
        k_scale: dequantisation scale of the cache.
        is_neox: pairing of the rotation.
        kv_cache_dtype: the layer's cache dtype as vLLM spells it.
        num_heads: N on this rank.
        nope_dim: P.
        rope_dim: R.
        latent_dim: L.
        prefused: whether vLLM's own RoPE + KV pass has rewritten the layer already.
    """

    layer_name: str
    layer_name_arg: Any
    attention: fx.Node
    kv_update: fx.Node
    q: fx.Node
    k_pe: fx.Node
    kv_c: fx.Node
    positions: fx.Node
    cos_sin_cache: fx.Node
    k_scale: fx.Node
    is_neox: bool
    kv_cache_dtype: str
    num_heads: int
    nope_dim: int
    rope_dim: int
    latent_dim: int
    prefused: bool


def match_layers(graph: fx.Graph) -> list[tuple[str, LayerMatch | Skip]]:
    """Match every MLA attention node of ``graph``, by layer name; the work is linear in the number of layers."""
    attention_op = torch.ops.vllm.unified_mla_attention_with_output.default
    pr.rotary_ops.cache_clear()
    cone, live = pr.Cone(), Liveness(graph)
    found: list[tuple[str, LayerMatch | Skip]] = []
    with pr.real_tensors():
        for node in graph.nodes:
            if is_functionalized(node, attention_op):
                name = layer_name_of(node.kwargs.get("layer_name"))
                found.append((name, _match_or_refuse(node, name, cone, live)))
    return found


def _match_or_refuse(attention: fx.Node, name: str, cone: pr.Cone, live: Liveness) -> LayerMatch | Skip:
    """Match one layer. An exception refuses this layer only."""
    try:
        return _Matcher(attention, name, cone, live).match()
    except NoMatchError as error:
        return error.skip
    except pr.ConeTooLargeError:
        return Skip("graph_too_deep", "the query or key expression is too large for a RoPE")
    except Exception as error:
        return Skip("not_evaluated", f"its expressions could not be evaluated: {type(error).__name__}: {error}")


def layer_name_of(arg: Any) -> str:
    """The layer's name behind a string constant or a hoisted placeholder; '?' where it cannot be read."""
    if isinstance(arg, str):
        return arg
    value = val(arg)
    holder = getattr(value, "real_obj", value)
    name = getattr(holder, "value", None)
    return name if isinstance(name, str) else "?"


class _Matcher:
    """Matches one layer. Methods either record what they found or raise ``NoMatchError``."""

    def __init__(self, attention: fx.Node, name: str, cone: pr.Cone, live: Liveness) -> None:
        self.attention = attention
        self.name = name
        self.cone = cone
        self.live = live
        self.kw = attention.kwargs
        self.generator = torch.Generator().manual_seed(0)

    def match(self) -> LayerMatch:
        self._check_attention()
        kv = self._kv_update()
        q_cone = self._rope_cone("q", self.kw["q"])
        k_cone = self._rope_cone("k_pe", self.kw["k_pe"])
        table, positions = self._one_table(q_cone, k_cone)
        rope_dim, (_, n, head) = self._sizes()
        q_root, k_root = self._root("q", q_cone), self._root("k_pe", k_cone)
        if view_root(q_root) is view_root(k_root):
            raise NoMatchError("crossed_branches", "the rotated query and the rotated key come from the same tensor")
        probe = self._probe(table, positions, (q_root, k_root), rope_dim)
        is_neox, q = self._find_q(probe, q_cone, head, rope_dim)
        k_pe = self._find_k(probe, k_cone, rope_dim, is_neox)
        self._check_kv_key(kv, q_cone, k_cone)
        self._check_readers(q_cone, k_cone, q_root, k_root, kv.nodes)
        self._check_columns(k_root, k_pe, k_cone)
        return LayerMatch(
            layer_name=self.name,
            layer_name_arg=self.kw["layer_name"],
            attention=self.attention,
            kv_update=kv.node,
            q=q,
            k_pe=k_pe,
            kv_c=kv.kv_c,
            positions=self._plain_positions(positions),
            cos_sin_cache=table,
            k_scale=kv.k_scale,
            is_neox=is_neox,
            kv_cache_dtype=kv.dtype,
            num_heads=n,
            nope_dim=head - rope_dim,
            rope_dim=rope_dim,
            latent_dim=self._latent(kv.kv_c),
            prefused=kv.prefused,
        )

    def _check_attention(self) -> None:
        refuse_unknown(self.attention, (*READ_ARGS, *NONE_ARGS))
        for arg, code in NONE_ARGS.items():
            if self.kw.get(arg) is not None:
                raise NoMatchError(code, f"the attention op is given {arg}")
        if self.name == "?":
            raise NoMatchError("layer_name_unreadable", "the layer's name cannot be read from the graph")
        output = self.kw["output"]
        if not isinstance(output, fx.Node) or any(u is not self.attention and u in self.live for u in output.users):
            raise NoMatchError("output_shared", "something else is given the attention op's output buffer")
        live = {index for index, item in results(self.attention).items() if item.users}
        if not live <= {1} or any(not is_call(user, operator.getitem) for user in self.attention.users):
            raise NoMatchError("attention_results", "something reads more of the attention op than its output")

    def _kv_update(self) -> KVUpdate:
        dep = self.kw.get("kv_cache_dummy_dep")
        found = self._find_update(dep)
        if set(dep.users) != {self.attention}:  # type: ignore[union-attr]
            raise NoMatchError("kv_update_shared", "something besides attention waits for the KV-cache update")
        if layer_name_of(found.layer_name) != self.name:
            raise NoMatchError("layer_name_mismatch", "the KV-cache update names another layer")
        if not same_value(found.kv_c, self.kw["kv_c_normed"]):
            raise NoMatchError("kv_c_mismatch", "the KV-cache update and attention read different latents")
        return found

    def _find_update(self, dep: Any) -> KVUpdate:
        """The node that writes the KV rows before attention, from the argument that orders the two."""
        if is_call(dep, torch.ops.vllm.unified_mla_kv_cache_update.default):
            return KVUpdate.of_update(dep)
        if not is_call(dep, operator.getitem) or dep.args[1] != 0 or not pr.rotary_call(dep.args[0]):
            raise NoMatchError("no_kv_update", "no KV-cache update is tied to the attention op in this graph piece")
        found = KVUpdate.of_fused(dep.args[0])
        if set(results(found.node)) != {0, 1, 2}:
            raise NoMatchError("vllm_fusion_incomplete", "vLLM's own fused RoPE + KV op lacks one of its three results")
        return found

    def _rope_cone(self, what: str, node: Any) -> pr.ConeNodes:
        if not isinstance(node, fx.Node) or not self.cone.uses_table(node):
            raise NoMatchError(
                "no_rope", f"no rotary embedding is applied to {what} (a NoPE layer, or outside this graph)"
            )
        return self.cone.collect(node)

    def _one_table(self, q_cone: pr.ConeNodes, k_cone: pr.ConeNodes) -> tuple[fx.Node, fx.Node]:
        tables = _distinct(q_cone.tables | k_cone.tables)
        positions = _distinct(view_root(node) for node in q_cone.positions | k_cone.positions)
        if len(tables) != 1 or len(positions) != 1:
            raise NoMatchError("two_tables", "query and key are rotated by different tables or positions")
        return tables[0], next(iter(q_cone.positions))

    def _sizes(self) -> tuple[int, tuple[Any, int, int]]:
        q, k_pe = val(self.kw["q"]), val(self.kw["k_pe"])
        if q is None or k_pe is None or q.dim() != 3 or not all(isinstance(size, int) for size in q.shape[1:]):
            raise NoMatchError("query_shape", "the query is not [tokens, heads, width] with static heads and width")
        rope_dim, head = k_pe.shape[-1], q.shape[2]
        if not isinstance(rope_dim, int) or rope_dim % 2 or rope_dim >= head:
            raise NoMatchError("query_shape", f"a rope part of {rope_dim} does not fit a query head of {head}")
        return rope_dim, tuple(q.shape)

    def _root(self, what: str, cone: pr.ConeNodes) -> fx.Node:
        if len(cone.roots) != 1:
            raise NoMatchError(
                "rope_other_operand", f"the rotated {what} also depends on something else (scaled, or mixed)"
            )
        root = next(iter(cone.roots))
        if not isinstance(val(root), torch.Tensor):
            raise NoMatchError("rope_other_operand", f"the root of the rotated {what} is no tensor")
        if root.op == "placeholder":
            raise NoMatchError("graph_input", f"the un-rotated {what} is an input of the graph")
        return root

    def _probe(self, table: fx.Node, positions: fx.Node, roots: Iterable[fx.Node], rope_dim: int) -> pr.Probe:
        if width(table) != rope_dim:
            raise NoMatchError("partial_rotary", f"the rotary table is {width(table)} wide, the rope part {rope_dim}")
        values: dict[fx.Node, Any] = {root: pr.random_like(root, self.generator) for root in roots}
        values[table] = pr.random_like(table, self.generator, rows=pr.TABLE_ROWS)
        rows = pr.concrete(val(positions).shape[0])
        index = torch.arange(rows, device="cpu") * 2 % pr.TABLE_ROWS
        # Positions may be re-emitted views of one node: bind the root, and this spelling of it.
        values[view_root(positions)] = index.view([pr.concrete(size) for size in val(view_root(positions)).shape])
        values[positions] = index
        self.cos, self.sin = values[table][index].chunk(2, -1)
        return pr.Probe(values)

    def _find_q(self, probe: pr.Probe, cone: pr.ConeNodes, head: int, rope_dim: int) -> tuple[bool, fx.Node]:
        """The un-rotated query node, and the pairing under which attention's query is its rotation."""
        want = probe(self.kw["q"])
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        for node in self._raw_views(cone, tuple(val(self.kw["q"]).shape)):
            raw = probe(node)
            if raw.shape != want.shape:
                continue
            nope, pe = raw.split([head - rope_dim, rope_dim], -1)
            for is_neox in (False, True):
                if torch.allclose(want, torch.cat([nope, pr.rope(pe, cos, sin, is_neox)], -1), rtol=1e-9, atol=1e-12):
                    return is_neox, node
        raise NoMatchError("query_not_rope", "attention's query is not [q_nope | RoPE(q_pe)] of one tensor")

    def _find_k(self, probe: pr.Probe, cone: pr.ConeNodes, rope_dim: int, is_neox: bool) -> fx.Node:
        """The un-rotated key node whose rotation, with the query's pairing, attention reads."""
        want = probe(self.kw["k_pe"]).reshape(-1, rope_dim)
        for node in self._raw_views(cone, None):
            raw = probe(node)
            if raw.shape not in ((want.shape[0], rope_dim), (want.shape[0], 1, rope_dim)):
                continue
            rotated = pr.rope(raw.reshape(-1, rope_dim), self.cos, self.sin, is_neox)
            if torch.allclose(want, rotated, rtol=1e-9, atol=1e-12):
                return node
        raise NoMatchError("key_not_rope", "attention's k_pe is not the RoPE of one tensor with the query's pairing")

    def _raw_views(self, cone: pr.ConeNodes, shape: tuple[Any, ...] | None) -> list[fx.Node]:
        """Pure views of the cone's root that the graph holds, the root included, in graph order."""
        views = [node for node in cone.inner if is_view(node) and view_root(node) in cone.roots]
        candidates = [*cone.roots, *sorted(views)]
        return [node for node in candidates if isinstance(val(node), torch.Tensor) and _fits(node, shape)]

    def _check_kv_key(self, kv: KVUpdate, q_cone: pr.ConeNodes, k_cone: pr.ConeNodes) -> None:
        rotated = kv.k_rotated
        if rotated is None:
            # vLLM's own fused op writes the key that it rotates: attention must read the results of this very call.
            if kv.node not in q_cone.inner or kv.node not in k_cone.inner:
                raise NoMatchError("kv_key_mismatch", "the KV-cache update and attention read different keys")
            return
        if rotated is not self.kw["k_pe"] and not same_value(rotated, self.kw["k_pe"]):
            raise NoMatchError("kv_key_mismatch", "the KV-cache update and attention read different keys")

    def _check_readers(
        self, q_cone: pr.ConeNodes, k_cone: pr.ConeNodes, q_root: fx.Node, k_root: fx.Node, kv_nodes: set[fx.Node]
    ) -> None:
        """No one outside the layer may read a value between the raw and the rotated q and k_pe."""
        inner = q_cone.inner | k_cone.inner
        allowed = inner | kv_nodes | {self.attention}
        for node in inner:
            # What only holds the table (expanded cos, sin) may be shared by every layer.
            if self._holds_data(node, (q_root, k_root)) and self.cone.uses_table(node):
                for user in node.users:
                    if user not in allowed and user in self.live:
                        raise NoMatchError("rotated_value_read_elsewhere", f"{user.name} also reads a rotated value")
        for reader, _ in readers_through(q_root):
            if reader not in allowed and reader in self.live:
                raise NoMatchError("query_read_elsewhere", f"{reader.name} also reads the query projection")

    def _check_columns(self, k_root: fx.Node, k_pe: fx.Node, k_cone: pr.ConeNodes) -> None:
        """Nobody outside the layer reads the columns of k_pe: pass 1's op rotates them in place."""
        others = [pair for pair in readers_through(k_root) if pair[0] not in k_cone.inner]
        if not others:
            return
        shape = [pr.concrete(size) for size in val(k_root).shape]
        columns = torch.arange(shape[-1], device="cpu").expand(shape)
        ids = pr.Probe({k_root: columns})
        mine = set(ids(k_pe).flatten().tolist())
        for reader, through in others:
            if mine & set(ids(through).flatten().tolist()) and reader in self.live:
                raise NoMatchError("key_read_elsewhere", f"{reader.name} also reads the un-rotated k_pe")

    def _holds_data(self, node: fx.Node, roots: tuple[fx.Node, ...]) -> bool:
        if not hasattr(self, "_data"):
            self._data: dict[fx.Node, bool] = dict.fromkeys(roots, True)
        known = self._data.get(node)
        if known is None:
            self._data[node] = False
            if pr.lookup(node) is None:
                self._data[node] = any(self._holds_data(parent, roots) for parent in node.all_input_nodes)
            known = self._data[node]
        return known

    def _plain_positions(self, positions: fx.Node) -> fx.Node:
        root = view_root(positions)
        node = root if val(root) is not None and val(root).dim() == 1 else positions
        value = val(node)
        if value is None or value.dim() != 1 or value.dtype != torch.int64:
            raise NoMatchError("positions", "positions are not one int64 per token")
        return node

    def _latent(self, kv_c: fx.Node) -> int:
        size = width(kv_c)
        if size is None or val(kv_c).dim() != 2:
            raise NoMatchError("latent_shape", "kv_c is not [tokens, kv_lora_rank] with a static width")
        return size


def _distinct(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    found: list[fx.Node] = []
    for node in nodes:
        if not any(same_value(node, other) for other in found):
            found.append(node)
    return found


def _fits(node: fx.Node, shape: tuple[Any, ...] | None) -> bool:
    return shape is None or len(val(node).shape) == len(shape)

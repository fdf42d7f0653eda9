"""Near-misses: a layer that only looks like one that the passes rewrite is declined by name and left as it was."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx

from tests.passes.execute import rewrite, stubs_for
from tests.passes.graphs import END, Builder, Layer, Spelling
from tests.passes.rotary import ROPES, Pair
from vllm_aiter_mla import status
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.passes.match import NONE_ARGS, match_layers

aten = torch.ops.aten


@dataclass
class Edit:
    """A layer to be spoiled, its builder, and what the graph returns besides the residual."""

    b: Builder
    layer: Layer
    outputs: list[fx.Node] = field(default_factory=list)

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Emit a node before the layer's attention."""
        with self.b.graph.inserting_before(self.layer.attention):
            return self.b(target, *args)

    def attend(self, **kwargs: Any) -> None:
        """Change arguments of the attention node."""
        self.layer.attention.kwargs = {**self.layer.attention.kwargs, **kwargs}

    def update(self, index: int, value: Any) -> None:
        """Change an argument of the KV update."""
        args = list(self.layer.kv_update.args)
        args[index] = value
        self.layer.kv_update.args = tuple(args)

    def rope_nodes(self, target: Any) -> list[fx.Node]:
        """The calls of ``target`` between the projections and attention, in order."""
        return [node for node in self.b.graph.nodes if node.op == "call_function" and node.target is target]

    def read(self, node: fx.Node) -> None:
        """Let the graph return something computed from ``node``."""
        self.outputs.append(self.b(aten.tanh.default, node))


def scaled_query(edit: Edit) -> None:
    """llama_4_scaling: one factor per token on the rotated query."""
    scale = edit.b.input("llama_4_scaling", edit.b.t.meta["val"], 1, 1)
    edit.attend(q=edit.call(aten.mul.Tensor, edit.layer.q, scale))


def doubled_query(edit: Edit) -> None:
    edit.attend(q=edit.call(aten.mul.Tensor, edit.layer.q, 2.0))


def scaled_key(edit: Edit) -> None:
    scaled = edit.call(aten.mul.Tensor, edit.layer.k_pe, 2.0)
    edit.update(1, scaled)
    edit.attend(k_pe=scaled)
    edit.layer.attention.prepend(edit.layer.kv_update)


def output_quant(name: str) -> Callable[[Edit], None]:
    return lambda edit: edit.attend(**{name: edit.layer.q if name == "q_dcp_replicated" else edit.b.k_scale})


def other_positions_for_keys(edit: Edit) -> None:
    lookup = edit.rope_nodes(aten.index.Tensor)[-1]
    lookup.args = (lookup.args[0], [edit.b.input("positions_2", edit.b.t.meta["val"], dtype=torch.int64)])


def other_table_for_keys(edit: Edit) -> None:
    lookup = edit.rope_nodes(aten.index.Tensor)[-1]
    lookup.args = (edit.b.input("table_2", 24, 16), lookup.args[1])


def swapped_cos_and_sin(edit: Edit) -> None:
    """Both halves of the table change places: the split of the looked-up rows is read in the other order."""
    lookup = edit.rope_nodes(aten.index.Tensor)[0]
    (split,) = lookup.users
    for item in list(split.users):
        item.args = (split, 1 - item.args[1])  # type: ignore[operator]


def inverse_rotation(edit: Edit) -> None:
    subtract, add = edit.rope_nodes(aten.sub.Tensor), edit.rope_nodes(aten.add.Tensor)
    for node in subtract:
        node.target = aten.add.Tensor
    for node in add:
        node.target = aten.sub.Tensor


def inverse_rotation_of_keys(edit: Edit) -> None:
    edit.rope_nodes(aten.sub.Tensor)[-1].target = aten.add.Tensor
    edit.rope_nodes(aten.add.Tensor)[-1].target = aten.sub.Tensor


def swapped_halves(edit: Edit) -> None:
    for node in edit.rope_nodes(aten.cat.default):
        node.args = (list(reversed(node.args[0])), node.args[1])  # type: ignore[arg-type]


def swapped_halves_of_keys(edit: Edit) -> None:
    node = edit.rope_nodes(aten.cat.default)[-1]
    node.args = (list(reversed(node.args[0])), node.args[1])  # type: ignore[arg-type]


def odd_before_even(edit: Edit) -> None:
    """GPT-J pairs (2i+1, 2i) instead of (2i, 2i+1)."""
    for node in edit.rope_nodes(aten.slice.Tensor):
        if len(node.args) == 5:
            node.args = (*node.args[:2], 1 - node.args[2], *node.args[3:])  # type: ignore[operator]


def two_writes(edit: Edit) -> None:
    """The rotated half overwrites the nope half as well."""
    nope = edit.call(aten.slice.Tensor, edit.layer.q_rotated, 2, 0, 8)
    edit.attend(q=edit.call(aten.slice_scatter.default, edit.layer.q, nope, 2, 0, 8))


def attention_reads_raw_key(edit: Edit) -> None:
    edit.attend(k_pe=edit.call(aten.unsqueeze.default, edit.layer.k_raw, 1))


def update_writes_raw_key(edit: Edit) -> None:
    raw = edit.b.graph.call_function(aten.unsqueeze.default, (edit.layer.k_raw, 1))
    raw.meta["val"] = edit.layer.k_pe.meta["val"]
    edit.layer.kv_update.prepend(raw)
    edit.update(1, raw)


def other_latent(edit: Edit) -> None:
    edit.attend(kv_c_normed=edit.call(aten.neg.default, edit.layer.kv_c))


def other_name(edit: Edit) -> None:
    name = edit.b.layer_name("model.layers.9.attn", "hoisted")
    edit.update(2, name)


def nameless(edit: Edit) -> None:
    edit.layer.name_arg.meta["val"] = object()


def narrow_positions(edit: Edit) -> None:
    with edit.b.mode:
        edit.b.positions.meta["val"] = torch.empty(edit.b.t.meta["val"], dtype=torch.int32)


def no_update(edit: Edit) -> None:
    edit.attend(kv_cache_dummy_dep=None)


def misbound_by_vllm(edit: Edit) -> None:
    """What vLLM's own pattern can do behind out-variant GEMMs: q_pe is bound to the key."""
    fused = edit.layer.kv_update
    with edit.b.graph.inserting_before(fused):
        wrong = edit.b(aten.unsqueeze.default, edit.layer.k_raw, 1)
    fused.kwargs = {**fused.kwargs, "q_pe": wrong}


def one_gemm(edit: Edit) -> None:
    """The rotation of the key in place would turn columns of the query."""
    edit.layer.q_gemm.replace_all_uses_with(edit.layer.kv_gemm)


def query_from_outside(edit: Edit) -> None:
    """A rotation in place would change what the graph's caller holds."""
    s = edit.b.spelling.sizes
    edit.layer.q_gemm.replace_all_uses_with(edit.b.input("q_in", edit.b.t.meta["val"], s.n * (s.p + s.r)))


def key_from_outside(edit: Edit) -> None:
    s = edit.b.spelling.sizes
    edit.layer.kv_gemm.replace_all_uses_with(edit.b.input("kv_in", edit.b.t.meta["val"], s.latent + s.r))


def without_a_result(edit: Edit) -> None:
    """vLLM's own node whose rotated key nobody takes out; attention reads the raw one."""
    edit.attend(k_pe=edit.call(aten.unsqueeze.default, edit.layer.k_raw, 1))
    for node in (edit.layer.k_pe, edit.layer.k_rotated):
        edit.b.graph.erase_node(node)


def partial(b: Builder, s: Spelling, q: fx.Node, k: fx.Node) -> Pair:
    """Only the first half of the rope part is rotated, by a table half as wide."""
    b.table = b.input("narrow", 24, s.sizes.r // 2)
    half = s.but(sizes=type(s.sizes)(r=s.sizes.r // 2))

    def front(x: fx.Node) -> fx.Node:
        return b(aten.slice.Tensor, x, 2, 0, s.sizes.r // 2)

    rotated = ROPES["plain"](b, half, front(q), front(k))
    rest = [b(aten.slice.Tensor, x, 2, s.sizes.r // 2, END) for x in (q, k)]
    return tuple(b(aten.cat.default, [a, c], -1) for a, c in zip(rotated, rest, strict=True))  # type: ignore[return-value]


def two_styles(b: Builder, s: Spelling, q: fx.Node, k: fx.Node) -> Pair:
    """NeoX for the query, GPT-J for the key."""
    return ROPES["plain"](b, s.but(is_neox=True), q, k)[0], ROPES["plain"](b, s.but(is_neox=False), q, k)[1]


def two_lookups(b: Builder, s: Spelling, q: fx.Node, k: fx.Node) -> Pair:
    """One lookup for the query and one for the key."""
    return ROPES["plain"](b, s, q, k)[0], ROPES["plain"](b, s, q, k)[1]


def op_with(**extra: Any) -> Callable[..., Pair]:
    """The rotary custom op with other arguments."""

    def rope(b: Builder, s: Spelling, q: fx.Node, k: fx.Node) -> Pair:
        rotated = ROPES["op, flat"](b, s, q, k)
        (call,) = (node for node in b.graph.nodes if "is_neox" in node.kwargs)
        call.kwargs = {**call.kwargs, **extra}
        return rotated

    return rope


def scaled_table(b: Builder, s: Spelling, q: fx.Node, k: fx.Node) -> Pair:
    """An attention factor on cos and sin inside the graph."""
    plain_lookup = b.lookup
    b.lookup = lambda *args: b(aten.mul.Tensor, plain_lookup(*args), 1.25)  # type: ignore[method-assign]
    return ROPES["plain"](b, s, q, k)


def quantised(b: Builder, s: Spelling, q: fx.Node, k: fx.Node) -> Pair:
    """A query that is rounded to fp8 and back before its RoPE."""
    cast = torch.ops.prims.convert_element_type.default
    return ROPES["plain"](b, s, b(cast, b(cast, q, torch.float8_e4m3fn), s.dtype), k)


def written_by_another_call(edit: Edit) -> None:
    """Attention waits for a fused call of this layer's name, and reads the results of another one."""
    first = edit.layer.attention.kwargs["kv_cache_dummy_dep"].args[0]  # type: ignore[union-attr,index]
    with edit.b.graph.inserting_before(first):
        second = edit.b.graph.node_copy(first)
    for index, result in ((1, edit.layer.q_rotated), (2, edit.layer.k_rotated)):
        edit.call(operator.getitem, first, index)
        result.args = (second, index)


def nothing(edit: Edit) -> None:
    """The rope itself is what is wrong."""


Case = tuple[str, Callable[[Edit], None], dict[str, Any]]
CASES: dict[str, Case] = {
    "a NoPE layer": ("no_rope", nothing, {"rope": "none"}),
    "a query scaled after its RoPE": ("rope_other_operand", scaled_query, {}),
    "a query doubled after its RoPE": ("query_not_rope", doubled_query, {}),
    "a key scaled after its RoPE": ("key_not_rope", scaled_key, {}),
    "a second reader of the rotated q": ("rotated_value_read_elsewhere", lambda e: e.read(e.layer.q_rotated), {}),
    "a second reader of the written-back q": ("rotated_value_read_elsewhere", lambda e: e.read(e.layer.q), {}),
    "a second reader of the rotated k": ("rotated_value_read_elsewhere", lambda e: e.read(e.layer.k_rotated), {}),
    "a graph that returns the rotated q": ("rotated_value_read_elsewhere", lambda e: e.outputs.append(e.layer.q), {}),
    "a second reader of vLLM's own rotated k": (
        "rotated_value_read_elsewhere",
        lambda e: e.read(e.layer.k_rotated),
        {"prefused": True},
    ),
    "a second reader of the raw q": ("query_read_elsewhere", lambda e: e.read(e.layer.q_gemm), {}),
    "a second reader of the raw q_pe": ("query_read_elsewhere", lambda e: e.read(e.layer.q_pe), {}),
    "a second reader of the raw k_pe": ("key_read_elsewhere", lambda e: e.read(e.layer.k_raw), {}),
    "a second reader of the whole KV projection": ("key_read_elsewhere", lambda e: e.read(e.layer.kv_gemm), {}),
    "other positions for the key": ("two_tables", other_positions_for_keys, {"rope": "lookups"}),
    "another table for the key": ("two_tables", other_table_for_keys, {"rope": "lookups"}),
    "a partial rotary": ("partial_rotary", nothing, {"rope": "partial"}),
    "cos and sin swapped": ("query_not_rope", swapped_cos_and_sin, {}),
    "a table scaled in the graph": ("query_not_rope", nothing, {"rope": "scaled table"}),
    "the inverse rotation": ("query_not_rope", inverse_rotation, {}),
    "the inverse rotation of the key": ("key_not_rope", inverse_rotation_of_keys, {}),
    "swapped halves": ("query_not_rope", swapped_halves, {}),
    "swapped halves of the key": ("key_not_rope", swapped_halves_of_keys, {}),
    "pairs in the wrong order": ("query_not_rope", odd_before_even, {"is_neox": False}),
    "a NeoX query beside a GPT-J key": ("key_not_rope", nothing, {"rope": "two styles"}),
    "the nope half overwritten": ("query_not_rope", two_writes, {}),
    "the inverse custom op": ("no_rope", nothing, {"rope": "inverse op"}),
    "the custom op at an offset": ("no_rope", nothing, {"rope": "offset op"}),
    "the custom op with heads of another width": ("no_rope", nothing, {"rope": "wide op"}),
    "attention on the raw key": ("no_rope", attention_reads_raw_key, {}),
    "a KV update with the raw key": ("kv_key_mismatch", update_writes_raw_key, {}),
    "a KV update with another latent": ("kv_c_mismatch", other_latent, {}),
    "a KV update of another layer": ("layer_name_mismatch", other_name, {}),
    "no KV update": ("no_kv_update", no_update, {}),
    "a KV update that something else waits for": (
        "kv_update_shared",
        lambda e: e.outputs.append(e.layer.kv_update),
        {},
    ),
    "vLLM's own fusion with q_pe bound to the key": ("rope_other_operand", misbound_by_vllm, {"prefused": True}),
    "a query and a key of one GEMM": ("crossed_branches", one_gemm, {}),
    "a query that is an input of the graph": ("graph_input", query_from_outside, {}),
    "a key that is an input of the graph": ("graph_input", key_from_outside, {}),
    "an output buffer with another reader": (
        "output_shared",
        lambda e: e.read(e.layer.attention.kwargs["output"]),
        {},
    ),
    "vLLM's own fusion beside another call of it": ("kv_key_mismatch", written_by_another_call, {"prefused": True}),
    "a query that is quantised before its RoPE": ("rope_other_operand", nothing, {"rope": "quantised"}),
    "vLLM's own fusion without one result": ("vllm_fusion_incomplete", without_a_result, {"prefused": True}),
    "a layer name that cannot be read": ("layer_name_unreadable", nameless, {}),
    "positions that are not int64": ("positions", narrow_positions, {}),
    **{f"attention given {name}": (code, output_quant(name), {}) for name, code in NONE_ARGS.items()},
}
EXTRA_ROPES = {
    "partial": partial,
    "two styles": two_styles,
    "lookups": two_lookups,
    "scaled table": scaled_table,
    "quantised": quantised,
    "inverse op": op_with(inverse=True),
    "offset op": op_with(rope_dim_offset=2),
    "wide op": op_with(head_size=32),
}


def spoiled(case: Case) -> tuple[fx.GraphModule, Layer, Spelling]:
    """A graph with one layer that is spoiled as ``case`` says."""
    _, edit, changes = case
    builder = Builder(Spelling(**changes))
    made = Edit(builder, builder.layer())
    edit(made)
    return builder.finish(*made.outputs), made.layer, builder.spelling


def assert_declined(case: Case) -> None:
    """Refused with the case's code, by the matcher and by the whole rewriting, which leaves the graph alone."""
    gm, layer, spelling = spoiled(case)
    ((name, found),) = match_layers(gm.graph)
    assert isinstance(found, Skip), f"matched: {found}"
    assert found.code == case[0], str(found)
    assert len(found.message) > 20, "the user reads it"
    before = str(gm.graph)
    counts = rewrite(gm, stubs_for([layer], spelling))
    assert str(gm.graph) == before
    assert (counts["matched"], counts["skipped"]) == (0, 1)
    assert status.current().skipped[name] == (found.code, found.message)


@pytest.fixture(autouse=True)
def more_ropes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rope in EXTRA_ROPES.items():
        monkeypatch.setitem(ROPES, name, rope)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_layer_is_declined_and_left_alone_with(case: Case) -> None:
    assert_declined(case)


def test_dead_readers_decline_nothing() -> None:
    """What tracing an in-place op leaves behind: chains of views that nobody reads."""
    builder = Builder(Spelling())
    layer = builder.layer()
    for node in (layer.q, layer.q_gemm, layer.k_rotated, layer.kv_gemm):
        flat = builder(aten.reshape.default, node, [builder.t, -1])
        builder(aten.slice.Tensor, flat, 1, 0, 4)
    assert not any(isinstance(found, Skip) for _, found in match_layers(builder.finish().graph))


def test_other_readers_of_the_latent_columns_decline_nothing() -> None:
    builder = Builder(Spelling())
    layer = builder.layer()
    latent = builder(operator.getitem, builder(aten.split_with_sizes.default, layer.kv_gemm, [32, 16], -1), 0)
    gm = builder.finish(builder(aten.tanh.default, latent), layer.kv_c)
    assert not any(isinstance(found, Skip) for _, found in match_layers(gm.graph))

"""Layers that only look like one that the passes rewrite, each with the code with which the matcher skips it."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from vllm.utils.torch_utils import HAS_OPAQUE_TYPE

from tests.passes.execute import clean, rewrite, skipped_in_graphs, stubs_for
from tests.passes.graphs import END, Builder, Layer, Spelling
from tests.passes.rotary import ROPES, Pair
from tests.passes.stubs import Sizes
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
        self.layer.attention.kwargs = {**self.layer.attention.kwargs, **kwargs}

    def update(self, index: int, value: Any) -> None:
        self.layer.kv_update.update_arg(index, value)

    def calls_of(self, target: Any) -> list[fx.Node]:
        """Return the calls of ``target`` in order; the last ones rotate the key."""
        return [node for node in self.b.graph.nodes if node.op == "call_function" and node.target is target]

    def raw_key(self) -> fx.Node:
        """Emit a view of the un-rotated key as attention would read it."""
        return self.call(aten.unsqueeze.default, self.layer.k_raw, 1)

    def read(self, node: fx.Node) -> None:
        """Let the graph return something computed from ``node``."""
        self.outputs.append(self.b(aten.tanh.default, node))

    def tokens_by(self, name: str, *sizes: int, dtype: torch.dtype | None = None) -> fx.Node:
        """Add an input with a row per token."""
        return self.b.input(name, self.b.t.meta["val"], *sizes, dtype=dtype)


def scaled_query(edit: Edit, *sizes: int) -> None:
    """Factors on the rotated query. One per row (llama_4_scaling) commutes with the rotation, but rounds elsewhere."""
    edit.attend(q=edit.call(aten.mul.Tensor, edit.layer.q, edit.tokens_by("factors", *sizes)))


def rotated_up_to_row_5(edit: Edit) -> None:
    """Three rows of the query are as they should be, and so is its shape."""
    view = edit.call(aten.view.default, edit.layer.q_gemm, [-1, *edit.layer.q.meta["val"].shape[1:]])
    rows = [edit.call(aten.slice.Tensor, q, 0, *ends) for q, *ends in ((edit.layer.q, 0, 5), (view, 5, END))]
    edit.attend(q=edit.call(aten.cat.default, rows, 0))


def cloned(edit: Edit, raw: fx.Node) -> None:
    """The layer reads a clone of what others read; vLLM's UnsafeCloneEliminationPass may drop the clone afterwards."""
    with edit.b.graph.inserting_after(raw):
        clone = edit.b(aten.clone.default, raw)
    raw.replace_all_uses_with(clone, delete_user_cb=lambda user: user is not clone)
    edit.read(raw)


def scaled_key(edit: Edit) -> None:
    scaled = edit.call(aten.mul.Tensor, edit.layer.k_pe, 2.0)
    edit.update(1, scaled)
    edit.attend(k_pe=scaled)
    edit.layer.attention.prepend(edit.layer.kv_update)


def latent_of_three_dimensions(edit: Edit) -> None:
    latent = edit.call(aten.unsqueeze.default, edit.layer.kv_c, 1)
    edit.update(0, latent)
    edit.attend(kv_c_normed=latent)
    edit.layer.attention.prepend(edit.layer.kv_update)


def other_positions_for_keys(edit: Edit) -> None:
    lookup = edit.calls_of(aten.index.Tensor)[-1]
    lookup.args = (lookup.args[0], [edit.tokens_by("positions_2", dtype=torch.int64)])


def swapped_cos_and_sin(edit: Edit) -> None:
    """Both halves of the table change places: the split of the looked-up rows is read in the other order."""
    (split,) = edit.calls_of(aten.index.Tensor)[0].users
    for item in list(split.users):
        item.args = (split, 1 - item.args[1])  # type: ignore[operator]


def inverse_rotation(edit: Edit, at: slice) -> None:
    subtract, add = edit.calls_of(aten.sub.Tensor)[at], edit.calls_of(aten.add.Tensor)[at]
    for node in (*subtract, *add):
        node.target = aten.add.Tensor if node in subtract else aten.sub.Tensor


def swapped_halves(edit: Edit, at: slice) -> None:
    for node in edit.calls_of(aten.cat.default)[at]:
        node.update_arg(0, list(reversed(node.args[0])))  # type: ignore[arg-type]


def odd_before_even(edit: Edit) -> None:
    """GPT-J pairs (2i+1, 2i) instead of (2i, 2i+1)."""
    for node in edit.calls_of(aten.slice.Tensor):
        if len(node.args) == 5:
            node.update_arg(2, 1 - node.args[2])  # type: ignore[operator]


def two_writes(edit: Edit) -> None:
    """The rotated half overwrites the nope half as well."""
    nope = edit.call(aten.slice.Tensor, edit.layer.q_rotated, 2, 0, 8)
    edit.attend(q=edit.call(aten.slice_scatter.default, edit.layer.q, nope, 2, 0, 8))


def update_writes_raw_key(edit: Edit) -> None:
    raw = edit.raw_key()
    edit.layer.kv_update.prepend(raw)
    edit.update(1, raw)


def narrow_positions(edit: Edit) -> None:
    with edit.b.mode:
        edit.b.positions.meta["val"] = torch.empty(edit.b.t.meta["val"], dtype=torch.int32)


def misbound_by_vllm(edit: Edit) -> None:
    """What vLLM's own pattern can do behind out-variant GEMMs: q_pe is bound to the key."""
    wrong, fused = edit.raw_key(), edit.layer.kv_update
    fused.prepend(wrong)
    fused.kwargs = {**fused.kwargs, "q_pe": wrong}


def from_outside(edit: Edit, gemm: fx.Node) -> None:
    """A rotation in place would change what the graph's caller holds."""
    gemm.replace_all_uses_with(edit.tokens_by("given", gemm.meta["val"].shape[1]))


def without_a_result(edit: Edit) -> None:
    """vLLM's own node whose rotated key nobody takes out; attention reads the raw one."""
    edit.attend(k_pe=edit.raw_key())
    for node in (edit.layer.k_pe, edit.layer.k_rotated):
        edit.b.graph.erase_node(node)


def written_by_another_call(edit: Edit) -> None:
    """Attention waits for a fused call of this layer's name, and reads the results of another one."""
    first = edit.layer.kv_update
    with edit.b.graph.inserting_before(first):
        second = edit.b.graph.node_copy(first)
    for index, result in ((1, edit.layer.q_rotated), (2, edit.layer.k_rotated)):
        edit.outputs.append(edit.call(operator.getitem, first, index))
        result.args = (second, index)


def give(node: fx.Node, *args: Any, **kwargs: Any) -> None:
    """Call a node with more arguments than it was built with."""
    node.args, node.kwargs = (*node.args, *args), {**node.kwargs, **kwargs}


def rotary_op(edit: Edit) -> fx.Node:
    return next(node for node in edit.b.graph.nodes if "head_size" in node.kwargs)


def partial(b: Builder, s: Spelling, q: fx.Node, k: fx.Node) -> Pair:
    """Only the first half of the rope part is rotated, by a table half as wide."""
    b.table = b.input("narrow", 24, s.sizes.r // 2)
    half = s.but(sizes=type(s.sizes)(r=s.sizes.r // 2))
    fronts, rest = (
        [b(aten.slice.Tensor, x, 2, *ends) for x in (q, k)] for ends in ((0, half.sizes.r), (half.sizes.r, END))
    )
    rotated = ROPES["plain"](b, half, *fronts)
    return tuple(b(aten.cat.default, [a, c], -1) for a, c in zip(rotated, rest, strict=True))  # type: ignore[return-value]


def two_ropes(**styles: tuple[bool, bool]) -> Callable[..., Pair]:
    """One lookup for the query and one for the key, each with its pairing."""

    def rope(b: Builder, s: Spelling, q: fx.Node, k: fx.Node) -> Pair:
        of_q, of_k = styles.get("is_neox", (s.is_neox, s.is_neox))
        return ROPES["plain"](b, s.but(is_neox=of_q), q, k)[0], ROPES["plain"](b, s.but(is_neox=of_k), q, k)[1]

    return rope


def op_with(**extra: Any) -> Callable[..., Pair]:
    def rope(b: Builder, s: Spelling, q: fx.Node, k: fx.Node) -> Pair:
        rotated = ROPES["op, flat"](b, s, q, k)
        (call,) = (node for node in b.graph.nodes if "is_neox" in node.kwargs)
        give(call, **extra)
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


ROPES |= {
    "partial": partial,
    "two styles": two_ropes(is_neox=(True, False)),
    "two lookups": two_ropes(),
    "scaled table": scaled_table,
    "quantised": quantised,
    "inverse op": op_with(inverse=True),
    "offset op": op_with(rope_dim_offset=2),
    "wide op": op_with(head_size=32),
}

BOTH, OF_KEYS = slice(None), slice(-1, None)
PREFUSED = {"prefused": True}
Case = tuple[str, Callable[[Edit], Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "a NoPE layer": ("no_rope", lambda e: None, {"rope": "none"}),
    "columns of a query scaled after its RoPE": ("rope_other_operand", lambda e: scaled_query(e, 1, 24), {}),
    "rows of a query scaled after its RoPE": ("rope_other_operand", lambda e: scaled_query(e, 1, 1), {}),
    "a query doubled after its RoPE": (
        "query_not_rope", lambda e: e.attend(q=e.call(aten.mul.Tensor, e.layer.q, 2.0)), {},
    ),
    "a query of which attention reads the first 1024 rows": (
        "not_evaluated", lambda e: e.attend(q=e.call(aten.slice.Tensor, e.layer.q, 0, 0, 1024)), {},
    ),
    "a query of which attention reads the last 1024 rows": (
        "not_evaluated", lambda e: e.attend(q=e.call(aten.slice.Tensor, e.layer.q, 0, -1024, END)), {},
    ),
    "a query that is rotated up to row 5": ("not_evaluated", rotated_up_to_row_5, {}),
    "a key scaled after its RoPE": ("key_not_rope", scaled_key, {}),
    "a second reader of the rotated q": ("rotated_value_read_elsewhere", lambda e: e.read(e.layer.q_rotated), {}),
    "a second reader of the written-back q": ("rotated_value_read_elsewhere", lambda e: e.read(e.layer.q), {}),
    "a second reader of the rotated k": ("rotated_value_read_elsewhere", lambda e: e.read(e.layer.k_rotated), {}),
    "a graph that returns the rotated q": ("rotated_value_read_elsewhere", lambda e: e.outputs.append(e.layer.q), {}),
    "a second reader of vLLM's own rotated k": (
        "rotated_value_read_elsewhere", lambda e: e.read(e.layer.k_rotated), PREFUSED,
    ),
    "a second reader of the raw q": ("query_read_elsewhere", lambda e: e.read(e.layer.q_gemm), {}),
    "a second reader of the raw q_pe": ("query_read_elsewhere", lambda e: e.read(e.layer.q_pe), {}),
    "a second reader of the raw k_pe": ("key_read_elsewhere", lambda e: e.read(e.layer.k_raw), {}),
    "a clone of a q that is read elsewhere": ("query_not_rope", lambda e: cloned(e, e.layer.q_gemm), {}),
    "a clone of a KV projection that is read elsewhere": ("key_not_rope", lambda e: cloned(e, e.layer.kv_gemm), {}),
    "a second reader of the whole KV projection": ("key_read_elsewhere", lambda e: e.read(e.layer.kv_gemm), {}),
    "other positions for the key": ("two_tables", other_positions_for_keys, {"rope": "two lookups"}),
    "another table for the key": (
        "two_tables",
        lambda e: e.calls_of(aten.index.Tensor)[-1].update_arg(0, e.b.input("table_2", 24, 16)),
        {"rope": "two lookups"},
    ),
    "heads that are rotated whole": ("query_shape", lambda e: None, {"sizes": Sizes(p=0)}),
    "a key wider than the heads": (
        "query_shape", lambda e: e.attend(k_pe=e.call(aten.cat.default, [e.layer.k_pe] * 2, -1)), {},
    ),
    "a key of odd width": (
        "query_shape", lambda e: e.attend(k_pe=e.call(aten.slice.Tensor, e.layer.k_pe, 2, 0, 15)), {},
    ),
    "a query without a dimension for its heads": (
        "query_shape", lambda e: e.attend(q=e.call(aten.reshape.default, e.layer.q, [e.b.t, -1])), {},
    ),
    "a partial rotary": ("partial_rotary", lambda e: None, {"rope": "partial"}),
    "cos and sin swapped": ("query_not_rope", swapped_cos_and_sin, {}),
    "a table scaled in the graph": ("query_not_rope", lambda e: None, {"rope": "scaled table"}),
    "the inverse rotation": ("query_not_rope", lambda e: inverse_rotation(e, BOTH), {}),
    "the inverse rotation of the key": ("key_not_rope", lambda e: inverse_rotation(e, OF_KEYS), {}),
    "swapped halves": ("query_not_rope", lambda e: swapped_halves(e, BOTH), {}),
    "swapped halves of the key": ("key_not_rope", lambda e: swapped_halves(e, OF_KEYS), {}),
    "pairs in the wrong order": ("query_not_rope", odd_before_even, {"is_neox": False}),
    "a NeoX query beside a GPT-J key": ("key_not_rope", lambda e: None, {"rope": "two styles"}),
    "the nope half overwritten": ("query_not_rope", two_writes, {}),
    "the inverse custom op": ("no_rope", lambda e: None, {"rope": "inverse op"}),
    "the custom op at an offset": ("no_rope", lambda e: None, {"rope": "offset op"}),
    "the custom op with heads of another width": ("no_rope", lambda e: None, {"rope": "wide op"}),
    "attention on the raw key": ("no_rope", lambda e: e.attend(k_pe=e.raw_key()), {}),
    "a RoPE of the query in another piece": (
        "rope_outside", lambda e: e.attend(q=e.tokens_by("rotated", *e.layer.q.meta["val"].shape[1:])), {},
    ),
    "a KV update with the raw key": ("kv_key_mismatch", update_writes_raw_key, {}),
    "a KV update with another latent": (
        "kv_c_mismatch", lambda e: e.attend(kv_c_normed=e.call(aten.neg.default, e.layer.kv_c)), {},
    ),
    "a latent of three dimensions": ("latent_shape", latent_of_three_dimensions, {}),
    "a KV update of another layer": (
        "layer_name_mismatch", lambda e: e.update(2, e.b.layer_name("model.layers.9.attn", "hoisted")), {},
    ),
    "no KV update": ("no_kv_update", lambda e: e.attend(kv_cache_dummy_dep=None), {}),
    "a KV update that something else waits for": (
        "kv_update_shared", lambda e: e.outputs.append(e.layer.kv_update), {},
    ),
    "vLLM's own fusion with q_pe bound to the key": ("rope_other_operand", misbound_by_vllm, PREFUSED),
    "a query and a key of one GEMM": (
        "crossed_branches", lambda e: e.layer.q_gemm.replace_all_uses_with(e.layer.kv_gemm), {},
    ),
    "a query that is an input of the graph": ("graph_input", lambda e: from_outside(e, e.layer.q_gemm), {}),
    "a key that is an input of the graph": ("graph_input", lambda e: from_outside(e, e.layer.kv_gemm), {}),
    "an output buffer with another reader": (
        "output_shared", lambda e: e.read(e.layer.attention.kwargs["output"]), {},
    ),
    "a reader of attention's second result": (
        "attention_results", lambda e: e.outputs.append(e.b(operator.getitem, e.layer.attention, 2)), {},
    ),
    "vLLM's own fusion beside another call of it": ("kv_key_mismatch", written_by_another_call, PREFUSED),
    "a query that is quantised before its RoPE": ("rope_other_operand", lambda e: None, {"rope": "quantised"}),
    "vLLM's own fusion without one result": ("vllm_fusion_incomplete", without_a_result, PREFUSED),
    # Below torch 2.11 vLLM's names are strings.
    **({"a layer name that cannot be read": (
        "layer_name_unreadable", lambda e: e.layer.name_arg.meta.update(val=object()), {},
    )} if HAS_OPAQUE_TYPE else {}),
    "positions that are not int64": ("positions", narrow_positions, {}),
    **{
        f"attention given {name}": (
            code,
            lambda e, name=name: e.attend(**{name: e.layer.q if name == "q_dcp_replicated" else e.layer.k_scale}),
            {},
        )
        for name, code in NONE_ARGS.items()
    },
}  # fmt: skip
UNKNOWN: dict[str, Case] = {
    name: ("unknown_argument", edit, changes)
    for name, edit, changes in (
        ("attn_sink of attention", lambda e: e.attend(attn_sink=e.layer.k_scale), {}),
        ("window of attention", lambda e: e.attend(window=128), {}),
        ("window=0 of attention", lambda e: e.attend(window=0), {}),
        ("skip_scale of the KV update", lambda e: give(e.layer.kv_update, skip_scale=True), {}),
        ("argument number 6 of the KV update", lambda e: give(e.layer.kv_update, True), {}),
        ("slots of vLLM's own fused op", lambda e: give(e.layer.kv_update, slots=e.layer.k_scale), PREFUSED),
        ("argument number 10 of vLLM's own fused op", lambda e: give(e.layer.kv_update, *range(10)), PREFUSED),
        ("mscale of the rotary op", lambda e: give(rotary_op(e), mscale=0.5), {"rope": "op, flat"}),
        ("mscale of AITER's rotary op", lambda e: give(rotary_op(e), mscale=0.5), {"rope": "aiter"}),
    )
}
"""Arguments that nobody knows, each named before " of ": the rewritten call would drop it."""


def spoiled(case: Case) -> tuple[fx.GraphModule, Layer, Spelling]:
    """Build a graph with one layer that is spoiled as ``case`` says, without dead nodes."""
    _, edit, changes = case
    builder = Builder(Spelling(**changes))
    made = Edit(builder, builder.layer())
    edit(made)
    return clean(builder.finish(*made.outputs)), made.layer, builder.spelling


def assert_declined(name: str) -> None:
    """Check that the matcher and the whole rewriting skip the layer with the case's code and leave the graph alone."""
    case = (CASES | UNKNOWN)[name]
    gm, layer, spelling = spoiled(case)
    ((of, found),) = match_layers(gm.graph)
    assert isinstance(found, Skip), f"matched: {found}"
    assert found.code == case[0], str(found)
    if name in UNKNOWN:
        assert name.partition(" of ")[0].partition("=")[0] in found.message
    before = str(gm.graph)
    stubs = stubs_for([layer], spelling)
    counts = rewrite(gm, stubs)
    assert str(gm.graph) == before
    assert (counts["matched"], counts["skipped"]) == (0, 1)
    # A graph may name no layer of the model.
    assert skipped_in_graphs(stubs) == ({of: (found.code, found.message)} if of == layer.name else {})

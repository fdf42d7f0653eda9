"""Post-grad graphs of MLA layers, built node by node in every spelling that Inductor hands to a pass.

Each node carries its fake value with a symbolic number of tokens, as in a real compilation. ``Layer`` keeps the nodes
by role, so that a test can edit one and ask what the matcher makes of it.
"""

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from vllm.utils.torch_utils import _encode_layer_name

from tests.passes import rotary
from tests.passes.stubs import Sizes

aten = torch.ops.aten
END = 9223372036854775807
TABLE_ROWS = 24


@dataclass(frozen=True)
class Spelling:
    """One way in which a layer appears.

    Attributes:
        rope: a key of ``rotary.ROPES``.
        lookup: how rows of the table are read.
        views: "shared" is one reshape of the GEMM for all readers, "emitted" one per reader.
        write: how the rotated half comes back into q: copied into a slice, scattered directly, or concatenated.
        names: "hoisted" placeholders, or "string" constants.
        none_kwargs: whether the attention node spells out its None arguments.
        prefused: vLLM's own RoPE + KV pass has run.
    """

    rope: str = "plain"
    is_neox: bool = True
    lookup: str = "index"
    q_lora: bool = True
    views: str = "emitted"
    write: str = "copy"
    names: str = "hoisted"
    none_kwargs: bool = True
    prefused: bool = False
    dtype: torch.dtype = torch.float32
    cache: str = "auto"
    sizes: Sizes = field(default_factory=Sizes)

    def but(self, **changes: Any) -> "Spelling":
        return replace(self, **changes)


@dataclass
class Layer:
    name: str
    name_arg: Any
    q_gemm: fx.Node
    q_view: fx.Node
    q_pe: fx.Node
    kv_gemm: fx.Node
    k_raw: fx.Node
    kv_c: fx.Node
    q_rotated: fx.Node
    k_rotated: fx.Node
    q: fx.Node
    k_pe: fx.Node
    k_scale: fx.Node
    kv_update: fx.Node
    attention: fx.Node


class Builder:
    """Emits layers into one graph.

    Args:
        spelling: the default of each layer.
        rows: the number of tokens with which the graph is traced.
        static: whether the graph is for this number only.
    """

    def __init__(self, spelling: Spelling, rows: int = 7, static: bool = False) -> None:
        self.spelling = spelling
        self.graph = fx.Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        sample = torch.empty(rows, spelling.sizes.hidden, dtype=spelling.dtype)
        dims = [DimDynamic.STATIC if static else DimDynamic.DYNAMIC, DimDynamic.STATIC]
        fake = self.mode.from_tensor(sample, symbolic_context=StatelessSymbolicContext(dims))
        self.t = rows if static else self._placeholder("t", fake.shape[0])
        self.x = self._placeholder("x", fake)
        self.positions = self.input("positions", fake.shape[0], dtype=torch.int64)
        self.table = self.input("table", TABLE_ROWS, spelling.sizes.r)
        self.residual = self.x
        self.layers: list[Layer] = []

    def _placeholder(self, name: str, value: Any) -> fx.Node:
        last = next((node for node in reversed(self.graph.nodes) if node.op == "placeholder"), None)
        with self.graph.inserting_after(last) if last is not None else self.graph.inserting_before():
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def input(self, name: str, *shape: Any, dtype: torch.dtype | None = None) -> fx.Node:
        with self.mode:
            return self._placeholder(name, torch.empty(shape, dtype=dtype or self.spelling.dtype))

    def layer_name(self, name: str, names: str) -> Any:
        """The layer's name as an argument: a hoisted placeholder or a constant."""
        encoded = _encode_layer_name(name)
        if names == "string" or isinstance(encoded, str):
            return name
        value = FakeScriptObject(None, "vllm.LayerName", None)
        object.__setattr__(value, "real_obj", encoded)
        return self._placeholder(name.replace(".", "_"), value)

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call and infer its fake value."""
        node = self.graph.call_function(target, args, kwargs)
        infer(node, self.mode)
        return node

    def view(self, node: fx.Node, *sizes: int) -> fx.Node:
        return self(aten.reshape.default, node, list(sizes))

    def lookup(self, table: fx.Node, positions: fx.Node, how: str) -> fx.Node:
        if how == "index":
            return self(aten.index.Tensor, table, [positions])
        if how == "embedding":
            return self(aten.embedding.default, table, positions)
        return self(aten.index_select.default, table, 0, positions)

    def layer(self, name: str | None = None, **changes: Any) -> Layer:
        """Append one layer and let the next one read its output."""
        s = self.spelling.but(**changes)
        name = name or f"model.layers.{len(self.layers)}.attn"
        name_arg = self.layer_name(name, s.names)
        prefix = name.replace(".", "_")
        k_scale = self.input(f"{prefix}_k_scale", dtype=torch.float32)
        q_gemm, kv_gemm = self._projections(prefix, s)
        kv_c, k_raw = self._split_kv(kv_gemm, s)
        q_view = self.view(q_gemm, -1, s.sizes.n, s.sizes.p + s.sizes.r)
        q_pe = self(aten.slice.Tensor, q_view, 2, s.sizes.p, END)
        k_3d = self(aten.unsqueeze.default, k_raw, 1)
        if s.prefused:
            q_rotated, k_rotated, k_pe, update = self._prefused(s, q_pe, k_raw, kv_c, k_scale, name_arg)
        else:
            q_rotated, k_rotated = rotary.ROPES[s.rope](self, s, q_pe, k_3d)
            k_pe = k_rotated
            update = self(torch.ops.vllm.unified_mla_kv_cache_update.default, kv_c, k_pe, name_arg, s.cache, k_scale)
        q = self._write_back(s, q_gemm, q_view, q_rotated)
        dep = self(operator.getitem, update, 0) if s.prefused else update
        attention = self._attend(s, q, kv_c, k_pe, name_arg, dep)
        made = Layer(
            name, name_arg, q_gemm, q_view, q_pe, kv_gemm, k_raw, kv_c, q_rotated, k_rotated, q, k_pe, k_scale, update,
            attention,
        )  # fmt: skip
        self.layers.append(made)
        return made

    def _projections(self, prefix: str, s: Spelling) -> tuple[fx.Node, fx.Node]:
        z, qk, kv = s.sizes, s.sizes.n * (s.sizes.p + s.sizes.r), s.sizes.latent + s.sizes.r
        if not s.q_lora:
            q = self(aten.mm.default, self.residual, self.input(f"{prefix}_w_q", z.hidden, qk))
            return q, self(aten.mm.default, self.residual, self.input(f"{prefix}_w_kv", z.hidden, kv))
        lora = self(aten.mm.default, self.residual, self.input(f"{prefix}_w_a", z.hidden, z.q_lora + kv))
        pieces = self(aten.split_with_sizes.default, lora, [z.q_lora, kv], -1)
        q_c = self(aten.tanh.default, self(operator.getitem, pieces, 0))
        q = self(aten.mm.default, q_c, self.input(f"{prefix}_w_q_b", z.q_lora, qk))
        return q, self(operator.getitem, pieces, 1)

    def _split_kv(self, kv: fx.Node, s: Spelling) -> tuple[fx.Node, fx.Node]:
        pieces = self(aten.split_with_sizes.default, kv, [s.sizes.latent, s.sizes.r], -1)
        # tanh stands for the norm: any op that is no view and reads the latent alone.
        return self(aten.tanh.default, self(operator.getitem, pieces, 0)), self(operator.getitem, pieces, 1)

    def _write_back(self, s: Spelling, q_gemm: fx.Node, q_view: fx.Node, rotated: fx.Node) -> fx.Node:
        p, width = s.sizes.p, s.sizes.p + s.sizes.r
        target = q_view if s.views == "shared" else self.view(q_gemm, -1, s.sizes.n, width)
        if s.write == "cat":
            nope = self(aten.slice.Tensor, target, 2, 0, p)
            return self(aten.cat.default, [nope, rotated], -1)
        if s.write == "copy":
            rotated = self(aten.copy.default, self(aten.slice.Tensor, q_view, 2, p, END), rotated)
        return self(aten.slice_scatter.default, target, rotated, 2, p, END)

    def _prefused(
        self, s: Spelling, q_pe: fx.Node, k: fx.Node, kv_c: fx.Node, k_scale: fx.Node, name: Any
    ) -> tuple[fx.Node, ...]:
        fused = self(
            auto_functionalized, torch.ops.vllm.fused_rope_unified_mla_kv_cache_update.default,
            positions=self.positions, q_pe=q_pe, k_pe=k, kv_c=kv_c, cos_sin_cache=self.table, is_neox=s.is_neox,
            kv_cache_dtype=s.cache, kv_cache_scale=k_scale, layer_name=name,
        )  # fmt: skip
        k_rotated = self(operator.getitem, fused, 2)
        return self(operator.getitem, fused, 1), k_rotated, self(aten.unsqueeze.default, k_rotated, 1), fused

    def _attend(self, s, q, kv_c, k_pe, name, dep):
        width = s.sizes.n * s.sizes.v
        buffer = self(aten.empty.memory_format, [self.t, width], dtype=s.dtype, device=torch.device("cpu"))
        # Old graphs leave defaults out; the mutated arguments are always there.
        spelled = {"output_scale": None, "quant_group_size": None, "quant_scale_ue8m0": None, "quant_col_major": None}
        spelled |= {"quant_tma_aligned": None, "q_dcp_replicated": None}
        attention = self(
            auto_functionalized, torch.ops.vllm.unified_mla_attention_with_output.default, q=q, kv_c_normed=kv_c,
            k_pe=k_pe, output=buffer, layer_name=name, output_block_scale=None, kv_cache_dummy_dep=dep,
            **(spelled if s.none_kwargs else {}),
        )  # fmt: skip
        out = self(operator.getitem, attention, 1)
        weight = self.input(f"w_o_{len(self.layers)}", width, s.sizes.hidden)
        self.residual = self(aten.addmm.default, self.residual, out, weight)
        return attention

    def finish(self, *also: fx.Node) -> fx.GraphModule:
        """Close the graph; ``also`` are further outputs."""
        self.graph.output((self.residual, *also))
        return fx.GraphModule({}, self.graph)


def shuffled(gm: fx.GraphModule, seed: int) -> fx.GraphModule:
    """The same module with its calls in another order, as a pattern matcher may leave them."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    last = [node for node in gm.graph.nodes if node.op == "placeholder"][-1]
    for node in random.Random(seed).sample(nodes, len(nodes)):
        last.append(node)
        last = node
    return gm


def infer(node: fx.Node, mode: FakeTensorMode) -> None:
    names = [node.kwargs.get("layer_name")] if node.target is auto_functionalized else []
    if any(isinstance(name, str) for name in names) and not isinstance(_encode_layer_name(""), str):
        # The op takes an object here; a constant is met on other releases only, and is matched, not run.
        mutated = [arg.name for arg in node.args[0]._schema.arguments if arg.alias_info and arg.alias_info.is_write]  # type: ignore[union-attr]
        returned = node.kwargs["kv_c"].meta["val"].new_empty(0) if "kv_c" in node.kwargs else None  # type: ignore[union-attr]
        node.meta["val"] = (returned, *(getattr(node.kwargs[name], "meta", {}).get("val") for name in mutated))
        return
    if node.target is torch.ops.vllm.unified_mla_kv_cache_update.default and isinstance(node.args[2], str):
        node.meta["val"] = node.args[0].meta["val"].new_empty(0)  # type: ignore[union-attr]
        return
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    with mode:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def build(layers: int = 2, spelling: Spelling | None = None, **changes: Any) -> tuple[fx.GraphModule, list[Layer]]:
    builder = Builder((spelling or Spelling()).but(**changes))
    made = [builder.layer() for _ in range(layers)]
    return builder.finish(), made

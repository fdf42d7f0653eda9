"""The three passes, one function each, on one layer of a graph.

1. ``fuse_rope_and_kv_write``: the RoPE of q_pe and k_pe and the KV-cache write become vLLM's own fused op.
2. ``lift_q_prep``: absorb BMM, concat and fp8 quantisation of the query leave the attention op.
3. ``fuse_into_one_op``: what these two put in, and attention itself, become one op on the un-rotated query.

Each is right by itself: it leaves a graph that computes the same. Each connects its nodes last, so that one that
raises leaves the layer as it was. What a pass replaces is only disconnected; ``pipeline`` removes it.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from vllm_aiter_mla.passes.match import LayerMatch

aten = torch.ops.aten
_TO_END = 9223372036854775807


def fuse_rope_and_kv_write(graph: fx.Graph, layer: LayerMatch) -> None:
    """Rewrite one layer with ``fused_rope_unified_mla_kv_cache_update``, unless vLLM's own pass has done so already.

    ::

        before   q ─ rope(q_pe) ─ scatter ─┐
                 k ─ rope ─┬───────────────┤ attention
                 kv_c ─────┴─ kv update ───┘

        after    q ─┬─ fused_rope_unified_mla_kv_cache_update ─┐
                 k ─┤  (rotates both, writes the KV row)       │ attention
                 kv_c ─────────────────────────────────────────┘

    vLLM's FixFunctionalizationPass takes the emitted nodes apart again. It erases the view under the scatter and the
    slice under the copy without looking at their users, so each has one user here.
    """
    if layer.prefused:
        return
    call, attention = graph.call_function, layer.attention

    def rope_part() -> fx.Node:
        return call(aten.slice.Tensor, (_heads(graph, layer), 2, layer.nope_dim, _TO_END))

    with graph.inserting_before(attention):
        fused = call(
            auto_functionalized,
            (torch.ops.vllm.fused_rope_unified_mla_kv_cache_update.default,),
            {
                "positions": layer.positions,
                "q_pe": rope_part(),
                "k_pe": _k_pe_2d(graph, layer),
                "kv_c": layer.kv_c,
                "cos_sin_cache": layer.cos_sin_cache,
                "is_neox": layer.is_neox,
                "kv_cache_dtype": layer.kv_cache_dtype,
                "kv_cache_scale": layer.k_scale,
                "layer_name": layer.layer_name_arg,
            },
        )
        dummy, q_pe, k_pe = (call(operator.getitem, (fused, index)) for index in range(3))
        q = _write_back(graph, layer, rope_part(), q_pe)
        k_pe = call(aten.unsqueeze.default, (k_pe, 1))
    attention.kwargs = {**attention.kwargs, "q": q, "k_pe": k_pe, "kv_cache_dummy_dep": dummy}


def _heads(graph: fx.Graph, layer: LayerMatch) -> fx.Node:
    """Insert a view of the query as [T, N, P+R]."""
    sizes = [-1, layer.num_heads, layer.nope_dim + layer.rope_dim]
    return graph.call_function(aten.reshape.default, (layer.q, sizes))


def _write_back(graph: fx.Graph, layer: LayerMatch, target: fx.Node, q_pe: fx.Node) -> fx.Node:
    """Insert the query with its rope part replaced by ``q_pe``."""
    copied = graph.call_function(aten.copy.default, (target, q_pe))
    scattered = (_heads(graph, layer), copied, 2, layer.nope_dim, _TO_END)
    return graph.call_function(aten.slice_scatter.default, scattered)


def _k_pe_2d(graph: fx.Graph, layer: LayerMatch) -> fx.Node:
    """Return the un-rotated k_pe as [T, R], through a new view if the graph holds it as [T, 1, R]."""
    if len(layer.k_pe.meta["val"].shape) == 2:
        return layer.k_pe
    return graph.call_function(aten.reshape.default, (layer.k_pe, [-1, layer.rope_dim]))


def lift_q_prep(graph: fx.Graph, layer: LayerMatch) -> None:
    """Prepare the decode query of one layer before attention, and replace vLLM's attention op by ours.

    ::

        before   q ─ attention{ split, absorb BMM, concat, fp8 quant, decode, v-up }
        after    q ─┬─ mla_decode_q_prep ── attention{ decode, v-up }
                    └──────────────────────────┘   (prefill rows still need q)
    """
    old = layer.attention
    with graph.inserting_before(old):
        q_prepared = graph.call_function(
            torch.ops.vllm_aiter_mla.mla_decode_q_prep.default,
            (old.kwargs["q"], layer.latent_dim, layer.rope_dim, layer.out_dtype, layer.layer_name_arg),
        )
        new = graph.call_function(
            auto_functionalized,
            (torch.ops.vllm_aiter_mla.mla_attention_with_prepared_q.default,),
            {
                "q": old.kwargs["q"],
                "kv_c_normed": layer.kv_c,
                "k_pe": old.kwargs["k_pe"],
                "q_prepared": q_prepared,
                "output": old.kwargs["output"],
                "layer_name": layer.layer_name_arg,
                "kv_cache_dummy_dep": old.kwargs["kv_cache_dummy_dep"],
            },
        )
        output = graph.call_function(operator.getitem, (new, 1))
    for item in list(old.users):
        output.meta = dict(item.meta)
        item.replace_all_uses_with(output)
    layer.attention = new


def fuse_into_one_op(graph: fx.Graph, layer: LayerMatch) -> None:
    """Replace one layer's RoPE + KV write, query preparation and attention by ``mla_attention_with_rope``.

    ::

        before   q ─ rope_kv_update ─ mla_decode_q_prep ─ attention
        after    q ─ mla_attention_with_rope

    The op is called directly, not functionalised: it writes into the buffers that it is given and returns nothing.
    A result would get a piecewise graph of its own. A functionalised call would clone k_pe if q and k_pe are columns
    of one GEMM. Both are safe because the matcher has checked that nothing else reads q, the columns of k_pe, or the
    output before. The graph must be sorted, because only its order keeps a reader of the output behind the op.
    """
    old = layer.attention
    output = old.kwargs["output"]
    with graph.inserting_before(old):
        layer.attention = graph.call_function(
            torch.ops.vllm_aiter_mla.mla_attention_with_rope.default,
            (
                layer.q,
                _k_pe_2d(graph, layer),
                layer.kv_c,
                layer.positions,
                layer.cos_sin_cache,
                layer.k_scale,
                output,
                layer.is_neox,
                layer.layer_name_arg,
            ),
        )
    for item in list(old.users):
        item.replace_all_uses_with(output)  # type: ignore[arg-type]


PASSES = {"rope_kv_cache": fuse_rope_and_kv_write, "q_prep_lift": lift_q_prep, "aiter_fusion": fuse_into_one_op}
"""What runs on each layer, in order, by the names of ``debug.stop_after``."""

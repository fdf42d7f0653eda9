# SPDX-License-Identifier: Apache-2.0
"""Pass 1: the RoPE of q_pe and k_pe and the KV-cache write become vLLM's own fused op."""

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
    call, attention = graph.call_function, layer.attention
    if layer.prefused:
        return

    def rope_part() -> fx.Node:
        return call(aten.slice.Tensor, (_heads(graph, layer), 2, layer.nope_dim, _TO_END))

    with graph.inserting_before(attention):
        fused = call(
            auto_functionalized,
            (torch.ops.vllm.fused_rope_unified_mla_kv_cache_update.default,),
            {
                "positions": layer.positions,
                "q_pe": rope_part(),
                "k_pe": k_pe_2d(graph, layer),
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


def k_pe_2d(graph: fx.Graph, layer: LayerMatch) -> fx.Node:
    """Return the un-rotated k_pe as [T, R], through a new view if the graph holds it as [T, 1, R]."""
    if len(layer.k_pe.meta["val"].shape) == 2:
        return layer.k_pe
    return graph.call_function(aten.reshape.default, (layer.k_pe, [-1, layer.rope_dim]))

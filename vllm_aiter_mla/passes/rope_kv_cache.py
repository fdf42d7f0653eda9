"""Pass 1: the RoPE of q_pe and k_pe and the KV-cache write become vLLM's own fused op.

::

    before   q ─ rope(q_pe) ─ scatter ─┐            after   q ─┬─ fused_rope_unified_mla_kv_cache_update ─┐
             k ─ rope ─┬───────────────┤ attention           k ─┘   (rotates both, writes the KV row)      │ attention
             kv_c ─────┴─ kv update ───┘                     kv_c ─┘ ──────────────────────────────────────┘

The nodes emitted are those that vLLM's FixFunctionalizationPass takes apart again: it erases the view under the
scatter and the slice under the copy without looking at their users, so both are emitted anew here and used once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from vllm_aiter_mla.passes.fx import Inserter, results
from vllm_aiter_mla.passes.match import LayerMatch

aten = torch.ops.aten
_TO_END = 9223372036854775807


@dataclass(frozen=True, slots=True)
class RopeKVFused:
    """A layer after pass 1: ``q`` and ``k_pe`` [T, 1, R] are rotated, ``dummy`` orders the KV write."""

    match: LayerMatch
    q: fx.Node
    k_pe: fx.Node
    dummy: fx.Node


class MLARoPEKVCacheFusionPass:
    """Rewrites matched layers with ``fused_rope_unified_mla_kv_cache_update``; ``rewritten`` counts them."""

    def __init__(self) -> None:
        self.rewritten = 0
        self.taken_over = 0

    def __call__(self, graph: fx.Graph, match: LayerMatch, lazy: bool = False) -> RopeKVFused:
        """Rewrite one layer; ``lazy`` as in ``Inserter``. A layer that vLLM's own pass has fused is taken as it is."""
        if match.prefused:
            self.taken_over += 1
            return self._take_over(match)
        emit = Inserter(graph, match.attention, lazy)
        fused = self._emit_op(emit, match)
        q = self._emit_scatter(emit, match, emit.result(fused, 1))
        k_pe = emit.call(aten.unsqueeze.default, emit.result(fused, 2), 1)
        dummy = emit.result(fused, 0)
        attention = match.attention
        attention.kwargs = {**attention.kwargs, "q": q, "k_pe": k_pe, "kv_cache_dummy_dep": dummy}
        # It has a side effect, so dead-code elimination would keep it: the row would be written twice.
        graph.erase_node(match.kv_update)
        self.rewritten += 1
        return RopeKVFused(match, q, k_pe, dummy)

    def _emit_op(self, emit: Inserter, match: LayerMatch) -> fx.Node:
        q_pe = emit.call(aten.slice.Tensor, self._view(emit, match), 2, match.nope_dim, _TO_END)
        return emit.functionalized(
            torch.ops.vllm.fused_rope_unified_mla_kv_cache_update.default,
            positions=match.positions,
            q_pe=q_pe,
            k_pe=two_dimensional(emit, match),
            kv_c=match.kv_c,
            cos_sin_cache=match.cos_sin_cache,
            is_neox=match.is_neox,
            kv_cache_dtype=match.kv_cache_dtype,
            kv_cache_scale=match.k_scale,
            layer_name=match.layer_name_arg,
        )

    def _emit_scatter(self, emit: Inserter, match: LayerMatch, q_pe: fx.Node) -> fx.Node:
        target = emit.call(aten.slice.Tensor, self._view(emit, match), 2, match.nope_dim, _TO_END)
        copied = emit.call(aten.copy.default, target, q_pe)
        return emit.call(aten.slice_scatter.default, self._view(emit, match), copied, 2, match.nope_dim, _TO_END)

    def _view(self, emit: Inserter, match: LayerMatch) -> fx.Node:
        return emit.call(aten.reshape.default, match.q, [-1, match.num_heads, match.nope_dim + match.rope_dim])

    def _take_over(self, match: LayerMatch) -> RopeKVFused:
        kw = match.attention.kwargs
        return RopeKVFused(match, kw["q"], kw["k_pe"], results(match.kv_update)[0])  # type: ignore[arg-type]


def two_dimensional(emit: Inserter, match: LayerMatch) -> fx.Node:
    """The un-rotated k_pe as [T, R]."""
    if len(match.k_pe.meta["val"].shape) == 2:
        return match.k_pe
    return emit.call(aten.reshape.default, match.k_pe, [-1, match.rope_dim])

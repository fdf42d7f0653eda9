"""Pass 3: the pair of passes 1 and 2 becomes one functional op on the un-rotated query.

::

    before   q ─ rope_kv_update ─ mla_decode_q_prep ─ attention
    after    q ─ fused_qk_rope_kv_cache_q_prep ─ attention

The op mutates no graph tensor, so there is nothing to defunctionalise and nothing is copied. Attention is given the
un-rotated q and k_pe: it rotates private copies where a batch holds prefill rows.
"""

from __future__ import annotations

import torch
from torch import fx

from vllm_aiter_mla.passes.fx import Emitter
from vllm_aiter_mla.passes.q_prep_lift import QPrepLifted, emit_attention
from vllm_aiter_mla.passes.rope_kv_cache import two_dimensional


class MLAAiterQkRopeKVCacheFusionPass:
    """Fuses each layer's RoPE + KV op and query preparation; ``rewritten`` counts them."""

    def __init__(self) -> None:
        self.rewritten = 0

    def __call__(self, graph: fx.Graph, lifted: QPrepLifted) -> fx.Node:
        """Rewrite one layer and return the fused node."""
        match = lifted.fused.match
        emit = Emitter(graph, lifted.attention)
        k_pe = two_dimensional(emit, match)
        fused = emit.call(
            torch.ops.vllm_aiter_mla.fused_qk_rope_kv_cache_q_prep.default,
            match.q,
            k_pe,
            match.kv_c,
            match.positions,
            match.cos_sin_cache,
            match.k_scale,
            match.is_neox,
            lifted.out_dtype,
            match.layer_name_arg,
        )
        emit_attention(emit, lifted.attention, lifted.fused, q=match.q, k_pe=k_pe, q_prepared=fused, is_rotated=False)
        self._erase(graph, lifted)
        self.rewritten += 1
        return fused

    def _erase(self, graph: fx.Graph, lifted: QPrepLifted) -> None:
        """Remove what passes 1 and 2 put in, users first: a half-removed chain breaks FixFunctionalizationPass."""
        stack = [lifted.q_prep, lifted.fused.q, lifted.fused.k_pe, lifted.fused.dummy]
        while stack:
            node = stack.pop()
            if node.users or node.op != "call_function" or node._erased:
                continue
            parents = list(node.all_input_nodes)
            graph.erase_node(node)
            stack.extend(parents)

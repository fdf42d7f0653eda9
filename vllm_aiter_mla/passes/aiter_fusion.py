"""Pass 3: what passes 1 and 2 put in, and attention itself, become one op on the un-rotated query.

::

    before   q ─ rope_kv_update ─ mla_decode_q_prep ─ attention
    after    q ─ mla_attention_with_rope

The op is called as it is, not functionalised: it is given the buffers that it changes and returns nothing. A result
would be captured in a piecewise graph of its own, and functionalised it would clone k_pe where q and k_pe are columns
of one GEMM. What this needs is checked by the matcher: nothing else reads q, the columns of k_pe, or the output before.
"""

from __future__ import annotations

import torch
from torch import fx

from vllm_aiter_mla.passes.fx import Inserter, results
from vllm_aiter_mla.passes.q_prep_lift import QPrepLifted
from vllm_aiter_mla.passes.rope_kv_cache import two_dimensional


class MLAAiterQkRopeKVCacheFusionPass:
    """Fuses each layer's RoPE + KV op, query preparation and attention; ``rewritten`` counts them."""

    def __init__(self) -> None:
        self.rewritten = 0

    def __call__(self, graph: fx.Graph, lifted: QPrepLifted) -> fx.Node:
        """Rewrite one layer and return the one node. The graph has to be sorted: its order says who reads what."""
        match, attention = lifted.fused.match, lifted.attention
        emit = Inserter(graph, attention)
        output = attention.kwargs["output"]
        one = emit.call(
            torch.ops.vllm_aiter_mla.mla_attention_with_rope.default,
            match.q,
            two_dimensional(emit, match),
            match.kv_c,
            match.positions,
            match.cos_sin_cache,
            match.k_scale,
            output,
            match.is_neox,
            match.layer_name_arg,
        )
        for item in results(attention).values():
            item.replace_all_uses_with(output)  # type: ignore[arg-type]
        self._erase(graph, lifted)
        self.rewritten += 1
        return one

    def _erase(self, graph: fx.Graph, lifted: QPrepLifted) -> None:
        """Remove what passes 1 and 2 put in, users first: a half-removed chain breaks FixFunctionalizationPass."""
        for user in list(lifted.attention.users):
            graph.erase_node(user)
        graph.erase_node(lifted.attention)
        stack = [lifted.q_prep, lifted.fused.q, lifted.fused.k_pe, lifted.fused.dummy]
        while stack:
            node = stack.pop()
            if node.users or node.op != "call_function" or node._erased:
                continue
            parents = list(node.all_input_nodes)
            graph.erase_node(node)
            stack.extend(parents)

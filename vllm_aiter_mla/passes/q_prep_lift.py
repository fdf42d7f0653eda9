"""Pass 2: absorb BMM, concat and fp8 quantisation of the query leave the attention op.

::

    before   q ─ attention{ split, absorb BMM, concat, fp8 quant, decode, v-up }
    after    q ─┬─ mla_decode_q_prep ── attention{ decode, v-up }
                └──────────────────────────┘   (prefill rows still need q itself)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from vllm_aiter_mla.passes.fx import Inserter, results
from vllm_aiter_mla.passes.rope_kv_cache import RopeKVFused


@dataclass(frozen=True, slots=True)
class QPrepLifted:
    """A layer after pass 2: ``q_prep`` makes the query that ``attention``, our op, takes."""

    fused: RopeKVFused
    q_prep: fx.Node
    attention: fx.Node


class MLADecodeQPrepLiftPass:
    """Lifts the query preparation out of each layer's attention op; ``rewritten`` counts them."""

    def __init__(self) -> None:
        self.rewritten = 0

    def __call__(self, graph: fx.Graph, fused: RopeKVFused, out_dtype: torch.dtype, lazy: bool = False) -> QPrepLifted:
        """Rewrite one layer; ``out_dtype`` is what its decode kernel reads, ``lazy`` as in ``Inserter``."""
        match = fused.match
        emit = Inserter(graph, match.attention, lazy)
        q_prep = emit.call(
            torch.ops.vllm_aiter_mla.mla_decode_q_prep.default,
            fused.q,
            match.latent_dim,
            match.rope_dim,
            out_dtype,
            match.layer_name_arg,
        )
        attention = self._emit_attention(emit, fused, q_prep)
        self.rewritten += 1
        return QPrepLifted(fused, q_prep, attention)

    def _emit_attention(self, emit: Inserter, fused: RopeKVFused, q_prep: fx.Node) -> fx.Node:
        """Put our attention op where vLLM's stands, give it the output buffer, and erase vLLM's."""
        match, old = fused.match, fused.match.attention
        new = emit.functionalized(
            torch.ops.vllm_aiter_mla.mla_attention_with_prepared_q.default,
            q=fused.q,
            kv_c_normed=match.kv_c,
            k_pe=fused.k_pe,
            q_prepared=q_prep,
            output=old.kwargs["output"],
            layer_name=match.layer_name_arg,
            kv_cache_dummy_dep=fused.dummy,
        )
        for index, item in results(old).items():
            if index == 1:
                item.replace_all_uses_with(emit.result(new, 1))
        for user in list(old.users):
            emit.graph.erase_node(user)
        emit.graph.erase_node(old)
        return new

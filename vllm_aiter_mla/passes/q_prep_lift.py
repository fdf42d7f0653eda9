# SPDX-License-Identifier: Apache-2.0
"""Pass 2: absorb BMM, concat and fp8 quantisation of the query leave the attention op."""

import operator

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from vllm_aiter_mla.passes.match import LayerMatch


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

# SPDX-License-Identifier: Apache-2.0
"""Pass 3: what passes 1 and 2 put in, and attention itself, become one op on the un-rotated query."""

import torch
from torch import fx

from vllm_aiter_mla.passes.match import LayerMatch
from vllm_aiter_mla.passes.rope_kv import k_pe_2d


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
            (layer.q, k_pe_2d(graph, layer), layer.kv_c, layer.positions, layer.cos_sin_cache, layer.k_scale, output,
             layer.is_neox, layer.rotation, layer.layer_name_arg),
        )  # fmt: skip
    for item in list(old.users):
        item.replace_all_uses_with(output)  # type: ignore[arg-type]

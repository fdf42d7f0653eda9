"""``mla_attention_with_prepared_q``: attention that takes the prepared query, and decides prefill or decode.

It is a splitting op: it runs outside piecewise graphs, where the metadata is the batch's own. A full graph holds it,
and vLLM replays full graphs of this kind for all-decode batches only.
"""

from typing import Any

import torch

from vllm_aiter_mla.ops import bodies
from vllm_aiter_mla.runtime import context


def mla_attention_with_prepared_q(
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    q_prepared: torch.Tensor,
    output: torch.Tensor,
    layer_name: Any,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    is_rotated: bool,
    kv_cache_dummy_dep: torch.Tensor | None = None,
) -> None:
    """Fill ``output`` [T, N*V] with the attention of one layer.

    Args:
        q: [T, N, P+R]; rotated where ``is_rotated``.
        kv_c_normed: [T, L].
        k_pe: [T, R] or [T, 1, R]; rotated where ``is_rotated``.
        q_prepared: [T, N, L+R] for the decode kernel.
        output: [T, N*V], written in place.
        layer_name: the layer.
        positions: [T] int64.
        cos_sin_cache: [max_position, R].
        is_neox: pairing of the rotation.
        is_rotated: False where q and k_pe have not been rotated yet (after pass 3).
        kv_cache_dummy_dep: orders a separate KV write before attention; its value is not read.

    Raises:
        RuntimeError: captured inside a piecewise graph: whatever this batch is, it would be frozen for all.
    """
    ctx, batch = context.layer_and_batch(layer_name)
    bodies.attention(
        ctx, batch, q, kv_c_normed, k_pe, q_prepared, output, positions, cos_sin_cache, is_neox, is_rotated
    )


def mla_attention_with_prepared_q_fake(
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    q_prepared: torch.Tensor,
    output: torch.Tensor,
    layer_name: Any,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    is_rotated: bool,
    kv_cache_dummy_dep: torch.Tensor | None = None,
) -> None:
    """Nothing is returned; ``output`` is written."""

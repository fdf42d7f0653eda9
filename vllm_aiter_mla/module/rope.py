"""Whether a layer's rotary embedding is the rotation that the op does: by what is known of its class, then by a try."""

from __future__ import annotations

from typing import Any

import torch

from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.compat import wrapper as compat_wrapper
from vllm_aiter_mla.kernels.reference import gather_cos_sin, rotate

KNOWN = ("RotaryEmbedding", "DeepseekScalingRotaryEmbedding", "YaRNScalingRotaryEmbedding")
"""Class names of vLLM's rotary embeddings that rotate by rows of one table and by nothing else."""

# vLLM's eager rotation rounds to the activation dtype three times.
ROUNDINGS = 8


def why_not(wrapper: Any) -> Skip | None:
    """Why the op may not rotate for this wrapper of a layer, or None."""
    embedding, width = wrapper.rotary_emb, wrapper.qk_rope_head_dim
    if embedding is None:
        return Skip("no_rope", "the layer has no rotary embedding")
    name = type(embedding).__name__
    if name not in KNOWN:
        return Skip("rope_other_operand", f"the rotary embedding is {name}; known: {', '.join(KNOWN)}")
    if (embedding.rotary_dim, embedding.cos_sin_cache.shape[-1]) != (width, width):
        return Skip("partial_rotary", f"the rotary embedding turns {embedding.rotary_dim} of {width} columns")
    if compat_wrapper.scales_query(wrapper):
        return Skip("rope_other_operand", "the model scales q after RoPE (llama_4_scaling)")
    off = _difference(embedding, width)
    if not off <= ROUNDINGS:  # NaN included
        return Skip("query_not_rope", f"{name} differs from the rotation by its table by {off:.3g} roundings")
    return None


@torch.inference_mode()
def _difference(embedding: Any, width: int) -> float:
    """Largest distance between the embedding's own result and the reference's, in roundings of the activation dtype.

    Asked of vLLM's module itself, at the first, the last and a few other rows of its table.
    """
    table = embedding.cos_sin_cache
    draw = torch.Generator().manual_seed(0)
    positions = torch.cat([torch.tensor([0, table.shape[0] - 1]), torch.randint(table.shape[0], (6,), generator=draw)])
    positions = positions.to(table.device)
    tokens = len(positions)
    q, k = (torch.randn(tokens, heads, width, generator=draw).to(table) for heads in (2, 1))
    cos, sin = (half.unsqueeze(1) for half in gather_cos_sin(table, positions))
    wanted = [rotate(x, cos, sin, embedding.is_neox_style) for x in (q, k)]
    found = embedding(positions, q.clone(), k.clone())
    step = torch.finfo(table.dtype).eps
    distances = [
        (one.float() - other).abs().amax() / (step * other.abs().amax())
        for one, other in zip(found, wanted, strict=True)
    ]
    return float(torch.stack(distances).max().item())

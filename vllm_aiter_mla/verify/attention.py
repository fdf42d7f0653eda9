"""A decode attention to stand behind the op: plain PyTorch, row by row, without a host synchronisation."""

from __future__ import annotations

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.verify.world import Layer, World


def decode_attention(world: World, layer: Layer, q_prepared: torch.Tensor) -> torch.Tensor:
    """Attend with a prepared query, and project up: [n, N, latent+R] -> [n, N*V] act.

    Every row sees the first ``row_keys`` keys of its own block table; a row without a key gives zeros. No row reads
    another one, so padded rows may hold anything.
    """
    n = q_prepared.shape[0]
    scale = layer.q_scale if world.variant.out != world.variant.act else torch.ones_like(layer.q_scale)
    return _attend(world, layer, q_prepared.float() * scale, n)


def mixed_attention(world: World, layer: Layer, q: torch.Tensor) -> torch.Tensor:
    """What a mixed batch gets: absorb the rotated q [n, N, P+R] in float32 and attend, prefill and decode rows alike.

    Stands for the layer's own ``forward_impl``; its KV rows are already written.
    """
    nope = world.geometry.nope
    absorbed = torch.einsum("tnp,npl->tnl", q[..., :nope].float(), layer.w_uk_t.float())
    return _attend(world, layer, torch.cat([absorbed, q[..., nope:].float()], dim=-1), q.shape[0])


def rotated_copies(world: World, layer: Layer, n: int) -> torch.Tensor:
    """A private copy of the first ``n`` rows of q with its rotated part rotated, rounded to the activation dtype."""
    nope = world.geometry.nope
    cos, sin = reference.gather_cos_sin(world.table, world.positions[:n])
    q = layer.q[:n]
    turned = reference.rotate(q[..., nope:], cos.unsqueeze(1), sin.unsqueeze(1), world.variant.is_neox)
    return torch.cat([q[..., :nope], turned.to(q.dtype)], dim=-1)


def _attend(world: World, layer: Layer, q: torch.Tensor, n: int) -> torch.Tensor:
    """Masked attention over paged keys in float32: q [n, N, latent+R], already in real units."""
    g, quantised = world.geometry, world.variant.quantised
    keys = _gather(layer.kv_cache, world.row_blocks[:n])
    if quantised:
        keys = keys * layer.k_scale
    logits = torch.einsum("tnd,tkd->tnk", q, keys) * (g.nope + g.rope) ** -0.5
    hidden = torch.arange(keys.shape[1], device=q.device) >= world.row_keys[:n].unsqueeze(1)
    weights = torch.softmax(logits.masked_fill(hidden.unsqueeze(1), -torch.inf), dim=-1)
    weights = weights.masked_fill(hidden.unsqueeze(1), 0.0)
    latent = torch.einsum("tnk,tkl->tnl", weights, keys[..., : g.latent])
    value = torch.einsum("tnl,nlv->tnv", latent, layer.w_uv.float())
    return value.flatten(1).to(world.variant.act)


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Rows of ``cache`` [blocks, block_size, D] in the order of ``blocks`` [n, b]: [n, b * block_size, D] float32."""
    # Bytes: indexing is not implemented for fp8 everywhere.
    data = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    picked = data.index_select(0, blocks.flatten())
    picked = picked.view(cache.dtype) if cache.dtype.itemsize == 1 else picked
    return picked.view(blocks.shape[0], -1, cache.shape[2]).float()

"""A layer of plain tensors in the place of vLLM's: what the op bodies ask of a layer, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_aiter_mla.kernels import fp8, reference
from vllm_aiter_mla.kernels.absorb import AbsorbWeight, PlainWeight
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.verify.world import Batch, Layer, World

Kernel = Callable[[DecodeInputs, Batch], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PlainLayer:
    """``bodies.MLALayer`` over the buffers of a world.

    Decode rows read the cache, row by row and without a host synchronisation; no row reads another one, so padded rows
    may hold anything. Prefill rows read q, k_pe and kv_c as they are handed over, so that a rotation that is missing or
    done twice changes the output.

    Attributes:
        world: the buffers that all layers share.
        own: this layer's tensors.
        kernel: what is under test; it is given the batch too, which it must not look at.
    """

    world: World
    own: Layer
    kernel: Kernel

    @property
    def q_scale(self) -> torch.Tensor:
        """See ``MLALayer.q_scale``; likewise the methods below."""
        return self.own.q_scale

    def weight(self) -> AbsorbWeight:
        """In the activation dtype."""
        return PlainWeight(self.own.w_uk_t)

    def prepare(self, inputs: DecodeInputs) -> torch.Tensor:
        """By the kernel under test."""
        return self.kernel(inputs, self.world.batch)

    def quantise(self, absorbed: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        """By the reference."""
        return reference.store_nope(
            torch.cat([absorbed, q_pe], dim=-1), self.q_scale.reciprocal(), self.world.variant.out
        )

    def rotate(
        self, q_pe: torch.Tensor, k_pe: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, is_neox: bool
    ) -> None:
        """By the reference, rounded to the activation dtype."""
        cos, sin = reference.gather_cos_sin(table, positions)
        q_pe.copy_(reference.rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1), is_neox))
        k_pe.copy_(reference.rotate(k_pe, cos, sin, is_neox))

    def forward_mqa(self, q_prepared: torch.Tensor, kv_cache: torch.Tensor, metadata: Batch) -> torch.Tensor:
        """Every row over the first ``row_keys`` keys of its own blocks, in float32."""
        scale = self.q_scale if fp8.is_fp8(q_prepared.dtype) else 1.0
        return self._attend_cache(q_prepared.float() * scale, kv_cache)

    def v_up(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """In float32, rounded once."""
        out.copy_(torch.einsum("tnl,nlv->tnv", attended, self.own.w_uv.float()).flatten(1))

    def stock_forward(
        self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, metadata: Batch | None, output: torch.Tensor
    ) -> None:
        """Decode rows over the cache, prefill rows over one another's keys as they are handed over."""
        if metadata is None:
            output.zero_()
            return
        n, rows = metadata.decode_rows, metadata.rows
        nope = self.world.geometry.nope
        absorbed = torch.einsum("tnp,npl->tnl", q[:rows, :, :nope].float(), self.own.w_uk_t.float())
        query = torch.cat([absorbed, q[:rows, :, nope:].float()], dim=-1)
        self.v_up(self._attend_cache(query[:n], self.own.kv_cache), output[:n])
        keys = torch.cat([kv_c[n:rows], k_pe[n:rows].flatten(1)], dim=-1).float()
        self.v_up(self._attend(query[n:], keys, None), output[n:rows])

    def _attend_cache(self, query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Attention over paged keys: query [n, N, L+R] in real units -> [n, N, L]; a row without a key gives zeros."""
        n = query.shape[0]
        # Bytes: indexing is not implemented for fp8 everywhere.
        data = cache.view(torch.uint8) if fp8.is_fp8(cache.dtype) else cache
        picked = data.index_select(0, self.world.row_blocks[:n].flatten()).view(cache.dtype)
        keys = picked.view(n, self.world.geometry.blocks * cache.shape[1], cache.shape[2]).float()
        if self.world.variant.quantised:
            keys = keys * self.own.k_scale
        hidden = torch.arange(keys.shape[1], device=query.device) >= self.world.row_keys[:n].unsqueeze(1)
        return self._attend(query, keys, hidden.unsqueeze(1))

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        """query [n, N, L+R], keys [n, K, L+R] of each row or [K, L+R] of all, hidden [n, 1, K] -> [n, N, L]."""
        g, own = self.world.geometry, "tk" if keys.dim() == 3 else "k"
        logits = torch.einsum(f"tnd,{own}d->tnk", query, keys) * (g.nope + g.rope) ** -0.5
        if hidden is None:
            weights = torch.softmax(logits, dim=-1)
        else:
            weights = torch.softmax(logits.masked_fill(hidden, -torch.inf), dim=-1).masked_fill(hidden, 0.0)
        return torch.einsum(f"tnk,{own}l->tnl", weights, keys[..., : g.latent])

"""A layer of plain tensors in the place of vLLM's: what the op bodies ask of a layer, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_aiter_mla.kernels import formats as fp8
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.backend import Run
from vllm_aiter_mla.kernels.inputs import DecodeInputs

if TYPE_CHECKING:
    from vllm_aiter_mla.verify.buffers import Buffers

# Blocks before and after the cache: what a bug writes out of bounds stays inside the allocation, and is seen.
GUARD_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """What Python knows of a step, in the place of vLLM's attention metadata.

    Attributes:
        rows: real rows; the rest of the padded size has slot -1 and whatever the last step left.
        prefill_rows: how many of them, the last ones, belong to a prefill.
        dummy: no metadata at all, as while a piecewise graph is captured.
    """

    rows: int
    prefill_rows: int = 0
    dummy: bool = False

    @property
    def decode_rows(self) -> int:
        """Real rows of decode requests."""
        return self.rows - self.prefill_rows


class Rows(NamedTuple):
    """What a step's matrix products hand to a layer, not rotated.

    Attributes:
        q: [L, N, P+R] act; a slice of wider rows.
        k_pe: [L, R] act, a slice of one tensor with kv_c.
        kv_c: [L, latent] act.
    """

    q: torch.Tensor
    k_pe: torch.Tensor
    kv_c: torch.Tensor

    def first(self, size: int) -> Rows:
        """The rows of a padded size: views, so that a graph sees what the next step writes."""
        return Rows(*(tensor[:size] for tensor in self))


@dataclass(frozen=True, slots=True)
class Layer:
    """``bodies.MLALayer`` over one layer's own tensors and the buffers that all layers share.

    Decode rows read the cache, row by row and without a host synchronisation; no row reads another one, so padded rows
    may hold anything. Prefill rows read q, k_pe and kv_c as they are handed over, so that a rotation that is missing or
    done twice changes the output.

    Attributes:
        buffers: what all layers share.
        source: the rows of a step, which nothing may change.
        work: what a captured segment writes from ``source`` and the op is given, which may rotate it in place.
        w_uk: the absorb weight, in the variant's form.
        w_uv: [N, latent, V] act.
        storage: [GUARD + blocks + GUARD, block_size, latent+R], the cache between its guards.
        k_scale: one float32.
        q_scale: one float32.
        out: [L, N*V] act, the attention's output.
        tested: the kernel under test; None where the layer only says what is expected.
    """

    buffers: Buffers
    source: Rows
    work: Rows
    w_uk: AbsorbWeight
    w_uv: torch.Tensor
    storage: torch.Tensor
    k_scale: torch.Tensor
    q_scale: torch.Tensor
    out: torch.Tensor
    tested: Run | None = None

    @property
    def kv_cache(self) -> torch.Tensor:
        """[blocks, block_size, latent+R] without the guards."""
        return self.storage[GUARD_BLOCKS:-GUARD_BLOCKS]

    def inputs(self, size: int, slots: int | None = None) -> DecodeInputs:
        """What the kernel should be given of ``size`` rows, and of ``slots`` slots (by default as many)."""
        return DecodeInputs(
            **self.source.first(size)._asdict(),
            weight=self.weight(),
            kv_cache=self.kv_cache,
            slot_mapping=self.buffers.slots[:slots][:size],
            positions=self.buffers.positions[:size],
            cos_sin_cache=self.buffers.table,
            k_scale=self.k_scale,
            q_scale=self.q_scale,
            is_neox=self.buffers.variant.is_neox,
            out_dtype=self.buffers.variant.out,
        )

    def weight(self) -> AbsorbWeight:
        """Returns the weight. This and the rest are the methods of ``MLALayer``."""
        return self.w_uk

    def query_dtype(self, act: torch.dtype) -> torch.dtype:
        """As the variant has it."""
        return self.buffers.variant.out

    def kernel(self, inputs: DecodeInputs) -> Run:
        """Returns the kernel under test."""
        assert self.tested is not None, "what is expected never runs what is tested"
        return self.tested

    def give_up(self, error: Exception) -> None:
        """Raises it: what fails here is what is looked for."""
        raise error

    def quantise(self, absorbed: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        """Quantises with the reference."""
        joined = torch.cat([absorbed, q_pe], dim=-1)
        return reference.store_nope(joined, self.q_scale.reciprocal(), self.buffers.variant.out)

    def rope_and_write(
        self, q_pe: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, positions: torch.Tensor,
        table: torch.Tensor, slots: torch.Tensor, k_scale: torch.Tensor, is_neox: bool,
    ) -> None:  # fmt: skip
        """Does what vLLM's kernel does, which wants a slot per row and leaves k_pe as it is where that is negative."""
        assert len(slots) == len(q_pe) == len(k_pe) == len(kv_c) == len(positions), "one slot per row"
        given = k_pe.clone()
        self.rotate(q_pe, k_pe, positions, table, is_neox)
        k_pe.copy_(torch.where(slots.view(-1, 1) >= 0, k_pe, given))
        rows = reference.store_nope(torch.cat([kv_c, k_pe], dim=-1), k_scale.reciprocal(), self.kv_cache.dtype)
        reference.scatter_rows(self.kv_cache, slots, rows)

    @staticmethod
    def rotate(
        q_pe: torch.Tensor, k_pe: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, is_neox: bool
    ) -> None:
        """Rotates with the reference and rounds to the activation dtype."""
        cos, sin = reference.gather_cos_sin(table, positions)
        q_pe.copy_(reference.rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1), is_neox))
        k_pe.copy_(reference.rotate(k_pe, cos, sin, is_neox))

    def forward_mqa(self, q_prepared: torch.Tensor, kv_cache: torch.Tensor, metadata: Batch) -> torch.Tensor:
        """Attends with each row over the first ``row_keys`` keys of its own blocks, in float32."""
        scale = self.q_scale if fp8.is_fp8(q_prepared.dtype) else 1.0
        return self._attend_cache(q_prepared.float() * scale, kv_cache)

    def v_up(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """Projects in float32 and rounds once."""
        out.copy_(torch.einsum("tnl,nlv->tnv", attended, self.w_uv.float()).flatten(1))

    def vllm_forward(
        self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, metadata: Batch | None, output: torch.Tensor
    ) -> None:
        """Decode rows attend over the cache, prefill rows over one another's keys as they are handed over."""
        if metadata is None:
            output.zero_()
            return
        n, rows = metadata.decode_rows, metadata.rows
        nope = self.buffers.geometry.nope
        absorbed = self.w_uk.reference(q[:rows, :, :nope])
        query = torch.cat([absorbed.float(), q[:rows, :, nope:].float()], dim=-1)
        self.v_up(self._attend_cache(query[:n], self.kv_cache), output[:n])
        keys = torch.cat([kv_c[n:rows], k_pe[n:rows].flatten(1)], dim=-1).float()
        self.v_up(self._attend(query[n:], keys, self.buffers.row_keys.new_full((rows - n,), rows - n)), output[n:rows])

    def _attend_cache(self, query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Attention over paged keys: query [n, N, L+R] in real units -> [n, N, L]."""
        n = query.shape[0]
        # Bytes: indexing is not implemented for fp8 everywhere.
        data = cache.view(torch.uint8) if fp8.is_fp8(cache.dtype) else cache
        picked = data.index_select(0, self.buffers.row_blocks[:n].flatten()).view(cache.dtype)
        keys = picked.view(n, self.buffers.geometry.blocks * cache.shape[1], cache.shape[2]).float()
        if self.buffers.variant.quantised:
            keys = keys * self.k_scale
        return self._attend(query, keys, self.buffers.row_keys[:n])

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """query [n, N, L+R] over the first ``counts`` [n] of keys [n, K, L+R], or [K, L+R] of all -> [n, N, L].

        A row without a key gives zeros.
        """
        g, own = self.buffers.geometry, "tk" if keys.dim() == 3 else "k"
        hidden = torch.arange(keys.shape[-2], device=query.device) >= counts.view(-1, 1, 1)
        logits = torch.einsum(f"tnd,{own}d->tnk", query, keys) * (g.nope + g.rope) ** -0.5
        weights = torch.softmax(logits.masked_fill(hidden, -torch.inf), dim=-1).masked_fill(hidden, 0.0)
        return torch.einsum(f"tnk,{own}l->tnl", weights, keys[..., : g.latent])

"""What the ops do, over plain records and without vLLM: the registered ops and ``verify`` both run these functions.

Sizes: T rows of a step (graph padding included), S slots, N heads, P and R the un-rotated and rotated widths of a query
head, L the latent width, V the width of a value head.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from vllm_aiter_mla.kernels import capture
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.inputs import DecodeInputs


class MLALayer(Protocol):
    """What belongs to the layer itself: in serving vLLM's module, in ``verify`` a layer made of plain tensors.

    Nothing is kept between calls: weights and scales are read per call, because reloading replaces them.
    """

    @property
    def q_scale(self) -> torch.Tensor:
        """One float32, dequantisation scale of the query."""
        ...

    def weight(self) -> AbsorbWeight:
        """The absorbed weight W_UK, in the form in which the layer holds it."""
        ...

    def prepare(self, inputs: DecodeInputs) -> torch.Tensor:
        """Run the layer's kernel: q_prepared [T, N, L+R], KV rows written."""
        ...

    def quantise(self, absorbed: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        """[T, N, L] and [T, N, R] -> fp8 [T, N, L+R], as the layer's own attention quantises its query."""
        ...

    def rotate(
        self, q_pe: torch.Tensor, k_pe: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, is_neox: bool
    ) -> None:
        """Rotate q_pe [T, N, R] and k_pe [T, R], both contiguous, in place."""
        ...

    def forward_mqa(self, q_prepared: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Decode attention over the cache: q_prepared [n, N, L+R] -> [n, N, L]."""
        ...

    def v_up(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """Write the projection of [n, N, L] to ``out`` [n, N*V]."""
        ...

    def stock_forward(
        self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> None:
        """The layer's own attention of rotated q [T, N, P+R] and k_pe [T, 1, R]; zeros where metadata is None."""
        ...


class LayerContext(NamedTuple):
    """One MLA layer inside a forward pass, without what is known of the batch.

    Attributes:
        name: the layer's dotted name.
        layer: what belongs to the layer.
        kv_cache: [blocks, block_size, L+R] in the activation dtype or the platform's fp8 type; empty before the cache
            exists.
        slots: [S] int64, S may exceed T; None while profiling.
        is_piecewise: whether the forward pass runs, or records, piecewise graphs.
    """

    name: str
    layer: MLALayer
    kv_cache: torch.Tensor
    slots: torch.Tensor | None
    is_piecewise: bool

    @property
    def has_cache(self) -> bool:
        """Whether there are slots and a cache to write to; neither is there while vLLM profiles memory."""
        return self.slots is not None and self.kv_cache.numel() > 0


class Batch(NamedTuple):
    """What Python knows of a step; for the attention op alone, because a captured op would freeze it.

    Attributes:
        metadata: of the layer's own attention, handed on as it is; None while profiling and in dummy runs.
        num_actual_tokens: real rows.
        decode_only: whether every real row is a decode row whose KV row has been written.
    """

    metadata: Any
    num_actual_tokens: int
    decode_only: bool


def declared(q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised q_prepared [T, N, L+R] of ``out_dtype``: what the fake of ``fused_prepare`` returns."""
    return q.new_empty((q.shape[0], q.shape[1], kv_c.shape[-1] + k_pe.shape[-1]), dtype=out_dtype)


def fused_prepare(
    ctx: LayerContext,
    q: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_scale: torch.Tensor,
    is_neox: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Un-rotated q [T, N, P+R], k_pe [T, R] and kv_c [T, L] -> q_prepared [T, N, L+R] of ``out_dtype``; writes KV rows.

    It may be captured in a piecewise graph and replayed for any batch, so it is given nothing that belongs to a batch:
    every row is prepared, and rows whose slot is >= 0 are written.

    Raises:
        RuntimeError: captured without slots or a cache: the write would be missing from every replay.
    """
    if not ctx.has_cache:
        if capture.is_capturing():
            missing = "slot mapping" if ctx.slots is None else "KV cache"
            raise RuntimeError(
                f"aiter-mla: {ctx.name} is being captured without a {missing}; its KV write would be missing from "
                "every replay. Capture after the KV cache is bound and with slot mappings, or switch "
                "pass_config.fuse_aiter_qk_rope_kvcache_mla off."
            )
        return declared(q, k_pe, kv_c, out_dtype)  # profiling: attention zero-fills its output and reads none of this
    assert ctx.slots is not None
    return ctx.layer.prepare(
        DecodeInputs(
            q=q,
            k_pe=k_pe,
            kv_c=kv_c,
            weight=ctx.layer.weight(),
            kv_cache=ctx.kv_cache,
            slot_mapping=ctx.slots[: q.shape[0]],
            positions=positions,
            cos_sin_cache=cos_sin_cache,
            k_scale=k_scale,
            q_scale=ctx.layer.q_scale,
            is_neox=is_neox,
            out_dtype=out_dtype,
        )
    )


def decode_q_prep(layer: MLALayer, q: torch.Tensor, rope_dim: int, out_dtype: torch.dtype) -> torch.Tensor:
    """Rotated q [T, N, P+R] -> q_prepared [T, N, L+R] of ``out_dtype``, as the layer's own attention prepares it."""
    q_nope, q_pe = q.split([q.shape[-1] - rope_dim, rope_dim], dim=-1)
    absorbed = layer.weight().product(q_nope)
    if out_dtype == q.dtype:
        return torch.cat([absorbed, q_pe], dim=-1)
    return layer.quantise(absorbed, q_pe)


def attention(
    ctx: LayerContext,
    batch: Batch,
    q: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    q_prepared: torch.Tensor,
    output: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    is_rotated: bool,
) -> None:
    """Fill ``output`` [T, N*V]: decode rows with ``q_prepared``, any other batch with the layer's own attention.

    Args:
        ctx: the layer.
        batch: the step.
        q: [T, N, P+R]; rotated where ``is_rotated``. Never changed, nor is k_pe.
        kv_c: [T, L].
        k_pe: [T, R] or [T, 1, R]; rotated where ``is_rotated``.
        q_prepared: [T, N, L+R].
        output: [T, N*V], written in place.
        positions: [T] int64.
        cos_sin_cache: [max_position, R].
        is_neox: pairing of the rotation.
        is_rotated: False where q and k_pe have not been rotated yet (after pass 3).

    Raises:
        RuntimeError: captured inside a piecewise graph: whatever this batch is, it would be frozen for all.
    """
    if ctx.is_piecewise and capture.is_capturing():
        raise RuntimeError(
            f"aiter-mla: the attention of {ctx.name} is inside a piecewise graph. Add "
            "'vllm_aiter_mla::mla_attention_with_prepared_q' to compilation_config.splitting_ops, or leave "
            "splitting_ops unset."
        )
    if batch.decode_only:
        decode(ctx, batch, q_prepared, output)
        return
    if batch.metadata is not None and not is_rotated:
        q, k_pe = rotated_copies(ctx.layer, q, k_pe, positions, cos_sin_cache, is_neox)
    ctx.layer.stock_forward(q, kv_c, k_pe.view(-1, 1, k_pe.shape[-1]), batch.metadata, output)


def decode(ctx: LayerContext, batch: Batch, q_prepared: torch.Tensor, output: torch.Tensor) -> None:
    """Decode attention and v-up projection of the real rows; padded rows of ``output`` stay as they are."""
    n = batch.num_actual_tokens
    attended = ctx.layer.forward_mqa(q_prepared[:n], ctx.kv_cache, batch.metadata)
    ctx.layer.v_up(attended, output[:n])


def rotated_copies(
    layer: MLALayer,
    q: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Private rotated copies of q [T, N, P+R] and k_pe [T, R]: (q, k_pe)."""
    rope_dim = k_pe.shape[-1]
    q_pe = q[..., -rope_dim:].contiguous()
    k_rotated = k_pe.reshape(-1, rope_dim).clone()
    layer.rotate(q_pe, k_rotated, positions[: q.shape[0]], cos_sin_cache, is_neox)
    return torch.cat([q[..., :-rope_dim], q_pe], dim=-1), k_rotated

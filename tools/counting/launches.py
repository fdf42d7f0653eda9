"""What is one launch on a GPU, and the bytes it has to move: for ops whose CPU stand-in does the same in many steps.

Rows are counted as the kernel handles them: a table, a cache or a slot mapping is read and written in the rows of this
batch, not whole.
"""

from __future__ import annotations

from typing import Any

import torch

from tools.counting.counter import Bytes, size, sizes


def rotary(positions: torch.Tensor, query: torch.Tensor, key: Any, *rest: Any) -> int:
    """``rotary_embedding``: query and key are read and written, with one row of the table per position."""
    table = rest[1]
    return 2 * sizes((query, key)) + size(positions) + positions.numel() * size(table[:1])


def rope_and_write(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    table: torch.Tensor,
    is_neox: bool,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *rest: Any,
) -> int:
    """``concat_and_cache_mla_rope_fused``: q_pe and k_pe are read and written, and the KV row of each slot.

    The kernel returns before it touches k_pe, kv_c and the cache where the slot is negative.
    """
    rows = slots.numel()
    rotated = 2 * size(q_pe[:rows]) + rows * size(table[:1]) + size(positions[:rows])
    return rotated + _real(slots) * (2 * size(k_pe[:1]) + size(kv_c[:1])) + write(slots, cache)


def rope_prepare_and_write(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    cache: torch.Tensor,
    q_out: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor,
    q_scale: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *rest: Any,
) -> int:
    """``fused_qk_rope_concat_and_cache_mla``: the query is read and its prepared form written, and the KV rows."""
    rows = slots.numel()
    query = sizes((q_latent[:rows], q_pe[:rows], q_out[:rows], positions[:rows]))
    return query + rows * sizes((cos[:1], sin[:1])) + _real(slots) * sizes((kv_c[:1], k_pe[:1])) + write(slots, cache)


def concat_and_write(kv_c: torch.Tensor, k_pe: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> int:
    """``concat_and_cache_mla``: rotated keys are read, the KV row of each slot is written."""
    return _real(slots) * sizes((kv_c[:1], k_pe[:1])) + write(slots, cache)


def write(slots: torch.Tensor, cache: torch.Tensor) -> int:
    """The slots and the KV rows behind them."""
    return size(slots) + _real(slots) * cache.shape[-1] * cache.itemsize


def _real(slots: torch.Tensor) -> int:
    return int((slots >= 0).sum())


KERNELS: dict[str, Bytes] = {
    "_C::rotary_embedding": rotary,
    "_C_cache_ops::concat_and_cache_mla_rope_fused": rope_and_write,
    "aiter::fused_qk_rope_concat_and_cache_mla": rope_prepare_and_write,
}
"""Ops by name. The Python functions of the same kind are in ``engine.py``."""

TABLE = (
    ("`rotary_embedding`", "1", "q_pe and k_pe read and written", "vLLM `csrc/pos_encoding_kernels.cu`"),
    ("`concat_and_cache_mla`", "1", "kv_c and k_pe read, KV rows written", "vLLM `csrc/cache_kernels.cu`"),
    (
        "`concat_and_cache_mla_rope_fused`",
        "1",
        "q_pe and k_pe read and written, kv_c read, KV rows written",
        "vLLM `csrc/cache_kernels_fused.cu`",
    ),
    (
        "`fused_qk_rope_concat_and_cache_mla`",
        "1",
        "absorbed query, q_pe, kv_c and k_pe read, prepared query and KV rows written",
        "AITER `csrc/kernels/cache_kernels.cu`",
    ),
    (
        "concat + fp8 quantisation of the query",
        "1 + a buffer",
        "absorbed query and q_pe read, fp8 query written",
        "`_DecodeConcatQuantFP8` of `vllm/model_executor/layers/attention/mla_attention.py`, compiled",
    ),
    (
        "concat of a query that is not quantised",
        "1 + a buffer",
        "absorbed query and q_pe read, query written",
        "`AiterMLAImpl.forward_mqa` of `vllm/v1/attention/backends/mla/rocm_aiter_mla.py`",
    ),
    (
        "the decode kernel",
        "1 + its output",
        "query read, output written; the cache is left out: the same rows in all",
        "the same",
    ),
    (
        "prefill attention, for new tokens or for a chunk of context",
        "1 + its output",
        "q, k, v, output",
        "the same in all",
    ),
    ("a kernel that Inductor makes", "1", "each buffer it reads or writes, whole", "one fused node of its scheduler"),
    ("a GEMM, a copy, any other op", "1", "its operands; a broadcast dimension once", "torch's dispatcher"),
    ("a view", "0", "0", "torch's dispatcher"),
)
"""For the page: what, launches, bytes, by which source."""

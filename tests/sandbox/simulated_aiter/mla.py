"""AITER's attention kernels for MLA, as vLLM's ``AiterMLAImpl`` and its metadata builder call them.

Decode reads its requests from the plan of ``get_mla_metadata_v1`` where it is given one: a stale plan gives other
tokens. A plan holds one work item per request; AITER cuts long ones further. What no request covers is NaN.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from tests.sandbox.simulated_aiter.memory import abort

HEADS = 16
"""The decode kernels take multiples of so many query heads: vLLM pads the query."""
WORK = 8
"""int32 per work item: request, partial result, first and end row, first and end key, two unused."""

# What a test wants to know about the calls so far: the function, and what vLLM chose for it.
calls: list[tuple[str, tuple[Any, ...]]] = []


def get_mla_metadata_info_v1(
    batch_size: int, max_seqlen_qo: int, num_heads: int, q_dtype: torch.dtype, kv_dtype: torch.dtype, **_options: Any
) -> tuple[tuple[Any, torch.dtype], ...]:
    """Sizes and dtypes of the six buffers of a plan for at most so many requests."""
    calls.append(("info", (batch_size, max_seqlen_qo, num_heads, q_dtype, kv_dtype)))
    sizes: tuple[Any, ...] = (1, 2, (batch_size, WORK), batch_size + 1, (batch_size, 2), batch_size)
    return tuple((size, torch.int32) for size in sizes)


def get_mla_metadata_v1(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    is_causal: bool,
    work_meta_data: torch.Tensor,
    work_info_set: torch.Tensor,
    work_indptr: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    *,
    max_seqlen_qo: int,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    **_options: Any,
) -> None:
    """Write the plan of one decode batch into the six buffers."""
    if num_heads % HEADS or num_kv_heads != 1:
        abort(f"no plan for {num_heads} heads over {num_kv_heads}")
    requests = qo_indptr.shape[0] - 1
    calls.append(("plan", (requests, int(max_seqlen_qo), num_heads, is_causal, dtype_q, dtype_kv)))
    work_info_set.fill_(-1)
    items = work_info_set[:requests]
    items[:, 0] = torch.arange(requests, dtype=torch.int32)
    items[:, 2], items[:, 3] = qo_indptr[:-1], qo_indptr[1:]
    items[:, 4], items[:, 5] = kv_indptr[:-1], kv_indptr[1:]
    work_indptr.copy_(torch.tensor([0, requests], dtype=torch.int32))


def mla_decode_fwd(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    max_seqlen_q: int,
    sm_scale: float = 1.0,
    logit_cap: float = 0.0,
    q_scale: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
    work_meta_data: torch.Tensor | None = None,
    work_indptr: torch.Tensor | None = None,
    work_info_set: torch.Tensor | None = None,
    reduce_indptr: torch.Tensor | None = None,
    reduce_final_map: torch.Tensor | None = None,
    reduce_partial_map: torch.Tensor | None = None,
    causal: bool = True,
) -> None:
    """Decode attention: q [T, N, L+R] over kv_buffer [tokens, 1, 1, L+R], one key per page, into o [T, N, L]."""
    if q.shape[1] % HEADS:
        abort(f"no decode kernel for {q.shape[1]} heads")
    if q.dtype != kv_buffer.dtype or not q.is_contiguous():
        abort(f"a contiguous query in {kv_buffer.dtype} is expected, got {q.dtype}, strides {q.stride()}")
    if (kv_last_page_lens != 1).any():
        abort("a page holds one key")
    calls.append(("decode", (q.shape[0], q.shape[1], int(max_seqlen_q), q.dtype, work_info_set is not None)))
    if work_info_set is not None and work_indptr is not None:
        items = work_info_set[: int(work_indptr[-1]), 2:6].tolist()
    else:
        bounds = qo_indptr[:-1], qo_indptr[1:], kv_indptr[:-1], kv_indptr[1:]
        items = torch.stack(bounds, 1).tolist()
    o.fill_(float("nan"))
    for first, end, key, last_key in items:
        keys = _rows(kv_buffer, kv_indices[key:last_key], kv_scale)
        o[first:end] = attend(_real(q[first:end], q_scale), keys, keys[:, : o.shape[-1]], sm_scale, causal)[0]


def mla_gluon(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    o: torch.Tensor,
    page_table: torch.Tensor,
    seq_info: torch.Tensor,
    sm_scale: float,
    min_kv_seq_len: int = 1,
    **_options: Any,
) -> None:
    """gfx950's decode for fewer than 16 heads: q_nope [B, N, L] or [B, rows, N, L], activation dtype, causal."""
    calls.append(("gluon", (tuple(q_nope.shape[:-1]), min_kv_seq_len)))
    for request, (key, last_key) in enumerate(pairwise(seq_info.tolist())):
        keys = _rows(kv_c, page_table[key:last_key], None)
        query = torch.cat([q_nope[request], q_pe[request]], -1).float()
        rows = attend(query.view(-1, *query.shape[-2:]), keys, keys[:, : o.shape[-1]], sm_scale, True)[0]
        o[request] = rows.view(o[request].shape).to(o.dtype)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = False,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Prefill attention: q, k [T, N, P+R] and v [T, N, V] by sequence -> [T, N, V], and the LSE [N, T] where asked."""
    calls.append(("prefill", (q.shape[0], q.shape[1], causal, return_lse)))
    found = q.new_empty((*q.shape[:2], v.shape[-1])) if out is None else out
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32)
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for (first, end), (key, last_key) in zip(pairwise(queries), pairwise(keys), strict=True):
        rows, row_lse = attend(q[first:end].float(), k[key:last_key], v[key:last_key], softmax_scale, causal)
        found[first:end], lse[:, first:end] = rows.to(found.dtype), row_lse
    return (found, lse) if return_lse else found


def _real(values: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The values in float32; fp8 codes are scaled."""
    if values.itemsize > 1:
        return values.float()
    if scale is None:
        abort("fp8 values need a scale")
    return values.float() * scale


def _rows(kv_buffer: torch.Tensor, indices: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    flat = kv_buffer.reshape(-1, kv_buffer.shape[-1])
    raw = flat.view(torch.uint8)[indices.long()].view(flat.dtype) if flat.itemsize == 1 else flat[indices.long()]
    return _real(raw, scale)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [Q, N, W] over k [K, W] or [K, N, W]: rows [Q, N, V] and LSE [N, Q]. The last query sees every key."""
    heads = "kn" if k.dim() == 3 else "k"
    scores = torch.einsum(f"qnw,{heads}w->nqk", q, k.float()) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
        scores.masked_fill_(hidden, float("-inf"))
    return torch.einsum(f"nqk,{heads}v->qnv", scores.softmax(-1), v.float()), scores.logsumexp(-1)

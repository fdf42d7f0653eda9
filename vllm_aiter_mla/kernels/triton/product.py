"""The absorb product of one query tile, for each form of the weight: q_nope [BLOCK_T, P] x W_UK [P, BLOCK_L].

No vLLM and no torch import, as in ``kernel.py``, which alone uses this.
"""

# ruff: noqa: N803
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from vllm_aiter_mla.kernels.triton import tiles

BLOCK_K = tl.constexpr(tiles.BLOCK_K)
# The least that AITER's GEMM takes for a group's largest magnitude (``kernels.absorb.fp8.FLOOR``).
FLOOR = tl.constexpr(1e-10)


@triton.jit
def saturated(x, LIMIT: tl.constexpr):
    """float32 ``x`` within +-LIMIT.

    max of the lower bound, then min of the upper one: a NaN loses to the lower bound and becomes -LIMIT.
    """
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def _fp8_rows(q, FP8_MAX: tl.constexpr, CODES: tl.constexpr):
    """Codes [rows, K] and scales [rows] of the rows of ``q``: AITER's quantisation of one group of 128.

    A row's largest magnitude passes over a NaN.
    """
    q = q.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(q), axis=1), FLOOR)
    step = largest * (1.0 / FP8_MAX)
    return saturated(q * tl.math.div_rn(1.0, step)[:, None], FP8_MAX).to(CODES), step


@triton.jit
def absorbed(
    q_row,
    w_ptr,
    w_scale_ptr,
    row_mask,
    cols,
    w_stride_p,
    w_stride_l,
    P: tl.constexpr,
    W_FP8_MAX: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """float32 [BLOCK_T, BLOCK_L]: the rows of q_nope times W_UK's columns ``cols`` of one head.

    q_row: pointers [BLOCK_T] to the rows; w_ptr: to the head's weight. Blocks of 128 along P, the last one may be
    narrower. W_FP8_MAX > 0: the weight is fp8 codes and w_scale_ptr its one scale; each block of a row is quantised by
    its own largest magnitude, and the products, exact in float32, are summed there and scaled twice.
    """
    acc = tl.zeros((BLOCK_T, BLOCK_L), tl.float32)
    for k in tl.static_range(0, P, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K if P - k >= BLOCK_K else P - k)
        q = tl.load(q_row[:, None] + ks[None, :], mask=row_mask[:, None], other=0.0)
        w = tl.load(w_ptr + ks[:, None] * w_stride_p + cols[None, :] * w_stride_l)
        if W_FP8_MAX > 0:
            codes, step = _fp8_rows(q, W_FP8_MAX, w.dtype)
            # 0: Hopper would otherwise add up in fewer bits than float32.
            acc += tl.dot(codes, w, max_num_imprecise_acc=0) * step[:, None]
        else:
            acc = tl.dot(q, w, acc)
    if W_FP8_MAX > 0:
        acc *= tl.load(w_scale_ptr)
    return acc

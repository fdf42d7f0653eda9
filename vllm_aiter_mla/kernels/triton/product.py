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
# Values under one scale of mxfp4, and values in a byte of its codes (``kernels.mxfp4``).
GROUP, PACKED = tl.constexpr(32), tl.constexpr(2)


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
def _mxfp4_rows(q, ROWS: tl.constexpr, K: tl.constexpr):
    """Packed codes uint8 [ROWS, K/2] and scales e8m0 uint8 [ROWS, K/32] of ``q`` [ROWS, K], as ``mxfp4.quantise``.

    A NaN is not modelled, as there.
    """
    x = tl.reshape(q.to(tl.float32), (ROWS, K // GROUP, GROUP))
    largest = tl.max(tl.abs(x), axis=2).to(tl.int32, bitcast=True)
    # A quarter more in the mantissa carries into the exponent from 1.75 on; 4, the largest power below 6, is 2 above.
    exponent = (largest + 0x200000) >> 23
    scale = tl.where(exponent == 0xFF, 254, tl.maximum(exponent - 2, 0))
    # 2**(127 - scale); its exponent is 0 for the largest scale, whose inverse is 2**-127.
    inverse = tl.maximum((254 - scale) << 23, 0x400000).to(tl.float32, bitcast=True)
    low, high = tl.split(tl.reshape(_e2m1(x * inverse[:, :, None]), (ROWS, K // PACKED, PACKED)))
    return (low | high << 4).to(tl.uint8), scale.to(tl.uint8)


@triton.jit
def _e2m1(x):
    """int32 codes of float32 ``x``, to the nearest value and a tie to the even mantissa; 6 beyond it."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # From 1 on: one bit of mantissa stays; the codes count up from 2 there. Below, float32 at 2**22 lies 0.5 apart.
    normal = ((size + 0x1FFFFF + (size >> 22 & 1)) >> 22) - 252
    small = (tl.abs(x) + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    return tl.minimum(tl.where(size < 0x3F800000, small, normal), 7) | (bits >> 28 & 8)


@triton.jit
def absorbed(
    q_row,
    w_ptr,
    w_scale_ptr,
    row_mask,
    cols,
    w_stride_p,
    w_stride_l,
    w_scale_stride_l,
    w_scale_stride_g,
    P: tl.constexpr,
    W_FP8_MAX: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """float32 [BLOCK_T, BLOCK_L]: the rows of q_nope times W_UK's columns ``cols`` of one head.

    q_row: pointers [BLOCK_T] to the rows; w_ptr: to the head's weight. Blocks of 128 along P, the last one may be
    narrower. W_FP8_MAX > 0: the weight is fp8 codes and w_scale_ptr its one scale; each block of a row is quantised by
    its own largest magnitude, and the products, exact in float32, are summed there and scaled twice.
    A weight of bytes is mxfp4, two values along P in each, and w_scale_ptr points to the head's scales, one a column
    and 32 values; each 32 values of a row are quantised like it.
    """
    is_mxfp4: tl.constexpr = w_ptr.dtype.element_ty == tl.uint8
    acc = tl.zeros((BLOCK_T, BLOCK_L), tl.float32)
    for k in tl.static_range(0, P, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K if P - k >= BLOCK_K else P - k)
        q = tl.load(q_row[:, None] + ks[None, :], mask=row_mask[:, None], other=0.0)
        if is_mxfp4:
            pairs = k // PACKED + tl.arange(0, BLOCK_K // PACKED)
            groups = k // GROUP + tl.arange(0, BLOCK_K // GROUP)
            w = tl.load(w_ptr + pairs[:, None] * w_stride_p + cols[None, :] * w_stride_l)
            w_scale = tl.load(w_scale_ptr + cols[:, None] * w_scale_stride_l + groups[None, :] * w_scale_stride_g)
            codes, scale = _mxfp4_rows(q, BLOCK_T, BLOCK_K)
            acc = tl.dot_scaled(codes, scale, "e2m1", w, w_scale, "e2m1", acc)
        else:
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

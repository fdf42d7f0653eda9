"""The kernel: from the un-rotated query projection to the prepared query and the KV rows, in one launch.

First the absorb product of a query tile for each weight format, then the four kinds of program. No vLLM and no torch
import: this file compiles for gfx942, gfx950 and sm90 on a machine that has neither.
"""

# Compile-time arguments are upper case and kernels carry no type annotations but tl.constexpr: Triton's own habit.
# ruff: noqa: N803
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from vllm_aiter_mla.kernels.triton import tiles

# Run-time integers whose value changes from step to step. Were they specialised (on 1, on divisibility by 16), a graph
# captured at T = 1 or T = 24 would need a compilation that no warm-up at another T had made.
STEP_ARGS = ("num_tokens", "num_slots", "last_position")
# Read one element at a time: their alignment changes no instruction, so it must not make a variant either.
SCALAR_POINTERS = ("slot_ptr", "pos_ptr", "k_scale_ptr", "q_scale_ptr", "w_scale_ptr")
BLOCK_K = tl.constexpr(tiles.BLOCK_K)
# The least that AITER's GEMM takes for a group's largest magnitude (``absorb.FP8_FLOOR``).
FLOOR = tl.constexpr(1e-10)
# Values under one scale of mxfp4, and values in a byte of its codes (``formats``).
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
    """Packed codes uint8 [ROWS, K/2] and scales e8m0 uint8 [ROWS, K/32] of ``q`` [ROWS, K]: ``quantise_mxfp4``.

    A NaN is not modelled there either.
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
                if k == 0:
                    whole_scale = tl.load(w_scale_ptr)
                codes, step = _fp8_rows(q, W_FP8_MAX, w.dtype)
                # 0: Hopper would otherwise add up in fewer bits than float32.
                acc += tl.dot(codes, w, max_num_imprecise_acc=0) * step[:, None]
            else:
                acc = tl.dot(q, w, acc)
    if W_FP8_MAX > 0:
        acc *= whole_scale
    return acc


@triton.jit
def _store_form(x, scale, FP8_MAX: tl.constexpr, OUT: tl.constexpr):
    """The stored form of float32 ``x``: saturated fp8 of x / scale where FP8_MAX > 0, else rounded to OUT.

    AITER multiplies by fp32(1) / scale, correctly rounded. The division stands here, after the operands' loads: a
    program that divided first would wait for the scale before it asked for them.
    """
    if FP8_MAX > 0:
        x = saturated(x * tl.math.div_rn(tl.full((), 1.0, tl.float32), scale), FP8_MAX)
    return x.to(OUT)


@triton.jit
def _rotate_and_store(
    src_row,
    dst_row,
    position,
    load_mask,
    store_mask,
    last_position,
    cos_sin_ptr,
    cos_sin_stride,
    scale,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    IS_NEOX: tl.constexpr,
    FP8_MAX: tl.constexpr,
):
    """Rotate ROWS rows of R values in float32, round once, store.

    src_row, dst_row: pointers [ROWS] to the first element of each row; position: int64 [ROWS], clamped here into the
    table as AITER does. Rows are loaded before the table's, whose addresses have to wait for the positions.
    NeoX moves two half rows, each contiguous. GPT-J moves whole rows and takes the pairs apart in registers, so that
    neither style loads or stores by single elements.
    """
    out: tl.constexpr = dst_row.dtype.element_ty
    half = tl.arange(0, R // 2)
    mask = load_mask[:, None]
    if IS_NEOX:
        src = src_row[:, None] + half[None, :]
        a = tl.load(src, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(src + R // 2, mask=mask, other=0.0).to(tl.float32)
    else:
        full = tl.arange(0, R)
        x = tl.load(src_row[:, None] + full[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (ROWS, R // 2, 2)))
    entry = tl.minimum(tl.maximum(position, 0), last_position).to(tl.int32)
    table = cos_sin_ptr + (entry * cos_sin_stride)[:, None] + half[None, :]
    cos = tl.load(table, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(table + R // 2, mask=mask, other=0.0).to(tl.float32)
    first, second = a * cos - b * sin, b * cos + a * sin
    mask = store_mask[:, None]
    if IS_NEOX:
        dst = dst_row[:, None] + half[None, :]
        tl.store(dst, _store_form(first, scale, FP8_MAX, out), mask=mask)
        tl.store(dst + R // 2, _store_form(second, scale, FP8_MAX, out), mask=mask)
    else:
        y = _store_form(tl.reshape(tl.join(first, second), (ROWS, R)), scale, FP8_MAX, out)
        tl.store(dst_row[:, None] + full[None, :], y, mask=mask)


@triton.jit
def _query_tile(
    q_ptr,
    w_ptr,
    w_scale_ptr,
    out_ptr,
    q_scale_ptr,
    head,
    first_token,
    first_col,
    num_tokens,
    q_stride_t,
    q_stride_h,
    w_stride_h,
    w_stride_p,
    w_stride_l,
    w_scale_stride_h,
    w_scale_stride_l,
    w_scale_stride_g,
    N: tl.constexpr,
    P: tl.constexpr,
    ROW: tl.constexpr,
    FP8_MAX: tl.constexpr,
    W_FP8_MAX: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Absorb BMM of one head, BLOCK_T tokens and BLOCK_L latent columns, and its store.

    The float32 accumulator is rounded to the activation dtype before it is scaled, as the separate BMM of the unfused
    sequence does: the query then differs from it by the BMM's summation order alone.
    """
    act: tl.constexpr = q_ptr.dtype.element_ty
    scale = tl.load(q_scale_ptr)
    rows = tl.arange(0, BLOCK_T)
    cols = first_col + tl.arange(0, BLOCK_L)
    row_mask = rows < num_tokens - first_token
    q_row = q_ptr + first_token.to(tl.int64) * q_stride_t + head.to(tl.int64) * q_stride_h + rows * q_stride_t
    if w_ptr.dtype.element_ty == tl.uint8:
        w_scale_ptr += head.to(tl.int64) * w_scale_stride_h
    acc = absorbed(
        q_row, w_ptr + head.to(tl.int64) * w_stride_h, w_scale_ptr, row_mask, cols, w_stride_p, w_stride_l,
        w_scale_stride_l, w_scale_stride_g, P, W_FP8_MAX, BLOCK_T, BLOCK_L,
    )  # fmt: skip
    x = acc.to(act)
    if FP8_MAX > 0:
        x = _store_form(x.to(tl.float32), scale, FP8_MAX, out_ptr.dtype.element_ty)
    out_base = out_ptr + (first_token.to(tl.int64) * N + head) * ROW
    tl.store(out_base + rows[:, None] * (N * ROW) + cols[None, :], x, mask=row_mask[:, None])


@triton.jit
def _query_rope(
    q_ptr,
    out_ptr,
    pos_ptr,
    cos_sin_ptr,
    q_scale_ptr,
    first_row,
    num_tokens,
    last_position,
    q_stride_t,
    q_stride_h,
    cos_sin_stride,
    N: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    IS_NEOX: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ROPE_ROWS: tl.constexpr,
):
    """The rope half of ROPE_ROWS consecutive (token, head) pairs of the query."""
    scale = tl.load(q_scale_ptr)
    first_token = first_row // N
    rows = first_row + tl.arange(0, ROPE_ROWS)
    token = rows // N
    head = rows - token * N
    mask = token < num_tokens
    position = tl.load(pos_ptr + token, mask=mask, other=0)
    src = q_ptr + first_token.to(tl.int64) * q_stride_t + ((token - first_token) * q_stride_t + head * q_stride_h + P)
    dst = out_ptr + first_row.to(tl.int64) * (L + R) + (tl.arange(0, ROPE_ROWS) * (L + R) + L)
    _rotate_and_store(
        src, dst, position, mask, mask, last_position, cos_sin_ptr, cos_sin_stride, scale, R, ROPE_ROWS, IS_NEOX,
        FP8_MAX,
    )  # fmt: skip


@triton.jit
def _cache_rows(cache_ptr, slot, cache_stride_b, cache_stride_s, BLOCK_SIZE: tl.constexpr):
    """Pointers to the first element of each slot's cache row.

    The slot is 64-bit and so is every product with it: a cache may exceed 4 GiB.
    """
    block = slot // BLOCK_SIZE
    return cache_ptr + (block * cache_stride_b + (slot - block * BLOCK_SIZE) * cache_stride_s)


@triton.jit
def _kv_latent(
    kv_c_ptr,
    cache_ptr,
    slot_ptr,
    k_scale_ptr,
    first_row,
    num_slots,
    kv_c_stride_t,
    cache_stride_b,
    cache_stride_s,
    L: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    KV_ROWS: tl.constexpr,
):
    """The latent part of KV_ROWS cache rows; a row whose slot is -1 touches no byte of the cache.

    It is loaded all the same, so that its load does not wait for the slot.
    """
    scale = tl.load(k_scale_ptr)
    local = tl.arange(0, KV_ROWS)
    rows = first_row + local
    loaded = rows < num_slots
    cols = tl.arange(0, L)
    src = kv_c_ptr + first_row.to(tl.int64) * kv_c_stride_t + (local * kv_c_stride_t)[:, None] + cols[None, :]
    x = tl.load(src, mask=loaded[:, None], other=0.0)
    slot = tl.load(slot_ptr + rows, mask=loaded, other=-1)
    if FP8_MAX > 0:
        x = _store_form(x.to(tl.float32), scale, FP8_MAX, cache_ptr.dtype.element_ty)
    dst = _cache_rows(cache_ptr, slot, cache_stride_b, cache_stride_s, BLOCK_SIZE)
    tl.store(dst[:, None] + cols[None, :], x, mask=(slot >= 0)[:, None])


@triton.jit
def _kv_rope(
    k_pe_ptr,
    cache_ptr,
    slot_ptr,
    pos_ptr,
    cos_sin_ptr,
    k_scale_ptr,
    first_row,
    num_slots,
    last_position,
    k_pe_stride_t,
    cos_sin_stride,
    cache_stride_b,
    cache_stride_s,
    R: tl.constexpr,
    L: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_NEOX: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ROPE_ROWS: tl.constexpr,
):
    """The rope part of ROPE_ROWS cache rows; a row whose slot is -1 touches no byte of the cache."""
    scale = tl.load(k_scale_ptr)
    local = tl.arange(0, ROPE_ROWS)
    rows = first_row + local
    loaded = rows < num_slots
    slot = tl.load(slot_ptr + rows, mask=loaded, other=-1)
    dst = _cache_rows(cache_ptr, slot, cache_stride_b, cache_stride_s, BLOCK_SIZE) + L
    src = k_pe_ptr + first_row.to(tl.int64) * k_pe_stride_t + local * k_pe_stride_t
    position = tl.load(pos_ptr + rows, mask=loaded, other=0)
    _rotate_and_store(
        src, dst, position, loaded, slot >= 0, last_position, cos_sin_ptr, cos_sin_stride, scale, R, ROPE_ROWS,
        IS_NEOX, FP8_MAX,
    )  # fmt: skip


@triton.jit(do_not_specialize=STEP_ARGS, do_not_specialize_on_alignment=SCALAR_POINTERS)
def decode_prep_kernel(
    # ROCm loads the first 14 words into registers before a program starts: what says which program it is, and what a
    # query tile needs for its first loads. Of w_stride_p and w_stride_l one is 1 and no argument.
    num_tokens,  # T
    num_slots,  # S <= T
    q_ptr,  # [T, N, P+R] act
    w_ptr,  # [N, P, L] act or fp8 codes, or [N, P/2, L] mxfp4, unit stride along P or L
    w_scale_ptr,  # one float32 of fp8 codes, [N, L, P/32] e8m0 of mxfp4, else None
    q_scale_ptr,
    q_stride_t,
    q_stride_h,
    w_stride_h,
    w_stride_p,
    w_stride_l,
    out_ptr,  # [T, N, L+R] act or fp8, contiguous
    w_scale_stride_h,
    w_scale_stride_l,
    w_scale_stride_g,
    pos_ptr,  # [T] int64
    cos_sin_ptr,  # [last_position + 1, R] act
    last_position,
    cos_sin_stride,
    k_pe_ptr,  # [T, R] act
    kv_c_ptr,  # [T, L] act
    slot_ptr,  # [S] int64
    k_scale_ptr,
    cache_ptr,  # [blocks, BLOCK_SIZE, L+R] act or fp8
    k_pe_stride_t,
    kv_c_stride_t,
    cache_stride_b,
    cache_stride_s,
    N: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_NEOX: tl.constexpr,
    Q_FP8_MAX: tl.constexpr,  # 0: the query is stored in the activation dtype, unscaled
    KV_FP8_MAX: tl.constexpr,  # 0: so is the cache
    W_FP8_MAX: tl.constexpr,  # 0: the weight is held in the activation dtype or in mxfp4
    BLOCK_T: tl.constexpr,
    BLOCK_L: tl.constexpr,
    ROPE_ROWS: tl.constexpr,
    KV_ROWS: tl.constexpr,
):
    """One program does one of four things, by its index alone.

    First N * ceil(T / BLOCK_T) * (L / BLOCK_L) programs: one tile of the absorb BMM, heads fastest, then latent
    blocks, then token blocks. Next ceil(T * N / ROPE_ROWS): the rope half of ROPE_ROWS (token, head) pairs. Then
    ceil(S / ROPE_ROWS): the rope part of ROPE_ROWS cache rows. Last ceil(S / KV_ROWS): the latent part of KV_ROWS cache
    rows. No program reads what another one writes.
    """
    pid = tl.program_id(0)
    latent_blocks: tl.constexpr = L // BLOCK_L
    token_blocks = tl.cdiv(num_tokens, BLOCK_T)
    query_tiles = N * token_blocks * latent_blocks
    rope_tiles = tl.cdiv(num_tokens * N, ROPE_ROWS)
    if pid < query_tiles:
        rest = pid // N
        head = pid - rest * N
        token_block = rest // latent_blocks
        first_token = token_block * BLOCK_T
        first_col = (rest - token_block * latent_blocks) * BLOCK_L
        _query_tile(
            q_ptr, w_ptr, w_scale_ptr, out_ptr, q_scale_ptr, head, first_token, first_col, num_tokens, q_stride_t,
            q_stride_h, w_stride_h, w_stride_p, w_stride_l, w_scale_stride_h, w_scale_stride_l, w_scale_stride_g,
            N, P, L + R, Q_FP8_MAX, W_FP8_MAX, BLOCK_T, BLOCK_L,
        )  # fmt: skip
    elif pid < query_tiles + rope_tiles:
        first_row = (pid - query_tiles) * ROPE_ROWS
        _query_rope(
            q_ptr, out_ptr, pos_ptr, cos_sin_ptr, q_scale_ptr, first_row, num_tokens, last_position, q_stride_t,
            q_stride_h, cos_sin_stride, N, P, R, L, IS_NEOX, Q_FP8_MAX, ROPE_ROWS,
        )  # fmt: skip
    else:
        rest = pid - query_tiles - rope_tiles
        kv_rope_tiles = tl.cdiv(num_slots, ROPE_ROWS)
        if rest < kv_rope_tiles:
            _kv_rope(
                k_pe_ptr, cache_ptr, slot_ptr, pos_ptr, cos_sin_ptr, k_scale_ptr, rest * ROPE_ROWS, num_slots,
                last_position, k_pe_stride_t, cos_sin_stride, cache_stride_b, cache_stride_s, R, L, BLOCK_SIZE, IS_NEOX,
                KV_FP8_MAX, ROPE_ROWS,
            )  # fmt: skip
        else:
            _kv_latent(
                kv_c_ptr, cache_ptr, slot_ptr, k_scale_ptr, (rest - kv_rope_tiles) * KV_ROWS, num_slots, kv_c_stride_t,
                cache_stride_b, cache_stride_s, L, BLOCK_SIZE, KV_FP8_MAX, KV_ROWS,
            )  # fmt: skip

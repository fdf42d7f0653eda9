# SPDX-License-Identifier: Apache-2.0
"""The kernel: from the un-rotated query projection to the prepared query and the KV rows, in one launch.

First the absorb product of a query tile for each weight format, then the four kinds of program. No vLLM and no torch
import: this file compiles for gfx942, gfx950 and sm90 on a machine that has neither.
"""

# Compile-time arguments are upper case and kernels carry no type annotations but tl.constexpr: Triton's own habit.
# ruff: noqa: N803, SIM300
# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl

from vllm_aiter_mla.kernels.triton import tiles

# Run-time integers whose value changes from step to step. Were they specialised (on 1, on divisibility by 16), a graph
# captured at T = 1 or T = 24 would need a compilation that no warm-up at another T had made.
STEP_ARGS = ("num_tokens", "last_position")
# Read one element at a time: their alignment changes no instruction, so it must not make a variant either.
SCALAR_POINTERS = ("slot_ptr", "pos_ptr", "k_scale_ptr", "q_scale_ptr", "w_scale_ptr")
BLOCK_K = tl.constexpr(tiles.BLOCK_K)
# The least that AITER's GEMM takes for a group's largest magnitude (``absorb.FP8_FLOOR``).
FLOOR = tl.constexpr(1e-10)
# The largest float32, and a number whose product with 65537 is finite.
MOST_INVERSE, MOST_SPLIT = tl.constexpr(float.fromhex("0x1.fffffep127")), tl.constexpr(2.0**111)
# Values under one scale of mxfp4, and values in a byte of its codes (``formats``).
GROUP, PACKED = tl.constexpr(32), tl.constexpr(2)
# Neighbouring values of the query that one lane stores: 16 bytes in fp8.
RUN = tl.constexpr(16)


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
def _load_rows(q_row, row_mask, k: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH values from column ``k`` on of the rows that ``q_row`` points to."""
    return tl.load(q_row[:, None] + (tl.arange(0, WIDTH) + k)[None, :], mask=row_mask[:, None], other=0.0)


@triton.jit
def _load_weight(
    w_ptr, w_scale_ptr, cols, w_stride_p, w_stride_l, w_scale_stride_l, w_scale_stride_g,
    k: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """WIDTH rows from ``k`` on of one head's weight, at the columns ``cols``, and their scales in mxfp4.

    mxfp4 holds two values along P in a byte, and one scale for a column and 32 values.
    """
    if w_ptr.dtype.element_ty == tl.uint8:
        pairs = tl.arange(0, WIDTH // PACKED) + k // PACKED
        groups = tl.arange(0, WIDTH // GROUP) + k // GROUP
        w = tl.load(w_ptr + pairs[:, None] * w_stride_p + cols[None, :] * w_stride_l)
        return w, tl.load(w_scale_ptr + cols[:, None] * w_scale_stride_l + groups[None, :] * w_scale_stride_g)
    else:
        w = tl.load(w_ptr + (tl.arange(0, WIDTH) + k)[:, None] * w_stride_p + cols[None, :] * w_stride_l)
        return w, w


@triton.jit
def _quantised(q, KIND: tl.constexpr, W_FP8_MAX: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of q [ROWS, WIDTH] in the weight's format, with their scales; over plain weights q itself, twice."""
    if KIND == tl.uint8:
        return _mxfp4_rows(q, ROWS, WIDTH)
    elif W_FP8_MAX > 0:
        return _fp8_rows(q, W_FP8_MAX, KIND)
    else:
        return q, q


@triton.jit
def _added(acc, q, q_scale, w, w_scale, W_FP8_MAX: tl.constexpr, k: tl.constexpr):
    """``acc`` and the product of the block at ``k``; over fp8 codes its float32 sums are scaled by the rows' scales."""
    if w.dtype == tl.uint8:
        return tl.dot_scaled(q, q_scale, "e2m1", w, w_scale, "e2m1", acc)
    elif W_FP8_MAX > 0:
        # 0: Hopper would otherwise add up in fewer bits than float32.
        product = tl.dot(q, w, max_num_imprecise_acc=0) * q_scale[:, None]
        return product if k == 0 else acc + product
    else:
        return tl.dot(q, w, acc)


@triton.jit
def _store_form(x, scale, FP8_MAX: tl.constexpr, OUT: tl.constexpr, KEEP_NAN: tl.constexpr = False):
    """The stored form of float32 ``x``: saturated fp8 of x / scale where FP8_MAX > 0, else rounded to OUT.

    With KEEP_NAN a NaN stays one: as in the rotated half of AITER's op, so that a corrupt row shows in the result. It
    costs two instructions a value, in programs that wait for memory anyway.
    AITER multiplies by fp32(1) / scale, correctly rounded. The division stands here, after the operands' loads: a
    program that divided first would wait for the scale before it asked for them.
    """
    if FP8_MAX > 0:
        x = x * tl.math.div_rn(tl.full((), 1.0, tl.float32), scale)
        x = tl.where(x == x, saturated(x, FP8_MAX), float("nan")) if KEEP_NAN else saturated(x, FP8_MAX)
    return x.to(OUT)


@triton.jit
def _inverse_and_limit(scale, entered, ACT: tl.constexpr, OUT: tl.constexpr, FP8_MAX: tl.constexpr):
    """1 / ``scale`` and FP8_MAX * ``scale`` for ``_absorbed_form``, where it needs them; ``entered`` is always true.

    The compiler does not know that. Without the branch it moves the division up between the loads of a tile, and the
    loads behind it wait for the scale. Both stay finite, and the limit within what can be split: no scale may turn a
    sum into NaN.
    """
    inverse, limit = scale, scale
    if ACT != tl.bfloat16 or OUT != tl.float8e4b8:
        return inverse, limit
    if entered:
        inverse = tl.minimum(tl.math.div_rn(tl.full((), 1.0, tl.float32), scale), MOST_INVERSE)
        limit = tl.minimum(scale * FP8_MAX, MOST_SPLIT)
    return inverse, limit


@triton.jit
def _absorbed_form(x, scale, inverse, limit, ACT: tl.constexpr, OUT: tl.constexpr, FP8_MAX: tl.constexpr):
    """The stored form of float32 sums ``x`` rounded to ACT.

    gfx942, whose fp8 type is float8e4b8, has no conversion to bfloat16. There Veltkamp's splitting rounds to 8
    significant bits, ties to even, two values an instruction. Its operations must not be fused, and its product
    overflows from 2**112 on. So x is saturated first, at what is stored as the largest fp8 number. A NaN becomes the
    lowest one. docs/kernels.md says for which scales this is exact.
    """
    if ACT == tl.bfloat16 and OUT == tl.float8e4b8:
        x = tl.clamp(x, -limit, limit)
        high = x * 65537.0
        return ((high - (high - x)) * inverse).to(OUT)
    elif FP8_MAX > 0:
        return _store_form(x.to(ACT).to(tl.float32), scale, FP8_MAX, OUT)
    else:
        return x.to(ACT)


@triton.jit
def _rotate_and_store(
    src_row, dst_row, position, load_mask, store_mask, last_position, cos_sin_ptr, cos_sin_stride, scale,
    R: tl.constexpr, ROWS: tl.constexpr, IS_NEOX: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
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
    tl.debug_barrier()  # As in ``_kv_latent``.
    first, second = a * cos - b * sin, b * cos + a * sin
    mask = store_mask[:, None]
    if IS_NEOX:
        dst = dst_row[:, None] + half[None, :]
        tl.store(dst, _store_form(first, scale, FP8_MAX, out, True), mask=mask)
        tl.store(dst + R // 2, _store_form(second, scale, FP8_MAX, out, True), mask=mask)
    else:
        y = _store_form(tl.reshape(tl.join(first, second), (ROWS, R)), scale, FP8_MAX, out, True)
        tl.store(dst_row[:, None] + full[None, :], y, mask=mask)


@triton.jit
def _store_columns(ptr, x, num_rows, STRIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Store the first ``num_rows`` rows of ``x`` [ROWS, WIDTH] at ``ptr``, STRIDE elements apart.

    Cut into runs of 16 values, it takes a layout of its own: neighbouring lanes store neighbouring runs. In that of the
    matrix product a wave of gfx942 would write 8 or 16 bytes of a row at a time, where a request moves up to 64.
    """
    groups: tl.constexpr = WIDTH // RUN
    run = tl.arange(0, ROWS * groups)
    row = run // groups
    to = ptr + (row * STRIDE + (run - row * groups) * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    tl.store(to, tl.reshape(x, (ROWS * groups, RUN)), mask=(row < num_rows)[:, None])


@triton.jit
def _query_tile(
    q_ptr, w_ptr, w_scale_ptr, out_ptr, q_scale_ptr, head, first_token, first_col, num_tokens, q_stride_t, q_stride_h,
    w_stride_h, w_stride_p, w_stride_l, w_scale_stride_h, w_scale_stride_l, w_scale_stride_g,
    N: tl.constexpr, M: tl.constexpr, P: tl.constexpr, ROW: tl.constexpr, FP8_MAX: tl.constexpr,
    W_FP8_MAX: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_L: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Absorb BMM of one head, BLOCK_T tokens and BLOCKS blocks of BLOCK_L latent columns, and its stores.

    P is cut into blocks of 128, the last one may be narrower. Where it is one block, the rows are loaded and quantised
    once for all latent blocks. The weight of the next block is loaded before this one's is waited for, and both before
    the rows.
    The float32 accumulator is rounded to the activation dtype before it is scaled, as the separate BMM of the unfused
    sequence does: the query then differs from it by the BMM's summation order alone.
    """
    act: tl.constexpr = q_ptr.dtype.element_ty
    kind: tl.constexpr = w_ptr.dtype.element_ty
    out: tl.constexpr = out_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_T)
    row_mask = rows < num_tokens - first_token
    q_row = q_ptr + first_token.to(tl.int64) * q_stride_t + head.to(tl.int64) * q_stride_h + rows * q_stride_t
    w_ptr += head.to(tl.int64) * w_stride_h
    if kind == tl.uint8:
        w_scale_ptr += head.to(tl.int64) * w_scale_stride_h
    out_head = head * (M // N) if M % N == 0 else head
    out_ptr += (first_token.to(tl.int64) * M + out_head) * ROW + first_col
    cols = first_col + tl.arange(0, BLOCK_L)
    w, w_scale = _load_weight(
        w_ptr, w_scale_ptr, cols, w_stride_p, w_stride_l, w_scale_stride_l, w_scale_stride_g, 0, min(P, BLOCK_K)
    )
    scale = tl.load(q_scale_ptr)
    if W_FP8_MAX > 0:
        weight_scale = tl.load(w_scale_ptr)
    for block in tl.static_range(BLOCKS):
        acc = tl.zeros((BLOCK_T, BLOCK_L), tl.float32)
        for k in tl.static_range(0, P, BLOCK_K):
            if k + BLOCK_K < P:
                ahead, scale_ahead = _load_weight(
                    w_ptr, w_scale_ptr, cols + block * BLOCK_L, w_stride_p, w_stride_l, w_scale_stride_l,
                    w_scale_stride_g, k + BLOCK_K, min(P - k - BLOCK_K, BLOCK_K),
                )  # fmt: skip
            elif block + 1 < BLOCKS:
                ahead, scale_ahead = _load_weight(
                    w_ptr, w_scale_ptr, cols + (block + 1) * BLOCK_L, w_stride_p, w_stride_l, w_scale_stride_l,
                    w_scale_stride_g, 0, min(P, BLOCK_K),
                )  # fmt: skip
            if k + block == 0:
                tl.debug_barrier()  # The rows come last: what waits for them is computed after all loads were issued.
            if P > BLOCK_K or block == 0:
                q = _load_rows(q_row, row_mask, k, min(P - k, BLOCK_K))
                if k + block == 0:
                    inverse, limit = _inverse_and_limit(scale, first_token < num_tokens, act, out, FP8_MAX)
                codes, step = _quantised(q, kind, W_FP8_MAX, BLOCK_T, min(P - k, BLOCK_K))
            acc = _added(acc, codes, step, w, w_scale, W_FP8_MAX, k)
            if k + BLOCK_K < P or block + 1 < BLOCKS:
                w, w_scale = ahead, scale_ahead
        if W_FP8_MAX > 0:
            acc *= weight_scale
        x = _absorbed_form(acc, scale, inverse, limit, act, out, FP8_MAX)
        _store_columns(out_ptr + block * BLOCK_L, x, num_tokens - first_token, M * ROW, BLOCK_T, BLOCK_L)


@triton.jit
def _query_rope(
    q_ptr, out_ptr, pos_ptr, cos_sin_ptr, q_scale_ptr, first_row, num_tokens, last_position, q_stride_t, q_stride_h,
    cos_sin_stride,
    N: tl.constexpr, M: tl.constexpr, P: tl.constexpr, R: tl.constexpr, L: tl.constexpr, IS_NEOX: tl.constexpr,
    FP8_MAX: tl.constexpr, ROPE_ROWS: tl.constexpr,
):  # fmt: skip
    """The rope half of ROPE_ROWS consecutive (token, head) pairs of the query."""
    scale = tl.load(q_scale_ptr)
    first_token = first_row // N
    rows = first_row + tl.arange(0, ROPE_ROWS)
    token = rows // N
    head = rows - token * N
    mask = token < num_tokens
    position = tl.load(pos_ptr + token, mask=mask, other=0)
    src = q_ptr + first_token.to(tl.int64) * q_stride_t + ((token - first_token) * q_stride_t + head * q_stride_h + P)
    if M % N == 0:
        # Heads lie M // N apart and a token's M right behind the last one's, so pairs do too.
        dst = out_ptr + first_row.to(tl.int64) * (M // N * (L + R)) + (tl.arange(0, ROPE_ROWS) * (M // N * (L + R)) + L)
    else:
        dst = out_ptr + first_token.to(tl.int64) * (M * (L + R))
        dst += ((token - first_token) * M + head) * (L + R) + L
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
    kv_c_ptr, cache_ptr, slot_ptr, k_scale_ptr, first_row, num_tokens, kv_c_stride_t, cache_stride_b, cache_stride_s,
    L: tl.constexpr, BLOCK_SIZE: tl.constexpr, FP8_MAX: tl.constexpr, KV_ROWS: tl.constexpr,
):  # fmt: skip
    """The latent part of KV_ROWS cache rows; a row whose slot is -1 touches no byte of the cache.

    It is loaded all the same, so that its load does not wait for the slot.
    """
    scale = tl.load(k_scale_ptr)
    local = tl.arange(0, KV_ROWS)
    rows = first_row + local
    loaded = rows < num_tokens
    cols = tl.arange(0, L)
    src = kv_c_ptr + first_row.to(tl.int64) * kv_c_stride_t + (local * kv_c_stride_t)[:, None] + cols[None, :]
    x = tl.load(src, mask=loaded[:, None], other=0.0)
    slot = tl.load(slot_ptr + rows, mask=loaded, other=-1)
    tl.debug_barrier()  # With 64-bit addresses the compiler would move the rows' load behind the slot's wait.
    if FP8_MAX > 0:
        x = _store_form(x.to(tl.float32), scale, FP8_MAX, cache_ptr.dtype.element_ty)
    dst = _cache_rows(cache_ptr, slot, cache_stride_b, cache_stride_s, BLOCK_SIZE)
    tl.store(dst[:, None] + cols[None, :], x, mask=(slot >= 0)[:, None])


@triton.jit
def _kv_rope(
    k_pe_ptr, cache_ptr, slot_ptr, pos_ptr, cos_sin_ptr, k_scale_ptr, first_row, num_tokens, last_position,
    k_pe_stride_t, cos_sin_stride, cache_stride_b, cache_stride_s,
    R: tl.constexpr, L: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_NEOX: tl.constexpr, FP8_MAX: tl.constexpr,
    ROPE_ROWS: tl.constexpr,
):  # fmt: skip
    """The rope part of ROPE_ROWS cache rows; a row whose slot is -1 touches no byte of the cache."""
    scale = tl.load(k_scale_ptr)
    local = tl.arange(0, ROPE_ROWS)
    rows = first_row + local
    loaded = rows < num_tokens
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
    q_ptr,  # [T, N, P+R] act
    w_ptr,  # [N, P, L] act or fp8 codes, or [N, P/2, L] mxfp4, unit stride along P or L
    w_scale_ptr,  # one float32 of fp8 codes, [N, L, P/32] e8m0 of mxfp4, else None
    q_scale_ptr,
    q_stride_t,
    q_stride_h,
    w_stride_h,
    w_stride_p,
    w_stride_l,
    out_ptr,  # [T, M, L+R] act or fp8, contiguous
    w_scale_stride_h,
    w_scale_stride_l,
    w_scale_stride_g,
    pos_ptr,  # [T] int64
    cos_sin_ptr,  # [last_position + 1, R] act
    last_position,
    cos_sin_stride,
    k_pe_ptr,  # [T, R] act
    kv_c_ptr,  # [T, L] act
    slot_ptr,  # [T] int64
    k_scale_ptr,
    cache_ptr,  # [blocks, BLOCK_SIZE, L+R] act or fp8
    k_pe_stride_t,
    kv_c_stride_t,
    cache_stride_b,
    cache_stride_s,
    N: tl.constexpr,
    M: tl.constexpr,  # heads of a row of out_ptr, of which N are written: see ``DecodeInputs.real_heads``
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
    BLOCKS: tl.constexpr,
    ROPE_ROWS: tl.constexpr,
    KV_ROWS: tl.constexpr,
):
    """One program does one of four things, by its index alone.

    First N * ceil(T / BLOCK_T) * L / (BLOCK_L * BLOCKS) programs: one tile of the absorb BMM, heads fastest, then the
    latent, then tokens. Next ceil(T * N / ROPE_ROWS): the rope half of ROPE_ROWS (token, head) pairs. Then
    ceil(T / ROPE_ROWS): the rope part of ROPE_ROWS cache rows. Last ceil(T / KV_ROWS): the latent part of KV_ROWS cache
    rows. No program reads what another one writes.
    """
    pid = tl.program_id(0)
    latent_tiles: tl.constexpr = L // (BLOCK_L * BLOCKS)
    token_blocks = tl.cdiv(num_tokens, BLOCK_T)
    query_tiles = N * token_blocks * latent_tiles
    rope_tiles = tl.cdiv(num_tokens * N, ROPE_ROWS)
    if pid < query_tiles:
        rest = pid // N
        head = pid - rest * N
        token_block = rest // latent_tiles
        first_token = token_block * BLOCK_T
        first_col = (rest - token_block * latent_tiles) * (BLOCK_L * BLOCKS)
        _query_tile(
            q_ptr, w_ptr, w_scale_ptr, out_ptr, q_scale_ptr, head, first_token, first_col, num_tokens, q_stride_t,
            q_stride_h, w_stride_h, w_stride_p, w_stride_l, w_scale_stride_h, w_scale_stride_l, w_scale_stride_g,
            N, M, P, L + R, Q_FP8_MAX, W_FP8_MAX, BLOCK_T, BLOCK_L, BLOCKS,
        )  # fmt: skip
    elif pid < query_tiles + rope_tiles:
        first_row = (pid - query_tiles) * ROPE_ROWS
        _query_rope(
            q_ptr, out_ptr, pos_ptr, cos_sin_ptr, q_scale_ptr, first_row, num_tokens, last_position, q_stride_t,
            q_stride_h, cos_sin_stride, N, M, P, R, L, IS_NEOX, Q_FP8_MAX, ROPE_ROWS,
        )  # fmt: skip
    else:
        rest = pid - query_tiles - rope_tiles
        kv_rope_tiles = tl.cdiv(num_tokens, ROPE_ROWS)
        if rest < kv_rope_tiles:
            _kv_rope(
                k_pe_ptr, cache_ptr, slot_ptr, pos_ptr, cos_sin_ptr, k_scale_ptr, rest * ROPE_ROWS, num_tokens,
                last_position, k_pe_stride_t, cos_sin_stride, cache_stride_b, cache_stride_s, R, L, BLOCK_SIZE, IS_NEOX,
                KV_FP8_MAX, ROPE_ROWS,
            )  # fmt: skip
        else:
            _kv_latent(
                kv_c_ptr, cache_ptr, slot_ptr, k_scale_ptr, (rest - kv_rope_tiles) * KV_ROWS, num_tokens, kv_c_stride_t,
                cache_stride_b, cache_stride_s, L, BLOCK_SIZE, KV_FP8_MAX, KV_ROWS,
            )  # fmt: skip

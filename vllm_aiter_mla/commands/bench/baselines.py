"""The strongest unfused sequence to measure against: torch.bmm, one RoPE + KV-write launch, one concat + quant launch.

It is what unmodified vLLM does with its RoPE + KV fusion and Inductor's concat + quant fusion both on. It uses the same
building blocks as the one launch, so the ratio measures only the number of launches.
Its numerics are vLLM's own: the rotated query is rounded to the activation dtype before it is quantised.
"""

# ruff: noqa: N803
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.triton.kernel import (
    SCALAR_POINTERS,
    STEP_ARGS,
    _kv_latent,
    _kv_rope,
    _rotate_and_store,
    _store_form,
)
from vllm_aiter_mla.kernels.triton.launcher import constants, strides
from vllm_aiter_mla.kernels.triton.tiles import FP_FUSION, Tile

# Static choice: the rows per program of the one launch (rope 32, latent 4); a program concatenates 4 query rows.
TILE = Tile(16, 64, 4)
CONCAT_ROWS = 4


@triton.jit(do_not_specialize=STEP_ARGS, do_not_specialize_on_alignment=SCALAR_POINTERS)
def rope_kv_kernel(
    q_ptr,
    k_pe_ptr,
    kv_c_ptr,
    cache_ptr,
    q_rot_ptr,  # [T, N, R] act, contiguous
    slot_ptr,
    pos_ptr,
    cos_sin_ptr,
    k_scale_ptr,
    num_tokens,
    num_slots,
    last_position,
    q_stride_t,
    q_stride_h,
    k_pe_stride_t,
    kv_c_stride_t,
    cos_sin_stride,
    cache_stride_b,
    cache_stride_s,
    N: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_NEOX: tl.constexpr,
    KV_FP8_MAX: tl.constexpr,
    ROPE_ROWS: tl.constexpr,
    KV_ROWS: tl.constexpr,
):
    """One program rotates ROPE_ROWS rows (q_pe into q_rot, k_pe into the cache) or stores KV_ROWS latent rows."""
    pid = tl.program_id(0)
    rope_tiles = tl.cdiv(num_tokens * N, ROPE_ROWS)
    if pid < rope_tiles:
        rows = (pid * ROPE_ROWS + tl.arange(0, ROPE_ROWS)).to(tl.int64)
        token = rows // N
        mask = token < num_tokens
        position = tl.load(pos_ptr + token, mask=mask, other=0)
        src = q_ptr + (token.to(tl.int64) * q_stride_t + (rows - token * N) * q_stride_h + P)
        _rotate_and_store(
            src, q_rot_ptr + rows * R, position, mask, mask, last_position, cos_sin_ptr, cos_sin_stride, 1.0, R,
            ROPE_ROWS, IS_NEOX, 0.0,
        )  # fmt: skip
    else:
        rest = pid - rope_tiles
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


@triton.jit(do_not_specialize=("num_rows",), do_not_specialize_on_alignment=("q_scale_ptr",))
def concat_quant_kernel(
    nope_ptr,  # [T*N, L] act
    rope_ptr,  # [T*N, R] act, rotated; rows rope_stride apart
    out_ptr,  # [T*N, L+R] act or fp8
    q_scale_ptr,
    num_rows,
    rope_stride,
    R: tl.constexpr,
    L: tl.constexpr,
    Q_FP8_MAX: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program concatenates ROWS rows of the query and quantises them where Q_FP8_MAX > 0."""
    out: tl.constexpr = out_ptr.dtype.element_ty
    # The query may have more than 2**31 elements.
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    mask = (rows < num_rows)[:, None]
    cols = tl.arange(0, L)
    rope_cols = tl.arange(0, R)
    nope = tl.load(nope_ptr + (rows * L)[:, None] + cols[None, :], mask=mask, other=0.0)
    rope = tl.load(rope_ptr + (rows * rope_stride)[:, None] + rope_cols[None, :], mask=mask, other=0.0)
    if Q_FP8_MAX > 0:
        scale = tl.load(q_scale_ptr)
        nope = _store_form(nope.to(tl.float32), scale, Q_FP8_MAX, out)
        rope = _store_form(rope.to(tl.float32), scale, Q_FP8_MAX, out)
    dst = out_ptr + (rows * (L + R))[:, None]
    tl.store(dst + cols[None, :], nope, mask=mask)
    tl.store(dst + L + rope_cols[None, :], rope, mask=mask)


def rope_kv(inputs: DecodeInputs) -> torch.Tensor:
    """Second launch of the sequence: rotated q_pe [T, N, R] of the activation dtype, and the KV rows."""
    tokens, heads, slots = inputs.num_tokens, inputs.num_heads, inputs.slot_mapping.shape[0]
    q_rot = torch.empty((tokens, heads, inputs.rope_dim), dtype=inputs.q.dtype, device=inputs.q.device)
    names = ("N", "P", "R", "L", "BLOCK_SIZE", "IS_NEOX", "KV_FP8_MAX", "ROPE_ROWS", "KV_ROWS")
    compile_time = {name: value for name, value in constants(inputs, TILE).items() if name in names}
    q_t, q_h, *_, table, k_pe_t, kv_c_t, cache_b, cache_s = strides(inputs)
    grid = (
        triton.cdiv(tokens * heads, TILE.rope_rows)
        + triton.cdiv(slots, TILE.rope_rows)
        + triton.cdiv(slots, TILE.kv_rows),
    )
    rope_kv_kernel[grid](
        inputs.q, inputs.k_pe, inputs.kv_c, inputs.kv_cache, q_rot, inputs.slot_mapping, inputs.positions,
        inputs.cos_sin_cache, inputs.k_scale, tokens, slots, inputs.cos_sin_cache.shape[0] - 1, q_t, q_h, k_pe_t,
        kv_c_t, table, cache_b, cache_s, **compile_time, **_options(),
    )  # fmt: skip
    return q_rot


def concat_quant(inputs: DecodeInputs, absorbed: torch.Tensor, q_rot: torch.Tensor) -> torch.Tensor:
    """Third launch: q_prepared [T, N, L+R] of ``inputs.out_dtype`` from absorbed [T, N, L] and q_rot [T, N, R].

    absorbed is contiguous; the rows of q_rot lie evenly, any stride apart.
    """
    tokens, heads, latent = absorbed.shape
    out = torch.empty((tokens, heads, latent + inputs.rope_dim), dtype=inputs.out_dtype, device=absorbed.device)
    fp8_max = constants(inputs, TILE)["Q_FP8_MAX"]
    concat_quant_kernel[(triton.cdiv(tokens * heads, CONCAT_ROWS),)](
        absorbed,
        q_rot,
        out,
        inputs.q_scale,
        tokens * heads,
        q_rot.stride(1),
        inputs.rope_dim,
        latent,
        fp8_max,
        CONCAT_ROWS,
        **_options(),
    )
    return out


def unfused(inputs: DecodeInputs) -> torch.Tensor:
    """The whole sequence in three launches, as ``KernelBackend.prepare``; the caller has checked the operands."""
    absorbed = inputs.weight.product(inputs.q_nope)
    return concat_quant(inputs, absorbed, rope_kv(inputs))


def _options() -> dict[str, Any]:
    return {"num_warps": TILE.num_warps, "num_stages": 1, "enable_fp_fusion": FP_FUSION}

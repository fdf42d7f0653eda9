"""Stand-ins, in Triton, for the kernels that vLLM launches in this region: a bare card has no vLLM.

They move the same bytes in as many launches as vLLM's own. vLLM's are CUDA and Inductor's code and may take another
time, so each figure of these says "stand-in".
"""

# Triton's habit: compile-time arguments are upper case, and kernels carry no other annotations.
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_aiter_mla.kernels.formats import FLAVOURS, is_fp8
from vllm_aiter_mla.kernels.triton.kernel import saturated


@triton.jit
def empty_kernel(ptr):
    """Do nothing: what a launch itself takes."""


@triton.jit
def _rotated(src, cos, sin, R: tl.constexpr, NEOX: tl.constexpr):
    """The first and the second half of the rotated pairs at ``src`` [ROWS], float32 [ROWS, R/2] each."""
    pair = tl.arange(0, R // 2)[None, :]
    at = src[:, None] + (pair if NEOX else 2 * pair)
    a, b = tl.load(at).to(tl.float32), tl.load(at + (R // 2 if NEOX else 1)).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _put(dst, first, second, R: tl.constexpr, NEOX: tl.constexpr):
    pair = tl.arange(0, R // 2)[None, :]
    at = dst[:, None] + (pair if NEOX else 2 * pair)
    out: tl.constexpr = dst.dtype.element_ty
    tl.store(at, first.to(out))
    tl.store(at + (R // 2 if NEOX else 1), second.to(out))


@triton.jit
def _stored(x, scale, FP8_MAX: tl.constexpr):
    return saturated(x / scale, FP8_MAX) if FP8_MAX > 0 else x


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, kv_c_ptr, pos_ptr, table_ptr, slot_ptr, cache_ptr, scale_ptr, q_t, q_h, k_t, c_t, table_t, cache_b,
    cache_s, N: tl.constexpr, R: tl.constexpr, L: tl.constexpr, BLOCK_SIZE: tl.constexpr, NEOX: tl.constexpr,
    FP8_MAX: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """One token a program: rotate its N query rows and its key row in place; with WRITE put the KV row at its slot."""
    token = tl.program_id(0).to(tl.int64)
    entry = table_ptr + tl.load(pos_ptr + token) * table_t + tl.arange(0, R // 2)[None, :]
    cos, sin = tl.load(entry).to(tl.float32), tl.load(entry + R // 2).to(tl.float32)
    q = q_ptr + token * q_t + tl.arange(0, N) * q_h
    first, second = _rotated(q, cos, sin, R, NEOX)
    _put(q, first, second, R, NEOX)
    k = k_ptr + token * k_t + tl.arange(0, 1)
    first, second = _rotated(k, cos, sin, R, NEOX)
    _put(k, first, second, R, NEOX)
    if WRITE:
        slot = tl.load(slot_ptr + token)
        if slot >= 0:
            row = cache_ptr + slot // BLOCK_SIZE * cache_b + slot % BLOCK_SIZE * cache_s
            scale = tl.load(scale_ptr)
            act: tl.constexpr = k_ptr.dtype.element_ty
            first = _stored(first.to(act).to(tl.float32), scale, FP8_MAX)
            second = _stored(second.to(act).to(tl.float32), scale, FP8_MAX)
            _put(row + L + tl.arange(0, 1), first, second, R, NEOX)
            c = tl.load(kv_c_ptr + token * c_t + tl.arange(0, L)).to(tl.float32)
            tl.store(row + tl.arange(0, L), _stored(c, scale, FP8_MAX).to(cache_ptr.dtype.element_ty))


@triton.jit
def concat_kernel(
    absorbed_ptr, q_ptr, out_ptr, scale_ptr, rows, q_t, q_h, N: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    FP8_MAX: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Put absorbed rows [L] and rotated rows [R] side by side, divided by the scale, in fp8: ROWS rows a program."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    mask, scale = (row < rows)[:, None], tl.load(scale_ptr)
    latent, rope = tl.arange(0, L)[None, :], tl.arange(0, R)[None, :]
    a = tl.load(absorbed_ptr + row[:, None] * L + latent, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(q_ptr + (row // N * q_t + row % N * q_h)[:, None] + rope, mask=mask, other=0.0).to(tl.float32)
    to = out_ptr + row[:, None] * (L + R)
    out: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(to + latent, _stored(a, scale, FP8_MAX).to(out), mask=mask)
    tl.store(to + L + rope, _stored(b, scale, FP8_MAX).to(out), mask=mask)


class Standin:
    """``rope_and_write`` and ``concat_quantise_fp8`` as ``VLLMBackend`` calls them on ``compat.layer``."""

    def __init__(self, fp8: torch.dtype) -> None:
        self.fp8 = fp8

    def rope_and_write(
        self, positions: torch.Tensor, q_pe: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, table: torch.Tensor,
        is_neox: bool, slots: torch.Tensor, kv_cache: torch.Tensor, dtype: str, k_scale: torch.Tensor,
    ) -> None:  # fmt: skip
        """As ``compat.layer.rope_and_write``: one launch. It rounds the rotation once, vLLM's kernel three times."""
        cache = kv_cache.view(self.fp8) if dtype == "fp8" else kv_cache
        _rope(positions, q_pe, k_pe, table, is_neox, kv_c, slots, cache, k_scale)

    def concat_quantise_fp8(self, absorbed: torch.Tensor, q_pe: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """As ``compat.layer.concat_quantise_fp8``: one launch."""
        (tokens, heads, latent), rope, rows = absorbed.shape, q_pe.shape[2], 4
        out = absorbed.new_empty((tokens, heads, latent + rope), dtype=self.fp8)
        concat_kernel[(triton.cdiv(tokens * heads, rows),)](
            absorbed, q_pe, out, scale, tokens * heads, q_pe.stride(0), q_pe.stride(1), N=heads, R=rope, L=latent,
            FP8_MAX=FLAVOURS[self.fp8].max, ROWS=rows,
        )  # fmt: skip
        return out


def rotate_in_place(
    positions: torch.Tensor, q_pe: torch.Tensor, k_pe: torch.Tensor, table: torch.Tensor, is_neox: bool
) -> None:
    """As ``compat.layer.rotary_embedding`` by vLLM's kernel: q_pe [T, N, R] and k_pe [T, 1, R], rounded once."""
    _rope(positions, q_pe, k_pe[:, 0], table, is_neox)


def _rope(
    positions: torch.Tensor, q_pe: torch.Tensor, k_pe: torch.Tensor, table: torch.Tensor, is_neox: bool,
    kv_c: Any = None, slots: Any = None, cache: Any = None, scale: Any = None,
) -> None:  # fmt: skip
    (tokens, heads, rope), write = q_pe.shape, cache is not None
    cache_strides = (cache.stride(0), cache.stride(1)) if write else (0, 0)
    strides = (kv_c.stride(0) if write else 0, table.stride(0), *cache_strides)
    rope_kernel[(tokens,)](
        q_pe, k_pe, kv_c, positions, table, slots, cache, scale, q_pe.stride(0), q_pe.stride(1), k_pe.stride(0),
        *strides, N=heads, R=rope, L=kv_c.shape[1] if write else rope, BLOCK_SIZE=cache.shape[1] if write else 1,
        NEOX=is_neox, FP8_MAX=FLAVOURS[cache.dtype].max if write and is_fp8(cache.dtype) else 0.0, WRITE=write,
    )  # fmt: skip

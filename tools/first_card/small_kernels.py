"""Two small kernels: one that does nothing, and the rotation of prefill rows as a stand-in for vLLM's rotary kernel."""

# Triton's habit: compile-time arguments are upper case, and kernels carry no other annotations.
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def empty_kernel(ptr):
    """Do nothing: what a launch itself takes."""


@triton.jit
def _rotate(row_ptr, cos, sin, R: tl.constexpr, NEOX: tl.constexpr):
    """Rotate the rows at ``row_ptr`` [ROWS, 1] in place."""
    pair = tl.arange(0, R // 2)[None, :]
    first = row_ptr + (pair if NEOX else 2 * pair)
    second = first + (R // 2 if NEOX else 1)
    a, b = tl.load(first).to(tl.float32), tl.load(second).to(tl.float32)
    out: tl.constexpr = row_ptr.dtype.element_ty
    tl.store(first, (a * cos - b * sin).to(out))
    tl.store(second, (b * cos + a * sin).to(out))


@triton.jit
def rotate_kernel(
    q_ptr, k_ptr, pos_ptr, table_ptr, q_t, q_h, k_t, table_t, N: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr
):  # fmt: skip
    """One token a program: rotate its N query rows, a power of two, and its key row."""
    token = tl.program_id(0).to(tl.int64)
    entry = table_ptr + tl.load(pos_ptr + token) * table_t + tl.arange(0, R // 2)[None, :]
    cos, sin = tl.load(entry).to(tl.float32), tl.load(entry + R // 2).to(tl.float32)
    _rotate(q_ptr + token * q_t + tl.arange(0, N)[:, None] * q_h, cos, sin, R, NEOX)
    _rotate(k_ptr + token * k_t + tl.arange(0, 1)[:, None], cos, sin, R, NEOX)


def rotate_in_place(
    positions: torch.Tensor, q_pe: torch.Tensor, k_pe: torch.Tensor, table: torch.Tensor, is_neox: bool
) -> None:
    """As ``compat.layer.rotary_embedding`` by vLLM's kernel: q_pe [T, N, R] and k_pe [T, 1, R], rounded once."""
    tokens, heads, rope = q_pe.shape
    rotate_kernel[(tokens,)](
        q_pe, k_pe, positions, table, q_pe.stride(0), q_pe.stride(1), k_pe.stride(0), table.stride(0), N=heads, R=rope,
        NEOX=is_neox,
    )  # fmt: skip

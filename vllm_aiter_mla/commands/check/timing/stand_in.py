# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM's kernels if neither they nor AITER are installed. The step ``timing`` times it; it never serves.

It makes three launches, as vLLM does: RoPE with the KV write, the absorb product by torch, and concat with the
quantisation. The first and the third kernel are not vLLM's code. Like vLLM's, the first has a program for each token.
"""

# As in ``kernels.triton.kernel``.
# ruff: noqa: N803
# mypy: disallow-untyped-defs=False

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_aiter_mla.commands.check.timing.record import STAND_IN
from vllm_aiter_mla.kernels import formats
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation
from vllm_aiter_mla.kernels.reference import VLLM_COMPILED


@triton.jit
def _stored(value, scale_ptr, FP8_MAX: tl.constexpr):
    """Return a value as it is stored: unchanged, or in float32 divided by the scale and clamped to the range of fp8."""
    if FP8_MAX > 0:
        value = tl.minimum(tl.maximum(value.to(tl.float32) * (1.0 / tl.load(scale_ptr)), -FP8_MAX), FP8_MAX)
    return value


@triton.jit
def rope_and_write_kernel(
    q_ptr, rotated_ptr, k_pe_ptr, kv_c_ptr, pos_ptr, cos_sin_ptr, slot_ptr, k_scale_ptr, cache_ptr,
    q_stride_t, q_stride_h, cos_sin_stride, k_pe_stride_t, kv_c_stride_t, cache_stride_b, cache_stride_s,
    N: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, L: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    IS_NEOX: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Rotate q_pe [T, N, R] into ``rotated`` and write the KV row of a slot. HEADS is N or the next power of two."""
    token = tl.program_id(0).to(tl.int64)
    pair, head = tl.arange(0, R // 2), tl.arange(0, HEADS)[:, None]
    first = pair if IS_NEOX else 2 * pair
    second = first + (R // 2 if IS_NEOX else 1)
    cos_ptr = cos_sin_ptr + tl.load(pos_ptr + token) * cos_sin_stride + pair
    cos, sin = tl.load(cos_ptr).to(tl.float32), tl.load(cos_ptr + R // 2).to(tl.float32)
    act: tl.constexpr = q_ptr.dtype.element_ty
    q_row_ptr, rotated_row_ptr = q_ptr + token * q_stride_t + head * q_stride_h, rotated_ptr + (token * N + head) * R
    q_first = tl.load(q_row_ptr + first[None, :], mask=head < N, other=0.0).to(tl.float32)
    q_second = tl.load(q_row_ptr + second[None, :], mask=head < N, other=0.0).to(tl.float32)
    rotated_first = (q_first * cos[None, :] - q_second * sin[None, :]).to(act)
    rotated_second = (q_second * cos[None, :] + q_first * sin[None, :]).to(act)
    tl.store(rotated_row_ptr + first[None, :], rotated_first, mask=head < N)
    tl.store(rotated_row_ptr + second[None, :], rotated_second, mask=head < N)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        cache_row_ptr = cache_ptr + slot // BLOCK_SIZE * cache_stride_b + slot % BLOCK_SIZE * cache_stride_s
        out: tl.constexpr = cache_ptr.dtype.element_ty
        column = tl.arange(0, L)
        latent = tl.load(kv_c_ptr + token * kv_c_stride_t + column)
        tl.store(cache_row_ptr + column, _stored(latent, k_scale_ptr, FP8_MAX).to(out))
        k_first = tl.load(k_pe_ptr + token * k_pe_stride_t + first).to(tl.float32)
        k_second = tl.load(k_pe_ptr + token * k_pe_stride_t + second).to(tl.float32)
        rotated_k_first = (k_first * cos - k_second * sin).to(act)
        rotated_k_second = (k_second * cos + k_first * sin).to(act)
        tl.store(cache_row_ptr + L + first, _stored(rotated_k_first, k_scale_ptr, FP8_MAX).to(out))
        tl.store(cache_row_ptr + L + second, _stored(rotated_k_second, k_scale_ptr, FP8_MAX).to(out))


@triton.jit
def concat_kernel(
    absorbed_ptr, rotated_ptr, out_ptr, q_scale_ptr, R: tl.constexpr, L: tl.constexpr, FP8_MAX: tl.constexpr
):  # fmt: skip
    """Write a row of [T*N, L+R]: the absorbed query, then the rotated one."""
    row = tl.program_id(0).to(tl.int64)
    out: tl.constexpr = out_ptr.dtype.element_ty
    latent, rope = tl.arange(0, L), tl.arange(0, R)
    out_row_ptr = out_ptr + row * (L + R)
    tl.store(out_row_ptr + latent, _stored(tl.load(absorbed_ptr + row * L + latent), q_scale_ptr, FP8_MAX).to(out))
    tl.store(out_row_ptr + L + rope, _stored(tl.load(rotated_ptr + row * R + rope), q_scale_ptr, FP8_MAX).to(out))


class StandInBackend(KernelBackend):
    """``KernelBackend`` over the three launches. It changes none of its inputs, whereas vLLM rotates in place.

    Args:
        weight_formats: of weights; AITER's GEMMs for others than plain ones must be there.
    """

    name = STAND_IN

    def __init__(self, weight_formats: tuple[str, ...] = ("plain",)) -> None:
        self._weight_formats = weight_formats

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class."""
        if inputs.weight.format not in self._weight_formats:
            return f"AITER multiplies {inputs.weight.format} weights for vLLM, and AITER is not installed here"
        for name, width in {"rope": inputs.rope_dim, "latent": inputs.latent_dim}.items():
            if width & (width - 1):
                return f"{name} width: a power of two expected, got {width}"
        return contract_violation(inputs) or Binding(self._run, numerics=VLLM_COMPILED)

    def _run(self, inputs: DecodeInputs) -> torch.Tensor:
        q_pe, cache, table = inputs.q[..., inputs.nope_dim :], inputs.kv_cache, inputs.cos_sin_cache
        tokens, heads, widths = inputs.num_tokens, inputs.num_heads, {"R": inputs.rope_dim, "L": inputs.latent_dim}
        rotated = q_pe.new_empty(q_pe.shape)
        rope_and_write_kernel[(tokens,)](
            q_pe, rotated, inputs.k_pe, inputs.kv_c, inputs.positions, table, inputs.slot_mapping, inputs.k_scale,
            cache, q_pe.stride(0), q_pe.stride(1), table.stride(0), inputs.k_pe.stride(0), inputs.kv_c.stride(0),
            cache.stride(0), cache.stride(1), N=heads, HEADS=triton.next_power_of_2(heads), BLOCK_SIZE=cache.shape[1],
            IS_NEOX=inputs.is_neox, FP8_MAX=_fp8_max(cache.dtype), **widths,
        )  # fmt: skip
        absorbed = inputs.weight.product(inputs.q_nope)
        out: Any = q_pe.new_empty((tokens, heads, inputs.latent_dim + inputs.rope_dim), dtype=inputs.out_dtype)
        concat_kernel[(tokens * heads,)](
            absorbed, rotated, out, inputs.q_scale, FP8_MAX=_fp8_max(inputs.out_dtype), **widths
        )
        return out


def _fp8_max(dtype: torch.dtype) -> float:
    return formats.FLAVOURS[dtype].max if formats.is_fp8(dtype) else 0.0

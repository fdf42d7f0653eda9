# SPDX-License-Identifier: Apache-2.0
"""The reference back end: plain PyTorch, bit-faithful to AITER's op, our Triton kernel or vLLM's own, by ``Numerics``.

It runs anywhere, never synchronises with the device and allocates only temporaries, so that a graph can capture it.
Formulas: csrc/kernels/cache_kernels.cu of ROCm/aiter, summarised in docs/kernels.md.
"""

from functools import partial

import torch

from vllm_aiter_mla.kernels import formats
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend, Numerics
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation

AITER = Numerics()
TRITON = Numerics(saturates=True)
VLLM_COMPILED = Numerics("vllm-compiled", saturates=True)
VLLM_KERNEL = Numerics("vllm-kernel", saturates=True)
VLLM_FNUZ_MAX = 224.0  # what vLLM clamps a query to on gfx942; its KV rows go up to 240


class ReferenceBackend(KernelBackend):
    """The reference as a back end: takes whatever the shared contract allows; ``numerics`` says how it rounds."""

    name = "reference"
    trusted = True

    def __init__(self, numerics: Numerics = AITER) -> None:
        self._numerics = numerics

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class."""
        run = partial(prepare, numerics=self._numerics)
        return contract_violation(inputs) or Binding(run, numerics=self._numerics)


def prepare(inputs: DecodeInputs, numerics: Numerics = AITER, q_latent: torch.Tensor | None = None) -> torch.Tensor:
    """Absorb, rotate, quantise and concatenate the query; write the KV rows.

    Args:
        inputs: the operands, which keep the shared contract; only rows of ``kv_cache`` whose slot is >= 0 are written.
        numerics: which roundings to follow.
        q_latent: [T, N, L], the absorbed query; by default the weight's reference product.

    Returns:
        q_prepared [T, N, L+R] of ``inputs.out_dtype``, contiguous; every row is defined, padded ones included. With M
        heads [T, M, L+R], of which the real ones are defined.
    """
    buffer = inputs.new_query()
    if inputs.num_tokens == 0:
        return buffer
    q_out = inputs.real_heads(buffer)
    cos, sin = gather_cos_sin(inputs.cos_sin_cache, inputs.positions)
    q_pe, computed_in = inputs.q[..., inputs.nope_dim :], _rotates_in(numerics, inputs.q.dtype)
    q_rot = rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1), inputs.is_neox, computed_in)
    inv_q = _reciprocal(inputs.q_scale)
    q_latent = inputs.weight.reference(inputs.q_nope) if q_latent is None else q_latent
    q_out[..., : inputs.latent_dim] = store_nope(q_latent, inv_q, inputs.out_dtype, numerics)
    q_out[..., inputs.latent_dim :] = store_rope(q_rot, inv_q, inputs.out_dtype, inputs.q.dtype, numerics)
    if inputs.out_dtype == torch.float8_e4m3fnuz and numerics.rounding != "aiter":
        # get_fp8_min_max in vllm/model_executor/layers/quantization/utils/quant_utils.py
        q_out.copy_(q_out.float().clamp(-VLLM_FNUZ_MAX, VLLM_FNUZ_MAX).to(inputs.out_dtype))
    if inputs.kv_cache.numel():
        scatter_rows(inputs.kv_cache, inputs.slot_mapping, kv_rows(inputs, cos, sin, numerics))
    return buffer


def gather_cos_sin(cos_sin_cache: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the table at the clamped positions: two float32 tensors [T, R/2]."""
    rows = cos_sin_cache.index_select(0, positions.clamp(0, cos_sin_cache.shape[0] - 1)).float()
    cos, sin = rows.chunk(2, dim=-1)
    return cos, sin


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Rotate pairs of the last dimension in ``dtype``: products and sums are rounded to it.

    Args:
        x: [..., R] activation dtype.
        cos, sin: [..., R/2] float32, broadcastable.
        is_neox: True pairs (i, i + R/2), False pairs (2i, 2i+1).
        dtype: float32, in which products of 16-bit values are exact, or the activation dtype.

    Returns:
        [..., R] of ``dtype``.
    """
    x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
    if is_neox:
        first, second = x.chunk(2, dim=-1)
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(rotated, dim=-1) if is_neox else torch.stack(rotated, dim=-1).flatten(-2)


def store_nope(
    x: torch.Tensor, inv_scale: torch.Tensor, out_dtype: torch.dtype, numerics: Numerics = AITER
) -> torch.Tensor:
    """Return un-rotated values as they are stored: the bits themselves, or saturated fp8 of x * inv_scale.

    vLLM keeps a NaN there; AITER's op and our kernel make it the lowest value.
    """
    if not formats.is_fp8(out_dtype):
        return x
    keep_nan = numerics.rounding != "aiter"
    return formats.round_saturating(x.float() * inv_scale, formats.FLAVOURS[out_dtype], keep_nan)


def store_rope(
    rotated: torch.Tensor, inv_scale: torch.Tensor, out_dtype: torch.dtype, act: torch.dtype, numerics: Numerics
) -> torch.Tensor:
    """Return rotated values as they are stored: rounded to the activation dtype, or fp8, or both; NaN stays NaN."""
    if not formats.is_fp8(out_dtype):
        return rotated.to(act)
    scaled = (rotated if numerics.rounding == "aiter" else rotated.to(act).float()) * inv_scale
    if numerics.saturates:
        return formats.round_saturating(scaled, formats.FLAVOURS[out_dtype], keep_nan=True)
    return formats.round_overflowing(scaled, formats.FLAVOURS[out_dtype])


def kv_rows(inputs: DecodeInputs, cos: torch.Tensor, sin: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """Return the KV rows [T, L+R] in the cache's dtype, those without a slot included."""
    inv_k = _reciprocal(inputs.k_scale)
    out_dtype, act = inputs.kv_cache.dtype, inputs.kv_c.dtype
    k_rot = rotate(inputs.k_pe, cos, sin, inputs.is_neox, _rotates_in(numerics, act))
    if numerics.truncate_cache_rope and out_dtype == torch.bfloat16:
        k_stored = (k_rot.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)  # the upper 16 bits
    else:
        k_stored = store_rope(k_rot, inv_k, out_dtype, act, numerics)
    width = inputs.latent_dim + inputs.rope_dim
    rows = torch.empty((inputs.num_tokens, width), dtype=out_dtype, device=inputs.kv_c.device)
    rows[:, : inputs.latent_dim] = store_nope(inputs.kv_c, inv_k, out_dtype, numerics)
    rows[:, inputs.latent_dim :] = k_stored
    return rows


def scatter_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write ``rows`` [T, D] to ``cache`` [blocks, block_size, D] at ``slots`` [T]; a slot of -1 touches no byte.

    A boolean mask would synchronise with the device. So a row without a slot repeats the write of the first row that
    has one; if no row has one, it writes the bytes that are already there.
    """
    valid = slots >= 0
    # int32, because argmax of bool is missing on some devices. Any of the equal maxima is right.
    donor = valid.to(torch.int32).argmax()
    source = torch.where(valid, torch.arange(slots.shape[0], device=slots.device), donor)
    target = slots[source].clamp(min=0)
    block = torch.div(target, cache.shape[1], rounding_mode="floor")
    offset = target - block * cache.shape[1]
    # Bytes for fp8: indexed assignment is not implemented for it everywhere.
    raw = cache.view(torch.uint8) if formats.is_fp8(cache.dtype) else cache
    data = rows.view(torch.uint8) if formats.is_fp8(cache.dtype) else rows
    raw[block, offset] = torch.where(valid.any(), data[source], raw[block, offset])


def _rotates_in(numerics: Numerics, act: torch.dtype) -> torch.dtype:
    return act if numerics.rounding == "vllm-kernel" else torch.float32


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """fp32(1)/scale of element 0, on its device: AITER multiplies by the reciprocal instead of dividing."""
    return scale.reshape(-1)[0].reciprocal()

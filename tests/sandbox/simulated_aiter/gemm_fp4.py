"""AITER's mxfp4 quantisation and its batched GEMM over mxfp4 weights, written apart from the reference.

Source: ``_mxfp4_quant_op``, ``dynamic_mxfp4_quant`` and ``batched_gemm_a16wfp4`` below aiter/ops/triton/.
"""

from __future__ import annotations

import torch

from tests.sandbox.simulated_aiter.op import arch

# What a test wants to know about the calls so far: heads, rows, and whether the result was divided.
calls: list[tuple[int, int, bool]] = []

# Magnitudes by code, those with an even mantissa first, so that a tie finds them first.
_CODES = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
_MAGNITUDES = torch.tensor([0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0])


def dynamic_mxfp4_quant(x: torch.Tensor, scaling_mode: str = "even") -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> codes uint8 [M, K/2], low half first, and e8m0 scales uint8 [M, K/32], the transpose of a buffer."""
    assert scaling_mode == "even", f"no scaling mode {scaling_mode}"
    assert x.dim() == 2, f"{x.dim()} dimensions"
    codes, exponents = _encoded(x)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low + 16 * high).to(torch.uint8), (exponents + 127).to(torch.uint8).T.contiguous().T


def batched_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = torch.bfloat16,
    y: torch.Tensor | None = None,
    config: dict | None = None,
    transpose_bm: bool | None = False,
    prequant: bool | None = True,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [B, M, K] times the transpose of w [B, N, K/2] mxfp4: [B, M, N], or [M, B, N] with ``transpose_bm``."""
    # AITER asserts these as well: exceptions, not aborts.
    assert prequant is True, "prequant = False is not supported"
    assert arch() == "gfx950", "MXFP4 is not available on your device"
    assert x.shape[0] == w.shape[0], f"{x.shape[0]} and {w.shape[0]} batches"
    if config is not None:
        raise NotImplementedError("only vLLM's calls are simulated")
    calls.append((x.shape[0], x.shape[1], y_scale is not None))
    width = x.shape[2]
    if width & (width - 1):
        # Its block does not divide K, and the bound of the load of x is the packed width, half of K.
        x = torch.cat([x[..., : width // 2], torch.zeros_like(x[..., width // 2 :])], -1)
    product = (_decoded(*_encoded(x)) @ _unpacked(w, w_scales).transpose(1, 2)).float()
    if y_scale is not None:
        product = product * (1 / y_scale.reshape(-1)[0])
    result = product.transpose(0, 1) if transpose_bm else product
    if y is None:
        return result.to(dtype).contiguous()
    assert y.shape == result.shape, f"Output dimension error {list(y.shape)}, not {list(result.shape)}"
    return y.copy_(result)


def _encoded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., K] and exponents [..., K/32], both as int64."""
    groups = x.double().unflatten(-1, (-1, 32))
    fraction, exponent = torch.frexp(groups.abs().amax(-1))  # fraction in [0.5, 1)
    floor = torch.where(fraction >= 0.875, exponent, exponent - 1).long()
    floor = torch.where(floor == 128, 999, floor)  # the carry makes an infinity of it in float32
    exponents = torch.where(fraction == 0, -127, floor - 2).clamp(-127, 127)
    scaled = groups * torch.exp2(-exponents.double())[..., None]
    nearest = (scaled.abs()[..., None] - _MAGNITUDES.double()).abs().argmin(-1)
    codes = _CODES[nearest] + 8 * groups.signbit().long()
    return codes.flatten(-2), exponents


def _decoded(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """[..., K] in double, exact."""
    values = torch.empty(16, dtype=torch.float64)
    values[_CODES], values[_CODES + 8] = _MAGNITUDES.double(), -_MAGNITUDES.double()
    return values[codes] * torch.exp2(exponents.double()).repeat_interleave(32, -1)


def _unpacked(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    codes = torch.stack([packed.long() % 16, packed.long() // 16], -1).flatten(-2)
    return _decoded(codes, scales.long() - 127)

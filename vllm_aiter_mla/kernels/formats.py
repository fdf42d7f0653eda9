# SPDX-License-Identifier: Apache-2.0
"""The number formats below 16 bits, and how AITER rounds into them.

fp8 is e4m3 in one of two flavours. mxfp4 is the OCP microscaling format: e2m1 values in groups of 32 under one power of
two. Two values share a byte, the even one in its low half. A scale is e8m0: byte b means 2**(b - 127), and 255 NaN.
"""

from dataclasses import dataclass

import torch

MXFP4_GROUP = 32
MXFP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TOP_EXPONENT = 2  # of the largest value, 6 = 1.5 * 2**2
_LARGEST_SCALE = 254  # means 2**127; 254 - b is the scale whose power is the inverse of b's


@dataclass(frozen=True, slots=True)
class Fp8Flavour:
    """One e4m3 encoding."""

    dtype: torch.dtype  # torch's type
    max: float  # largest finite value
    last: float  # largest float32 that a non-saturating, round-to-nearest-even cast turns into ``max``
    nan: int  # byte of a NaN


# e4m3fn (gfx950, sm90): 448 has mantissa 110, so the tie 464 rounds down to it; there is no 480.
E4M3FN = Fp8Flavour(torch.float8_e4m3fn, 448.0, 464.0, 0x7F)
# e4m3fnuz (gfx942): 240 has mantissa 111, so the tie 248 rounds up, which is NaN's encoding.
E4M3FNUZ = Fp8Flavour(torch.float8_e4m3fnuz, 240.0, 248.0 - 2**-16, 0x80)
FLAVOURS = {flavour.dtype: flavour for flavour in (E4M3FN, E4M3FNUZ)}


def is_fp8(dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` is one of the two e4m3 flavours."""
    return dtype in FLAVOURS


def round_saturating(x: torch.Tensor, flavour: Fp8Flavour, keep_nan: bool = False) -> torch.Tensor:
    """Round float32 to fp8, clamping to +-max first. NaN stays NaN, or gives -max as in AITER's un-rotated half.

    AITER clamps with ``v_med3_f32`` (csrc/include/aiter_opus_plus.h), the median of value and bounds. By AMD's ISA
    manuals it returns the least operand if one of them is a NaN, hence -max. Inferred, not measured.
    """
    clamped = torch.where(x.isnan(), -flavour.max, x.clamp(-flavour.max, flavour.max)).to(flavour.dtype)
    if not keep_nan:
        return clamped
    return torch.where(x.isnan(), flavour.nan, clamped.view(torch.uint8)).view(flavour.dtype)


def round_overflowing(x: torch.Tensor, flavour: Fp8Flavour) -> torch.Tensor:
    """Round float32 to fp8 without saturation: overflow gives NaN. AITER rounds the rotated half like this.

    torch's own CPU casts treat overflow differently for the two flavours, so it is handled here.
    """
    rounded = x.clamp(-flavour.max, flavour.max).to(flavour.dtype).view(torch.uint8)
    return torch.where(x.abs() <= flavour.last, rounded, flavour.nan).view(flavour.dtype)


def quantise_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x [..., K], K a multiple of 32, to codes [..., K/2] and scales [..., K/32], both uint8 and contiguous.

    A group's scale is the power of two that puts its largest magnitude below 7. Values above 6 then become 6, others
    go to the nearest value, and a tie to the one with an even mantissa. A NaN is not modelled.
    Source: ``_mxfp4_quant_op`` in AITER's Triton sources, which vLLM's Quark helper calls for weights.
    """
    groups = x.float().unflatten(-1, (-1, MXFP4_GROUP))
    # Adding a quarter to the mantissa carries into the exponent from 1.75 on: such a group takes the next power.
    exponent = (groups.abs().amax(-1).view(torch.int32) + 0x200000) >> 23
    scales = torch.where(exponent == 0xFF, _LARGEST_SCALE, (exponent - _TOP_EXPONENT).clamp(min=0)).to(torch.uint8)
    codes = _e2m1_codes(groups * _power_of_two(_LARGEST_SCALE - scales)[..., None]).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def dequantise_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., K] of codes [..., K/2] and scales [..., K/32]: exact, unless the scale leaves float32."""
    table = torch.tensor([sign * level for sign in (1.0, -1.0) for level in MXFP4_LEVELS], device=codes.device)
    values = table[torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2).long()]
    return (values.unflatten(-1, (-1, MXFP4_GROUP)) * _power_of_two(scales)[..., None]).flatten(-2)


def _power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes -> float32."""
    return scales.view(torch.float8_e8m0fnu).float()


def _e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """float32 -> e2m1 codes in the low half of uint8."""
    magnitude = x.abs()
    # Values lie 0.5 apart up to 2, 1 up to 4, 2 up to 6; torch.round takes a tie to the even multiple of that.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = ((magnitude / step).round() * step).clamp(max=MXFP4_LEVELS[-1])
    levels = torch.tensor(MXFP4_LEVELS, device=x.device)
    return torch.searchsorted(levels, rounded.contiguous()).to(torch.uint8) | (x.signbit().to(torch.uint8) << 3)

"""mxfp4: e2m1 values in groups of 32 under one power of two, by the OCP microscaling formats, as AITER rounds into it.

Two values lie in a byte, the even one in its low half. A scale is e8m0: byte b stands for 2**(b - 127), 255 for NaN.
"""

from __future__ import annotations

import torch

GROUP = 32
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TOP = 2  # exponent of the largest value, 6 = 1.5 * 2**2
_LARGEST = 254  # the largest scale that is no NaN, 2**127; 254 - b is the scale whose power is b's inverse


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K], K a multiple of 32 -> codes [..., K/2] and scales [..., K/32], both uint8 and contiguous.

    A group's scale is the power of two that puts its largest magnitude below 7; what then lies above 6 becomes 6, what
    lies between two values goes to the nearer one, a tie to the one with an even mantissa. A NaN is not modelled.
    Source: ``_mxfp4_quant_op`` in AITER's Triton sources, which vLLM's Quark helper calls for weights.
    """
    groups = x.float().unflatten(-1, (-1, GROUP))
    # Adding a quarter to the mantissa carries into the exponent from 1.75 on: such a group takes the next power.
    exponent = (groups.abs().amax(-1).view(torch.int32) + 0x200000) >> 23
    scales = torch.where(exponent == 0xFF, _LARGEST, (exponent - _TOP).clamp(min=0)).to(torch.uint8)
    scaled = groups * power_of_two(_LARGEST - scales)[..., None]
    return _pack(_encode(scaled).flatten(-2)), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [..., K/2] and scales [..., K/32] -> float32 [..., K]: exact, unless the scale leaves float32."""
    table = torch.tensor([sign * level for sign in (1.0, -1.0) for level in LEVELS], device=codes.device)
    values = table[torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2).long()]
    return (values.unflatten(-1, (-1, GROUP)) * power_of_two(scales)[..., None]).flatten(-2)


def power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes -> float32."""
    return scales.view(torch.float8_e8m0fnu).float()


def _encode(x: torch.Tensor) -> torch.Tensor:
    """float32 -> e2m1 codes in the low half of uint8."""
    magnitude = x.abs()
    # Values lie 0.5 apart up to 2, 1 up to 4, 2 up to 6; torch.round takes a tie to the even multiple of that.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = ((magnitude / step).round() * step).clamp(max=LEVELS[-1])
    levels = torch.tensor(LEVELS, device=x.device)
    return torch.searchsorted(levels, rounded.contiguous()).to(torch.uint8) | (x.signbit().to(torch.uint8) << 3)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)

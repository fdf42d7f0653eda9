"""The two fp8 (e4m3) flavours of AMD hardware and the two ways AITER rounds into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Fp8Flavour:
    """One e4m3 encoding.

    Attributes:
        dtype: torch's type.
        max: largest finite value.
        overflow_from: magnitude at which a non-saturating, round-to-nearest-even cast stops giving ``max``.
        overflow_from_is_max: whether that very magnitude still rounds to ``max`` (a tie to an even mantissa).
        nan: byte of a NaN.
    """

    dtype: torch.dtype
    max: float
    overflow_from: float
    overflow_from_is_max: bool
    nan: int


# e4m3fn (gfx950, sm90): 448 has mantissa 110, so the tie 464 goes down to it; there is no 480.
E4M3FN = Fp8Flavour(torch.float8_e4m3fn, 448.0, 464.0, True, 0x7F)
# e4m3fnuz (gfx942): 240 has mantissa 111, so the tie 248 goes up, which is NaN's encoding.
E4M3FNUZ = Fp8Flavour(torch.float8_e4m3fnuz, 240.0, 248.0, False, 0x80)
FLAVOURS = {flavour.dtype: flavour for flavour in (E4M3FN, E4M3FNUZ)}


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether ``dtype`` is one of the two e4m3 flavours."""
    return dtype in FLAVOURS


def flavour_of(dtype: torch.dtype) -> Fp8Flavour:
    """The flavour of an fp8 dtype.

    Raises:
        ValueError: ``dtype`` is no e4m3 type.
    """
    try:
        return FLAVOURS[dtype]
    except KeyError:
        raise ValueError(f"no e4m3 dtype: {dtype}") from None


def round_saturating(x: torch.Tensor, flavour: Fp8Flavour) -> torch.Tensor:
    """Round float32 to fp8, clamping to +-max first; NaN gives -max (AITER's nope half).

    AITER clamps with ``v_med3_f32`` (csrc/include/aiter_opus_plus.h), the median of value and bounds; AMD's ISA manuals
    have it return the least operand if one is a NaN, hence -max. Inferred, not measured.
    """
    clamped = torch.where(x.isnan(), -flavour.max, x.clamp(-flavour.max, flavour.max))
    return clamped.to(flavour.dtype)


def round_overflowing(x: torch.Tensor, flavour: Fp8Flavour) -> torch.Tensor:
    """Round float32 to fp8 without saturation: what does not round to a finite value gives NaN (AITER's rope half).

    torch's own CPU casts differ in this between the flavours, so overflow is handled here.
    """
    magnitude = x.abs()
    finite = magnitude <= flavour.overflow_from if flavour.overflow_from_is_max else magnitude < flavour.overflow_from
    rounded = x.clamp(-flavour.max, flavour.max).to(flavour.dtype).view(torch.uint8)
    return torch.where(finite, rounded, torch.full_like(rounded, flavour.nan)).view(flavour.dtype)


def ordinal(x: torch.Tensor) -> torch.Tensor:
    """Map fp8 values to integers so that neighbours differ by one; NaN maps to 1 << 16. int32, same shape."""
    flavour = flavour_of(x.dtype)
    raw = x.contiguous().view(torch.uint8).to(torch.int32)
    magnitude = raw & 0x7F
    signed = torch.where(raw >= 0x80, -magnitude, magnitude)
    nan = raw == 0x80 if flavour is E4M3FNUZ else magnitude == 0x7F
    return torch.where(nan, 1 << 16, signed)


def step_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance in representable fp8 values between two tensors of one flavour; two NaNs are equal. int32."""
    return (ordinal(a) - ordinal(b)).abs()

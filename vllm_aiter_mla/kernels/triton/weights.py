"""The forms of the absorbed weight that the kernel multiplies by, and how it reads each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_aiter_mla.kernels import fp8
from vllm_aiter_mla.kernels.absorb import AbsorbWeight, Fp8Weight, Mxfp4Weight, PlainWeight
from vllm_aiter_mla.kernels.triton.tiles import BLOCK_K

# Below 16 neither the matrix instructions nor 16-byte accesses have anything to work on.
MIN_WIDTH = 16
# Along the reduction one fp8 matrix instruction multiplies 32 values.
MIN_FP8_WIDTH = 32


@dataclass(frozen=True, slots=True)
class Operand:
    """What the kernel loads of a weight.

    Attributes:
        name: of ``values``, as a skip names it.
        values: [N, P, L] in the activation dtype, or e4m3 codes; uint8 [N, P/2, L] of mxfp4; a view.
        scale: one float32 of e4m3 codes, e8m0 uint8 [N, L, P/32] of mxfp4, or None.
    """

    name: str
    values: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def fp8_max(self) -> float:
        """Largest value of the codes' type; 0 for values in the activation dtype."""
        return fp8.flavour_of(self.values.dtype).max if fp8.is_fp8(self.values.dtype) else 0.0

    @property
    def is_mxfp4(self) -> bool:
        """Whether the values are pairs of mxfp4 codes."""
        return self.values.dtype == torch.uint8

    @property
    def scale_strides(self) -> tuple[int, ...]:
        """Strides of mxfp4's scales along N, L and P/32; zeros for the other forms."""
        return self.scale.stride() if self.is_mxfp4 and self.scale is not None else (0, 0, 0)


def operand(weight: AbsorbWeight) -> Operand | str:
    """What the kernel loads of ``weight``, without a copy, or why it cannot multiply by that form."""
    if isinstance(weight, PlainWeight):
        return Operand("w_uk_t", weight.w_uk_t)
    if isinstance(weight, Fp8Weight):
        return Operand("W_K", weight.codes.transpose(1, 2), weight.scale)
    if isinstance(weight, Mxfp4Weight):
        return Operand("W_K", weight.codes.transpose(1, 2), weight.scales)
    return f"W_UK: the form plain, fp8 or mxfp4 expected, got {weight.form}; {weight.avoid}"


def width_violation(nope: int, weight: Operand) -> str | None:
    """Why the reduction over P = ``nope`` cannot be cut into blocks, or None: 128 each, the rest a power of two.

    Over mxfp4 a power of two: at other widths vLLM's own GEMM drops values, so that nothing right runs beside this.
    """
    if weight.is_mxfp4:
        taken = nope >= BLOCK_K and not nope & (nope - 1)
        return None if taken else f"nope width: 128, 256, 512 and so on expected over mxfp4, got {nope}"
    least, rest = MIN_FP8_WIDTH if weight.fp8_max else MIN_WIDTH, nope % BLOCK_K
    if nope >= least and (rest == 0 or (rest >= least and rest & (rest - 1) == 0)):
        return None
    return f"nope width: blocks of {BLOCK_K} and a power of two from {least} on expected, got {nope}"

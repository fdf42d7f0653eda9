"""The forms of the absorbed weight that the kernel multiplies by, and how it reads each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_aiter_mla.kernels import fp8
from vllm_aiter_mla.kernels.absorb import AbsorbWeight, Fp8Weight, PlainWeight
from vllm_aiter_mla.kernels.triton.tiles import BLOCK_K

# Below 16 neither the matrix instructions nor 16-byte accesses have anything to work on.
MIN_WIDTH = 16
# Along the reduction one fp8 matrix instruction multiplies 32 values.
MIN_FP8_WIDTH = 32


@dataclass(frozen=True, slots=True)
class Operand:
    """What the kernel loads of a weight.

    Attributes:
        name: of ``values``, as a refusal names it.
        values: [N, P, L] in the activation dtype, or e4m3 codes; a view.
        scale: one float32 of the codes, or None.
    """

    name: str
    values: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def fp8_max(self) -> float:
        """Largest value of the codes' type; 0 for values in the activation dtype."""
        return fp8.flavour_of(self.values.dtype).max if fp8.is_fp8(self.values.dtype) else 0.0


def operand(weight: AbsorbWeight) -> Operand | str:
    """What the kernel loads of ``weight``, without a copy, or why it cannot multiply by that form."""
    if isinstance(weight, PlainWeight):
        return Operand("w_uk_t", weight.w_uk_t)
    if isinstance(weight, Fp8Weight):
        return Operand("W_K", weight.codes.transpose(1, 2), weight.scale)
    return f"W_UK: the form plain or fp8 expected, got {weight.form}; {weight.avoid}"


def width_violation(nope: int, is_fp8: bool) -> str | None:
    """Why the reduction over P = ``nope`` cannot be cut into blocks, or None: 128 each, the rest a power of two."""
    least, rest = MIN_FP8_WIDTH if is_fp8 else MIN_WIDTH, nope % BLOCK_K
    if nope >= least and (rest == 0 or (rest >= least and rest & (rest - 1) == 0)):
        return None
    return f"nope width: blocks of {BLOCK_K} and a power of two from {least} on expected, got {nope}"

"""How far apart two results of one call are, in representable steps of the stored type, and what still agrees."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_aiter_mla.kernels import fp8


@dataclass(frozen=True, slots=True)
class Bounds:
    """What still counts as agreement, in representable steps of the stored type (PR vllm-project/vllm#55230's bar).

    Attributes:
        nope_steps: largest distance in the un-rotated part.
        rope_steps: largest distance in the rotated part.
        rope_share: largest share of rotated elements that differ at all.
        slack: differences of the query's un-rotated part up to this share of its largest magnitude do not count.
    """

    nope_steps: int = 0
    rope_steps: int = 1
    rope_share: float = 0.01
    slack: float = 0.0


EXACT = Bounds()
# A kernel with a BMM of its own sums in another order: a step here and there, many of them next to zero.
OWN_BMM = Bounds(nope_steps=1, slack=2**-8)


@dataclass(frozen=True, slots=True)
class Difference:
    """Distance of one tensor part from the reference: largest step and share of elements that differ."""

    steps: int
    share: float


def difference(a: torch.Tensor, b: torch.Tensor, slack: float = 0.0) -> Difference:
    """Largest distance in representable values, and share of elements that differ, of two tensors of one dtype.

    Differences up to ``slack`` times the largest magnitude in ``b`` do not count.
    """
    if not a.numel():
        return Difference(0, 0.0)
    steps = (steps_of(a) - steps_of(b)).abs()
    if slack:
        near = (a.float() - b.float()).abs() <= slack * b.float().abs().max()
        steps = torch.where(near, 0, steps)
    return Difference(int(steps.max()), float((steps > 0).double().mean()))


def deviation(product: torch.Tensor, expected: torch.Tensor) -> float:
    """||product - expected|| / ||expected||; infinite where shape or dtype differ, or the result is no number."""
    if product.shape != expected.shape or product.dtype != expected.dtype:
        return float("inf")
    distance = (product.float() - expected.float()).norm() / expected.float().norm()
    return float("inf") if distance.isnan() else float(distance)


def norm_bound(product_bound: float, dtype: torch.dtype) -> float:
    """The largest ``deviation`` of a prepared query whose product may be ``product_bound`` off.

    A product that is 1 % off is 2.3 % off once both sides are rounded to fp8; a wrong scale or rounding costs 5 %.
    """
    return product_bound * (3 if fp8.is_fp8(dtype) else 1)


def steps_of(x: torch.Tensor) -> torch.Tensor:
    """Map floating-point values to integers so that neighbours differ by one. int64, same shape; NaNs are all equal."""
    if fp8.is_fp8(x.dtype):
        return fp8.ordinal(x).to(torch.int64)
    integer = {2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    raw = x.contiguous().view(integer).to(torch.int64)
    magnitude = raw & ((1 << (8 * x.dtype.itemsize - 1)) - 1)
    signed = torch.where(raw < 0, -magnitude, magnitude)
    return torch.where(x.isnan(), 1 << 40, signed)

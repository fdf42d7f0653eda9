# SPDX-License-Identifier: Apache-2.0
"""How far a result is from the one that was expected: in representable steps, or as a share of the norm."""

import math
from dataclasses import dataclass

import torch

ROW_BOUNDS = 10
"""How many bounds of a whole product one of its rows may be off; see ``why_off``."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two tensors are apart, counted in the values that their dtype can represent."""

    steps: int  # between the two elements that are the furthest apart
    share: float  # of the elements that differ at all, from 0 to 1


def difference(got: torch.Tensor, wanted: torch.Tensor, slack: float = 0.0) -> Difference:
    """Return how far two tensors of one shape and floating-point dtype are apart; empty ones are equal.

    Elements that differ by up to ``slack`` times the largest magnitude in ``wanted`` count as equal.
    """
    if not got.numel():
        return Difference(0, 0.0)
    steps = (ordinals(got) - ordinals(wanted)).abs()
    if slack:
        near = (got.float() - wanted.float()).abs() <= slack * wanted.float().abs().max()
        steps = torch.where(near, 0, steps)
    return Difference(int(steps.max()), float((steps > 0).double().mean()))


def deviation(product: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||product - expected|| / ||expected||; infinite if shape or dtype differ, or the result is NaN."""
    if product.shape != expected.shape or product.dtype != expected.dtype:
        return float("inf")
    distance = (product.float() - expected.float()).norm() / expected.float().norm()
    return float("inf") if distance.isnan() else float(distance)


def why_off(product: torch.Tensor, expected: torch.Tensor, bound: float) -> str:
    """Return why a product is further from the expected one than ``bound`` allows, or "".

    The bound is for ``deviation``. One wrong row among thousands hardly moves that, so each row has a bound as well:
    one code of a quantised activation moves a row by up to two bounds, sixteen lost columns of 512 move it by eighteen.
    """
    whole = deviation(product, expected)
    if math.isinf(whole):
        return "of another shape or dtype, or NaN"
    if whole > bound:
        return f"{whole:.2%} off by its norm, {bound:.0%} may be"
    wanted = expected.float().norm(dim=-1)
    distances = (product.float() - expected.float()).norm(dim=-1)
    row = float((distances / wanted.clamp_min(torch.finfo(torch.float32).tiny)).max())
    return f"one row is {row:.0%} off by its norm, {ROW_BOUNDS * bound:.0%} may be" if row > ROW_BOUNDS * bound else ""


def ordinals(x: torch.Tensor) -> torch.Tensor:
    """Map floating-point values to integers so that neighbours differ by 1. int64, same shape; NaNs are all equal."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.itemsize]
    raw = x.contiguous().view(integer).to(torch.int64)
    magnitude = raw & torch.iinfo(integer).max
    signed = torch.where(raw < 0, -magnitude, magnitude)
    return torch.where(x.float().isnan(), 1 << 40, signed)

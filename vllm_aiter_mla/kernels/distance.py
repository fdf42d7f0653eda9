# SPDX-License-Identifier: Apache-2.0
"""How far a result is from the one that was expected: in representable steps, or as a share of the norm."""

import math
from dataclasses import dataclass

import torch

from vllm_aiter_mla.kernels.formats import is_fp8

ROW_BOUNDS = 10
"""How many bounds of a whole product one of its rows may be off; see ``why_off``."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two tensors are apart, counted in the values that their dtype can represent."""

    steps: int  # between the two elements that are the furthest apart
    share: float  # of the elements that differ at all, from 0 to 1


def difference(got: torch.Tensor, wanted: torch.Tensor, slack: float = 0.0) -> Difference:
    """Return how far two tensors of one shape and floating-point dtype are apart; empty ones are equal.

    Elements that differ by up to ``slack`` times the largest finite magnitude in ``wanted`` count as equal.

    Raises:
        ValueError: the shapes differ.
    """
    if got.shape != wanted.shape:
        raise ValueError(f"tensors of one shape expected, got {list(got.shape)} and {list(wanted.shape)}")
    if not got.numel():
        return Difference(0, 0.0)
    steps = (ordinals(got) - ordinals(wanted)).abs()
    if slack:
        largest = wanted.float().nan_to_num(0.0, 0.0, 0.0).abs().max()
        near = (got.float() - wanted.float()).abs() <= slack * largest
        steps = torch.where(near, 0, steps)
    return Difference(int(steps.max()), float((steps > 0).double().mean()))


def is_within(found: Difference, steps: int, share: float, elements: int) -> bool:
    """Return whether a difference is within bounds. One element may always be off: a KV row has 64 rotated ones."""
    return found.steps <= steps and found.share <= max(share, 1 / max(elements, 1))


def norm_bound(product_bound: float, dtype: torch.dtype) -> float:
    """Return how far a query that holds a product may be off, where the product itself may be off by ``product_bound``.

    A product that is 1 % off is 2.3 % off once both sides are rounded to fp8. A wrong scale or rounding costs 5 %.
    """
    return product_bound * (3 if is_fp8(dtype) else 1)


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

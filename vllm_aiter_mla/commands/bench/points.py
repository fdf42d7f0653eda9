"""What is measured: the grid of calls, their operands, and the bytes and operations each of them must cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, synthetic_inputs

NOPE, ROPE, LATENT, BLOCK_SIZE = 128, 64, 512, 64
MAX_POSITION = 4096
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
HEADS = (8, 16, 32, 64, 128)
ACT = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Point:
    """One call: T tokens, N heads, fp8 (query and cache) or bfloat16, absorb weights of one byte or of two."""

    tokens: int
    heads: int
    quantised: bool
    fp8_weight: bool = False

    @property
    def label(self) -> str:
        """Types, for a table: of query and cache, and of the weight where it is fp8."""
        return ("fp8" if self.quantised else "bf16") + ("/w8" if self.fp8_weight else "")

    @property
    def item(self) -> int:
        """Bytes of a stored value."""
        return 1 if self.quantised else 2

    @property
    def bytes_once(self) -> int:
        """Bytes that must move, each counted once: weights, q, latent, k_pe and table rows, query and cache rows."""
        t, n = self.tokens, self.heads
        weights = n * NOPE * LATENT * (1 if self.fp8_weight else 2)
        read = t * n * (NOPE + ROPE) * 2 + t * (LATENT + ROPE) * 2 + t * (ROPE * 2 + 16)
        written = t * (n + 1) * (LATENT + ROPE) * self.item
        return weights + read + written

    @property
    def flops(self) -> int:
        """Operations of the absorb BMM; the rest is below a hundredth of them."""
        return 2 * self.tokens * self.heads * NOPE * LATENT


def grid(tokens: Sequence[int], heads: Sequence[int], kinds: Sequence[bool], fp8_weight: bool = False) -> list[Point]:
    """All points, quantised ones first, by heads, then by tokens."""
    return [Point(t, n, kind, fp8_weight) for kind in kinds for n in heads for t in tokens]


def operands(point: Point, fp8_dtype: torch.dtype, count: int, device: str = "cuda") -> list[DecodeInputs]:
    """``count`` independent sets with weights, q, latent and cache of their own, as different layers have them."""
    g = torch.Generator(device=device).manual_seed(0)
    table = torch.randn(MAX_POSITION, ROPE, generator=g, device=device).to(ACT)
    stored = fp8_dtype if point.quantised else ACT
    weight = ("fp8", fp8_dtype) if point.fp8_weight else ("plain",)
    shape = LayerShape(point.heads, NOPE, stored, stored, BLOCK_SIZE, False, ACT, device, LATENT, ROPE, weight)
    return [synthetic_inputs(shape, point.tokens, padded=None, table=table, generator=g) for _ in range(count)]

"""Sizes and dtypes of a run: small on a CPU, a real layer on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_aiter_mla.kernels import formats as fp8


@dataclass(frozen=True, slots=True)
class Geometry:
    """One MLA layer as a rank sees it.

    Attributes:
        heads: query heads.
        nope: un-rotated width of a query head.
        rope: rotated width.
        latent: ``kv_lora_rank``.
        value: width of a value head.
        block_size: of the KV cache.
        blocks: blocks a request may hold.
        max_position: rows of the rotary table; a prime, so that no other buffer has as many.
    """

    heads: int
    nope: int
    rope: int
    latent: int
    value: int
    block_size: int
    blocks: int
    max_position: int


# Widths are powers of two from 16 on: what the Triton back end takes. An interpreted launch lasts milliseconds.
SMALL = Geometry(heads=2, nope=32, rope=16, latent=32, value=16, block_size=8, blocks=3, max_position=509)
# DeepSeek's widths at 16 heads a rank (128 heads on 8 ranks).
REAL = Geometry(heads=16, nope=128, rope=64, latent=512, value=128, block_size=64, blocks=3, max_position=4099)


@dataclass(frozen=True, slots=True)
class Variant:
    """Dtypes and rotary style of a run.

    Attributes:
        name: as printed and selected.
        cache: dtype of the KV cache.
        out: dtype of the prepared query.
        is_neox: rotary style.
        act: activation dtype.
        weight: form of the absorb weight, as ``AbsorbWeight.key`` has it.
    """

    name: str
    cache: torch.dtype
    out: torch.dtype
    is_neox: bool = False
    act: torch.dtype = torch.bfloat16
    weight: tuple[Any, ...] = ("plain",)

    @property
    def quantised(self) -> bool:
        """Whether the cache is fp8."""
        return fp8.is_fp8(self.cache)


def variants(device: str, native: torch.dtype, quick: bool) -> tuple[Variant, ...]:
    """The variants of a run: fp8 and bf16 always, both fp8 flavours on a CPU, an fp8 cache beside a bf16 query.

    And fp8 absorb weights, which vLLM 0.30 to 0.32 hold by default on these cards: on one, a quick run has them too.
    """
    act, is_cpu = torch.bfloat16, device == "cpu"
    both = (Variant("fp8", native, native), Variant("bf16", act, act, is_neox=True))
    weights = Variant("fp8-weight", native, native, weight=("fp8", native))
    if quick:
        return both if is_cpu else (*both, weights)
    mixed = Variant("fp8-cache", native, act)
    if not is_cpu:
        return (*both, weights, mixed)
    other = torch.float8_e4m3fnuz if native == torch.float8_e4m3fn else torch.float8_e4m3fn
    return (*both, weights, mixed, Variant("fp8-other", other, other, is_neox=True))


def capture_sizes(limit: int, width: int = 1) -> tuple[int, ...]:
    """1, 2, 4, 8, ... up to ``limit`` and ``limit`` itself, in tokens; multiples of ``width`` where a request has more.

    vLLM captures decode graphs of speculative requests for whole requests only.

    Raises:
        ValueError: ``limit`` holds no request of ``width`` tokens.
    """
    requests = limit // width
    if requests < 1:
        raise ValueError(f"a limit of {limit} tokens holds no request of {width}")
    sizes = {1 << i for i in range(requests.bit_length()) if 1 << i <= requests} | {requests}
    return tuple(size * width for size in sorted(sizes))

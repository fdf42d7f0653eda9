"""What decides the kernel of a layer without a batch, and the one maker of synthetic operands for such a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_aiter_mla.kernels import absorb
from vllm_aiter_mla.kernels.inputs import DecodeInputs

TOKENS = 7
PADDED = 3  # the row without a slot, in the middle
PATTERN = 0x35  # the scratch cache is filled with this byte; a finite number in every type
K_SCALE, Q_SCALE = 0.053, 0.047  # no powers of two; no rotated element overflows fp8 by them
Q_LORA_RANK = 1536  # DeepSeek-V3's; it only moves k_pe away from the start of a row


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One MLA layer as the choice of a kernel sees it.

    Attributes:
        heads: query heads of this rank.
        nope_dim: width of a query head's un-rotated part.
        cache_dtype: activation dtype, or the card's fp8 type.
        out_dtype: dtype of the prepared query.
        block_size: of the KV cache.
        is_neox: the rotary style.
        act: activation dtype.
        device: where to run.
        latent: ``kv_lora_rank``.
        rope: rope width.
        weight: ``key`` of the absorbed weight: its form and dtypes.
    """

    heads: int
    nope_dim: int
    cache_dtype: torch.dtype
    out_dtype: torch.dtype
    block_size: int
    is_neox: bool
    act: torch.dtype = torch.bfloat16
    device: str | torch.device = "cpu"
    latent: int = 512
    rope: int = 64
    weight: absorb.Key = ("plain",)


def synthetic_inputs(
    shape: LayerShape,
    tokens: int = TOKENS,
    seed: int = 20260,
    *,
    padded: int | None = PADDED,
    table: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> DecodeInputs:
    """Random operands of a layer, over a scratch cache of three blocks or ``tokens`` slots and one block to spare.

    Args:
        shape: the layer; on the device "meta" the operands have no memory.
        tokens: T, 0 included.
        seed: of the generator on the CPU that is used by default: the same values on every device.
        padded: the row without a slot, the last one where there are fewer rows; None: each row has one.
        table: the rotary table; 4 * T rows by default.
        generator: where to draw from, on its own device.
    """
    width, device = shape.latent + shape.rope, torch.device(shape.device)
    if device.type == "meta":
        draw, home = None, device
    else:
        draw = torch.Generator().manual_seed(seed) if generator is None else generator
        home = draw.device

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=draw, device=home) * scale).to(shape.act).to(device)

    if table is None:
        angles = torch.rand(4 * max(tokens, 1), shape.rope // 2, generator=draw, device=home) * 6.283
        table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(shape.act).to(device)
    blocks = max(3, -(-tokens // shape.block_size) + 1)
    slots = torch.randperm(blocks * shape.block_size, generator=draw, device=home)[:tokens]
    if padded is not None:
        slots[min(padded, tokens - 1) :][:1] = -1
    # One block of another layer before it: vLLM packs the caches of all layers into one allocation.
    size = (blocks + 1, shape.block_size, width * shape.cache_dtype.itemsize)
    raw = torch.full(size, PATTERN, dtype=torch.uint8, device=device)
    weight = normal(shape.heads, shape.nope_dim, shape.latent, scale=shape.nope_dim**-0.5)
    return DecodeInputs(
        q=normal(tokens, shape.heads, shape.nope_dim + shape.rope),
        # As serving hands them over: the last columns of one projection's result, a row far from the next.
        k_pe=normal(tokens, Q_LORA_RANK + width)[:, Q_LORA_RANK + shape.latent :],
        kv_c=normal(tokens, shape.latent),
        weight=absorb.make(weight, shape.weight),
        kv_cache=raw[1:].view(shape.cache_dtype),
        slot_mapping=slots.to(device),
        positions=torch.randint(0, table.shape[0], (tokens,), generator=draw, device=home).to(device),
        cos_sin_cache=table,
        k_scale=torch.tensor(K_SCALE, dtype=torch.float32, device=device),
        q_scale=torch.tensor(Q_SCALE, dtype=torch.float32, device=device),
        is_neox=shape.is_neox,
        out_dtype=shape.out_dtype,
    )

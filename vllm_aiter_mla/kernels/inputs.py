# SPDX-License-Identifier: Apache-2.0
"""One layer and one step as every kernel back end sees them: operands, shared contract, keys, synthetic operands."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from vllm_aiter_mla.kernels import absorb, formats
from vllm_aiter_mla.kernels.absorb import AbsorbWeight

VECTOR_BYTES = 16  # of the widest memory access; where a tensor starts within it is part of a call's key

# Of synthetic operands.
TOKENS, SEED = 7, 20260
PADDED = 3  # the row without a slot, in the middle
PATTERN = 0x35  # the scratch cache is filled with this byte; a finite number in every type
K_SCALE, Q_SCALE = 0.053, 0.047  # not powers of two; with them no rotated element overflows fp8
GUARD_ROWS = 16  # before and behind a query of ``GuardedInputs``
OVERFLOW_FACTOR = 64.0  # of N(0, 1) over these scales: most of a row is then beyond fp8's range
Q_LORA_RANK = 1536  # DeepSeek-V3's; it only moves k_pe away from the start of a row


@dataclass(slots=True)  # not frozen: one is made per layer and step, and a frozen one takes five times as long
class DecodeInputs:
    """The operands of the decode-side preparation of one MLA layer.

    Sizes: T rows (graph padding included), N heads of this rank, P nope width of a query head, R rope width, L latent
    width (``kv_lora_rank``). "act" is the activation dtype (bfloat16, float16 or float32).
    """

    q: torch.Tensor  # [T, N, P+R] act, not rotated; any row and head stride, last stride 1
    k_pe: torch.Tensor  # [T, R] act, not rotated; any row stride
    kv_c: torch.Tensor  # [T, L] act, after its norm; any row stride
    weight: AbsorbWeight  # the absorbed up-projection W_UK in the format in which vLLM holds it
    # [blocks, block_size, L+R] act or the platform's fp8 type (never raw uint8). Written in place.
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor  # [T] int64; block * block_size + offset, or -1 for a row without a KV row
    positions: torch.Tensor  # [T] int64; clamped into the table as AITER does
    cos_sin_cache: torch.Tensor  # [max_position, R] act; cos in the first half of a row, sin in the second
    k_scale: torch.Tensor  # one float32, dequantisation scale of the cache: stored = fp8(x / k_scale)
    q_scale: torch.Tensor  # one float32, dequantisation scale of the query
    is_neox: bool  # True pairs (i, i + R/2), False (GPT-J, DeepSeek) pairs (2i, 2i+1)
    out_dtype: torch.dtype  # dtype of the prepared query: act, or fp8 if the cache is fp8
    out_heads: int = 0  # M, the heads that the decode kernel reads; 0 for N. See ``real_heads``.

    @property
    def num_tokens(self) -> int:
        """T, rows of q including graph padding."""
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        """N, query heads on this rank."""
        return self.q.shape[1]

    @property
    def rope_dim(self) -> int:
        """R, width of the rotated part."""
        return self.k_pe.shape[-1]

    @property
    def latent_dim(self) -> int:
        """L, ``kv_lora_rank``."""
        return self.kv_c.shape[-1]

    @property
    def nope_dim(self) -> int:
        """P, width of a query head's un-rotated part."""
        return self.q.shape[2] - self.rope_dim

    @property
    def q_nope(self) -> torch.Tensor:
        """[T, N, P], the query's un-rotated part; a view."""
        return self.q[..., : self.nope_dim]

    @property
    def tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """(name, tensor) of every operand, the weight's included."""
        return (
            ("q", self.q), ("k_pe", self.k_pe), ("kv_c", self.kv_c), ("kv_cache", self.kv_cache),
            ("slot_mapping", self.slot_mapping), ("positions", self.positions), ("cos_sin_cache", self.cos_sin_cache),
            ("k_scale", self.k_scale), ("q_scale", self.q_scale), *self.weight.tensors,
        )  # fmt: skip

    def new_query(self, padded: bool = True) -> torch.Tensor:
        """[T, N, L+R] of ``out_dtype``, contiguous and uninitialised; with ``padded`` [T, M, L+R] where M is given."""
        tokens, heads, _ = self.q.shape
        heads, width = (padded and self.out_heads) or heads, self.kv_cache.shape[-1]
        # With strides torch skips its search for a memory format: half the time of ``new_empty``.
        return self.q.new_empty_strided((tokens, heads, width), (heads * width, width, 1), dtype=self.out_dtype)

    def real_heads(self, query: torch.Tensor) -> torch.Tensor:
        """Return the N heads of a query [T, N or M, L+R], a view.

        Where N divides M, every (M / N)th is one of ours, otherwise the first N are: where vLLM looks for them in the
        result of its attention. The others may hold anything: attention does not mix heads.
        """
        heads = self.num_heads
        if query.shape[1] == heads:
            return query
        return query[:, :: self.head_step][:, :heads]

    @property
    def head_step(self) -> int:
        """From one head to the next among M."""
        step = self.out_heads // self.num_heads
        return step if step and self.out_heads % self.num_heads == 0 else 1


@dataclass(slots=True)
class GuardedInputs(DecodeInputs):
    """Operands whose prepared query lies between rows that no kernel may write: a check looks at them afterwards."""

    @classmethod
    def of(cls, inputs: DecodeInputs) -> "GuardedInputs":
        """Return the same operands with such a query."""
        return cls(*(getattr(inputs, each.name) for each in fields(inputs)))

    def new_query(self, padded: bool = True) -> torch.Tensor:
        """See the base class: a slice of a longer tensor, which ``with_guards`` returns."""
        heads, width = (padded and self.out_heads) or self.num_heads, self.kv_cache.shape[-1]
        whole = self.q.new_empty((self.num_tokens + 2 * GUARD_ROWS, heads, width), dtype=self.out_dtype)
        return whole[GUARD_ROWS:-GUARD_ROWS]


def with_guards(query: torch.Tensor) -> torch.Tensor:
    """Return a query [T, ...] and the rows around it, [GUARD_ROWS + T + GUARD_ROWS, ...], a view.

    A query that ``GuardedInputs`` did not make is returned as it is.
    """
    row, rows = query.stride(0), query.shape[0] + 2 * GUARD_ROWS
    is_guarded = query.storage_offset() == GUARD_ROWS * row
    if not is_guarded or query.untyped_storage().nbytes() != rows * row * query.itemsize:
        return query
    return query.as_strided((rows, *query.shape[1:]), query.stride(), 0)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What decides the kernel of one MLA layer, apart from the batch: the key of a layer."""

    heads: int  # query heads of this rank
    nope_dim: int  # width of a query head's un-rotated part
    cache_dtype: torch.dtype  # activation dtype, or the card's fp8 type
    out_dtype: torch.dtype  # dtype of the prepared query
    # Of the KV cache. It is not compared: a self-check on synthetic blocks must hold for the real ones.
    block_size: int = field(compare=False)
    is_neox: bool  # the rotary style
    act: torch.dtype = torch.bfloat16  # activation dtype
    device: str | torch.device = "cpu"  # where to run
    latent: int = 512  # ``kv_lora_rank``
    rope: int = 64  # rope width
    weight: absorb.Key = ("plain",)  # ``key`` of the absorbed weight: its format and dtypes
    out_heads: int = 0  # heads that the decode kernel reads; 0 for ``heads``

    def in_words(self) -> str:
        """Return it in the same words on every rank: without the device, whose index differs, and the rotary style."""
        act, cache, query = (str(t).removeprefix("torch.") for t in (self.act, self.cache_dtype, self.out_dtype))
        weight = " ".join(str(part).removeprefix("torch.") for part in self.weight)
        heads = f"{self.heads} of {self.out_heads}" if self.out_heads else f"{self.heads}"
        return (
            f"{heads} heads, widths {self.nope_dim}+{self.rope} and {self.latent}, {act}, {weight} weight, "
            f"{query} query, {cache} cache in blocks of {self.block_size}"
        )


def step_key(inputs: DecodeInputs) -> tuple[Any, ...]:
    """Return all that a kernel's contract looks at in the rows of a step."""
    q, k_pe, kv_c, slots, positions = inputs.q, inputs.k_pe, inputs.kv_c, inputs.slot_mapping, inputs.positions
    return (
        q.shape, q.stride(), q.storage_offset(), q.dtype, k_pe.shape, k_pe.stride(), k_pe.storage_offset(), k_pe.dtype,
        kv_c.shape, kv_c.stride(), kv_c.storage_offset(), kv_c.dtype, positions.shape, positions.stride(),
        positions.dtype, slots.shape, slots.stride(), slots.dtype, inputs.is_neox, inputs.out_dtype,
    )  # fmt: skip


def contract_violation(inputs: DecodeInputs) -> str | None:
    """Return the first breach of the contract that all back ends share, or None. Metadata only."""
    return next(_wrong_shapes(inputs), None) or next(_wrong_dtypes(inputs), None)


def _wrong_shapes(inputs: DecodeInputs) -> Iterator[str]:
    """What is wrong with the shapes; each check relies on those before it."""
    if inputs.q.dim() != 3:
        yield f"q: [T, N, P+R] expected, got {list(inputs.q.shape)}"
    t, n, p, r, lat = inputs.num_tokens, inputs.num_heads, inputs.nope_dim, inputs.rope_dim, inputs.latent_dim
    if p <= 0 or r <= 0 or r % 2:
        yield f"q: [T, N, P+R] with P > 0 and an even R expected, got {tuple(inputs.q.shape)}, R={r}"
    for name, shape in (("k_pe", (t, r)), ("kv_c", (t, lat)), ("slot_mapping", (t,)), ("positions", (t,))):
        given = tuple(getattr(inputs, name).shape)
        if given != shape:
            yield f"{name}: shape {list(shape)} expected, got {list(given)}"
    if inputs.out_heads and inputs.out_heads < n:
        yield f"out_heads: 0 or at least {n} expected, got {inputs.out_heads}"
    if inputs.weight.sizes != (n, p, lat):
        yield f"{inputs.weight.tensors[0][0]}: N, P and L of {[n, p, lat]} expected, got {list(inputs.weight.sizes)}"
    cache, table = inputs.kv_cache, inputs.cos_sin_cache
    if cache.dim() != 3 or cache.shape[2] != lat + r:
        yield f"kv_cache: [blocks, block_size, {lat + r}] expected, got {tuple(cache.shape)}"
    if table.dim() != 2 or table.shape[1] != r:
        yield f"cos_sin_cache: [max_position, {r}] expected, got {tuple(table.shape)}"


def _wrong_dtypes(inputs: DecodeInputs) -> Iterator[str]:
    """What is wrong with the dtypes, where the shapes are right."""
    act, cache = inputs.q.dtype, inputs.kv_cache.dtype
    for name in ("k_pe", "kv_c", "cos_sin_cache"):
        if (dtype := getattr(inputs, name).dtype) != act:
            yield f"{name}: dtype {act} (that of q) expected, got {dtype}"
    if (broken := inputs.weight.broken(act)) is not None:
        yield broken
    for name in ("slot_mapping", "positions"):
        if (dtype := getattr(inputs, name).dtype) != torch.int64:
            yield f"{name}: torch.int64 expected, got {dtype}"
    for name in ("k_scale", "q_scale"):
        scale = getattr(inputs, name)
        if scale.dtype != torch.float32 or scale.numel() < 1:
            yield f"{name}: one float32 element expected, got {scale.numel()} of {scale.dtype}"
    if cache == torch.uint8:
        yield "kv_cache: view uint8 storage as the platform's fp8 type first, got torch.uint8"
    if not formats.is_fp8(cache) and cache != act:
        yield f"kv_cache: an e4m3 type or {act} expected, got {cache}"
    if inputs.out_dtype not in (cache, act):
        yield f"out_dtype: one of {(cache, act)} expected for a {cache} cache, got {inputs.out_dtype}"


def synthetic_inputs(
    shape: LayerShape,
    tokens: int = TOKENS,
    *,
    padded: int | None = PADDED,
    generator: torch.Generator | None = None,
    large: bool = False,
) -> DecodeInputs:
    """Draw random operands of a layer. The scratch cache has three blocks, or ``tokens`` slots and a block to spare.

    Args:
        shape: the layer; on the device "meta" the operands have no memory.
        tokens: T, 0 included.
        padded: the row without a slot, the last one if there are fewer rows; None: each row has one.
        generator: where to draw from, on its own device; by default on the CPU: the same values on every device.
        large: let the cache claim to span 2 GiB, so that Triton runs the variant for such caches.
    """
    width, device = shape.latent + shape.rope, torch.device(shape.device)
    draw, home = None, device
    if device.type != "meta":
        draw = torch.Generator().manual_seed(SEED) if generator is None else generator
        home = draw.device

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=draw, device=home) * scale).to(shape.act).to(device)

    angles = torch.rand(4 * max(tokens, 1), shape.rope // 2, generator=draw, device=home) * 6.283
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(shape.act).to(device)
    blocks = max(3, -(-tokens // shape.block_size) + 1)
    slots = torch.randperm(blocks * shape.block_size, generator=draw, device=home)[:tokens]
    if padded is not None:
        slots[min(padded, tokens - 1) :][:1] = -1
    positions = torch.randint(0, table.shape[0], (tokens,), generator=draw, device=home)
    positions[:1], positions[1:2] = 0, table.shape[0] - 1  # both ends of the table, whatever is drawn
    # A block of another layer lies on either side: vLLM packs the caches of all layers into one allocation.
    size = (blocks + 2, shape.block_size, width * shape.cache_dtype.itemsize)
    raw = torch.full(size, PATTERN, dtype=torch.uint8, device=device)
    cache = raw[1:-1].view(shape.cache_dtype)
    if large:  # Triton asks a tensor for this before it asks for the size of its storage
        cache.ptr_range = lambda: 1 << 31  # type: ignore[attr-defined]
    weight = normal(shape.heads, shape.nope_dim, shape.latent, scale=shape.nope_dim**-0.5)
    return DecodeInputs(
        q=normal(tokens, shape.heads, shape.nope_dim + shape.rope),
        # As in serving: the last columns of one projection's result, a row far from the next.
        k_pe=normal(tokens, Q_LORA_RANK + width)[:, Q_LORA_RANK + shape.latent :],
        kv_c=normal(tokens, shape.latent),
        weight=absorb.make(weight, shape.weight),
        kv_cache=cache,
        slot_mapping=slots.to(device),
        positions=positions.to(device),
        cos_sin_cache=table,
        k_scale=torch.tensor(K_SCALE, dtype=torch.float32, device=device),
        q_scale=torch.tensor(Q_SCALE, dtype=torch.float32, device=device),
        is_neox=shape.is_neox,
        out_dtype=shape.out_dtype,
        out_heads=shape.out_heads,
    )


def meta_inputs(shape: LayerShape, tokens: int = 1) -> DecodeInputs:
    """Return operands of a layer without memory: what a contract looks at."""
    return synthetic_inputs(replace(shape, device="meta"), tokens)

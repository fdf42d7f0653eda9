"""The Triton kernel's variants on the interpreter: operands with the strides that vLLM gives, and the reference beside.

The values of q_nope and W_UK are multiples of 1/8 and 1/16 up to 1: every sum of their products is exact in float32, in
any order, so that the whole result has to equal the reference to the byte. So it has over mxfp4, where q_nope gets
rounded: all values are multiples of half their scale, up to 6 scales, and the products of scales in a sum lie at most
2**8 apart. Values in the latent halves go beyond the largest fp8 number, three are NaN. In an ``overflow`` case those
in the rope halves do too: the reference is that of our kernel, which saturates there, unlike AITER's op. Over plain
weights three rows of q_nope then are infinite, overflow and NaN.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from tools import aot
from tools.gfx9.code import load
from tools.gfx9.machine import Counts, Program, launch
from tools.gfx9.memory import Memory
from vllm_aiter_mla.kernels import formats, reference
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.formats import MXFP4_GROUP
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.platform import CARDS
from vllm_aiter_mla.kernels.triton import launcher

Q_SCALE, K_SCALE, W_SCALE = 0.0061, 0.0137, 0.0625
# With ties. Rotated values are the product below: 157.5 / 128, so that a tie goes to the greater number. Latents are
# multiples of 1/128, so that they lie halfway from 2 on, which fp8 has to hold.
TIED_VALUE, TIED_COS, TIED_Q_SCALE = 140 / 128, 144 / 128, 0.0244
SIGNALLING_NANS = torch.tensor([0x7F81, 0xFFA5], dtype=torch.uint16).view(torch.bfloat16)
BLOCK_SIZES = (64, 1, 16)
TABLE_ROWS, GUARD_BLOCKS, UNTOUCHED = 40, 1, 0xCD
V_WIDTH = 128  # of a head in kv_b_proj, beside its nope width
Q_LORA_RANK = 1536  # DeepSeek's: k_pe is the end of a row of this width, the latent and itself


@dataclass(frozen=True)
class Case:
    """One launch."""

    variant: aot.Variant  # what is compiled
    tokens: int  # rows
    heads: tuple[int, ...] | None = None  # those whose absorb tiles run, all if None
    seed: int = 0  # of the values
    ties: bool = False  # every rotated value lies halfway between two bfloat16 numbers, and fp8 holds latents that do
    overflow: bool = False  # rotated values of the first row, and sums of three, are infinite, NaN or above fp8's range

    @property
    def run_heads(self) -> list[int]:
        """The heads whose absorb tiles run."""
        return list(range(self.variant.heads) if self.heads is None else self.heads)


class Compiled:
    """One variant, compiled and bound once, for launches of any row count."""

    def __init__(self, target: aot.Target, variant: aot.Variant) -> None:
        made = aot.compile_variant(target, variant)
        self.target, self.variant = target, variant
        self.assembly = made.asm["amdgcn"]
        self.lds_bytes = int(made.metadata.shared)
        self.program = Program(load(self.assembly, target.name, made.asm["hsaco"]))

    def planted(self, assembly: str) -> Compiled:
        """The same variant with other assembly, assembled to a code object of its own."""
        other = copy(self)
        other.program = Program(load(assembly, self.target.name))
        return other

    def run(self, case: Case, preload: bool = True) -> tuple[int, Counts]:
        """One launch: bytes of the query and of the guarded cache that are not the reference's, and its counts."""
        inputs, storage = operands(self.target, case)
        expected, expected_cache = expectation(inputs, storage, case)
        out = inputs.new_query()
        out.view(torch.uint8).fill_(UNTOUCHED)
        memory = Memory()
        kernarg, waves = arguments(self, memory, inputs, out), self.variant.tile.num_warps
        counts = launch(self.program, memory, kernarg, workgroups(case), waves, self.lds_bytes, preload)
        return count_different(out, expected) + count_different(storage, expected_cache), counts


def operands(target: aot.Target, case: Case) -> tuple[DecodeInputs, torch.Tensor]:
    """The operands, and the guarded storage that the cache is a slice of."""
    g = torch.Generator().manual_seed(case.seed)
    variant, t, n = case.variant, case.tokens, case.variant.heads
    p, r, latent = aot.NOPE, aot.ROPE, aot.LATENT
    stored = CARDS[target.name] if variant.quantised else torch.bfloat16

    def grid(scale: int, *shape: int) -> torch.Tensor:
        return (torch.randint(-8, 9, shape, generator=g) / scale).to(torch.bfloat16)

    def bounded(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=g)
        values = values.sign() * TIED_VALUE if case.ties else (values * 0.4).clamp(-0.9, 0.9)
        return values.to(torch.bfloat16)

    q_nope = by_group(g, t, n, p) if variant.weight == "mxfp4" else one_peak(g, t, n, p)
    q = torch.cat((q_nope, bounded(t, n, r)), dim=-1)
    kv_c = (torch.randn(t, latent, generator=g) * 2).to(torch.bfloat16)
    kv_c[t // 2, 5] = float("nan")
    kv_c[t // 2, 6:8] = SIGNALLING_NANS
    down = bounded(t, Q_LORA_RANK + latent + r)
    angles = torch.rand(TABLE_ROWS, r // 2, generator=g) * 6.28
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(torch.bfloat16)
    if case.ties:
        table = torch.cat((torch.full_like(angles, TIED_COS), angles * 0), dim=-1).to(torch.bfloat16)
    blocks = -(-(t + 3) // variant.block_size) + 1
    storage = torch.empty((blocks + 2 * GUARD_BLOCKS, variant.block_size, latent + r), dtype=stored)
    storage.view(torch.uint8).fill_(UNTOUCHED)
    positions = torch.randint(0, TABLE_ROWS, (t,), generator=g)
    positions[-1] = TABLE_ROWS + 7
    if t > 2:
        positions[1] = -1
    slot_mapping = torch.randperm(blocks * variant.block_size, generator=g)[:t]
    if t > 1:
        slot_mapping[t // 2] = -1
    if case.overflow:
        # The first row of the table turns by nothing, so these are the rotated values of the first row.
        positions[0], table[0] = 0, torch.tensor([1.0, 0.0]).repeat_interleave(r // 2)
        q[0, :, p:], down[0, -r:] = beyond(stored, Q_SCALE), beyond(stored, K_SCALE)
        if variant.weight == "plain":
            q[:3, :, :p] = 0
            q[:3, :, 0] = torch.tensor([float("inf"), 3e38, float("nan")])[:t, None]
    inputs = DecodeInputs(
        q=q,
        k_pe=down[:, Q_LORA_RANK + latent :],
        kv_c=kv_c,
        weight=weight(target, case, grid, g),
        kv_cache=storage[GUARD_BLOCKS:-GUARD_BLOCKS],
        slot_mapping=slot_mapping,
        positions=positions,
        cos_sin_cache=table,
        k_scale=torch.tensor([K_SCALE]),
        q_scale=torch.tensor([TIED_Q_SCALE if case.ties else Q_SCALE]),
        is_neox=variant.is_neox,
        out_dtype=stored,
        out_heads=variant.out_heads,
    )
    return inputs, storage


def beyond(stored: torch.dtype, scale: float) -> torch.Tensor:
    """A row of 64 values: around fp8's largest and the edge of its overflow, far above, infinite, NaNs. bfloat16."""
    flavour = formats.FLAVOURS[stored]
    edges = (torch.tensor([flavour.max, flavour.last]) * scale).to(torch.bfloat16)
    near = (edges.view(torch.int16)[:, None] + torch.arange(-2, 3)).to(torch.int16).view(torch.bfloat16).flatten()
    values = torch.cat([near, -near, torch.tensor([1e4, -1e4, 1e30, -1e30, 3e38, -3e38], dtype=torch.bfloat16)])
    row = torch.ones(64, dtype=torch.bfloat16)
    # In both pairings an infinity or a NaN has a neighbour of its own, which becomes NaN: infinity times zero.
    row[6:32], row[38:], row[0:6:2] = values, -values, torch.tensor([float("inf"), float("-inf"), float("nan")])
    row[33:37:2] = SIGNALLING_NANS  # also a neighbour of an infinity or a one, in each pairing
    return row


def one_peak(g: torch.Generator, t: int, n: int, p: int) -> torch.Tensor:
    """q_nope in multiples of 1/8: one +-1 at a random place of each row, the others within 5/8. bfloat16 [t, n, p].

    The largest magnitude of a part of a row, or without the sign dropped, is then mostly not that of the row.
    """
    values = torch.randint(-5, 6, (t, n, p), generator=g)
    place = torch.randint(0, p, (t, n, 1), generator=g)
    peak = torch.randint(0, 2, (t, n, 1), generator=g) * 16 - 8
    return (values.scatter(2, place, peak) / 8).to(torch.bfloat16)


def by_group(g: torch.Generator, t: int, n: int, p: int) -> torch.Tensor:
    """q_nope whose groups of 32 take scales of their own; one group is zero. bfloat16 [t, n, p]."""
    groups = torch.randn(t, n, p // MXFP4_GROUP, MXFP4_GROUP, generator=g).clamp(-3.9, 3.9)
    groups[..., 0] = 1.5  # the least that a group's largest magnitude can be
    groups *= 0.5 ** torch.randint(4, 7, groups.shape[:3], generator=g)[..., None]
    groups[t // 2, :, 1] = 0
    return groups.flatten(2).to(torch.bfloat16)


def weight(target: aot.Target, case: Case, grid: Callable[..., torch.Tensor], g: torch.Generator) -> AbsorbWeight:
    """W_UK as vLLM holds it: a view of ``kv_b_proj``, or codes. Heads whose tiles do not run are left at 0."""
    variant, n, p, latent, heads = case.variant, case.variant.heads, aot.NOPE, aot.LATENT, case.run_heads
    if variant.weight == "mxfp4":
        pairs = torch.zeros(latent, n, p // 2, dtype=torch.uint8).transpose(0, 1)
        scales = torch.zeros(p // MXFP4_GROUP, latent, n, dtype=torch.uint8).permute(2, 1, 0)
        pairs[heads] = torch.randint(0, 256, pairs[heads].shape, generator=g, dtype=torch.uint8)
        scales[heads] = torch.randint(125, 130, scales[heads].shape, generator=g, dtype=torch.uint8)
        return AbsorbWeight("mxfp4", pairs, scales)
    if variant.weight == "fp8":
        codes = torch.zeros(n, latent, p)
        codes[heads] = grid(1, len(heads), latent, p).float()
        return AbsorbWeight("fp8", codes.to(CARDS[target.name]), torch.tensor([W_SCALE]))
    major_l = variant.weight_major == "L"
    whole = torch.zeros((n, p + V_WIDTH, latent) if major_l else (latent, n, p + V_WIDTH), dtype=torch.bfloat16)
    w = whole[:, :p] if major_l else whole[..., :p].permute(1, 2, 0)
    w[heads] = grid(16, len(heads), p, latent)
    return AbsorbWeight("plain", w)


def absorbed(inputs: DecodeInputs, heads: list[int]) -> torch.Tensor:
    """[T, len(heads), L]: the exact product, rounded once; over codes as AITER's GEMMs scale it."""
    q, held = inputs.q_nope[:, heads], inputs.weight
    if held.scale is not None:
        scale = held.scale if held.format == "fp8" else held.scale[heads]
        return AbsorbWeight(held.format, held.values[heads], scale).reference(q)
    return torch.einsum("tnp,npl->tnl", q.double(), held.values[heads].double()).to(q.dtype)


def expectation(inputs: DecodeInputs, storage: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's query and cache; heads whose tiles do not run, and those between ours, keep what was there."""
    before = storage.clone()
    heads = case.run_heads
    latents = inputs.q.new_zeros((inputs.num_tokens, inputs.num_heads, inputs.latent_dim))
    latents[:, heads] = absorbed(inputs, heads)
    prepared = reference.prepare(inputs, reference.TRITON, latents)
    query = prepared.clone()
    query.view(torch.uint8).fill_(UNTOUCHED)
    inputs.real_heads(query).copy_(inputs.real_heads(prepared))
    after = storage.clone()
    storage.view(torch.uint8).copy_(before.view(torch.uint8))
    left = [h for h in range(inputs.num_heads) if h not in heads]
    if left:
        row = inputs.real_heads(query.view(torch.uint8).reshape(*query.shape[:2], -1))
        row[:, left, : inputs.latent_dim * query.itemsize] = UNTOUCHED
    return query, after


def workgroups(case: Case) -> list[int]:
    """Indices of the programs: the absorb tiles of the chosen heads, and all others."""
    tile, n, t = case.variant.tile, case.variant.heads, case.tokens
    total = sum(launcher.programs(t, n, aot.LATENT, tile))
    tiles = -(-t // tile.block_t) * (aot.LATENT // (tile.block_l * tile.blocks))
    return [k * n + h for h in case.run_heads for k in range(tiles)] + list(range(n * tiles, total))


def arguments(compiled: Compiled, memory: Memory, inputs: DecodeInputs, out: torch.Tensor) -> bytes:
    """Place the operands in ``memory`` and pack the kernel's argument block."""
    from vllm_aiter_mla.kernels.triton.kernel import decode_prep_kernel

    tensors = {
        "q": inputs.q, "k_pe": inputs.k_pe, "kv_c": inputs.kv_c, "w": inputs.weight.as_npl,
        "cache": inputs.kv_cache, "out": out, "slot": inputs.slot_mapping, "pos": inputs.positions,
        "cos_sin": inputs.cos_sin_cache, "k_scale": inputs.k_scale, "q_scale": inputs.q_scale,
        "w_scale": inputs.weight.scale,
    }  # fmt: skip
    present = {k: x for k, x in tensors.items() if x is not None}
    values = {f"{k}_ptr": place(memory, k, x, k in ("cache", "out")) for k, x in present.items()}
    strides = [name for name in decode_prep_kernel.arg_names if "stride" in name]
    values |= dict(zip(strides, launcher.strides(inputs), strict=True))
    values |= {"num_tokens": inputs.num_tokens, "last_position": inputs.cos_sin_cache.shape[0] - 1}
    constants = aot.constants(compiled.target, compiled.variant)
    given = [values[name] for name in decode_prep_kernel.arg_names if name not in constants]
    code = compiled.program.code
    block = bytearray(code.argument_bytes)
    # What Triton adds after the kernel's own arguments are pointers to scratch memory, null where it needs none.
    for (offset, size), value in zip(code.arguments, given + [0] * (len(code.arguments) - len(given)), strict=True):
        struct.pack_into({4: "<i", 8: "<Q"}[size], block, offset, value)
    return bytes(block)


def place(memory: Memory, name: str, tensor: torch.Tensor, writable: bool) -> int:
    """Add a tensor's storage; the bytes of the view alone may be read, or written. Returns the address of the view."""
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    ours = torch.zeros(raw.numel() // tensor.itemsize, dtype=torch.bool)
    torch.as_strided(ours, tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    allowed = ours.repeat_interleave(tensor.itemsize).numpy()
    region = memory.add(name, raw.numpy(), *((False, allowed) if writable else (allowed, False)))
    return region.start + tensor.storage_offset() * tensor.itemsize


def count_different(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())


def minimum_bytes(inputs: DecodeInputs, case: Case) -> dict[str, int]:
    """What a launch has to move: every value that it needs once, every value of its result once."""
    t, n, p, r, latent = inputs.num_tokens, inputs.num_heads, inputs.nope_dim, inputs.rope_dim, inputs.latent_dim
    h = len(case.run_heads)
    slots, out = inputs.slot_mapping, inputs.out_dtype.itemsize
    rows = int((slots >= 0).sum())
    table = inputs.cos_sin_cache
    scales = 4 if case.variant.quantised else 0
    held, scale = inputs.weight.as_npl, inputs.weight.scale
    w_scale = 0 if scale is None else (scale[:h] if inputs.weight.format == "mxfp4" else scale).nbytes
    distinct = len(inputs.positions.clamp(0, table.shape[0] - 1).unique())
    return {
        "q": 2 * t * (h * p + n * r), "k_pe": 2 * rows * r, "kv_c": 2 * rows * latent,
        "w": held[:h].nbytes, "w_scale": w_scale,
        "cache": inputs.kv_cache.itemsize * rows * (latent + r), "out": out * t * (h * latent + n * r),
        "slot": 8 * len(slots), "pos": 8 * t, "cos_sin": 2 * distinct * r, "k_scale": scales, "q_scale": scales,
    }  # fmt: skip


def matrix(variant: aot.Variant, tokens: Sequence[int] = ()) -> Iterator[Case]:
    """The cases of one variant: row counts at the compiled block size, then the other block sizes at 17 rows.

    ``tokens`` replaces the row counts, and leaves the other block sizes out.
    """
    counts = sorted(tokens or {1, 3, 16, 17, variant.tile.block_t + 1})
    # The first head, the last and one between: a tile of another head is the same code on other addresses.
    heads = tuple(sorted({0, variant.heads * 3 // 5, variant.heads - 1}))
    for block_size in BLOCK_SIZES[: 1 if tokens else None]:
        for count in counts if block_size == BLOCK_SIZES[0] else [17]:
            yield Case(replace(variant, block_size=block_size), count, heads)


def record(compiled: Compiled, case: Case) -> dict[str, Any]:
    """One launch as a record for JSON; instructions over all its waves."""
    different, counts = compiled.run(case)
    said = {"label": case.variant.label, "tokens": case.tokens, "block_size": case.variant.block_size}
    said |= {"heads_run": len(case.run_heads), "waves": counts.waves, "instructions": counts.instructions.total()}
    return said | {"different": different}

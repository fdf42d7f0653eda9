"""The arithmetic of AITER's decode kernels, written apart from the reference so that the two can contradict."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.sandbox.simulated_aiter.memory import dense, fault, reinterpret

PE, LATENT, WIDTH = 64, 512, 576
FP8_MAX = {torch.float8_e4m3fnuz: 240.0, torch.float8_e4m3fn: 448.0}
FP8_NAN = {torch.float8_e4m3fnuz: 0x80, torch.float8_e4m3fn: 0x7F}


@dataclass(frozen=True, slots=True)
class Call:
    """One launch: the op's arguments and what the dispatch made of them."""

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    kv_cache: torch.Tensor
    q_out: torch.Tensor
    slot_mapping: torch.Tensor
    k_scale: torch.Tensor
    q_scale: torch.Tensor
    positions: torch.Tensor
    cos_cache: torch.Tensor
    sin_cache: torch.Tensor
    is_neox: bool
    all_rows: bool
    kernel: str
    arch: str


def run(call: Call) -> None:
    """Write ``q_out`` and ``kv_cache`` as the chosen kernel would.

    AITER leaves rows it skips as they were, that is with whatever the allocator handed out. Here all of ``q_out`` is
    filled with NaN first, so that reading an unwritten row is noticed.
    """
    act, tokens = call.kv_c.dtype, call.slot_mapping.shape[0]
    _bytes(call.q_out).fill_(FP8_NAN.get(call.q_out.dtype, 0xFF))
    slots = dense(call.slot_mapping, torch.int64, (tokens,), "slot_mapping")
    rows = torch.arange(tokens) if call.all_rows else torch.nonzero(slots >= 0).flatten()
    if not rows.numel():
        return
    cos, sin = _angles(call, act, tokens, rows)
    _write_query(call, act, tokens, rows, cos, sin)
    _write_cache(call, act, slots, rows, cos, sin)


def _angles(call: Call, act: torch.dtype, tokens: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positions = dense(call.positions, torch.int64, (tokens,), "positions")[rows]
    limit = call.cos_cache.shape[0]
    if call.kernel != "general":
        positions = positions.clamp(0, limit - 1)
    elif bool(((positions < 0) | (positions >= limit)).any()):
        fault("a position outside the cos/sin table (the general kernel does not clamp)")
    size = (limit, PE // 2)
    cos = dense(call.cos_cache, act, size, "cos_cache")
    sin = dense(call.sin_cache, act, size, "sin_cache")
    return cos[positions], sin[positions]


def _write_query(
    call: Call, act: torch.dtype, tokens: int, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    heads = call.q_nope.shape[1]
    stored = call.q_out.dtype if call.q_out.dtype in FP8_MAX else act
    inverse = 1.0 / dense(call.q_scale, torch.float32, (1,), "q_scale")
    nope_steps = (call.q_nope.stride(0), call.q_nope.stride(1), 1)
    pe_steps = (call.q_pe.stride(0), call.q_pe.stride(1), 1)
    out_steps = (call.q_out.stride(0), call.q_out.stride(1), 1)
    nope = reinterpret(call.q_nope, act, (tokens, heads, LATENT), nope_steps, "q_nope")[rows]
    pe = reinterpret(call.q_pe, act, (tokens, heads, PE), pe_steps, "q_pe")[rows]
    out = reinterpret(call.q_out, stored, (tokens, heads, WIDTH), out_steps, "q_out")
    rope = _rope(pe, cos[:, None], sin[:, None], inverse, stored, call)
    _bytes(out)[rows] = torch.cat([_bytes(_nope(nope, inverse, stored)), _bytes(rope)], -1)
    if call.kernel != "per-head" and call.q_out.stride(1) != WIDTH:
        _drop_beyond_the_buffer(call, out, rows, heads)


def _drop_beyond_the_buffer(call: Call, out: torch.Tensor, rows: torch.Tensor, heads: int) -> None:
    # opt and general write the nope part through a descriptor of heads * 576 elements: what lies beyond is lost.
    reach = torch.arange(heads)[:, None] * call.q_out.stride(1) + torch.arange(LATENT)
    lost = torch.nonzero(reach >= heads * WIDTH)
    poison = torch.full((), float("nan")).to(out.dtype)
    for head, column in lost.tolist():
        _bytes(out[rows, head, column : column + 1])[:] = _bytes(poison.reshape(1))


def _write_cache(
    call: Call, act: torch.dtype, slots: torch.Tensor, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    cache, tokens = call.kv_cache, slots.shape[0]
    stored = cache.dtype if cache.dtype in FP8_MAX else act
    inverse = 1.0 / dense(call.k_scale, torch.float32, (1,), "k_scale")
    kept = slots[rows] >= 0
    owners = rows[kept]
    latent = reinterpret(call.kv_c, act, (tokens, LATENT), (call.kv_c.stride(0), 1), "kv_c")[owners]
    pe = reinterpret(call.k_pe, act, (tokens, PE), (call.k_pe.stride(0), 1), "k_pe")[owners]
    cut = call.kernel == "opt" and call.arch == "gfx942" and stored == torch.bfloat16
    rope = _rope(pe, cos[kept], sin[kept], inverse, stored, call, truncate=cut)
    data = torch.cat([_bytes(_nope(latent, inverse, stored)), _bytes(rope)], -1)
    block = cache.shape[1]
    target = slots[owners]
    blocks = torch.div(target, block, rounding_mode="floor")
    start: torch.Tensor = blocks * cache.stride(0) + (target - blocks * block) * cache.stride(1)
    memory = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    first: torch.Tensor = (start + int(cache.storage_offset())) * cache.itemsize
    if first.numel() and int(first.max()) + data.shape[1] > memory.numel():
        fault("a KV row outside the cache")
    memory[first[:, None] + torch.arange(data.shape[1])] = data


def _nope(x: torch.Tensor, inverse: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    if stored not in FP8_MAX:
        return x
    scaled = x.float() * inverse
    top = FP8_MAX[stored]
    # v_med3_f32 of (x, -top, top); with a NaN among them it is the least operand.
    median = torch.minimum(torch.maximum(scaled.nan_to_num(nan=-top), torch.tensor(-top)), torch.tensor(top))
    return encode(median, stored)


def _rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inverse: torch.Tensor,
    stored: torch.dtype,
    call: Call,
    truncate: bool = False,
) -> torch.Tensor:
    # Complex multiplication in double: the products of 16-bit floats are exact there as they are in fp32.
    half = PE // 2
    wide = x.double()
    pairs = torch.complex(wide[..., :half], wide[..., half:]) if call.is_neox else torch.view_as_complex(
        wide.unflatten(-1, (half, 2)).contiguous()
    )  # fmt: skip
    turned = torch.view_as_real(pairs * torch.complex(cos.double(), sin.double()))
    rotated = (turned.transpose(-1, -2) if call.is_neox else turned).flatten(-2).float()
    if stored in FP8_MAX:
        return encode(rotated * inverse, stored)
    if truncate:
        return (rotated.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)  # the high half
    return rotated.to(stored)


def encode(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 to the nearest e4m3 code, ties to the even code; beyond the last code NaN.

    Searches a table of all 127 or 128 magnitudes, plus one code for overflow.
    """
    codes = torch.arange(0, 0x80 if dtype == torch.float8_e4m3fnuz else 0x7F, dtype=torch.uint8)
    grid = codes.view(dtype).double()
    last_step = grid[-1] - grid[-2]
    grid = torch.cat([grid, (grid[-1] + last_step)[None]])
    middles = (grid[1:] + grid[:-1]) / 2
    magnitude = x.double().abs()
    index = torch.searchsorted(middles, magnitude.contiguous(), right=False)
    tie = (index < len(middles)) & (magnitude == middles[index.clamp(max=len(middles) - 1)])
    index = torch.where(tie & (index % 2 == 1), index + 1, index)
    overflow = x.isnan() | (index >= len(codes))
    byte = index.clamp(max=len(codes) - 1).to(torch.uint8)
    # fnuz has no negative zero: its code is the NaN.
    negative = torch.signbit(x) & ((byte > 0) | (dtype == torch.float8_e4m3fn))
    byte = torch.where(negative, byte | 0x80, byte)
    return torch.where(overflow, FP8_NAN[dtype], byte).to(torch.uint8).view(dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)

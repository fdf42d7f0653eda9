"""Operands for the kernel's tests, and the comparison with the reference. Imports neither Triton nor vLLM."""

import mmap
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from vllm_aiter_mla.kernels import absorb, formats, reference
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.distance import difference
from vllm_aiter_mla.kernels.inputs import DecodeInputs

# Blocks before and after the cache, and rows before and after the cos/sin table: what a bug reads or writes out of
# bounds stays inside the allocation, and is seen.
GUARD_BLOCKS, GUARD_ROWS = 2, 16
MAX_POSITION = 50


@dataclass(frozen=True)
class Case:
    """One call. Sizes as in DecodeInputs; ``magnitude`` scales k_pe, q_pe and kv_c."""

    tokens: int = 5
    heads: int = 2
    nope: int = 128
    rope: int = 64
    latent: int = 512
    block_size: int = 16
    act: str = "bfloat16"
    cache: str = "float8_e4m3fn"
    out: str | None = None
    is_neox: bool = False
    w_major: str = "L"
    weight: str = "plain"  # or the fp8 type of codes, or "mxfp4"
    no_slot: str = "some"  # "some" rows, "all" rows or "none"
    magnitude: float = 1.0
    out_heads: int = 0
    seed: int = 0

    def label(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(changed) or "default"


def build(case: Case, device: str = "cpu") -> tuple[DecodeInputs, torch.Tensor]:
    """The operands and the guarded storage [GUARD + blocks + GUARD, block_size, L+R] that the cache is a slice of.

    q is a slice of wider heads, k_pe and kv_c are slices of one tensor: every stride differs from the dense one. Among
    the positions are one below and one above the table, which itself is a slice of a longer one.
    """
    g = torch.Generator().manual_seed(case.seed)
    act = getattr(torch, case.act)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(act)

    t, n, width = case.tokens, case.heads, case.latent + case.rope
    q = random(t, n, case.nope + case.rope + 16)[..., : case.nope + case.rope]
    latent_and_rope = random(t, width + 16) * case.magnitude
    q[..., case.nope :] *= case.magnitude
    shape = (n, case.nope, case.latent) if case.w_major == "L" else (n, case.latent, case.nope)
    w = random(*shape) * case.nope**-0.5
    table = random(MAX_POSITION + 2 * GUARD_ROWS, case.rope)
    blocks = -(-(t + 3) // case.block_size) + 2
    storage = _filled_cache((blocks + 2 * GUARD_BLOCKS, case.block_size, width), getattr(torch, case.cache), g)
    storage = storage.to(device)
    inputs = DecodeInputs(
        q=_on(q, device), k_pe=_on(latent_and_rope, device)[:, case.latent : width],
        kv_c=_on(latent_and_rope, device)[:, : case.latent],
        weight=_weight(case, w if case.w_major == "L" else w.transpose(1, 2), device),
        kv_cache=storage[GUARD_BLOCKS:-GUARD_BLOCKS], slot_mapping=_slots(case, blocks * case.block_size, g).to(device),
        positions=_positions(t, g).to(device), cos_sin_cache=_on(table, device)[GUARD_ROWS:-GUARD_ROWS],
        k_scale=torch.tensor([0.37], device=device), q_scale=torch.tensor([0.061], device=device), is_neox=case.is_neox,
        out_dtype=getattr(torch, case.out or case.cache), out_heads=case.out_heads,
    )  # fmt: skip
    return inputs, storage


def _weight(case: Case, w_uk_t: torch.Tensor, device: str) -> AbsorbWeight:
    """The weight in the case's format; codes keep the unit stride that ``w_uk_t`` [N, P, L] has."""
    if case.weight == "plain":
        return AbsorbWeight("plain", w_uk_t.to(device))
    if case.weight == "mxfp4":
        made = absorb.make(w_uk_t, ("mxfp4",))
        return replace(made, values=_on(made.values, device), scale=_on(made.scale, device))
    made = absorb.make(w_uk_t, ("fp8", getattr(torch, case.weight)))
    codes = made.values if case.w_major == "P" else made.values.transpose(1, 2).contiguous().transpose(1, 2)
    return replace(made, values=_on(codes, device), scale=made.scale.to(device))


def compare(
    inputs: DecodeInputs, storage: torch.Tensor, prepare: Any, numerics: reference.Numerics = reference.TRITON
) -> dict[str, Any]:
    """Run ``prepare`` and the reference on equal operands; count what differs.

    Returns a record: refused (reason or None), wrong_rope (rope values whose bytes differ), wrong_cache (the same over
    the whole guarded storage), nope_steps (largest distance to the reference in representable values), nope_different
    (fraction), bmm_bound (largest |error| against float64 as a fraction of the stated bound).
    """
    cpu, cpu_storage = on_cpu(inputs, storage)
    expected = reference.prepare(cpu, numerics)
    got = prepare(inputs).cpu()
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.is_contiguous()
    got, expected = cpu.real_heads(got), cpu.real_heads(expected)
    lat = cpu.latent_dim
    record: dict[str, Any] = {
        "wrong_rope": wrong_values(got[..., lat:], expected[..., lat:]),
        "wrong_cache": wrong_values(storage.cpu(), cpu_storage),
    }
    return record | _nope_record(cpu, got[..., :lat], expected[..., :lat])


def on_cpu(inputs: DecodeInputs, storage: torch.Tensor) -> tuple[DecodeInputs, torch.Tensor]:
    """A copy of the operands on the CPU, with a cache storage of its own."""
    copy = storage.detach().cpu().clone()
    values = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    moved = {name: v.cpu() for name, v in values.items() if isinstance(v, torch.Tensor) and name != "kv_cache"}
    weight = AbsorbWeight(inputs.weight.format, *(tensor.cpu() for _, tensor in inputs.weight.tensors))
    return replace(inputs, **moved, weight=weight, kv_cache=copy[GUARD_BLOCKS:-GUARD_BLOCKS]), copy


def wrong_values(got: torch.Tensor, expected: torch.Tensor) -> int:
    return int((plain_bits(got) != plain_bits(expected)).sum())


def plain_bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8 if x.itemsize == 1 else torch.int16)


def _nope_record(cpu: DecodeInputs, got: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    if got.numel() == 0:
        return {"nope_steps": 0, "nope_different": 0.0, "bmm_bound": 0.0}
    found = difference(got, expected)
    record = {"nope_steps": found.steps, "nope_different": found.share}
    if formats.is_fp8(got.dtype) or cpu.weight.format != "plain":
        return record | {"bmm_bound": 0.0}
    q, w = cpu.q_nope.double(), cpu.weight.values.double()
    exact = torch.einsum("tnp,npl->tnl", q, w)
    # One rounding to the activation dtype (unit roundoff u), and P float32 additions (2**-24 each) in any order.
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[cpu.q.dtype]
    sums = torch.einsum("tnp,npl->tnl", q.abs(), w.abs())
    bound = unit * exact.abs() + (1 + unit) * cpu.nope_dim * 2.0**-24 * sums
    return record | {"bmm_bound": float(((got.double() - exact).abs() / bound).max())}


def sparse_bytes(size: int) -> torch.Tensor:
    """``size`` zero bytes of address space; a page takes memory only once it is written."""
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _filled_cache(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Old content without NaN, so that every byte that must stay can be compared."""
    return torch.randint(0, 0x70, (*shape, dtype.itemsize), dtype=torch.uint8, generator=g).view(dtype).squeeze(-1)


def _slots(case: Case, capacity: int, g: torch.Generator) -> torch.Tensor:
    slots = torch.randperm(capacity, generator=g)[: case.tokens]
    if case.no_slot == "all":
        slots[:] = -1
    elif case.no_slot == "some" and case.tokens > 1:
        slots[1::3] = -1
    return slots


def _positions(tokens: int, g: torch.Generator) -> torch.Tensor:
    positions = torch.randint(0, MAX_POSITION, (tokens,), generator=g)
    outside = torch.tensor([-3, MAX_POSITION + 2, MAX_POSITION - 1, 0])[:tokens]
    positions[: outside.shape[0]] = outside
    return positions


def _on(x: torch.Tensor, device: str) -> torch.Tensor:
    """Move and keep the strides: a slice that is moved would become dense."""
    if device == "cpu":
        return x
    base = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return base.copy_(x)

"""Compile the kernel for a GPU that is not there: gfx942, gfx950 and sm90, from Triton's plain wheel, without torch.

One architecture per process: Triton 3.6.0 keeps state between architectures and then emits wrong code silently.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_aiter_mla.kernels.triton.tiles import FP_FUSION, MORE, MXFP4_ARCH, TABLE, Tile

# A whole DeepSeek-V3 layer: the heads that an entry without a limit is compiled for.
MANY_HEADS = 128
NOPE, ROPE, LATENT = 128, 64, 512
# Pointers to single elements; the launcher's alignment check leaves them out, so they carry no divisibility.
SCALAR_TYPES = {"slot_ptr": "i64", "pos_ptr": "i64"} | dict.fromkeys(
    ("k_scale_ptr", "q_scale_ptr", "w_scale_ptr"), "fp32"
)
MXFP4_TYPES = {"w_ptr": "u8", "w_scale_ptr": "u8"}


@dataclass(frozen=True, slots=True)
class Target:
    """One architecture: Triton's target triple, its hardware fp8 type (Triton's name) and that type's largest value."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    fp8_type: str
    fp8_max: float


TARGETS = {
    "gfx942": Target("gfx942", "hip", "gfx942", 64, "fp8e4b8", 240.0),
    "gfx950": Target("gfx950", "hip", "gfx950", 64, "fp8e4nv", 448.0),
    "sm90": Target("sm90", "cuda", 90, 32, "fp8e4nv", 448.0),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation: tile, pairing, stored type, and what the launcher would know of the arguments."""

    tile: Tile  # from the table
    heads: int  # N
    is_neox: bool = False  # pairing of the rotation
    quantised: bool = True  # fp8 query and cache, else bfloat16 both
    pointer_hint: bool = True  # tensors below 2 GiB (``tt.pointer_range`` 32); a larger cache loses the hint. ROCm only
    weight_major: str = "L"  # "L" or "P", the axis along which W_UK_T has unit stride; vLLM produces both
    weight: str = "plain"  # form of the absorbed weight, "plain" (bfloat16), "fp8" or "mxfp4"
    block_size: int = 64  # tokens of a cache block
    out_heads: int = 0  # M, where the decode kernel takes more heads than N; else 0

    @property
    def label(self) -> str:
        """Short and unique within a target, for tables and test names."""
        tile = self.tile
        parts = [tile.label, f"N{self.heads}" + f"of{self.out_heads}" * bool(self.out_heads)]
        parts += ["fp8" if self.quantised else "bf16", "neox" if self.is_neox else "gptj"]
        parts += [f"W-{self.weight}-{self.weight_major}", "<2GiB" if self.pointer_hint else ">2GiB"]
        return " ".join(parts)


def variants(target: Target) -> list[Variant]:
    """Every tile of the target's table over each form of weight there; at its ends the other pairing and layout.

    The last tile also with bfloat16 in the cache and the query, over each form of the weight. The first one also for
    head counts that the decode kernel does not take: one that divides its count, and one that does not. On ROCm each
    with a cache below 2 GiB and with a larger one; and the tiles that only tuning may choose.
    """
    tiles: dict[Tile, int] = {}
    for entry in TABLE[target.name]:
        full = entry.max_rows // entry.tile.block_t
        tiles[entry.tile] = max(tiles.get(entry.tile, 0), min(MANY_HEADS, full))
    found = [Variant(tile, heads) for tile, heads in tiles.items()]
    ordered = list(tiles)
    first, last = ordered[0], ordered[-1]
    for tile in (first, last):
        found.append(Variant(tile, tiles[tile], is_neox=True))
        found.append(Variant(tile, tiles[tile], weight_major="P"))
    found.append(Variant(last, tiles[last], quantised=False))
    found += [Variant(first, heads, out_heads=16) for heads in (8, 10)]
    # Unit stride along P, as vLLM has it on ROCm. Elsewhere it has no such weights, but verify and measure run them.
    for tile in ordered:
        found.append(Variant(tile, tiles[tile], weight_major="P", weight="fp8"))
    found.append(Variant(last, tiles[last], quantised=False, weight_major="P", weight="fp8"))
    if target.name == MXFP4_ARCH:
        found += [Variant(tile, tiles[tile], weight_major="P", weight="mxfp4") for tile in ordered]
        found.append(Variant(last, tiles[last], quantised=False, weight_major="P", weight="mxfp4"))
    return [replace(one, pointer_hint=hint) for one in found for hint in hints(target)] + tuned(target)


def served(target: Target) -> list[Variant]:
    """Those of ``variants`` that a server runs which has not been tuned: its cache is large."""
    own, large = tuned(target), hints(target)[-1]
    return [one for one in variants(target) if one not in own and one.pointer_hint == large]


def tuned(target: Target) -> list[Variant]:
    """The tiles that tuning tries beside the table's, each over each form of weight, with a large cache on ROCm."""
    forms = {"plain": "L", "fp8": "P"} | ({"mxfp4": "P"} if target.name == MXFP4_ARCH else {})
    return [
        Variant(tile, 16, pointer_hint=hints(target)[-1], weight=weight, weight_major=major)
        for tile in MORE
        for weight, major in forms.items()
    ]


def hints(target: Target) -> tuple[bool, ...]:
    """The values of ``Variant.pointer_hint`` that Triton compiles differently for this target."""
    return (True, False) if target.backend == "hip" else (True,)


_arch_of_process: list[str] = []


def compile_variant(target: Target, variant: Variant, fp8_type: str | None = None) -> Any:
    """Compile one variant; returns Triton's compiled kernel (``.asm``, ``.metadata``), raises as ``compile_kernel``.

    It stores ``fp8_type`` instead of the target's own type; the wrong one becomes a software cast.
    """
    claim_process(target)
    from vllm_aiter_mla.kernels.triton.kernel import decode_prep_kernel

    fp8_type = fp8_type or target.fp8_type
    stored = fp8_type if variant.quantised else "bf16"
    unhinted = () if variant.pointer_hint else ("cache_ptr",)
    types = {"cache_ptr": stored, "out_ptr": stored}
    types |= {"fp8": {"w_ptr": fp8_type}, "mxfp4": MXFP4_TYPES}.get(variant.weight, {})
    return compile_kernel(target, decode_prep_kernel, constants(target, variant), types, variant.tile, unhinted)


def compile_kernel(
    target: Target,
    kernel: Any,
    constexprs: dict[str, Any],
    types: dict[str, str],
    tile: Tile,
    unhinted: Sequence[str] = (),
) -> Any:
    """Compile a kernel of this package with the argument hints the launcher would find for DeepSeek's shapes.

    Args:
        target: the architecture that this process compiles for.
        kernel: a ``triton.jit`` function whose pointers end in ``_ptr``.
        constexprs: its compile-time arguments by name.
        types: Triton element types of its pointers, where not bfloat16 (slots, positions and scales are known).
        tile: warps and matrix instruction.
        unhinted: pointers to tensors beyond 2 GiB, which ROCm's launcher does not mark as 32-bit.

    Raises:
        RuntimeError: this process has compiled for another architecture, or interprets its kernels.
    """
    claim_process(target)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    attrs: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        known = name in constexprs
        signature[name], hints = ("constexpr", []) if known else _argument(target, name, types, unhinted)
        if hints:
            attrs[(index,)] = hints
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": 1, "enable_fp_fusion": FP_FUSION}
    if target.backend == "hip":
        options["matrix_instr_nonkdim"] = tile.mfma
    source = ASTSource(kernel, signature, constexprs, attrs)
    return triton.compile(source, GPUTarget(target.backend, target.arch, target.warp_size), options)


def constants(target: Target, variant: Variant) -> dict[str, Any]:
    """The compile-time arguments of the kernel, as ``launcher.constants`` would give them."""
    tile = variant.tile
    limit = target.fp8_max if variant.quantised else 0.0
    found: dict[str, Any] = {"N": variant.heads, "M": variant.out_heads or variant.heads, "P": NOPE, "R": ROPE}
    found |= {"L": LATENT, "IS_NEOX": variant.is_neox}
    found |= {"BLOCK_SIZE": variant.block_size, "Q_FP8_MAX": limit, "KV_FP8_MAX": limit}
    found |= {name.upper(): getattr(tile, name) for name in ("block_t", "block_l", "blocks", "rope_rows", "kv_rows")}
    found["W_FP8_MAX"] = target.fp8_max if variant.weight == "fp8" else 0.0
    # The launcher's specialisation on 1, and on an argument that is not there.
    found["w_stride_l" if variant.weight_major == "L" else "w_stride_p"] = 1
    return found | {"plain": {"w_scale_ptr": None}, "mxfp4": {"w_scale_stride_h": 1}}.get(variant.weight, {})


def claim_process(target: Target) -> None:
    """Raise if this process compiled for another architecture, and pin fusion before Triton reads its environment."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("a process with TRITON_INTERPRET=1 cannot cross-compile")
    if _arch_of_process and _arch_of_process[0] != target.name:
        raise RuntimeError(f"this process compiles for {_arch_of_process[0]}; start another one for {target.name}")
    _arch_of_process[:] = [target.name]
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1" if FP_FUSION else "0"


def _argument(target: Target, name: str, types: dict[str, str], unhinted: Sequence[str]) -> tuple[str, list[list[Any]]]:
    divisible: list[list[Any]] = [["tt.divisibility", 16]]
    if not name.endswith("_ptr"):
        return "i32", divisible if "stride" in name else []
    hints = [] if name in SCALAR_TYPES else divisible
    if target.backend == "hip" and name not in unhinted:
        hints = [*hints, ["tt.pointer_range", 32]]
    return "*" + (types.get(name) or SCALAR_TYPES.get(name, "bf16")), hints

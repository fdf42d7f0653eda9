"""What the compiled code is made of, read from its text, and the bounds it has to keep. Never how fast it runs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.aot import LATENT, NOPE, ROPE, Target, Variant

# Vector registers of one SIMD lane (512 on gfx9, VGPRs and AGPRs together) and its wave limit; LDS of a compute unit.
GFX9_SIMDS = 4
GFX9_LDS = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
# sm90: registers, warps, shared memory of a multiprocessor; granules of allocation (CUDA programming guide, 9.0).
SM90_REGISTERS, SM90_WARPS, SM90_GRANULE, SM90_BLOCKS = 65536, 64, 256, 32
SM90_SHARED, SM90_RESERVED_SHARED = 228 * 1024, 1024
# The least waves a SIMD (sm90: warps a multiprocessor), by tile and format of the weight: what Triton 3.9.0 leaves.
# LDS of a compute unit limits tiles of plain weights on gfx942, registers limit the wide ones elsewhere.
OCCUPANCY: dict[str, dict[str, dict[str, int]]] = {
    "gfx942": {
        "16x64/4w": {"plain": 4, "fp8": 8},
        "16x128/4w": {"plain": 2, "fp8": 4},
        "32x128/8w": {"plain": 4, "fp8": 8},
        "64x128/4w": {"plain": 2, "fp8": 4},
        "64x2x128/4w": {"plain": 2, "fp8": 4},
    },
    "gfx950": {
        "16x64/4w": {"plain": 8, "fp8": 8, "mxfp4": 8},
        "16x128/4w": {"plain": 5, "fp8": 8, "mxfp4": 8},
        "32x128/8w": {"plain": 8, "fp8": 8, "mxfp4": 8},
        "64x128/4w": {"plain": 4, "fp8": 7, "mxfp4": 7},
        "64x2x128/4w": {"plain": 2, "fp8": 4, "mxfp4": 5},
    },
    "sm90": {
        "16x64/4w": {"plain": 36, "fp8": 28},
        "32x64/4w": {"plain": 36, "fp8": 20},
        "64x64/4w": {"plain": 24, "fp8": 12},
        "64x128/4w": {"plain": 16, "fp8": 12},
        "128x128/8w": {"plain": 16, "fp8": 8},
    },
}
TUNED = 2  # the least of a tile that only tuning may choose: the card's own time decides about it
# Where an older release leaves room for fewer: release, then target, tile and format of the weight.
OLDER: dict[str, dict[tuple[str, str, str], int]] = {
    "3.6": {
        ("gfx950", "64x128/4w", "plain"): 3,
        ("gfx950", "64x128/4w", "fp8"): 4,
        ("gfx950", "64x128/4w", "mxfp4"): 4,
        ("gfx950", "64x2x128/4w", "fp8"): 3,
        ("gfx950", "64x2x128/4w", "mxfp4"): 4,
    },
    "3.7": {("gfx942", "64x2x128/4w", "plain"): 1, ("gfx950", "64x128/4w", "fp8"): 6},
    "3.8": {("gfx950", "64x128/4w", "fp8"): 6, ("gfx950", "64x128/4w", "mxfp4"): 6},
}
# Of a value of the weight, without scales.
WEIGHT_BYTES = {"plain": 2, "fp8": 1, "mxfp4": 0.5}


@dataclass(frozen=True, slots=True)
class Figures:
    """Static figures of one compiled variant."""

    registers: int  # vector registers of a lane (VGPRs + AGPRs) or registers of a thread
    spills: int  # spilled registers, or bytes of local memory on CUDA
    scratch: int  # bytes of scratch, or of stack on CUDA
    lds: int  # bytes of LDS or shared memory of a program
    occupancy: int  # waves per SIMD (ROCm) or warps per multiprocessor (CUDA) that registers and LDS allow
    instructions: int  # instructions in the text (amdgcn, PTX)
    matrix: int  # MFMA, MMA or WGMMA instructions
    fp8_matrix: int  # those of them that multiply fp8
    scaled_matrix: int  # those of them that scale both operands as they multiply: mxfp4 here
    fp8_conversions: int  # hardware conversions to fp8, two values each
    wide_loads: int  # 16-byte loads from global memory
    byte_stores: int  # single-byte stores to global memory
    crossed_fmas: int  # packed float32 multiply-adds that take a half of a source pair for the other one


def figures(target: Target, variant: Variant, compiled: Any) -> Figures:
    lds = int(compiled.metadata.shared)
    if target.backend == "hip":
        return amdgcn_figures(compiled.asm["amdgcn"], target.name, lds, variant.tile.num_warps)
    usage = cubin_usage(compiled.asm["cubin"])
    return ptx_figures(compiled.asm["ptx"], usage, lds, variant.tile.num_warps)


def amdgcn_figures(text: str, arch: str, lds: int, num_warps: int) -> Figures:
    """Figures of an amdgcn listing; ``lds`` bytes of a workgroup of ``num_warps`` waves."""
    names = re.findall(r"^\t([a-z]\w+)", text, re.MULTILINE)
    waves = _number(text, r"; Occupancy: (\d+)")
    if lds:
        groups = GFX9_LDS[arch] // lds
        waves = min(waves, groups * num_warps // GFX9_SIMDS)
    return Figures(
        registers=_number(text, r"\.vgpr_count:\s+(\d+)"),
        spills=_number(text, r"\.vgpr_spill_count:\s+(\d+)") + _number(text, r"\.sgpr_spill_count:\s+(\d+)"),
        scratch=_number(text, r"\.private_segment_fixed_size:\s+(\d+)"),
        lds=lds,
        occupancy=waves,
        instructions=len(names),
        matrix=_count(names, r"v_mfma_"),
        fp8_matrix=_count(names, r"v_mfma_f32_\w+_(fp8_fp8|f8f6f4)"),
        scaled_matrix=_count(names, r"v_mfma_scale_f32_\w+_f8f6f4"),
        fp8_conversions=_count(names, r"v_cvt_(scalef32_)?pk_fp8_f32"),
        wide_loads=_count(names, r"(global|buffer)_load_(dwordx4|b128)"),
        byte_stores=_count(names, r"(global|buffer)_store_(byte|b8)"),
        crossed_fmas=len(re.findall(r"^\tv_pk_fma_f32 .*\bop_sel:", text, re.MULTILINE)),
    )


def ptx_figures(text: str, usage: dict[str, int], shared: int, num_warps: int) -> Figures:
    """Figures of a PTX listing and of what ``cuobjdump`` says of its cubin (``cubin_usage``)."""
    names = re.findall(r"^\s+(?:@!?%\w+ )?([a-z][\w.:]+)\s", text, re.MULTILINE)
    registers = usage["REG"]
    per_warp = -(-registers * 32 // SM90_GRANULE) * SM90_GRANULE
    blocks = min(SM90_REGISTERS // (per_warp * num_warps), SM90_SHARED // (shared + SM90_RESERVED_SHARED), SM90_BLOCKS)
    return Figures(
        registers=registers,
        spills=usage["LOCAL"],
        scratch=usage["STACK"],
        lds=shared,
        occupancy=min(SM90_WARPS, blocks * num_warps),
        instructions=len(names),
        matrix=_count(names, r"(wgmma\.mma_async|mma\.sync)"),
        fp8_matrix=_count(names, r"(wgmma\.mma_async|mma\.sync).*\.e4m3\.e4m3"),
        scaled_matrix=0,
        fp8_conversions=_count(names, r"cvt\.rn\.satfinite\.e4m3x2\.f32"),
        wide_loads=_count(names, r"ld\.global.*\.v4\.b32"),
        byte_stores=_count(names, r"st\.global.*\.[bu]8$"),
        crossed_fmas=0,
    )


def cubin_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL and SHARED of a cubin, from the ``cuobjdump`` inside Triton's wheel.

    Raises:
        subprocess.CalledProcessError: cuobjdump fails.
    """
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text)}


def breaches(target: Target, variant: Variant, found: Figures) -> list[str]:
    """The bounds that ``found`` breaks, one sentence each; empty when it keeps them all."""
    tile = variant.tile
    threads = tile.num_warps * target.warp_size
    over_fp8 = variant.weight == "fp8"
    # None where a lane has less than 16 bytes to load: mxfp4 weights on eight waves.
    q_loads = tile.block_t * NOPE * 2 // 16 // threads
    w_loads = int(NOPE * tile.block_l * WEIGHT_BYTES[variant.weight]) // 16 // threads
    stored = tile.block_t * tile.block_l * tile.blocks + 2 * tile.rope_rows * ROPE + tile.kv_rows * LATENT
    # Over fp8 weights q_nope is quantised too.
    converted = stored * variant.quantised + tile.block_t * NOPE * over_fp8
    conversions = converted // threads // 2
    broken = []
    if found.fp8_conversions < conversions:
        broken.append(f"{conversions} hardware fp8 conversions expected, {found.fp8_conversions} found")
    if found.matrix == 0:
        broken.append("no matrix instruction")
    if over_fp8 and target.backend == "hip" and found.fp8_matrix < found.matrix:
        broken.append(f"{found.matrix} fp8 matrix instructions expected, {found.fp8_matrix} found")
    if variant.weight == "mxfp4" and found.scaled_matrix < found.matrix:
        broken.append(f"{found.matrix} scaled matrix instructions expected, {found.scaled_matrix} found")
    held = {"spilled": found.spills, "bytes of scratch": found.scratch, "single-byte stores": found.byte_stores}
    if target.name == "gfx950":
        held["v_pk_fma_f32 with op_sel, which ROCm/rocMLIR#2459 found wrong at times"] = found.crossed_fmas
    broken += [f"{count} {what}" for what, count in held.items() if count]
    if found.wide_loads < q_loads + w_loads:
        broken.append(f"{q_loads + w_loads} 16-byte loads of q and the weight expected, {found.wide_loads} in all")
    least = least_waves(target.name, tile.label, variant.weight)
    if found.occupancy < least:
        lds, registers = found.lds, found.registers
        broken.append(f"{found.occupancy} waves by {lds} bytes of LDS and {registers} registers, at least {least}")
    return broken


def least_waves(target: str, tile: str, weight: str) -> int:
    """Return how many waves the installed Triton has to leave room for."""
    import triton

    release = ".".join(triton.__version__.split(".")[:2])
    return OLDER.get(release, {}).get((target, tile, weight), OCCUPANCY[target].get(tile, {}).get(weight, TUNED))


def _count(names: list[str], pattern: str) -> int:
    return sum(1 for name in names if re.match(pattern, name))


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the listing does not say {pattern!r}")
    return int(found.group(1))

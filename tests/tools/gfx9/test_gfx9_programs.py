"""Short programs on one wave: what they leave in registers and memory, or the fault in which they end."""

from contextlib import nullcontext

import numpy as np
import pytest

from tests.tools.gfx9.gfx9_lanes import execute, wave
from tools.gfx9.operand import register
from tools.gfx9.parse import Fault

ALL, LANE = (1 << 64) - 1, np.arange(64)


def raw(values):
    """One value or 64 as a VGPR holds them: the bits of a float32, or 32 bits of an integer."""
    values = np.asarray(values)
    return values.astype(np.float32).view(np.uint32) if values.dtype.kind == "f" else values.astype(np.uint32)


def waves(given, arch="gfx942"):
    """Two waves of a group with a buffer, and its region; s[2:3] is its address, s[4:7] its descriptor.

    The words of the buffer are their own numbers. Byte 1000 may not be read, and byte 1004 may not be written.
    ``given`` is defined in both waves: a list is v0 and the next ones, None is undefined.
    """
    pair = wave(arch), wave(number=1)
    pair[1].group = pair[0].group
    region = pair[0].group.memory.add("x", np.arange(256, dtype=np.uint32).view(np.uint8), True, True)
    region.readable[1000] = region.writable[1004] = 0
    if isinstance(given, list):
        given = {f"v{number}": values for number, values in enumerate(given) if values is not None}
    descriptor = {"s[2:3]": region.start, "s[4:5]": region.start, "s6": 1 << 20, "s7": 0x27000}
    for w in pair:
        for name, value in (descriptor | given).items():
            at = register(name, 0)
            if at.bank == "v":
                w.put(w.u, at.index, raw(value))
            else:
                (w.set_scalar64 if at.count == 2 else w.set_scalar)(at.index, value)
    return *pair, region


def held(w, region, name):
    """A register, SCC, "known" lanes of a VGPR, or the first 64 words of the "memory"."""
    if name in ("scc", "exec"):
        return getattr(w, name)
    if name == "memory":
        return region.data.view(np.uint32)[:64]
    at = register(name.removeprefix("known "), 0)
    if name.startswith("known "):
        return w.known[at.index]
    return w.u[at.index] if at.bank == "v" else (w.scalar64 if at.count == 2 else w.scalar)(at.index)


END = "row_mask:0xf bank_mask:0xf bound_ctrl:1"
SELECTED = "dst_sel:DWORD dst_unused:UNUSED_PAD"
WHOLE = "dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD"
TO_FP8 = [("gfx942", "v_cvt_pk_fp8_f32 v2, v0, v0", " op_sel:[0,0,1]", 0x40400000),
          ("gfx950", "v_cvt_scalef32_pk_fp8_f32 v2, v0, v0, 1.0", " op_sel:[0,0,0,1]", 0x38380000)]  # fmt: skip
LOADS = "global_load_dword v2, v0, s[2:3]; global_load_dword v3, v0, s[2:3]"
SCALAR_LOADS = "s_load_dword s10, s[2:3], 0x8; s_load_dwordx2 s[12:13], s[2:3], 0x10"
SHARED = "ds_write_b32 v0, v0; ds_read_b32 v1, v0; ds_read_b32 v2, v0"
STORED_LOW = (0x04030201 * LANE + 0x7F80FF01) % 2**32
PAIR = "buffer_load_dwordx2 v[2:3], v0, s[4:7], 0 offen"
WORDS = [4 * LANE]
SIGNALLING, MINUS_SIGNALLING = 0x7F8A0001, 0xFF8A0001
QUIET, MINUS_QUIET = SIGNALLING | 1 << 22, MINUS_SIGNALLING | 1 << 22
# What is defined, a program, and what it leaves, or the fault of its last instruction.
PROGRAMS = [
    # Of two zeros the negative one is less.
    ([0.0, -0.0], "v_min_f32 v3, v0, v1", {"v3": -0.0}),
    ([-0.0, 0.0], "v_min_f32 v3, v0, v1", {"v3": -0.0}),
    ([0.0, -0.0], "v_max_f32 v3, v0, v1", {"v3": 0.0}),
    ([-0.0, 0.0], "v_max_f32 v3, v0, v1", {"v3": 0.0}),
    ([-0.0, 0.0, -0.0], "v_med3_f32 v3, v0, v1, v2", {"v3": 0.0}),
    ([0.0, -0.0, -0.0], "v_med3_f32 v3, v0, v1, v2", {"v3": -0.0}),
    # A quiet NaN loses to a number. A signalling one wins and becomes quiet; the first one of two.
    ([QUIET, 1.0], "v_max_f32 v3, v0, v1; v_min_f32 v4, v1, v0", {"v3": 1.0, "v4": 1.0}),
    ([SIGNALLING, 1.0, MINUS_SIGNALLING], "v_max_f32 v3, v0, v1; v_max_f32 v4, v1, v0; v_min_f32 v5, v1, v2; "
     "v_min_f32 v6, v0, v2; v_max_f32 v7, v2, v0; v_max_f32 v8, v3, v1; v_max_f32 v9, |v2|, v1",
     {"v3": QUIET, "v4": QUIET, "v5": MINUS_QUIET, "v6": QUIET, "v7": MINUS_QUIET, "v8": 1.0, "v9": QUIET}),
    ([SIGNALLING, 1.0], "v_max3_f32 v3, v0, v1, v1; v_max3_f32 v4, v1, v1, v0; v_med3_f32 v5, v1, v1, v0",
     {"v3": 1.0, "v4": QUIET, "v5": QUIET}),
    ([SIGNALLING, 1.0, 1.0, MINUS_SIGNALLING],
     "v_pk_mul_f32 v[10:11], v[0:1], v[2:3]; v_pk_add_f32 v[12:13], v[0:1], v[2:3]",
     {"v10": QUIET, "v11": MINUS_QUIET, "v12": QUIET, "v13": MINUS_QUIET}),
    # It adds to its destination.
    ([1.5, 2.0, 0.25], "v_fmac_f32_e32 v2, v0, v1", {"v2": 3.25}),
    # Packed ones take the halves and signs they are told, do not read another, and read all before they write.
    ([2.0, 3.0, 5.0, 7.0], "v_pk_mul_f32 v[10:11], v[0:1], v[2:3]", {"v10": 10.0, "v11": 21.0}),
    ([2.0, None, 5.0, 7.0], "v_pk_mul_f32 v[10:11], v[0:1], v[2:3] op_sel_hi:[0,1]", {"v10": 10.0, "v11": 14.0}),
    ([2.0, 3.0, 5.0, 7.0], "v_pk_add_f32 v[4:5], v[0:1], v[2:3] op_sel:[1,0] neg_lo:[0,1] neg_hi:[0,1]",
     {"v4": -2.0, "v5": -4.0}),
    ([2.0, 3.0], "v_pk_add_f32 v[16:17], v[0:1], 0 op_sel_hi:[1,0]", {"v16": 2.0, "v17": 3.0}),
    *[([LANE, 100 + LANE], f"v_permlane{n}_swap_b32_e32 v0, v1",
       {"v0": np.where(LANE & n, 100 + LANE - n, LANE), "v1": np.where(LANE & n, 100 + LANE, LANE + n)})
      for n in (16, 32)],
    ([1.0, 2.0, 3.0, 4.0], "v_pk_mov_b32 v[10:11], v[0:1], v[2:3] op_sel:[1,0]", {"v10": 2.0, "v11": 3.0}),
    ([1.0, 2.0, 3.0, 4.0], "v_pk_mov_b32 v[0:1], v[2:3], v[0:1] op_sel:[0,1]", {"v0": 3.0, "v1": 2.0}),
    # A constant is bits of the type as which it is read. SDWA takes a part of a source, DPP the source of another lane.
    ([0.0, 0], "v_mov_b32_e32 v0, -4.0; v_add_u32_e32 v2, -1, v1; v_mul_f32_e32 v3, 0x40400000, v0",
     {"v0": 0xC0800000, "v2": -1, "v3": -12.0}),
    *[([0x12345678, -1], f"v_and_b32_sdwa v2, v0, v1 {SELECTED} src0_sel:{part} src1_sel:DWORD", {"v2": taken})
      for part, taken in (("WORD_1", 0x1234), ("BYTE_1", 0x56))],
    *[({"v0": 4, "v1": 0x12345678, "v2": -1}, f"v_lshrrev_b32_sdwa v2, v0, v1 dst_sel:{part} {WHOLE}", {"v2": left})
      for part, left in (("BYTE_1", 0x6700), ("BYTE_3", 0x67000000), ("WORD_1", 0x45670000), ("DWORD", 0x1234567))],
    *[([LANE, 1000 * LANE], f"v_mov_b32_dpp v2, v0 {move} {END}; v_add_u32_dpp v3, v0, v1 {move} {END}",
       {"v2": taken, "v3": taken + 1000 * LANE})
      for move, taken in (("row_ror:8", (LANE & 48) + (LANE - 8) % 16), ("row_ror:1", (LANE & 48) + (LANE - 1) % 16),
                          ("row_mirror", (LANE & 48) + 15 - LANE % 16),
                          ("row_half_mirror", (LANE & 56) + 7 - LANE % 8),
                          ("quad_perm:[1,0,3,2]", LANE ^ 1), ("quad_perm:[2,3,0,1]", LANE ^ 2))],
    # A shifted row has sources for the lanes that bank_mask names, four each; the others keep what they had.
    ([LANE, 1000 + LANE], "v_mov_b32_dpp v1, v0 row_shr:8 row_mask:0xf bank_mask:0xc",
     {"v1": np.where(LANE % 16 < 8, 1000 + LANE, LANE - 8)}),
    ([LANE, 1000 + LANE], "v_mov_b32_dpp v1, v0 row_shl:8 row_mask:0xf bank_mask:0x3",
     {"v1": np.where(LANE % 16 < 8, LANE + 8, 1000 + LANE)}),
    # 64 bits by two subtractions, with the borrow of lanes in a mask.
    ([LANE, 7, 32, 3], "v_sub_co_u32_e32 v10, vcc, v0, v2; v_subb_co_u32_e32 v11, vcc, v1, v3, vcc",
     {"v10": LANE - 32, "v11": np.where(LANE < 32, 3, 4), "vcc": 0}),
    ([LANE, 7, 32, 7], "v_sub_co_u32_e64 v10, s[8:9], v0, v2; v_subb_co_u32_e64 v11, s[10:11], v1, v3, s[8:9]",
     {"v11": np.where(LANE < 32, -1, 0), "s[8:9]": 2**32 - 1, "s[10:11]": 2**32 - 1}),
    ({"v0": 0x12345678, "v1": 0x9ABCDEF0, "vcc": 1},
     "v_cndmask_b32_sdwa v2, v0, v1, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1",
     {"v2": np.where(LANE == 0, 0x9ABC, 0x12345678)}),
    # Above 16 bits that are written there are neither zeros nor what was there.
    *[({"v0": 0x12345678, "v1": 0x9ABCDEF0, "s0": 0}, line, {"v1": 0xBAAD0000 + low})
      for line, low in (("v_lshlrev_b16_e32 v1, 8, v0", 0x7800),
                        ("v_bitop3_b16 v1, v0, v0, s0 bitop3:0xec", 0x5678))],
    # Inactive lanes keep what they had, and a comparison clears their bits. EXEC is one mask, also if halves are set.
    ([LANE], "s_mov_b64 exec, 24; v_readfirstlane_b32 s8, v0", {"s8": 3}),
    ({"v0": 7, "vcc": ALL, "exec": 0xFF},
     "v_cmp_gt_i32_e32 vcc, 9, v0; v_add_u32_e32 v0, v0, v0; v_mov_b32_e32 v1, 1.0",
     {"vcc": 0xFF, "known v1": 0xFF, "v0": np.where(LANE < 8, 14, 7)}),
    ([7], "s_mov_b32 exec_lo, 0xff; s_mov_b32 exec_hi, 0; v_mov_b32_e32 v0, 5",
     {"exec": 0xFF, "v0": np.where(LANE < 8, 5, 7)}),
    ({"v0": 7, "exec": 1}, "s_mov_b64 exec, -1; v_mov_b32_e32 v0, 5", {"exec": ALL, "v0": 5}),
    *[({"exec": 0b1100, "s[8:9]": 0b1010}, f"s_{name}_saveexec_b64 s[10:11], s[8:9]",
       {"s[10:11]": 0b1100, "exec": left, "scc": 1})
      for name, left in (("and", 0b1000), ("or", 0b1110), ("xor", 0b0110), ("andn2", 0b0010))],
    *[(dict.fromkeys(("v0", "v1", "v2", "v3"), 0) | {"exec": 1}, line, "inactive lanes")
      for line in ("v_permlane32_swap_b32_e32 v0, v1", "ds_bpermute_b32 v2, v0, v1",
                   "v_mfma_f32_16x16x16_bf16 v[4:7], v[0:1], v[2:3], 0")],
    ([255] * 10, "v_mfma_scale_f32_16x16x128_f8f6f4 v[12:15], v[0:3], v[4:7], 0, v8, v9 cbsz:4 blgp:4",
     "a scale that is no number"),
    ({"v0": 0, "v1": 0, "v2": 0, "vcc": 1}, "v_div_fmas_f32 v3, v0, v1, v2", "scaled quotient"),
    # Scalar constants of 16 bits are signed.
    ([], "s_movk_i32 s0, 0xff80; s_movk_i32 s1, 0x200; s_movk_i32 s8, 5; s_mulk_i32 s8, 0xffff",
     {"s0": 2**32 - 128, "s1": 512, "s8": 2**32 - 5}),
    ({"s8": 2**31 - 1}, "s_addk_i32 s8, 0x1", {"s8": 2**31, "scc": 1}),
    # Nothing undefined is read: no SGPR, no SCC, no active lane.
    *[([], line, "undefined")
      for line in ("s_add_i32 s2, s0, s1", "s_cselect_b32 s2, 1, 0", "s_and_b64 s[2:3], s[8:9], exec")],
    ([], "s_mov_b64 exec, 0xff; v_mov_b32_e32 v0, 1; v_add_u32_e32 v1, v0, v0; s_mov_b64 exec, 0x1ff; "
     "v_add_u32_e32 v1, v0, v0", "v0 is undefined in lanes 0x100"),
    # Outside a descriptor's bound a load gives zero and a store is dropped.
    ({"v0": 4 * LANE, "v1": 99, "s6": 128},
     "buffer_load_dword v2, v0, s[4:7], 0 offen; s_waitcnt vmcnt(0); buffer_store_dword v1, v0, s[4:7], 0 offen",
     {"v2": np.where(LANE < 32, LANE, 0), "memory": np.where(LANE < 32, 99, LANE)}),
    # Global memory has two forms of address.
    (WORDS, "v_add_u32_e32 v8, s2, v0; v_mov_b32_e32 v9, s3; global_load_dword v2, v0, s[2:3] offset:4; "
     "global_load_dword v3, v[8:9], off offset:8; s_waitcnt vmcnt(0); global_store_dword v0, v3, s[2:3]",
     {"v2": LANE + 1, "v3": LANE + 2, "memory": LANE + 2}),
    # Bytes and shorts are extended when loaded, and stored low.
    ([4 * LANE, STORED_LOW], "global_store_dword v0, v1, s[2:3]; global_load_ubyte v2, v0, s[2:3] offset:1; "
     "global_load_ushort v3, v0, s[2:3] offset:2; buffer_load_sbyte v4, v0, s[4:7], 0 offen offset:3; "
     "s_waitcnt vmcnt(0)",
     {"v2": STORED_LOW >> 8 & 255, "v3": STORED_LOW >> 16, "v4": STORED_LOW.astype(np.uint32).view(np.int32) >> 24}),
    ([4 * LANE, 0xABCD], "global_store_byte v0, v1, s[2:3] offset:1", {"memory": LANE + 0xCD00}),
    # Inactive lanes touch nothing.
    ({"v0": np.where(LANE < 4, 0, 1 << 30), "exec": 0xF}, "global_load_dword v2, v0, s[2:3]; s_waitcnt vmcnt(0)",
     {"known v2": 0xF}),
    # Not an access of the operand, not modelled, or one that leads nowhere.
    ([0], "global_load_dwordx4 v[2:5], v0, s[2:3] offset:992", "byte 1000 of the buffer is not one to read"),
    ([0, 0], "global_store_dword v0, v1, s[2:3] offset:1004", "byte 1004 of the buffer is not one to write"),
    ({"v0": 0, "s6": 6}, PAIR, "across the descriptor's bound"),
    *[([0], f"s_or_b32 s5, s5, {1 << bit:#x}; {PAIR}", "descriptor with words") for bit in (16, 31)],
    *[({"v0": 0, "s7": word}, PAIR, "descriptor with words") for word in (0x27001, 0)],
    *[([0], f"global_load_dword v2, v0, s[2:3] offset:{at}", "in no buffer") for at in (-4, 1024)],
    ([0], "ds_read_u16 v2, v0 offset:1", "no multiple of 2"),
    ([0], "ds_read_b32 v1, v0", "byte 0 is read before it is written"),
    ([0], "ds_write_b32 v0, v0 offset:1024", "byte 1024 of 1024"),
    # A loaded register is undefined until a wait covers the load.
    (WORDS, f"{LOADS}; v_mov_b32_e32 v4, v2", "v2 is still being loaded"),
    (WORDS, f"{LOADS}; s_waitcnt vmcnt(1); v_mov_b32_e32 v4, v2", {"v4": LANE}),
    (WORDS, f"{LOADS}; s_waitcnt vmcnt(1); v_mov_b32_e32 v4, v3", "v3 is still being loaded"),
    (WORDS, f"{LOADS}; s_waitcnt vmcnt(1); v_mov_b32_e32 v3, 0", "v3 is written while a load to it is in flight"),
    (WORDS, "global_load_dword v2, v0, s[2:3]; global_store_dword v0, v0, s[2:3]; s_waitcnt vmcnt(1); "
     "v_mov_b32_e32 v4, v2", {"v4": LANE}),
    # Scalar loads arrive in any order, so that only a wait for 0 counts.
    ([], f"{SCALAR_LOADS}; s_waitcnt lgkmcnt(1); s_mov_b32 s20, s10", "s10 is still being loaded"),
    ([], f"{SCALAR_LOADS}; s_waitcnt lgkmcnt(1); s_mov_b32 s13, 0", "s13 is written while"),
    ([], f"{SCALAR_LOADS}; s_waitcnt lgkmcnt(0); s_add_u32 s20, s10, s13", {"s20": 2 + 5}),
    (WORDS, "ds_bpermute_b32 v2, v0, v0; v_mov_b32_e32 v4, v2", "v2 is still being loaded"),
    (WORDS, f"{SHARED}; s_waitcnt lgkmcnt(1); v_mov_b32_e32 v3, v1", {"v3": 4 * LANE}),
    (WORDS, f"{SHARED}; s_waitcnt lgkmcnt(1); v_mov_b32_e32 v3, v2", "v2 is still being loaded"),
    # Less than a word is written to LDS, and read back over zeros.
    *[([size * LANE, 0xFEDCBA98 + LANE], f"ds_write_b{8 * size} v0, v1 offset:64; ds_read_u{8 * size} v2, v0 offset:64;"
       f" s_waitcnt lgkmcnt(0){more}", left)
      for size in (1, 2) for more, left in (("", {"v2": (0xBA98 + LANE) % 256**size}),
                                            ("; ds_read_u8 v2, v0", "byte 0 is read before it is written"))],
    ([4 * LANE + 260, LANE], "ds_bpermute_b32 v2, v0, v1; s_waitcnt lgkmcnt(0)", {"v2": (LANE + 1) % 64}),
]  # fmt: skip


def assert_leaves(given, program, left, arch="gfx942"):
    """Only the last instruction of ``program`` may fault."""
    w, _, region = waves(given, arch)
    *before, last = program.split("; ")
    execute(w, *before)
    with pytest.raises(Fault, match=left) if isinstance(left, str) else nullcontext():
        execute(w, last)
    for name, value in left.items() if isinstance(left, dict) else ():
        found = held(w, region, name)
        assert (found == raw(value)).all() if isinstance(found, np.ndarray) else found == value, name


@pytest.mark.parametrize(("given", "program", "left"), PROGRAMS)
def test_gfx9_program_leaves(given, program, left):
    assert_leaves(given, program, left)


@pytest.mark.parametrize(("arch", "line", "upper", "ones"), TO_FP8)
def test_gfx9_fp8_conversion_keeps_the_other_half_which_may_be_undefined(arch, line, upper, ones):
    assert_leaves([0.0], line, {"known v2": 0}, arch)
    assert_leaves([0.0], f"{line}; v_mov_b32_e32 v0, 1.0; {line}{upper}", {"known v2": ALL, "v2": ones}, arch)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ds_write_b32 v0, v0", "ds_read_b32 v1, v0"),
        ("ds_read_b32 v1, v0", "ds_write_b32 v0, v0"),
        ("ds_write_b32 v0, v0", "ds_write_b32 v0, v0"),
    ],
)
@pytest.mark.parametrize(("waited", "barrier"), [(True, True), (True, False), (False, True)])
def test_gfx9_two_waves_meet_at_a_word_only_with_a_wait_and_a_barrier_between(one, other, waited, barrier):
    first, second, _ = waves(WORDS)
    execute(first, "ds_write_b32 v0, v0", "s_waitcnt lgkmcnt(0)")
    first.group.lds.barrier((first, second))
    execute(first, one, *["s_waitcnt lgkmcnt(0)"] * waited)
    if barrier:
        first.group.lds.barrier((first, second))
    with nullcontext() if waited and barrier else pytest.raises(Fault, match="LDS race"):
        execute(second, other)


def test_gfx9_two_waves_write_neighbouring_bytes_of_a_word_and_race_at_one():
    first, second, _ = waves(WORDS)
    execute(first, "ds_write_b8 v0, v0")
    execute(second, "ds_write_b8 v0, v0 offset:1")
    with pytest.raises(Fault, match="LDS race"):
        execute(second, "ds_write_b8 v0, v0")

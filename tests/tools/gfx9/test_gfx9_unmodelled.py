"""What is not modelled is an error that names the line; nothing is skipped."""

from __future__ import annotations

import pytest

from tests.tools.gfx9.gfx9_lanes import execute, fill, wave
from tools.gfx9 import code
from tools.gfx9.code import Code
from tools.gfx9.machine import Program, bind, launch
from tools.gfx9.memory import Memory
from tools.gfx9.parse import Fault, Skipped, instruction, parse

SCALED = "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], 0, v12, v13 "
HEAD = ".amdhsa_kernel k\n.end_amdhsa_kernel\n"


# Mnemonics, modifiers, operands that do not fit, waits and mode bits.
UNKNOWN = f"""
v_dot2_f32_f16 v0, v1, v2, v3
s_sleep 1
s_setprio 1
s_sendmsg 1
s_getreg_b32 s0, hwreg(HW_REG_MODE)
ds_permute_b32 v0, v1, v2
ds_read_i8 v0, v1
ds_read_u8_d16 v0, v1
ds_write_b8_d16_hi v0, v1
ds_read2_u8 v[0:1], v1
ds_add_u32 v0, v1
flat_load_dword v0, v[2:3]
buffer_load_short_d16 v0, v1, s[4:7], 0 offen
buffer_load_dword v0, s[4:7], 0 offen lds
global_atomic_add v0, v1, s[2:3]
buffer_load_sshort v0, v1, s[4:7], 0 offen
buffer_store_sbyte v0, v1, s[4:7], 0 offen
v_mfma_f64_16x16x4_f64 v[0:7], v[8:9], v[10:11], v[0:7]
v_mfma_i32_16x16x32_i8 v[0:3], v[8:9], v[10:11], v[0:3]
v_mfma_ld_scale_b32 v0, v1
v_mov_b32_dpp v0, v1 row_shr:1 row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v0, v1 row_bcast:15 row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v0, v1 row_ror:1 row_mask:0xa bank_mask:0xf
v_readfirstlane_b32_dpp s0, v1 row_ror:1 row_mask:0xf bank_mask:0xf
v_add_f32_e64 v0, v1, v2 clamp
v_mul_f32_e64 v0, v1, v2 mul:2
v_pk_mul_f32 v[0:1], v[2:3], v[4:5] clamp
buffer_load_dword v0, v1, s[4:7], 0 offen glc
buffer_load_dword v0, v1, s[4:7], 0 idxen
global_load_dword v0, v1, s[2:3] sc0
global_store_dword v0, v1, s[2:3] nt
ds_read_b32 v0, v1 gds
v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], 0 cbsz:1
v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], 0 cbsz:4 blgp:4
{SCALED}cbsz:4
{SCALED}blgp:4
{SCALED}cbsz:4 blgp:2
{SCALED}cbsz:4 blgp:4 op_sel:[0,0,1]
{SCALED}cbsz:4 blgp:4 neg_lo:[1,0,0]
ds_bpermute_b32 v0, v1, v2 gds
s_load_dword s0, s[2:3], 0x0 glc
v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[1,0,0]
v_cvt_scalef32_pk_fp8_f32 v0, v1, v2, 2.0
v_and_b32_sdwa v0, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD
v_and_b32_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_7 src1_sel:DWORD
v_add_u32_e32 v0, v1
v_add_u32_e32 v0, v1, src_lds_direct
v_add_u32_e32 v0, -v1, v2
v_add_u32_e32 v[0:1], v1, v2
v_lshl_add_u64 v[0:1], v2, 0, v[4:5]
s_mov_b64 s[0:1], 0x80000000
s_mov_b32 s0, s[2:3]
s_mov_b32 ttmp0, 0
s_mov_b32 s0, src_private_base
s_movk_i32 s0, 0x10000
v_pk_mul_f32 v[0:1], v[2:3], 1.0
{SCALED.replace("v13", "s13")}cbsz:4 blgp:4
{SCALED.replace("v13", "1.0")}cbsz:4 blgp:4
{SCALED.replace("v[4:7]", "v[4:11]")}cbsz:4 blgp:4
{SCALED}cbsz:4 blgp:4 op_sel:[1,1]
ds_read_b64 v0, v1
s_load_dwordx2 s0, s[2:3], 0x0
global_load_dword v0, v[2:3], s[2:3]
s_waitcnt expcnt(0)
s_waitcnt 0
s_waitcnt vmcnt(0) vscnt(0)
s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 5
s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 2
"""


@pytest.mark.parametrize("line", UNKNOWN.strip().splitlines())
def test_gfx9_what_is_not_modelled_is_refused_with_its_line(line):
    with pytest.raises(Skipped) as caught:
        bind(instruction(line, 7))
    assert "line 7" in str(caught.value)
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        # No wave reaches it.
        (" s_branch .L1\n s_sleep 3\n.L1:\n s_endpgm\n", "line 5: s_sleep 3"),
        *[(f" {data}\n s_endpgm\n", "directive") for data in (".long 0xbf800000", ".byte 1", ".fill 2, 4, 0")],
        (" s_nop 0\n", "runs on past"),
    ],
)
def test_gfx9_code_that_is_not_modelled_is_refused_reached_or_not(body, why):
    with pytest.raises(Skipped, match=why):
        Program(Code("gfx942", parse(f"{HEAD}k:\n{body}"), 2, 0, (), 0, 8, 8))


def run(body, waves=1):
    program = Program(Code("gfx942", parse(f"{HEAD}k:\n{body}\n s_endpgm\n"), 2, 0, (), 16, 8, 8))
    launch(program, Memory(), bytes(16), [5], waves, 256)


def test_gfx9_a_fault_names_the_workgroup_and_the_line():
    with pytest.raises(Fault, match=r"workgroup 5: line 5: v_mov_b32_e32 v1, v2: v2 is undefined"):
        run(" s_nop 0\n v_mov_b32_e32 v1, v2")


def test_gfx9_branches_loop_and_waves_meet_at_barriers():
    run(" s_mov_b32 s3, 3\n.L0:\n s_barrier\n s_add_i32 s3, s3, -1\n s_cmp_lg_u32 s3, 0\n s_cbranch_scc1 .L0", waves=2)


def test_gfx9_waves_that_part_at_a_barrier_fault():
    body = " v_readfirstlane_b32 s3, v0\n s_cmp_eq_u32 s3, 0\n s_cbranch_scc1 .L0\n s_barrier\n.L0:\n s_nop 0"
    with pytest.raises(Fault, match="different barriers, or one has ended"):
        run(body, waves=2)


DESCRIPTOR = bytearray(64)
DESCRIPTOR[8:12] = (152).to_bytes(4, "little")
DESCRIPTOR[44:48] = (11).to_bytes(4, "little")
DESCRIPTOR[48:52] = (code.RSRC1_MODE | 5).to_bytes(4, "little")
DESCRIPTOR[52:56] = (16 << 1 | code.RSRC2_WORKGROUP_X).to_bytes(4, "little")
DESCRIPTOR[56:60] = bytes((8, 0, 14, 0))


def test_gfx9_descriptor_says_registers_and_preload():
    found = code._checked(bytes(DESCRIPTOR))
    assert found == {"user_sgprs": 16, "preloaded": 14, "argument_bytes": 152, "vgprs": 48, "accum_offset": 48}


@pytest.mark.parametrize(
    ("what", "places"),
    [
        ("LDS", [(0, 1)]),
        ("scratch", [(4, 1)]),
        ("float mode, IEEE or clamp", [(49, 0x10), (50, 0x01), (50, 0x20), (51, 0x04)]),
        ("SGPRs", [(52, 0x01), (53, 0x01), (53, 0x08)]),
        ("properties", [(56, 0x01)]),
        ("preload", [(58, 0x01)]),
        ("split", [(46, 1)]),
    ],
)
def test_gfx9_descriptor_bits_that_are_not_modelled_are_refused(what, places):
    for at, bit in places:
        changed = bytearray(DESCRIPTOR)
        changed[at] ^= bit
        with pytest.raises(Skipped, match=what):
            code._checked(bytes(changed))


@pytest.mark.parametrize(
    "line",
    [
        "v_permlane32_swap_b32_e32 v0, v1",
        "ds_bpermute_b32 v2, v0, v1",
        "v_mfma_f32_16x16x16_bf16 v[4:7], v[0:1], v[2:3], 0",
    ],
)
def test_gfx9_operations_across_lanes_with_inactive_lanes_fault(line):
    w = wave()
    for register in range(4):
        fill(w, register, 0)
    w.set_exec(1)
    with pytest.raises(Fault, match="inactive lanes"):
        execute(w, line)


def test_gfx9_a_division_that_has_to_be_scaled_back_faults():
    w = wave()
    for register in (0, 1, 2):
        fill(w, register, 0)
    w.set_scalar64(106, 1)
    with pytest.raises(Fault, match="scaled quotient"):
        execute(w, "v_div_fmas_f32 v3, v0, v1, v2")

; What the interpreter refuses: mnemonics, modifiers, operands that do not fit, waits and mode bits.
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
v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], 0, v12, v13 cbsz:4
v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], 0, v12, v13 blgp:4
v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], 0, v12, v13 cbsz:4 blgp:2
v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], 0, v12, v13 cbsz:4 blgp:4 op_sel:[0,0,1]
v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], 0, v12, v13 cbsz:4 blgp:4 neg_lo:[1,0,0]
ds_bpermute_b32 v0, v1, v2 gds
s_load_dword s0, s[2:3], 0x0 glc
v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[1,0,0]
v_cvt_scalef32_pk_fp8_f32 v0, v1, v2, 2.0
v_and_b32_sdwa v0, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:DWORD
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
v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], 0, v12, s13 cbsz:4 blgp:4
v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], 0, v12, 1.0 cbsz:4 blgp:4
v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[8:11], 0, v12, v13 cbsz:4 blgp:4
v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], 0, v12, v13 cbsz:4 blgp:4 op_sel:[1,1]
ds_read_b64 v0, v1
s_load_dwordx2 s0, s[2:3], 0x0
global_load_dword v0, v[2:3], s[2:3]
s_waitcnt expcnt(0)
s_waitcnt 0
s_waitcnt vmcnt(0) vscnt(0)
s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 5
s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 2

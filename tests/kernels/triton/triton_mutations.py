"""Calls of the kernel; and bugs to plant in its source, with the case and the figure that must show each."""

from tests.support.triton_cases import Case

# Codes of the weight, with the stride that vLLM gives them.
CODES = {"weight": "float8_e4m3fn", "w_major": "P"}
MXFP4 = {"weight": "mxfp4"}
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")

CASES = [
    Case(),
    Case(is_neox=True, cache="float8_e4m3fnuz", block_size=1),
    Case(cache="bfloat16", block_size=64),
    Case(cache="bfloat16", is_neox=True, block_size=1, w_major="P"),
    Case(cache="float8_e4m3fnuz", out="bfloat16", block_size=64),
    Case(act="float16", cache="float16"),
    Case(act="float16", cache="float8_e4m3fn", is_neox=True),
    Case(w_major="P", heads=3, tokens=17),
    Case(tokens=1, heads=1),
    Case(tokens=0),
    Case(no_slot="all"),
    Case(tokens=70, heads=1, block_size=64),
    Case(nope=64, rope=32, latent=256, heads=1, is_neox=True),
    Case(nope=256, rope=128, latent=1024, heads=1),
    Case(nope=16, rope=16, latent=16, heads=5, tokens=33, cache="bfloat16"),
    Case(block_size=48, tokens=7),
    Case(nope=192, heads=3),
    # Both halves overflow, and saturate.
    *[Case(cache=fp8, is_neox=neox, magnitude=300.0) for fp8 in FP8 for neox in (False, True)],
    # Room between the heads, and behind them.
    Case(heads=2, out_heads=4),
    Case(heads=3, out_heads=4, tokens=17, is_neox=True, **CODES),
    Case(**CODES),
    Case(weight="float8_e4m3fnuz", w_major="P", cache="float8_e4m3fnuz", block_size=1, is_neox=True),
    Case(**CODES, cache="bfloat16", nope=192, heads=3, tokens=17),
    Case(**CODES, act="float16", cache="float16", nope=256),
    Case(weight="float8_e4m3fn", out="bfloat16", nope=64),
    Case(**CODES, no_slot="all", nope=32),
    Case(**MXFP4),
    Case(**MXFP4, cache="bfloat16", nope=256, heads=3, tokens=17),
    Case(**MXFP4, out="bfloat16", nope=512, latent=64, heads=1, is_neox=True),
]

# Name: text, replacement, how often the text occurs, case, figure. Without a case another test plants it.
MUTATIONS = {
    "dropped_position_clamp": ("tl.minimum(tl.maximum(position, 0), last_position)", "position", 1,
                               Case(), "wrong_rope"),
    "slot_minus_one_written": ("slot >= 0", "slot >= -1", 2, Case(), "wrong_cache"),
    "wrong_pair_order": ("a, b = tl.split(", "b, a = tl.split(", 1, Case(), "wrong_rope"),
    "wrong_pairing_style": ("if IS_NEOX:", "if not IS_NEOX:", 2, Case(), "wrong_rope"),
    "unscaled_rope_half": ("scale, FP8_MAX, out, True)", "1.0, FP8_MAX, out, True)", 3, Case(), "wrong_rope"),
    "nan_of_the_rotated_half_hidden": (", out, True)", ", out)", 3, None, None),
    "row_in_the_wrong_block": ("(block * cache_stride_b", "((block + 1) * cache_stride_b", 1, Case(), "wrong_cache"),
    "slot_in_32_bits": ("(block * cache_stride_b", "((block * cache_stride_b).to(tl.int32)", 1, None, None),
    "accumulator_not_rounded": ("x.to(ACT).to(tl.float32)", "x", 1, Case(), "nope_different"),
    "accumulator_split_elsewhere": ("x * 65537.0", "x * 32769.0", 1, Case(cache="float8_e4m3fnuz"), "nope_different"),
    "second_columns_of_the_first": ("out_ptr + block * BLOCK_L", "out_ptr", 1, None, None),
    "second_weight_of_the_first": ("cols + (block + 1) * BLOCK_L", "cols", 1, None, None),
    "stored_runs_too_near": ("(run - row * groups) * RUN", "(run - row * groups) * PACKED", 1,
                             Case(), "nope_different"),
    "overflow_not_saturated": ("tl.minimum(tl.maximum(x, -LIMIT), LIMIT)", "x", 1,
                               Case(magnitude=300.0, cache="float8_e4m3fnuz"), "wrong_cache"),
    "last_token_block_dropped": ("tl.cdiv(num_tokens, BLOCK_T)", "tl.maximum(num_tokens // BLOCK_T, 1)", 1,
                                 Case(tokens=70, heads=1), "nope_different"),
    "heads_without_room": ("head * (M // N) if M % N == 0 else head", "head", 1,
                           Case(heads=2, out_heads=4), "nope_different"),
    "rope_heads_without_room": ("if M % N == 0:", "if True:", 1, Case(heads=3, out_heads=4), "wrong_rope"),
    "group_scale_dropped": (" * q_scale[:, None]", "", 1, Case(**CODES), "nope_different"),
    "weight_scale_dropped": ("acc *= weight_scale", "acc *= 1.0", 1, Case(**CODES), "nope_different"),
    "signed_row_maximum": ("tl.max(tl.abs(q), axis=1)", "tl.max(q, axis=1)", 1, Case(**CODES), "nope_different"),
    "row_maximum_without_floor": ("tl.maximum(tl.max(tl.abs(q), axis=1), FLOOR)", "tl.max(tl.abs(q), axis=1)", 1,
                                  None, None),
    "fp4_tie_goes_up": ("0x1FFFFF + (size >> 22 & 1)", "0x200000", 1, Case(**MXFP4), "nope_different"),
    "fp4_small_values_truncated": ("(tl.abs(x) + 4194304.0)", "(tl.abs(x) + 4194303.75)", 1,
                                   Case(**MXFP4), "nope_different"),
    "fp4_scale_without_its_carry": ("(largest + 0x200000) >> 23", "largest >> 23", 1, Case(**MXFP4), "nope_different"),
    "fp4_sign_lost": (" | (bits >> 28 & 8)", "", 1, Case(**MXFP4), "nope_different"),
    "fp4_halves_of_a_byte_swapped": ("(low | high << 4)", "(high | low << 4)", 1, Case(**MXFP4), "nope_different"),
    "fp4_scales_of_the_first_block": (" + k // GROUP", "", 1, Case(**MXFP4, nope=256), "nope_different"),
    "fp4_scales_of_the_first_head": ("w_scale_ptr += head.to(tl.int64) * w_scale_stride_h", "w_scale_ptr += 0", 1,
                                     Case(**MXFP4), "nope_different"),
    "rest_of_the_row_dropped": ("tl.static_range(0, P, BLOCK_K)", "tl.static_range(0, P // BLOCK_K * BLOCK_K, BLOCK_K)",
                                1, Case(**CODES, nope=192), "nope_different"),
}  # fmt: skip

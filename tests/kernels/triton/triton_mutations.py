"""Bugs to plant in the kernel's source: name -> (text, replacement, how often the text must stand there)."""

MUTATIONS = {
    "dropped_position_clamp": ("tl.minimum(tl.maximum(position, 0), last_position)", "position", 1),
    "slot_minus_one_written": ("slot >= 0", "slot >= -1", 2),
    "wrong_pair_order": ("a, b = tl.split(", "b, a = tl.split(", 1),
    "wrong_pairing_style": ("if IS_NEOX:", "if not IS_NEOX:", 1),
    "unscaled_rope_half": ("inv_scale, FP8_MAX, out)", "1.0, FP8_MAX, out)", 3),
    "row_in_the_wrong_block": ("(block * cache_stride_b", "((block + 1) * cache_stride_b", 1),
    "slot_in_32_bits": ("(block * cache_stride_b", "((block * cache_stride_b).to(tl.int32)", 1),
    "accumulator_not_rounded": ("x = acc.to(act)\n", "x = acc\n", 1),
    "overflow_not_saturated": ("tl.minimum(tl.maximum(x * inv_scale, -FP8_MAX), FP8_MAX)", "x * inv_scale", 1),
    "last_token_block_dropped": ("tl.cdiv(num_tokens, BLOCK_T)", "tl.maximum(num_tokens // BLOCK_T, 1)", 1),
}

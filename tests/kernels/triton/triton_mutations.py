"""Bugs to plant in the kernel's two files: name -> (text, replacement, how often the text must stand in them)."""

MUTATIONS = {
    "dropped_position_clamp": ("tl.minimum(tl.maximum(position, 0), last_position)", "position", 1),
    "slot_minus_one_written": ("slot >= 0", "slot >= -1", 2),
    "wrong_pair_order": ("a, b = tl.split(", "b, a = tl.split(", 1),
    "wrong_pairing_style": ("if IS_NEOX:", "if not IS_NEOX:", 1),
    "unscaled_rope_half": ("inv_scale, FP8_MAX, out)", "1.0, FP8_MAX, out)", 3),
    "row_in_the_wrong_block": ("(block * cache_stride_b", "((block + 1) * cache_stride_b", 1),
    "slot_in_32_bits": ("(block * cache_stride_b", "((block * cache_stride_b).to(tl.int32)", 1),
    "accumulator_not_rounded": ("x = acc.to(act)\n", "x = acc\n", 1),
    "overflow_not_saturated": ("tl.minimum(tl.maximum(x, -LIMIT), LIMIT)", "x", 1),
    "last_token_block_dropped": ("tl.cdiv(num_tokens, BLOCK_T)", "tl.maximum(num_tokens // BLOCK_T, 1)", 1),
    "group_scale_dropped": (" * step[:, None]", "", 1),
    "weight_scale_dropped": ("acc *= tl.load(w_scale_ptr)", "acc *= 1.0", 1),
    "signed_row_maximum": ("tl.max(tl.abs(q), axis=1)", "tl.max(q, axis=1)", 1),
    "row_maximum_without_floor": ("tl.maximum(tl.max(tl.abs(q), axis=1), FLOOR)", "tl.max(tl.abs(q), axis=1)", 1),
    "rest_of_the_row_dropped": (
        "tl.static_range(0, P, BLOCK_K)",
        "tl.static_range(0, P // BLOCK_K * BLOCK_K, BLOCK_K)",
        1,
    ),
}

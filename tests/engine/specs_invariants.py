"""Engines of test_engine_invariants.py: planted bugs, warm starts, an engine without the plugin."""

from dataclasses import replace

from tests.engine.specs_common import CHUNKED, DRAFTING, EAGER, FULL, PLAIN, broken
from tests.engine.specs_parity import CACHED, RANGES
from tests.sandbox.spec import EngineSpec, PluginOptions, by_passes

WARM = by_passes(EngineSpec(("short",), replace(CACHED, compilation=RANGES), emulation=PLAIN))
SMALL = by_passes(EngineSpec(("mixed",), CHUNKED, emulation=PLAIN, dump_graphs=True))

SPECS = {
    "warm": WARM,
    "mutation-half-a-layer": broken(WARM, "every_second_layer_is_skipped"),
    "no-plugin": EngineSpec(
        ("short", "mixed"), CHUNKED, PluginOptions(loaded=False), PLAIN, side="off", dump_graphs=True
    ),
    "mutation-no-split": broken(FULL, "attention_does_not_split"),
    "mutation-padded-slots": broken(FULL, "padding_has_the_slot_of_another_row"),
    "mutation-raw-prefill-and-no-range": broken(SMALL, "prefill_rows_stay_raw_and_passes_ignore_the_range"),
    "mutation-kept-pieces": broken(FULL, "pieces_keep_what_they_captured_to_measure_memory"),
    "mutation-dropped-option": broken(EAGER, "the_platform_drops_an_option"),
    "skipped": broken(EAGER, "no_implementation_is_known"),
    "renamed": broken(EAGER, "a_private_function_is_renamed"),
    "strict": replace(EAGER, plugin=PluginOptions("triton", additional={"strict": True})),
    "mutation-draft-rows": broken(DRAFTING, "a_request_has_one_decode_row"),
    "mutation-mixed-as-decode": broken(DRAFTING, "a_mixed_batch_counts_as_decode"),
    "mutation-scale-twice": broken(DRAFTING, "q_scale_is_applied_twice"),
    "mutation-first-q-scale": broken(DRAFTING, "every_query_has_the_scale_of_the_first_layer"),
    "mutation-swapped": broken(EAGER, "query_and_key_are_swapped"),
    "mutation-no-kv-write": broken(EAGER, "the_op_writes_no_kv_row"),
}
# Each starts after another engine, in the cache of that one.
AFTER = {"warm": "bf16-on", "mutation-half-a-layer": "warm"}

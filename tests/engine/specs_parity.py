"""Engines of test_engine_parity.py: the passes, over graph partition on both sides."""

from dataclasses import replace

from tests.engine.specs_aiter import CLASS942
from tests.engine.specs_common import CHUNKED, FULL, PLAIN, SCALES, SMALL, broken, pair, with_graphs
from tests.sandbox.runs import BF16_SCENARIOS, FP8_SCENARIOS
from tests.sandbox.spec import LIMIT_REQUESTS, Emulation, EngineSpec, Fault, PluginOptions, VllmOptions, by_passes

# In one process: a planted fingerprint does not reach a spawned one, and the artifact would be found again.
CACHED = replace(CHUNKED, compile_cache=True)
# Both sides have the same compile ranges, so that graphs above the decode limit can be compared.
RANGES = {"compile_ranges_endpoints": [LIMIT_REQUESTS]}
SHORT = ("short", "mixed")
# As vLLM's fused op rounds, in decode steps too. The default integration over graph partition is the passes.
THREE = PluginOptions(rounding="three", integration="auto")
# A graph that only the first passes have rewritten serves nobody: it is compared without the roundings of that op.
ROUNDS_ONCE = "tests.engine.engine_mutations:vllms_fused_op_rounds_once"
OWN_PASS = EngineSpec(SHORT, replace(CHUNKED, own_pass=True, compilation=RANGES), emulation=PLAIN, dump_graphs=True)
FP8 = with_graphs(
    EngineSpec(FP8_SCENARIOS, VllmOptions(model=SMALL, kv_cache_dtype="fp8"), emulation=Emulation(scales=SCALES))
)

SPECS = {
    **pair("bf16", by_passes(EngineSpec(
        BF16_SCENARIOS, replace(CACHED, compilation=RANGES), emulation=PLAIN, dump_graphs=True
    ))),
    "full-passes": by_passes(FULL),
    # The user's graph partition, and the module by name.
    "full-module-partition": replace(by_passes(FULL), plugin=FULL.plugin),
    **pair("fp8-passes", by_passes(FP8)),
    **pair("static", by_passes(EngineSpec(
        SHORT, replace(CHUNKED, compilation={"compile_sizes": [1, 2, 8]}), emulation=PLAIN, dump_graphs=True
    ))),
    "mutation-first-k-scale": broken(by_passes(FP8), "every_cache_has_the_scale_of_the_first_layer"),
    # Users of what V2 does not take yet, and of VLLM_USE_V2_MODEL_RUNNER=0.
    "v1-passes": by_passes(replace(FULL, vllm=replace(FULL.vllm, runner="v1"))),
    **pair("vllms-pass", replace(by_passes(OWN_PASS), plugin=THREE)),
    **pair("class-gfx942-passes", by_passes(CLASS942)),
} | {
    name: by_passes(EngineSpec(SHORT, CHUNKED, emulation=PLAIN, fault=Fault(ROUNDS_ONCE, last)))
    for name, last in (("stop-rope-kv", "rope_kv_cache"), ("stop-q-prep", "q_prep_lift"))
}  # fmt: skip
AFTER: dict[str, str] = {}

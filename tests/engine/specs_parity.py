"""Engines of test_engine_parity.py; the others' tests compare with them too."""

from dataclasses import replace

from tests.engine.specs_common import CHUNKED, FP32, FULL, PLAIN, SCALES, SMALL, THREE, pair
from tests.sandbox.runs import BF16_SCENARIOS, FP8_SCENARIOS
from tests.sandbox.spec import Emulation, EngineSpec, Fault, VllmOptions

# In one process: a planted fingerprint does not reach a spawned one, and the artifact would be found again.
CACHED = replace(CHUNKED, compile_cache=True)
OWN_PASS = replace(CHUNKED, own_pass=True)
# A graph that only the first passes have rewritten serves nobody: it is compared without the roundings of that op.
ROUNDS_ONCE = "tests.engine.engine_mutations:vllms_fused_op_rounds_once"

SPECS = {
    **pair("bf16", EngineSpec(BF16_SCENARIOS, CACHED, emulation=PLAIN, dump_graphs=True)),
    # Pieces are cut and captured as on a GPU, in this one after decode batches and in fp32 without metadata.
    **pair("fp8", EngineSpec(
        FP8_SCENARIOS, VllmOptions(model=SMALL, kv_cache_dtype="fp8"),
        emulation=Emulation(graphs="decode", scales=SCALES),
    )),
    **pair("fp32", FP32),
    "full-on": FULL,
    **pair("vllms-pass", EngineSpec(("short", "mixed"), OWN_PASS, THREE, PLAIN, dump_graphs=True)),
} | {
    name: EngineSpec(("short", "mixed"), CHUNKED, emulation=PLAIN, fault=Fault(ROUNDS_ONCE, last))
    for name, last in (("stop-rope-kv", "rope_kv_cache"), ("stop-q-prep", "q_prep_lift"))
}  # fmt: skip
AFTER: dict[str, str] = {}

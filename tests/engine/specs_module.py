"""Engines of test_engine_module.py: no compiled graph, one that is cut at attention, and one with full graphs."""

from tests.engine.specs_common import (
    CHUNK_TOKENS,
    DRAFTING,
    EAGER,
    FP32,
    FP32_MODEL,
    FULL_GRAPHS,
    FULL_SIZES,
    NO_YARN,
    PLAIN,
    broken,
    pair,
)
from tests.sandbox.spec import EngineSpec, PluginOptions, VllmOptions

CUT = {"use_inductor_graph_partition": False}
WHOLE = FULL_SIZES | {"use_inductor_graph_partition": True}

SPECS = {
    **pair("eager", EAGER),
    **pair("eager-drafts", DRAFTING),
    **pair("cut", EngineSpec(
        ("mixed", "long"), VllmOptions(model=NO_YARN, max_num_batched_tokens=CHUNK_TOKENS, compilation=CUT),
        emulation=PLAIN,
    )),
    "module-full": EngineSpec(
        FP32.scenarios, VllmOptions(model=FP32_MODEL, compilation=WHOLE),
        PluginOptions(additional={"integration": "module"}), FULL_GRAPHS,
    ),
    "mutation-unknown-forward": broken(EAGER, "the_wrappers_forward_is_unknown"),
}  # fmt: skip
AFTER: dict[str, str] = {}

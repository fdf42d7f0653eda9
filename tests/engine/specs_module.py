"""Engines of test_engine_module.py: no compiled graph, one that is cut at attention, and one with full graphs."""

from dataclasses import replace

from tests.engine.specs_common import DRAFTING, EAGER, EAGER_VLLM, FULL, FULL_SIZES, PLAIN, broken, pair
from tests.sandbox.spec import EngineSpec, PluginOptions

CUT = {"use_inductor_graph_partition": False}
WHOLE = FULL_SIZES | {"use_inductor_graph_partition": True}

SPECS = {
    **pair("eager", EAGER),
    **pair("eager-drafts", DRAFTING),
    **pair("cut", EngineSpec(
        ("mixed", "long"), replace(EAGER_VLLM, compilation=CUT, extra={}), emulation=PLAIN
    )),
    "module-full": replace(
        FULL, vllm=replace(FULL.vllm, compilation=WHOLE), plugin=PluginOptions(additional={"integration": "module"})
    ),
    "mutation-unknown-forward": broken(EAGER, "the_wrappers_forward_is_unknown"),
}  # fmt: skip
AFTER: dict[str, str] = {}

"""Engines of test_engine_rotation.py: vLLM's default pieces, whose RoPE Inductor compiles, and eager mode with YaRN."""

from dataclasses import replace

from tests.engine.specs_common import CHUNKED, EAGER_MODE, PLAIN, THREE, broken, pair
from tests.sandbox.spec import EngineSpec

PIECES = EngineSpec(
    ("mixed", "long"), replace(CHUNKED, compilation={"use_inductor_graph_partition": False}), emulation=PLAIN
)

SPECS = {
    # vLLM rotates YaRN op by op here and rounds three times, in decode steps too.
    **pair("rotation-eager", EngineSpec(("mixed", "long"), replace(CHUNKED, extra=EAGER_MODE), THREE, PLAIN)),
    "mutation-fused-rotation": broken(PIECES, "every_batch_is_rotated_by_vllms_fused_op"),
}
AFTER: dict[str, str] = {}

"""Engines of test_engine_topology.py: other models, schedulers and workers."""

from dataclasses import replace

from tests.engine.specs_common import CHUNKED, EAGER_MODE, EAGER_VLLM, FP32_MODEL, PLAIN, pair
from tests.sandbox.spec import Emulation, EngineSpec, PluginOptions, VllmOptions
from tests.support.model_configs import ROWS


def of_model(name: str, **vllm: object) -> EngineSpec:
    """Return a row of the model configs in eager mode, so without YaRN, which vLLM rotates there op by op."""
    row, unscaled = ROWS[name], {"rope_scaling": None}
    draft = row.draft and row.draft | unscaled
    config = {"config": row.config | unscaled, "draft_config": draft, "drafts": row.drafts, "extra": EAGER_MODE}
    return EngineSpec(("mixed",), VllmOptions(**config | vllm), emulation=PLAIN)


# Blocks for a third of what "crowded" asks for, prompts in chunks, steps scheduled before the last one has ended.
SCHEDULE = {
    "enable_prefix_caching": True, "block_size": 16, "num_gpu_blocks_override": 40, "async_scheduling": True,
    "disable_log_stats": False,
}  # fmt: skip
RAY = EAGER_MODE | {"distributed_executor_backend": "ray"}
SPECS = {
    # AITER's kernel derives a table of its own, which a reload renews.
    **pair("schedule", EngineSpec(
        ("prefixes", "crowded"), replace(CHUNKED, extra=SCHEDULE), PluginOptions("aiter"), Emulation(arch="gfx950"),
        reload=11,
    )),
    # Compiled: in eager mode unmodified vLLM failed here with two stages.
    **pair("pp2", EngineSpec(("mixed",), replace(CHUNKED, extra={"pipeline_parallel_size": 2}), emulation=PLAIN)),
    **pair("kv", EngineSpec(
        ("prefixes",),
        VllmOptions(
            model={"num_hidden_layers": 1}, shares_kv=True, extra={"block_size": 16, "disable_log_stats": False}
        ),
    )),
    **pair("lora", EngineSpec(("mixed",), replace(EAGER_VLLM, lora=True), emulation=PLAIN)),
    # Compared with unmodified vLLM in one process: in fp32 two ranks move no token.
    "ray-on": EngineSpec(
        ("mixed",), VllmOptions(model=FP32_MODEL, tensor_parallel_size=2, extra=RAY), emulation=PLAIN
    ),
    # Of the model matrix: a nope width of 192 with experts, and an EAGLE-3 draft, whose layer is rewritten too.
    **pair("glm", of_model("GLM-4.7-Flash")),
    **pair("eagle", of_model("DeepSeek-V3 with an EAGLE-3 draft")),
    # Each rank has its experts, and their outputs are combined as in tensor parallelism.
    **pair("ep", of_model(
        "DeepSeek-V3 with experts", tensor_parallel_size=2, extra=EAGER_MODE | {"enable_expert_parallel": True}
    )),
}  # fmt: skip
AFTER = {"kv-on": "kv-off"}

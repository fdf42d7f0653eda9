"""Engines of test_engine_default_options.py: the module, over what a user gets who gives vLLM no compile option.

One engine shows several features where each can still be seen; those that need an engine of their own are wide.
"""

from dataclasses import replace

from tests.engine.specs_common import (
    CHUNKED,
    DRAFTING,
    EAGER,
    EAGER_MODE,
    FP32,
    FULL,
    NO_YARN,
    PLAIN,
    SCALES,
    SMALL,
    THREE,
    broken,
    pair,
    with_graphs,
)
from tests.engine.specs_parity import CACHED
from tests.engine.specs_topology import of_model
from tests.sandbox.runs import BF16_SCENARIOS, FP8_SCENARIOS
from tests.sandbox.spec import Emulation, EngineSpec, PluginOptions, VllmOptions

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
MIXED = EngineSpec(("mixed", "long"), VllmOptions(model=NO_YARN), emulation=PLAIN, dump_graphs=True)


def with_options(**vllm: object) -> EngineSpec:
    """Return an engine of two scenarios with other options of vLLM."""
    return replace(MIXED, vllm=replace(MIXED.vllm, **vllm))


def of_drafts(drafts: int) -> EngineSpec:
    """Return an engine whose model proposes so many tokens by its own layer."""
    model = {"num_hidden_layers": 1, "yarn": False}
    return EngineSpec(("mixed", "chunked"), replace(CHUNKED, model=model, drafts=drafts), emulation=PLAIN)


BF16 = EngineSpec(BF16_SCENARIOS, CACHED, emulation=PLAIN, dump_graphs=True)
WIDE = {
    "piecewise": with_graphs(MIXED, cudagraph_mode="PIECEWISE"),
    "decode-only": with_graphs(MIXED, cudagraph_mode="FULL_DECODE_ONLY"),
    "heads": with_options(model=SMALL | {"num_attention_heads": 6, "hidden_size": 384, "q_lora_rank": None}),
    "ngram": with_options(extra={"speculative_config": NGRAM}),
    # vLLM's LoRA for CPUs lets the compiled graph keep how many adapters its first batch had; V2 warms up with others.
    "lora-compiled": with_options(lora=True, runner="v1"),
    **{f"mtp-{drafts}": with_graphs(of_drafts(drafts), cudagraph_capture_sizes=[4, 16, 64]) for drafts in (1, 3)},
    "tp2": with_options(tensor_parallel_size=2),
    # The cache of the second of three layers is bf16.
    "skip-layers": EngineSpec(
        ("mixed",),
        VllmOptions(
            model=NO_YARN | {"num_hidden_layers": 3},
            kv_cache_dtype="fp8",
            extra=EAGER_MODE | {"kv_cache_dtype_skip_layers": ["1"]},
        ),
        emulation=replace(PLAIN, scales=SCALES),
    ),
    "glm-compiled": replace(of_model("GLM-4.7-Flash", extra={}), dump_graphs=True),
    "eagle-compiled": replace(of_model("DeepSeek-V3 with an EAGLE-3 draft", extra={}), dump_graphs=True),
    **{f"mode-{mode}": with_options(compilation={"mode": mode}) for mode in (0, 1, 2)},
}  # fmt: skip
SPECS = {
    **pair("default", BF16),
    "default-warm": replace(BF16, scenarios=("short",)),
    # Three heads, an fp8 cache with scales, full graphs and pieces. The default integration here is the module.
    **pair("fp8", with_graphs(EngineSpec(
        FP8_SCENARIOS, VllmOptions(model=SMALL | {"num_attention_heads": 3, "hidden_size": 192}, kv_cache_dtype="fp8"),
        PluginOptions(integration="auto"), Emulation(scales=SCALES),
    ))),
    "fp32-off": replace(FP32, side="off"),
    "full-on": FULL,
    "limit-on": replace(BF16, vllm=CHUNKED, plugin=PluginOptions(additional={"max_token_num": 7}), dump_graphs=False),
    **pair("eager", EAGER),
    # vLLM rotates YaRN op by op here and rounds three times, in decode steps too.
    **pair("eager-yarn", EngineSpec(("mixed", "long"), replace(CHUNKED, extra=EAGER_MODE), THREE, PLAIN)),
    "mutation-fused-rotation": broken(replace(BF16, vllm=CHUNKED), "every_batch_is_rotated_by_vllms_fused_op"),
    # And without a compiled graph.
    **pair("eager-drafts", replace(DRAFTING, plugin=replace(DRAFTING.plugin, integration="auto"))),
    "mutation-unknown-forward": broken(EAGER, "the_wrappers_forward_is_unknown"),
}  # fmt: skip
for _name, _spec in WIDE.items():
    SPECS |= pair(_name, _spec)
AFTER = {"default-warm": "default-on"}

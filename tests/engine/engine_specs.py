"""The engines that these tests start, by name."""

from dataclasses import replace
from itertools import product

from tests.sandbox.runs import BF16_SCENARIOS, CHUNK_TOKENS, FP8_SCENARIOS
from tests.sandbox.spec import EngineSpec
from tests.support.model_configs import ROWS, spec_of

MOST = 28
"""Engines that compile; one takes up to a minute. Show what you can without one, or in eager mode, which takes ten
seconds. One run of unmodified vLLM serves many tests."""

SCALES = (0.5, 0.7)
SMALL = {"num_hidden_layers": 2}


def _matrix_row(name: str) -> EngineSpec:
    """Return a row of the model configs in eager mode, so without YaRN, which vLLM rotates there op by op."""
    spec = spec_of(ROWS[name])
    return replace(
        spec, scenarios=("mixed",), config=spec.config | {"rope_scaling": None}, llm={"enforce_eager": True},
        draft_config=spec.draft_config and spec.draft_config | {"rope_scaling": None},
    )  # fmt: skip


# Plain GEMMs, as on GPUs: vLLM's own pass reads its pattern from those. The fp8 engines have the CPU build's.
_bf16 = EngineSpec(
    scenarios=BF16_SCENARIOS, model=SMALL, linear="aten", max_num_batched_tokens=CHUNK_TOKENS, dump_graphs=True
)  # fmt: skip
_small = replace(_bf16, scenarios=("short", "mixed"), dump_graphs=False)
# In one process: a planted fingerprint does not reach a spawned one, and the artifact would be found again.
_cold = replace(_bf16, compile_cache=True)
_warm = replace(_cold, dump_graphs=False)
# Pieces are cut and captured as on a GPU, in this one after decode batches and in fp32 without metadata.
_fp8 = EngineSpec(
    scenarios=FP8_SCENARIOS, model=SMALL, kv_cache_dtype="fp8", scales=SCALES, graphs="decode"
)  # fmt: skip
# Plain RotaryEmbedding, no q_lora, and an odd layer count.
_fp32 = EngineSpec(
    scenarios=("concurrent", "short", "mixed", "long"), linear="aten", graphs="none",
    model={"num_hidden_layers": 1, "yarn": False, "q_lora_rank": None, "dtype": "float32"},
)  # fmt: skip

# Full graphs of 4 and 16 requests; most batches are padded. In fp32, where a GEMM over more rows moves no token.
_full = replace(_fp32, graphs="full", compilation={"cudagraph_capture_sizes": [4, 16]})
# vLLM's own AITER attention. Its decode takes 16 heads and more: 8 are padded on gfx942; gfx950 has a kernel for them.
# The model's own draft layer proposes: one layer of the target and the draft's; L is 16 x (1 + drafts).
# With full graphs, over which its metadata builder keeps buffers: 1 to 4 requests of 3 rows in 12, up to 16 in 48.
_class942 = EngineSpec(
    scenarios=("mixed", "chunked"), model={"num_hidden_layers": 1, "num_attention_heads": 8}, drafts=2,
    kv_cache_dtype="fp8", scales=SCALES, max_num_batched_tokens=CHUNK_TOKENS, kernel="reference",
    fake_arch="gfx942", attention="aiter", graphs="full", compilation={"cudagraph_capture_sizes": [12, 48]},
)  # fmt: skip
# Blocks for a third of what "crowded" asks for, prompts in chunks, steps scheduled before the last one has ended.
_schedule = EngineSpec(
    scenarios=("prefixes", "crowded"), model=SMALL, max_num_batched_tokens=CHUNK_TOKENS, reload=11,
    llm={
        "enable_prefix_caching": True, "block_size": 16, "num_gpu_blocks_override": 40, "async_scheduling": True,
        "disable_log_stats": False,
    },
)  # fmt: skip
# Compiled: in eager mode unmodified vLLM failed here with two stages.
_stages = replace(_small, scenarios=("mixed",), llm={"pipeline_parallel_size": 2})
_shared_kv = EngineSpec(
    scenarios=("prefixes",), model={"num_hidden_layers": 1}, shares_kv=True,
    llm={"block_size": 16, "disable_log_stats": False},
)  # fmt: skip
# The module integration without a compiled graph, and with one that is cut at attention. Plain RotaryEmbedding, which
# vLLM rotates by a kernel in eager mode too; YaRN is rotated there op by op, and rounded three times.
_eager = EngineSpec(
    scenarios=BF16_SCENARIOS, model=SMALL | {"yarn": False}, linear="aten", max_num_batched_tokens=CHUNK_TOKENS,
    llm={"enforce_eager": True},
)  # fmt: skip
# Over weights in fp8 and in mxfp4, vLLM's defaults up to 0.32 where AITER is on.
_fp8_bmm = replace(
    _eager, scenarios=("short", "mixed"), kernel="aiter", rounding="single", fake_arch="gfx950", fp8_bmm=True
)  # fmt: skip
_fp4_bmm = replace(_fp8_bmm, fp8_bmm=False, fp4_bmm=True)
_class950 = EngineSpec(
    scenarios=("mixed",), model={"num_hidden_layers": 1, "num_attention_heads": 16, "yarn": False},
    tensor_parallel_size=2, kernel="aiter", fake_arch="gfx950", attention="aiter", llm={"enforce_eager": True},
)  # fmt: skip
_eager_drafts = EngineSpec(
    scenarios=("mixed", "chunked"), model={"num_hidden_layers": 1, "num_attention_heads": 16, "yarn": False}, drafts=2,
    kv_cache_dtype="fp8", scales=SCALES, max_num_batched_tokens=CHUNK_TOKENS, kernel="reference",
    fake_arch="gfx950", attention="aiter", llm={"enforce_eager": True},
)  # fmt: skip
_eager_small = replace(_eager, scenarios=("short", "mixed"))
_aiter942 = replace(_eager_small, kernel="aiter", rounding="single", fake_arch="gfx942", kv_cache_dtype="fp8")
_cut = replace(_eager, scenarios=("mixed", "long"), llm={}, compilation={"use_inductor_graph_partition": False})
_full_module = replace(
    _full, additional={"integration": "module"}, compilation=_full.compilation | {"use_inductor_graph_partition": True}
)


# Of the model matrix: a nope width of 192 with experts, and an EAGLE-3 draft, whose layer is rewritten too.
_glm = _matrix_row("GLM-4.7-Flash")
_eagle = _matrix_row("DeepSeek-V3 with an EAGLE-3 draft")
# Each rank has its experts, and their outputs are combined as in tensor parallelism.
_expert_parallel = replace(
    _matrix_row("DeepSeek-V3 with experts"), tensor_parallel_size=2,
    llm={"enforce_eager": True, "enable_expert_parallel": True},
)  # fmt: skip
_lora = replace(_eager, scenarios=("mixed",), lora=True)
# Compared with unmodified vLLM in one process: in fp32 two ranks move no token.
_ray = replace(
    _fp32, scenarios=("mixed",), graphs=None, tensor_parallel_size=2,
    llm={"enforce_eager": True, "distributed_executor_backend": "ray"},
)  # fmt: skip


def _off(spec: EngineSpec) -> EngineSpec:
    graphs = spec.graphs if spec.graphs == "full" else None
    return replace(spec, side="control", vllm_pass=False, graphs=graphs, compile_cache=False)


def _broken(spec: EngineSpec, mutation: str) -> EngineSpec:
    return replace(spec, scenarios=("mixed",), mutation=f"tests.engine.engine_mutations:{mutation}")


# Each with the flag off and on.
PAIRS = {
    "bf16": _cold, "fp8": _fp8, "fp32": _fp32, "aiter-fp8-bmm": _fp8_bmm, "aiter-fp4-bmm": _fp4_bmm,
    "class-gfx942": _class942, "class-gfx950": _class950, "schedule": _schedule, "pp2": _stages, "kv": _shared_kv,
    "glm": _glm, "eagle": _eagle, "ep": _expert_parallel, "lora": _lora, "eager": _eager, "cut": _cut,
    "eager-drafts": _eager_drafts,
}  # fmt: skip
SPECS: dict[str, EngineSpec] = {
    "warm": replace(_warm, scenarios=("short",)),
    "mutation-half-a-layer": _broken(_warm, "every_second_layer_is_skipped"),
    "no-plugin": replace(_off(_small), dump_graphs=True, plugin=False),
    "mutation-no-split": _broken(_fp32, "attention_does_not_split"),
    "on-after-vllms-pass": replace(_small, vllm_pass=True, dump_graphs=True),
    "off-after-vllms-pass": replace(_off(_small), vllm_pass=True, dump_graphs=True),
    "stop-rope-kv": replace(_small, stop_after="rope_kv_cache"),
    "full-on": _full,
    "mutation-padded-slots": _broken(_full, "padding_has_the_slot_of_another_row"),
    "mutation-raw-prefill-and-no-range": replace(
        _broken(_small, "prefill_rows_stay_raw_and_passes_ignore_the_range"), dump_graphs=True
    ),
    # The real Triton kernel on CPU tensors; a step takes a few tenths of a second.
    "triton": replace(_eager, scenarios=("mixed",), kernel="triton", rounding="single", interpret=True),
    "stop-q-prep": replace(_small, stop_after="q_prep_lift"),
    "mutation-rank-1-falls-back": _broken(_class950, "the_check_fails_on_rank_1"),
    "ray-on": _ray,
    "module-full": _full_module,
    "skipped": replace(_broken(_eager, "no_implementation_is_known"), scenarios=("short", "mixed")),
    "renamed": replace(_broken(_eager, "a_private_function_is_renamed"), scenarios=("short", "mixed")),
    "strict": replace(_eager_small, kernel="triton", additional={"strict": True}),
    "aiter-gfx942-fp8": _aiter942,
    "reference-gfx942-fp8": replace(_aiter942, kernel="reference"),
    "aiter-gfx942-broken": replace(_broken(_aiter942, "the_aiter_kernel_is_wrong"), scenarios=("short",)),
    "mutation-draft-rows": _broken(_eager_drafts, "a_request_has_one_decode_row"),
    "mutation-mixed-as-decode": _broken(_eager_drafts, "a_mixed_batch_counts_as_decode"),
    "mutation-scale-twice": _broken(_eager_drafts, "q_scale_is_applied_twice"),
    "mutation-unknown-forward": _broken(_eager, "the_wrappers_forward_is_unknown"),
    "mutation-swapped": _broken(_eager, "query_and_key_are_swapped"),
    "mutation-no-kv-write": _broken(_eager, "the_op_writes_no_kv_row"),
}
# vLLM's AITER attention class over every card, cache and head count, with and without drafts. With an fp8 cache AITER
# rounds otherwise than unmodified vLLM; the reference can round as vLLM does.
CLASS_MATRIX = {
    f"class-{arch}-{cache}-{heads}-heads-{drafts}-drafts": replace(
        _eager_drafts, fake_arch=arch, kv_cache_dtype=cache, drafts=drafts, scales=SCALES if cache == "fp8" else None,
        kernel="reference" if cache == "fp8" else "aiter", model=_eager_drafts.model | {"num_attention_heads": heads},
    )
    for arch, cache, heads, drafts in product(("gfx942", "gfx950"), ("auto", "fp8"), (8, 16, 128), (0, 2))
    if (arch, cache, heads, drafts) != ("gfx950", "fp8", 16, 2)  # that is "eager-drafts"
}  # fmt: skip
# Head counts that vLLM pads for AITER's decode kernel, drafts included. AITER's op writes heads side by side, so the
# reference stands for a kernel that leaves room between them, as 8 of 16 need it.
PADDED = {
    f"padded-{heads}-heads-{cache}": replace(
        _eager_drafts, scenarios=("mixed",), fake_arch="gfx942", kv_cache_dtype=cache,
        scales=SCALES if cache == "fp8" else None,
        kernel=kernel, model=_eager_drafts.model | {"num_attention_heads": heads},
    )
    for heads, cache, kernel in (
        (5, "auto", "aiter"), (8, "auto", "reference"), (8, "fp8", "reference"), (10, "fp8", "reference"),
        (12, "auto", "aiter"), (20, "auto", "aiter"),
    )
}  # fmt: skip
CLASS_MATRIX |= PADDED
SPECS |= {f"{name}-off": _off(spec) for name, spec in (PAIRS | CLASS_MATRIX).items()}
SPECS |= {f"{name}-on": spec for name, spec in (PAIRS | CLASS_MATRIX).items()}
# These start after another one, in the cache of the first.
AFTER = {"warm": "bf16-on", "mutation-half-a-layer": "warm", "kv-on": "kv-off"}
CACHES = {"warm": "bf16-on", "mutation-half-a-layer": "bf16-on", "kv-on": "kv-off"}


def longest_first(names: list[str]) -> list[str]:
    """The order in which to start engines, two at a time, so that the last ones end together.

    Interpreted kernels are slow; else it is layers to compile and scenarios to run. A chain of warm starts is one
    after the other, so its head goes first.
    """

    def length(name: str) -> float:
        spec = SPECS[name]
        layers = spec.model.get("num_hidden_layers", 4) + (spec.drafts > 0)
        return layers * (1 + 0.3 * len(spec.scenarios)) * (3 if spec.interpret else 1)

    return sorted(names, key=lambda name: (name not in AFTER.values(), -length(name)))

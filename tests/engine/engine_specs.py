"""The engines that these tests start, by name."""

from __future__ import annotations

from dataclasses import replace

from vllm_aiter_mla.sandbox.runs import BF16_SCENARIOS, CHUNK_TOKENS, FP8_SCENARIOS
from vllm_aiter_mla.sandbox.spec import EngineSpec

SMALL = {"num_hidden_layers": 2}
SCALES = (0.5, 0.7)

# The demo's scenarios on fewer layers: there are four of them there.
_bf16 = EngineSpec(scenarios=BF16_SCENARIOS, model=SMALL, max_num_batched_tokens=CHUNK_TOKENS, dump_graphs=True)
_fp8 = EngineSpec(scenarios=FP8_SCENARIOS, model=SMALL, kv_cache_dtype="fp8", scales=SCALES)
_small = EngineSpec(scenarios=("short", "mixed"), model=SMALL)
# Plain RotaryEmbedding, no q_lora, ordinary GEMMs, and an odd layer count.
_fp32 = EngineSpec(
    scenarios=("short", "mixed"),
    linear="aten",
    model={"num_hidden_layers": 3, "yarn": False, "q_lora_rank": None, "dtype": "float32"},
)
_aten = replace(_small, linear="aten", dump_graphs=True)
_tp2 = EngineSpec(scenarios=("mixed",), model=SMALL, tensor_parallel_size=2)
# The model's own draft layer proposes: one layer of the target and the draft's in one bucket of 16 x (1 + drafts).
_mtp = EngineSpec(scenarios=("mixed",), model={"num_hidden_layers": 1}, drafts=2, kv_cache_dtype="fp8", scales=SCALES)
# In one process: a planted fingerprint does not reach a spawned one, and the artifact would be found again.
_warm = replace(_small, scenarios=("short",), compile_cache=True)


def _off(spec: EngineSpec) -> EngineSpec:
    return replace(spec, enabled=False, stock_pass=False)


_aiter942 = replace(_small, kernel="aiter", rounding="single", fake_arch="gfx942", kv_cache_dtype="fp8")
# Stock and ours over AITER's fp8 batched GEMM, vLLM's default where AITER is on.
_fp8_bmm = replace(_small, kernel="aiter", rounding="single", fake_arch="gfx950", fp8_bmm=True)
# The same over mxfp4 weights, vLLM's default up to 0.32 on gfx950 beside bf16 attention.
_fp4_bmm = replace(_fp8_bmm, fp8_bmm=False, fp4_bmm=True)
# One request at a time: a core of its own schedules by the clock, and which requests share a step moves the last bits.
_aiter950 = replace(_small, scenarios=("short",), kernel="aiter", rounding="single", fake_arch="gfx950", spawn=True)
# The real Triton kernel on CPU tensors; a step takes a few tenths of a second.
_triton = replace(_small, kernel="triton", rounding="single", interpret=True)
_triton_fp8 = replace(_triton, scenarios=("mixed",), kv_cache_dtype="fp8", scales=SCALES)
# Full graphs of 4 and 16 requests; most batches are padded. In fp32, where a GEMM over more rows moves no token.
_full = replace(_fp32, graphs="full", compilation={"cudagraph_capture_sizes": [4, 16]})
# vLLM's own AITER attention. Its decode takes 16 heads and more: 8 are padded on gfx942; gfx950 has a kernel for them.
# With full graphs, over which its metadata builder keeps buffers: 1 to 4 requests of 3 rows in 12, up to 16 in 48.
_class942 = replace(
    _mtp, scenarios=("mixed", "chunked"), model={"num_hidden_layers": 1, "num_attention_heads": 8},
    max_num_batched_tokens=CHUNK_TOKENS, kernel="reference", fake_arch="gfx942", attention="aiter",
    graphs="full", compilation={"cudagraph_capture_sizes": [12, 48]},
)  # fmt: skip
_class950 = replace(
    _tp2, model={"num_hidden_layers": 1, "num_attention_heads": 16}, kernel="aiter", rounding="single",
    fake_arch="gfx950", attention="aiter",
)  # fmt: skip


SPECS: dict[str, EngineSpec] = {
    "bf16-off": _off(_bf16),
    "bf16-on": _bf16,
    "fp8-off": _off(_fp8),
    "fp8-on": _fp8,
    "fp32-off": _off(_fp32),
    "fp32-on": _fp32,
    "aten-off": _off(_aten),
    "aten-on-after-stock": replace(_aten, stock_pass=True),
    "tp2-off": _off(_tp2),
    "tp2-on": _tp2,
    "small-off": replace(_off(_small), dump_graphs=True),
    "stop-rope-kv": replace(_small, stop_after="rope_kv_cache"),
    "stop-q-prep": replace(_small, stop_after="q_prep_lift"),
    "piecewise-none": replace(_small, graphs="none"),
    "piecewise-decode": replace(_small, graphs="decode"),
    "full-on": _full,
    "mutation-padded-slots": replace(
        _full, scenarios=("mixed",), mutation="engine_mutations:padding_has_the_slot_of_another_row"
    ),
    "mutation-no-split": replace(_small, graphs="none", mutation="engine_mutations:attention_does_not_split"),
    "mutation-raw-prefill": replace(_small, mutation="engine_mutations:prefill_rows_stay_raw"),
    "mutation-above-bucket": replace(_small, dump_graphs=True, mutation="engine_mutations:passes_ignore_the_range"),
    "small-no-plugin": replace(_off(_small), dump_graphs=True, plugin=False),
    "mutation-half-a-layer": replace(_small, mutation="engine_mutations:every_second_layer_is_refused"),
    "mutation-scale-twice": replace(_fp8, scenarios=("mixed",), mutation="engine_mutations:q_scale_is_applied_twice"),
    "refused": replace(_small, mutation="engine_mutations:no_implementation_is_known"),
    "refused-strict": replace(
        _small, mutation="engine_mutations:no_implementation_is_known", additional={"strict": True}
    ),
    "mtp-off": _off(_mtp),
    "mtp-on": _mtp,
    "mutation-mtp-rows": replace(_mtp, mutation="engine_mutations:a_request_has_one_decode_row"),
    "aiter-gfx942-fp8": _aiter942,
    "reference-gfx942-fp8": replace(_aiter942, kernel="reference"),
    "aiter-gfx950-bf16": _aiter950,
    "aiter-fp8-bmm-off": _off(_fp8_bmm),
    "aiter-fp8-bmm-on": _fp8_bmm,
    "aiter-fp4-bmm-off": _off(_fp4_bmm),
    "aiter-fp4-bmm-on": _fp4_bmm,
    "aiter-fp8-bmm-q-prep": replace(_fp8_bmm, stop_after="q_prep_lift"),
    "aiter-gfx942-broken": replace(_aiter942, mutation="engine_mutations:the_aiter_kernel_is_wrong"),
    "class-gfx942-off": _off(_class942),
    "class-gfx942-on": _class942,
    "class-gfx942-mixed-as-decode": replace(
        _class942, scenarios=("mixed",), mutation="engine_mutations:a_mixed_batch_counts_as_decode"
    ),
    "class-gfx950-off": _off(_class950),
    "class-gfx950-on": _class950,
    "triton-on-cpu": replace(_small, scenarios=("short",), kernel="triton"),
    "triton-bf16": _triton,
    "triton-fp8": _triton_fp8,
    "triton-fp8-reference": replace(_triton_fp8, kernel="reference", interpret=False),
    "warm-1": _warm,
    "warm-2": _warm,
    "warm-changed": replace(_warm, mutation="engine_mutations:another_fingerprint"),
}
# These start after another one, in its cache.
AFTER = {"warm-2": "warm-1", "warm-changed": "warm-2"}
CACHES = {"warm-2": "warm-1", "warm-changed": "warm-1"}


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

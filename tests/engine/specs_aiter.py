"""Engines of test_engine_aiter.py: over the simulated AITER, vLLM's AITER attention, and the interpreted kernel."""

from dataclasses import replace
from itertools import product

from tests.engine.specs_common import EAGER_MODE, EAGER_VLLM, SCALES, broken, drafting, pair
from tests.sandbox.runs import CHUNK_TOKENS
from tests.sandbox.spec import Emulation, EngineSpec, PluginOptions, VllmOptions

AITER = PluginOptions("aiter", rounding="single")
SHORT = ("short", "mixed")
GFX942 = EngineSpec(
    SHORT,
    replace(EAGER_VLLM, kv_cache_dtype="fp8", max_num_batched_tokens=512),
    AITER,
    Emulation(linear="aten", arch="gfx942"),
)
# vLLM's own AITER attention. Its decode takes 16 heads and more: 8 are padded on gfx942; gfx950 has a kernel for them.
# The model's own draft layer proposes: one layer of the target and the draft's; L is 16 x (1 + drafts).
# With full graphs, over which its metadata builder keeps buffers: 1 to 4 requests of 3 rows in 12, up to 16 in 48.
CLASS942 = EngineSpec(
    ("mixed", "chunked"),
    VllmOptions(
        model={"num_hidden_layers": 1, "num_attention_heads": 8},
        drafts=2,
        kv_cache_dtype="fp8",
        max_num_batched_tokens=CHUNK_TOKENS,
        compilation={"cudagraph_capture_sizes": [12, 48]},
    ),
    PluginOptions("reference"),
    Emulation(arch="gfx942", attention="aiter", graphs=True, scales=SCALES),
)
CLASS950 = EngineSpec(
    ("mixed",),
    VllmOptions(
        model={"num_hidden_layers": 1, "num_attention_heads": 16, "yarn": False},
        tensor_parallel_size=2,
        extra=EAGER_MODE,
    ),
    PluginOptions("aiter"),
    Emulation(arch="gfx950", attention="aiter"),
)
# vLLM's AITER attention class over every card, cache and head count, with and without drafts. With an fp8 cache AITER
# rounds otherwise than unmodified vLLM; the reference can round as vLLM does.
CLASS_MATRIX = {
    f"class-{arch}-{cache}-{heads}-heads-{drafts}-drafts": drafting(
        arch, cache, heads, "reference" if cache == "fp8" else "aiter", drafts
    )
    for arch, cache, heads, drafts in product(("gfx942", "gfx950"), ("auto", "fp8"), (8, 16, 128), (0, 2))
    if (arch, cache, heads, drafts) != ("gfx950", "fp8", 16, 2)  # that is "eager-drafts"
}
# Head counts that vLLM pads for AITER's decode kernel, drafts included. AITER's op writes heads side by side, so the
# reference stands for a kernel that leaves room between them, as 8 of 16 need it.
PADDED = {
    f"padded-{heads}-heads-{cache}": replace(drafting("gfx942", cache, heads, kernel), scenarios=("mixed",))
    for heads, cache, kernel in (
        (5, "auto", "aiter"), (8, "auto", "reference"), (8, "fp8", "reference"), (10, "fp8", "reference"),
        (12, "auto", "aiter"), (20, "auto", "aiter"),
    )
}  # fmt: skip
PAIRS = CLASS_MATRIX | PADDED | {
    # Over weights in fp8 and in mxfp4, vLLM's defaults up to 0.32 where AITER is on.
    f"aiter-{short}-bmm": EngineSpec(
        SHORT, EAGER_VLLM, AITER, Emulation(linear="aten", arch="gfx950", absorb=absorb)
    )
    for short, absorb in (("fp8", "fp8"), ("fp4", "mxfp4"))
}  # fmt: skip

SPECS = {
    "aiter-gfx942-fp8": GFX942,
    "reference-gfx942-fp8": replace(GFX942, plugin=PluginOptions("reference", rounding="single")),
    "aiter-gfx942-broken": broken(GFX942, "the_aiter_kernel_is_wrong"),
    # The real Triton kernel on CPU tensors; a step takes a few tenths of a second.
    "triton": EngineSpec(
        ("mixed",), EAGER_VLLM, PluginOptions("triton", rounding="single"), Emulation(linear="aten", interpret=True)
    ),
    "mutation-rank-1-falls-back": broken(CLASS950, "the_check_fails_on_rank_1"),
    **pair("class-gfx942", CLASS942),
    **pair("class-gfx950", CLASS950),
}
for _name, _spec in PAIRS.items():
    SPECS |= pair(_name, _spec)
AFTER: dict[str, str] = {}

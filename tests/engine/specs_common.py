"""What the engines of several topics are made of.

An engine is written out, or is one ``replace`` away from one that is. It runs vLLM's default options and the module,
unless it says otherwise; ``by_passes`` gives it graph partition and the passes.
"""

from dataclasses import replace

from tests.sandbox.runs import BF16_SCENARIOS, CHUNK_TOKENS
from tests.sandbox.spec import Emulation, EngineSpec, Fault, PluginOptions, VllmOptions, flag_off

SCALES = (0.5, 0.7)
SMALL = {"num_hidden_layers": 2}
# vLLM's eager mode rotates YaRN op by op and rounds three times; a plain RotaryEmbedding it rotates by a kernel.
NO_YARN = SMALL | {"yarn": False}
EAGER_MODE = {"enforce_eager": True}
CHUNKED = VllmOptions(model=SMALL, max_num_batched_tokens=CHUNK_TOKENS)
EAGER_VLLM = VllmOptions(model=NO_YARN, max_num_batched_tokens=CHUNK_TOKENS, extra=EAGER_MODE)
# Plain GEMMs, as on GPUs: vLLM's own pass reads its pattern from those. The fp8 engines have the CPU build's.
PLAIN = Emulation(linear="aten")
# Decode rows round as vLLM's fused RoPE + KV write, and as its eager YaRN.
THREE = PluginOptions(rounding="three")

# Plain RotaryEmbedding, no q_lora, and an odd layer count. In fp32, where neither a GEMM over more rows nor another way
# to compile moves a token: one engine with the flag off serves all of these.
FP32_MODEL = {"num_hidden_layers": 1, "yarn": False, "q_lora_rank": None, "dtype": "float32"}
FP32 = EngineSpec(("concurrent", "short", "mixed", "long"), VllmOptions(model=FP32_MODEL), emulation=PLAIN)
# Graphs of 4 and 16 requests; most batches are padded.
FULL_SIZES = {"cudagraph_capture_sizes": [4, 16]}


def with_graphs(spec: EngineSpec, **compilation: object) -> EngineSpec:
    """Return the engine with the graphs that vLLM captures, of ``FULL_SIZES`` rows, or as ``compilation`` says."""
    vllm = replace(spec.vllm, compilation=spec.vllm.compilation | FULL_SIZES | compilation)
    return replace(spec, vllm=vllm, emulation=replace(spec.emulation, graphs=True))


FULL = with_graphs(FP32)
# The module without a compiled graph.
EAGER = EngineSpec(BF16_SCENARIOS, EAGER_VLLM, emulation=PLAIN)


def drafting(arch: str, cache: str, heads: int, kernel: str, drafts: int = 2, layers: int = 1) -> EngineSpec:
    """Return an engine in eager mode over vLLM's AITER attention, whose model drafts by its own layer.

    An fp8 cache has scales.
    """
    model = {"num_hidden_layers": layers, "num_attention_heads": heads, "yarn": False}
    return EngineSpec(
        ("mixed", "chunked"),
        VllmOptions(
            model=model, kv_cache_dtype=cache, drafts=drafts, max_num_batched_tokens=CHUNK_TOKENS, extra=EAGER_MODE
        ),
        PluginOptions(kernel),
        Emulation(arch=arch, attention="aiter", scales=SCALES if cache == "fp8" else None),
    )


# Two layers: a wrong scale in the draft's costs drafts and changes no token.
DRAFTING = drafting("gfx950", "fp8", 16, "reference", layers=2)


def pair(name: str, spec: EngineSpec) -> dict[str, EngineSpec]:
    """Return the engine with the flag off and on, as "NAME-off" and "NAME-on"."""
    return {f"{name}-off": off(spec), f"{name}-on": spec}


def off(spec: EngineSpec) -> EngineSpec:
    """Return the engine with the flag off, compiled again."""
    return flag_off(replace(spec, vllm=replace(spec.vllm, compile_cache=False)))


def broken(spec: EngineSpec, bug: str) -> EngineSpec:
    """Return the engine with a function of ``engine_mutations`` planted in its process."""
    return replace(spec, scenarios=("mixed",), fault=Fault(f"tests.engine.engine_mutations:{bug}"))

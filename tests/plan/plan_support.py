"""Plans in this process: vLLM is imported once for all of them."""

from __future__ import annotations

from typing import Any

from vllm_aiter_mla.commands.plan import build, model, serve_options

NO_FP8_BMM = "VLLM_ROCM_USE_AITER_FP8BMM=0"
NO_FP4_BMM = "VLLM_ROCM_USE_AITER_FP4BMM=0"
ENGAGING = (NO_FP8_BMM, NO_FP4_BMM)


def planned(name: str, *arguments: str, arch: str = "gfx942", env: tuple[str, ...] = ENGAGING) -> dict[str, Any]:
    """The plan of ``name``; the fp8 and fp4 BMM are off unless ``env`` says otherwise."""
    given = ["--max-num-seqs", "256", *arguments]
    options = serve_options.read(given, name, arch, serve_options.environment(env, {}))
    return build.build(options, facts(name, options))


MODEL_OPTIONS = (
    "tensor_parallel_size", "decode_context_parallel_size", "dtype", "kv_cache_dtype", "quantization", "hf_overrides",
    "speculative_config", "spec_method", "spec_tokens", "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip
"""Options that vLLM's answers about a bundled example hang on, in these tests."""
_asked: dict[tuple[str, ...], model.ModelFacts] = {}


def facts(name: str, options: serve_options.ServeOptions) -> model.ModelFacts:
    """vLLM's answers about the model ``name`` with the options; about a bundled example it is asked once."""
    source = model.find(name)
    if source.config is None:
        return model.facts(source, options)
    key = (name, options.arch, *(repr(getattr(options.parsed, option, None)) for option in MODEL_OPTIONS))
    if key not in _asked:
        _asked[key] = model.facts(source, options)
    return _asked[key]


def codes(plan: dict[str, Any]) -> list[str]:
    """Codes of the reasons, in order."""
    return [reason["code"] for reason in plan["reasons"]]

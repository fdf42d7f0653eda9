"""Which engines the demo runs for its options, what must hold between them, and whether a GPU can run them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.sandbox.spec import Emulation, EngineSpec, PluginOptions, VllmOptions, by_passes, flag_off
from vllm_aiter_mla.commands.check.engine import distance

BF16_SCENARIOS = ("concurrent", "short", "mixed", "long", "chunked")
# vLLM's chunked path over an fp8 cache needs a gather kernel that only GPU builds have.
FP8_SCENARIOS = BF16_SCENARIOS[:-1]
# What the demo runs by default: prefill rows within the decode limit, with and without decoding requests.
SHORT_SCENARIOS = ("short", "mixed")
SMALL = {"num_hidden_layers": 2}
CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Options:
    """The demo's options, as its command line has checked them."""

    json: Path | None = None
    tensor_parallel_size: int = 1
    full: bool = False
    kernel: str = "reference"
    arch: str = "gfx942"
    attention: str = "aiter"
    integration: str = "both"
    keep: Path | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """What must hold between flag off and flag on, in every scenario.

    Attributes:
        top1: least share of positions, among those with the same context in both runs, whose token is the same.
        max_abs_dlogprob: largest allowed difference of a log-probability over the common top 5 of those positions.
    """

    top1: float
    max_abs_dlogprob: float

    def holds(self, found: distance.TokenComparison) -> bool:
        """Whether a scenario's figures lie inside."""
        return (
            found.tokens > 0 and found.top1_agreement >= self.top1 and found.max_abs_dlogprob <= self.max_abs_dlogprob
        )

    def __str__(self) -> str:
        tokens = "all tokens equal" if self.top1 == 1 else f"top-1 >= {self.top1:.0%}"
        return f"{tokens}, max |dlogprob| <= {self.max_abs_dlogprob:g}"


EXACT = Bound(1.0, 1e-3)
"""The reference kernel rounds as vLLM's kernels and compiled graph do; so does AITER's arithmetic over a bf16 cache."""

SUM_ORDER = Bound(distance.MIN_TOP1_AGREEMENT, distance.MAX_DLOGPROB)
"""Another kernel adds the absorb BMM up in another order, so near ties of a random model give other tokens."""


@dataclass(frozen=True, slots=True)
class Run:
    """One comparison: an engine with the flag on, and the same engine with the flag off.

    Attributes:
        name: for the table.
        spec: the engine with the flag on.
        numerics: "activation dtype", "two-rounding" or "aiter".
        bound: what must hold; None where the figures are only reported.
    """

    name: str
    spec: EngineSpec
    numerics: str
    bound: Bound | None

    @property
    def off(self) -> EngineSpec:
        """The engine with the flag off and the same options of vLLM's."""
        return flag_off(self.spec)


def runs(options: Options) -> list[Run]:
    """Return the runs of the demo: short prompts and mixed batches over both caches; with ``full`` all there is.

    Each runs over vLLM's default options, where the module is the integration, and over graph partition by the passes.
    """
    found = _of_kernel(options)
    by_module = [replace(run, name=f"{run.name}, module") for run in found if options.integration != "passes"]
    partitioned = [
        replace(run, name=f"{run.name}, passes", spec=by_passes(run.spec))
        for run in found
        if options.integration != "module"
    ]
    return by_module + partitioned


def _of_kernel(options: Options) -> list[Run]:
    if options.kernel == "triton":
        return _on_gpu(options)
    if options.kernel == "simulated-aiter" and options.attention == "aiter":
        return _over_aiters_class(options)
    fake = options.kernel == "simulated-aiter"
    plugin = PluginOptions(kernel="aiter" if fake else "auto")
    emulation = Emulation(arch=options.arch if fake else None)
    one_rank = options.tensor_parallel_size == 1
    bf16 = EngineSpec(_scenarios(options), _vllm(options), plugin, emulation, dump_graphs=one_rank)
    found = [Run("bf16 KV", bf16, "activation dtype", EXACT)]
    vllm = _vllm(options, kv_cache_dtype="fp8", max_num_batched_tokens=512)
    fp8 = EngineSpec(_scenarios(options, FP8_SCENARIOS), vllm, plugin, emulation, dump_graphs=one_rank)
    if not fake:
        found.append(Run("fp8 KV, two-rounding", fp8, "two-rounding", EXACT))
    if fake or options.full:
        rounded = replace(fp8, plugin=replace(plugin, rounding="single"))
        found.append(Run("fp8 KV, AITER's numerics", rounded, "aiter", None))
    return found


def _scenarios(options: Options, every: tuple[str, ...] = BF16_SCENARIOS) -> tuple[str, ...]:
    return every if options.full else SHORT_SCENARIOS


def _vllm(options: Options, **others: Any) -> VllmOptions:
    """vLLM's options: four layers with ``full``, else two; prompts in chunks; as many workers as the user asked for."""
    settings: dict[str, Any] = {"model": {} if options.full else SMALL, "max_num_batched_tokens": CHUNK_TOKENS}
    return VllmOptions(tensor_parallel_size=options.tensor_parallel_size, **settings | others)


def _over_aiters_class(options: Options) -> list[Run]:
    """vLLM's own AITER attention: heads that it takes as they are and heads that it pads, fp8 scales, drafts."""
    one_rank = options.tensor_parallel_size == 1
    # Scales are only put into layers of this process; the draft's graph would hide the model's.
    card = Emulation(arch=options.arch, attention="aiter")
    scaled = replace(card, scales=(0.5, 0.7) if one_rank else None)
    aiter = PluginOptions(kernel="aiter")

    def vllm(heads: int, **others: Any) -> VllmOptions:
        model = SMALL | {"num_attention_heads": heads * options.tensor_parallel_size}
        return _vllm(options, model=model, **others)

    bf16 = EngineSpec(_scenarios(options), vllm(16), aiter, card, dump_graphs=one_rank)
    padded = vllm(8, kv_cache_dtype="fp8", drafts=2)
    two = EngineSpec(_scenarios(options), padded, PluginOptions(kernel="reference"), scaled)
    found = [
        Run("bf16 KV, 16 heads", bf16, "activation dtype", EXACT),
        Run("fp8 KV, 8 heads, 2 drafts, two-rounding", two, "two-rounding", EXACT),
    ]
    if options.full:
        single = EngineSpec(_scenarios(options), padded, PluginOptions("aiter", rounding="single"), scaled)
        many = EngineSpec(("mixed",), vllm(128), aiter, card, dump_graphs=one_rank)
        found.append(Run("fp8 KV, 8 heads, 2 drafts", single, "aiter", None))
        found.append(Run("bf16 KV, 128 heads", many, "activation dtype", EXACT))
    return found


def _on_gpu(options: Options) -> list[Run]:
    """The Triton kernel on the card that torch sees, under vLLM's own platform, with its graphs captured."""
    plugin, gpu, one_rank = PluginOptions(kernel="triton"), Emulation(device="gpu"), options.tensor_parallel_size == 1
    bf16, fp8 = (
        EngineSpec(_scenarios(options), _vllm(options, kv_cache_dtype=cache), plugin, gpu, dump_graphs=one_rank)
        for cache in ("auto", "fp8")
    )
    return [
        Run("bf16 KV", bf16, "aiter", SUM_ORDER),
        Run("fp8 KV", fp8, "aiter", None),
    ]


def describe(spec: EngineSpec) -> str:
    """Return a run in a few words."""
    cache = "fp8 KV" if spec.vllm.kv_cache_dtype.startswith("fp8") else "bf16 KV"
    options = "graph partition" if spec.vllm.compilation.get("use_inductor_graph_partition") else "default options"
    return f"{cache}, {options}, flag {spec.side}"


def why_no_gpu(workers: int) -> str | None:
    """Return why the demo cannot run on GPUs here with so many workers, or None."""
    import torch

    if not torch.cuda.is_available():
        return (
            "--kernel triton needs a GPU, and torch sees none here. On a CPU its results are checked through "
            "Triton's interpreter: pytest -k triton"
        )
    if torch.cuda.device_count() < workers:
        return f"--tensor-parallel-size {workers}: torch sees {torch.cuda.device_count()} GPU here"
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        return (
            f"--kernel triton needs a vLLM built for CUDA or ROCm; this one's platform is "
            f"{current_platform.device_type!r}, although torch sees a GPU"
        )
    return None

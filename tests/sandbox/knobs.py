"""What a spec asks of the sandbox beyond vLLM's own options."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import torch

from tests.sandbox import card, platform
from tests.sandbox.spec import EngineSpec

GRAPHS: dict[str, list[str]] = {}
CODE: dict[str, list[str]] = {}
BRANCHES: Counter[str] = Counter()


def apply(spec: EngineSpec) -> None:
    """Set this process up; before any vLLM config is built."""
    platform.vllm_pass = spec.vllm.own_pass
    if spec.emulation.linear == "aten":
        plain_linears()
    if spec.emulation.arch:
        card.pretend(spec.emulation.arch, attention=spec.emulation.attention == "aiter")
        if spec.emulation.absorb == "fp8":
            card.hold_weights_in_fp8()
        if spec.emulation.absorb == "mxfp4":
            card.hold_weights_in_fp4()
    if spec.fault.bug:
        plant(spec.fault.bug)
    if spec.fault.stop_after:
        from vllm_aiter_mla.passes import pipeline

        names = list(pipeline.PASSES)
        for name in names[names.index(spec.fault.stop_after) + 1 :]:
            del pipeline.PASSES[name]
    if spec.dump_graphs:
        dump_graphs()
    count_branches()
    if spec.emulation.attention == "aiter":
        poison_queries()
        count_copies()


RUNNERS = {"v1": "vllm.v1.worker.cpu_model_runner", "v2": "vllm.v1.worker.cpu.model_runner"}
"""The module of each model runner's class on a CPU. V2's is that of a GPU and one method more."""


def check_kept(spec: EngineSpec, llm: Any) -> None:
    """Check that the engine has the options that the spec names, in its config and in what runs.

    Raises:
        RuntimeError: an option has another value.
    """
    config = llm.llm_engine.vllm_config
    compilation = config.compilation_config
    from vllm.compilation.counter import compilation_counter

    compiles_whole = compilation_counter.stock_torch_compile_count > 0
    if (compilation.mode == 1) is not compiles_whole:
        raise RuntimeError(
            f"mode {compilation.mode}, and the whole model is {'' if compiles_whole else 'not '}compiled"
        )
    has = {
        "async_scheduling": config.scheduler_config.async_scheduling,
        "enable_prefix_caching": config.cache_config.enable_prefix_caching,
        "kv_cache_dtype_skip_layers": config.cache_config.kv_cache_dtype_skip_layers,
        "mode": compilation.mode,
        "cudagraph_mode": compilation.cudagraph_mode.name,
        "use_inductor_graph_partition": compilation.use_inductor_graph_partition,
        "runner of each worker": set(llm.collective_rpc("runner_module")),
    }
    asked = spec.vllm.extra | spec.vllm.compilation
    if spec.emulation.device == "cpu":  # a GPU's runner is vLLM's choice
        asked |= {"runner of each worker": {RUNNERS[spec.vllm.runner]}}
    lost = {name: value for name, value in asked.items() if name in has and has[name] != value}
    if lost:
        raise RuntimeError(f"the engine runs without these options of its spec: {lost}")


def plant(mutation: str) -> None:
    """Call "module:function", which plants a bug in this process."""
    module, _, function = mutation.partition(":")
    getattr(importlib.import_module(module), function)()


def count_branches() -> None:
    """Count what the op does with its batches: a claim about prefill rows is empty where none came by."""
    from vllm_aiter_mla.serving import ops

    for name in ("prepared_query", "rotate_and_write"):
        inner = getattr(ops, name)

        def counted(*args: Any, name: str = name, inner: Any = inner) -> Any:
            BRANCHES[name] += 1
            return inner(*args)

        setattr(ops, name, counted)


def poison_queries() -> None:
    """Let NaN stand where a kernel writes nothing into a prepared query: what reads it shows."""
    from vllm_aiter_mla.kernels.inputs import DecodeInputs

    inner = DecodeInputs.new_query

    def poisoned(inputs: DecodeInputs, padded: bool = True) -> torch.Tensor:
        query = inner(inputs, padded)
        query.view(torch.uint8).fill_(0xFF)
        return query

    DecodeInputs.new_query = poisoned  # type: ignore[method-assign]


def count_copies() -> None:
    """Count the queries that vLLM copies to more heads, of those that the op has prepared."""
    from vllm.v1.attention.backends.mla.rocm_aiter_mla import AiterMLAHelper

    from vllm_aiter_mla.serving.layer import Layer

    pad, decode, inside = AiterMLAHelper.get_mla_padded_q, Layer.forward_mqa, []

    def counted(heads: int, q: torch.Tensor, target_heads: int | None = None) -> torch.Tensor:
        padded: torch.Tensor = pad(heads, q, target_heads)
        BRANCHES["query copies"] += bool(inside) and padded.data_ptr() != q.data_ptr()
        return padded

    def attend(*args: Any) -> torch.Tensor:
        inside.append(True)
        try:
            return decode(*args)
        finally:
            inside.pop()

    AiterMLAHelper.get_mla_padded_q, Layer.forward_mqa = staticmethod(counted), attend  # type: ignore[method-assign]


def plain_linears() -> None:
    """Let unquantised linears be ``aten`` GEMMs, as on GPUs, instead of the CPU build's out-variant."""
    from vllm.model_executor.layers import utils

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def dump_graphs() -> None:
    """Keep the text of each range's graphs as they leave vLLM's post-grad passes, and the code that Inductor makes."""
    from torch._inductor.graph import GraphLowering
    from vllm.compilation.passes import inductor_pass, pass_manager
    from vllm.compilation.passes.inductor_pass import get_pass_context

    inner = pass_manager.PostGradPassManager.__call__

    def call(self: Any, graph: torch.fx.Graph) -> None:
        inner(self, graph)
        GRAPHS.setdefault(compile_range(), []).append(str(graph))

    def compile_range() -> str:
        r = get_pass_context().compile_range
        return f"{r.start}-{r.end}"

    def keep(code: str) -> None:
        if inductor_pass._pass_context is not None:  # else a small graph of the sampler's
            CODE.setdefault(compile_range(), []).append(code)

    GraphLowering.save_output_code = staticmethod(keep)
    pass_manager.PostGradPassManager.__call__ = call


def set_scales(llm: Any, k_scale: float, q_scale: float) -> None:
    """Give each MLA layer dequantisation scales of its own, in place; the first has these. In-process engines only.

    vLLM divides KV rows by their scale, our kernels multiply by its reciprocal. From 0.5 on in steps of 1.5 both give
    every bf16 value the same fp8 code; by 0.875, say, they do not.
    """
    every = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    for index, layer in enumerate(layer for layer in every if hasattr(layer, "kv_lora_rank")):
        layer._k_scale.fill_(k_scale * 1.5**index)
        layer._q_scale.fill_(q_scale * 1.5**index)
        layer._v_scale.fill_(3 * k_scale)  # MLA reads none

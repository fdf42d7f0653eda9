"""What a spec asks of the sandbox beyond vLLM's own options."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import torch

from tests.sandbox import aiter_attention, full_graphs, piecewise, platform
from tests.sandbox.spec import EngineSpec

GRAPHS: dict[str, str] = {}
CODE: dict[str, str] = {}
BRANCHES: Counter[str] = Counter()


def apply(spec: EngineSpec) -> None:
    """Set this process up; before any vLLM config is built."""
    platform.vllm_pass = spec.vllm_pass
    if spec.linear == "aten":
        plain_linears()
    if spec.fake_arch:
        from tests.sandbox.simulated_aiter import engine

        engine.pretend(spec.fake_arch)
        if spec.attention == "aiter":
            aiter_attention.take(spec.fake_arch)
        if spec.fp8_bmm:
            engine.hold_weights_in_fp8()
        if spec.fp4_bmm:
            engine.hold_weights_in_fp4()
    if spec.interpret:
        from vllm_aiter_mla.kernels.triton import interpreter

        interpreter.install()
    if spec.graphs:
        piecewise.emulate(spec.graphs)
    if spec.graphs == "full":
        full_graphs.emulate()
    if spec.mutation:
        plant(spec.mutation)
    if spec.perturb:
        perturb_cache(spec.perturb)
    if spec.dump_graphs:
        dump_graphs()
    count_branches()


def plant(mutation: str) -> None:
    """Call "module:function", which plants a bug in this process."""
    module, _, function = mutation.partition(":")
    getattr(importlib.import_module(module), function)()


def count_branches() -> None:
    """Count what the op does with its batches: a claim about prefill rows is empty where none came by."""
    from vllm_aiter_mla import ops as bodies

    for name in ("prepared_query", "rotate_and_write"):
        inner = getattr(bodies, name)

        def counted(*args: Any, name: str = name, inner: Any = inner) -> Any:
            BRANCHES[name] += 1
            return inner(*args)

        setattr(bodies, name, counted)


def plain_linears() -> None:
    """Let unquantised linears be ``aten`` GEMMs, as on GPUs, instead of the CPU build's out-variant."""
    from vllm.model_executor.layers import utils

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    utils.dispatch_cpu_unquantized_gemm = dispatch


def perturb_cache(share: float) -> None:
    """Shift a fixed ``share`` of fp8 rope values by one step. The demo compares its differences with this."""
    from tests.sandbox import attention, gpu_ops

    write = gpu_ops.write_kv_rows

    def write_perturbed(
        kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, k_scale: torch.Tensor
    ) -> None:
        write(kv_c, k_pe, kv_cache, slots, k_scale)
        if kv_cache.numel() == 0 or kv_cache.dtype != torch.uint8:
            return
        rows = kv_cache.view(-1, kv_cache.shape[-1])
        chosen = slots[slots >= 0]
        rope = rows[chosen, kv_c.shape[-1] :]
        picked = torch.rand(rope.shape, generator=torch.Generator().manual_seed(0)) < share
        # The next code of larger magnitude; the largest finite one stays.
        moved = torch.where(picked & ((rope & 0x7F) < 0x7E), rope + 1, rope)
        rows[chosen, kv_c.shape[-1] :] = moved

    gpu_ops.write_kv_rows = write_perturbed
    attention.write_kv_rows = write_perturbed


def dump_graphs() -> None:
    """Keep the text of each range's graph as it leaves vLLM's post-grad passes, and the code that Inductor makes."""
    from torch._inductor.graph import GraphLowering
    from vllm.compilation.passes import inductor_pass, pass_manager
    from vllm.compilation.passes.inductor_pass import get_pass_context

    inner = pass_manager.PostGradPassManager.__call__

    def call(self: Any, graph: torch.fx.Graph) -> None:
        inner(self, graph)
        GRAPHS[compile_range()] = str(graph)

    def compile_range() -> str:
        r = get_pass_context().compile_range
        return f"{r.start}-{r.end}"

    def keep(code: str) -> None:
        if inductor_pass._pass_context is not None:  # else a small graph of the sampler's
            CODE[compile_range()] = code

    GraphLowering.save_output_code = staticmethod(keep)
    pass_manager.PostGradPassManager.__call__ = call  # type: ignore[method-assign]


def set_scales(llm: Any, k_scale: float, q_scale: float) -> None:
    """Give every MLA layer these dequantisation scales, in place. In-process engines only."""
    for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
        if hasattr(layer, "kv_lora_rank"):
            layer._k_scale.fill_(k_scale)
            layer._q_scale.fill_(q_scale)

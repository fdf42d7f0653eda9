"""Planted bugs, in every process of an engine: see the variable ``MUTATION`` of the sandbox's plugin."""

from __future__ import annotations

from typing import Any

from tests.sandbox import plugin


def decode_reads_another_channel() -> None:
    """Each value of the result of decode attention comes from its neighbour's channel, on every side."""
    from tests.sandbox.attention import SandboxMLAImpl

    def forward_mqa(inner: Any, *args: Any) -> Any:
        attended, *rest = inner(*args)
        return attended.roll(1, dims=-1), *rest

    plugin.spoil(SandboxMLAImpl, "forward_mqa", forward_mqa)


def the_gate_partitions_with_the_flag_off() -> None:
    """The engine of today gets what only the flag may bring, so today and control are one and the same."""
    from vllm_aiter_mla import gate
    from vllm_aiter_mla.compat.config import settings_of

    def apply(inner: Any, vllm_config: Any) -> Any:
        vllm_config.compilation_config.use_inductor_graph_partition = True
        return inner(vllm_config)

    plugin.spoil(gate, "apply", apply, when=lambda vllm_config: not settings_of(vllm_config).enabled)


def a_rounding_moves_above_the_limit() -> None:
    """With the flag on, the last matrix of each graph above the decode limit grows by one step of bf16.

    No norm follows that would take the factor out again.
    """
    import torch
    from torch import fx

    from vllm_aiter_mla.compat.inductor import get_pass_context
    from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline

    def call(inner: Any, self: AiterMLAPipeline, graph: fx.Graph) -> None:
        inner(self, graph)
        last = [node for node in graph.nodes if node.op == "call_function" and _is_a_matrix(node)][-1]
        with graph.inserting_after(last):
            grown = graph.call_function(torch.ops.aten.mul.Tensor, (last, 1 + 2**-7))
        grown.meta["val"] = last.meta["val"]
        last.replace_all_uses_with(grown, delete_user_cb=lambda user: user is not grown)

    def above(self: AiterMLAPipeline, graph: fx.Graph) -> bool:
        return int(get_pass_context().compile_range.end) > self.limit

    plugin.spoil(AiterMLAPipeline, "__call__", call, when=above)
    AiterMLAPipeline.is_applicable_for_range = lambda self, compile_range: True  # type: ignore[method-assign]


def _is_a_matrix(node: Any) -> bool:
    value = node.meta.get("val")
    return getattr(value, "ndim", 0) == 2 and value.is_floating_point()

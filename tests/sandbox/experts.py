"""vLLM's experts for CPUs, made fit for expert parallelism.

Its kernel takes the ids of all ranks' experts for its own rank's, and reads past its weights: the process dies. Here
ids become local ones, and an expert of another rank weighs nothing.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch


@cache
def register() -> None:
    """Wrap the method that calls the kernel. A vLLM whose experts are somewhere else is left as it is."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return
    inner = CPUUnquantizedExperts.apply
    signature = inspect.signature(inner)

    def apply(*args: Any, **named: Any) -> None:
        given = signature.bind(*args, **named)
        values = given.arguments
        if values["expert_map"] is not None:
            found = local(values["topk_weights"], values["topk_ids"], values["expert_map"])
            values["topk_weights"], values["topk_ids"] = found
        inner(*given.args, **given.kwargs)

    CPUUnquantizedExperts.apply = apply  # type: ignore[method-assign]


def local(weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, K] and ids [T, K] of this rank: ``expert_map`` has -1 for an expert of another rank."""
    mapped = expert_map[ids.long()]
    return torch.where(mapped < 0, 0, weights), mapped.clamp(min=0).to(ids.dtype)

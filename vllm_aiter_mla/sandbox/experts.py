"""vLLM's experts for CPUs, made fit for expert parallelism.

Its kernel takes the ids of all ranks' experts for its own rank's, and reads past its weights: the process dies. Here
ids become local ones, and an expert of another rank weighs nothing.
"""

from __future__ import annotations

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

    def apply(self: Any, *args: Any, **named: Any) -> None:
        given = dict(zip(_names(inner), args, strict=False)) | named
        expert_map = given.get("expert_map")
        if expert_map is not None:
            given["topk_weights"], given["topk_ids"] = local(given["topk_weights"], given["topk_ids"], expert_map)
        inner(self, **given)

    CPUUnquantizedExperts.apply = apply


def local(weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, K] and ids [T, K] of this rank: ``expert_map`` has -1 for an expert of another rank."""
    mapped = expert_map[ids.long()]
    return torch.where(mapped < 0, 0, weights), mapped.clamp(min=0).to(ids.dtype)


def _names(function: Any) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[1 : code.co_argcount]

"""The few facts of vLLM's forward context that the ops need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class LayerContext:
    """One MLA layer inside a forward pass.

    Attributes:
        name: the layer's dotted name.
        metadata: its attention metadata, or None while profiling or capturing. Only the attention op may look at it.
        layer: the ``MLAAttention`` module.
        kv_cache: [blocks, block_size, L+R] as vLLM stores it: uint8 for fp8; empty before the cache exists.
        slots: [S] int64, or None while profiling.
    """

    name: str
    metadata: Any
    layer: Any
    kv_cache: torch.Tensor
    slots: torch.Tensor | None


def layer_context(layer_name: Any) -> LayerContext:
    """The context of the layer that an op was given by name."""
    from vllm.model_executor.layers.attention.attention import get_attention_context
    from vllm.utils.torch_utils import _resolve_layer_name

    name = _resolve_layer_name(layer_name)
    metadata, layer, kv_cache, slots = get_attention_context(name)
    return LayerContext(name, metadata, layer, kv_cache, slots)


def is_piecewise() -> bool:
    """Whether this forward pass runs, or records, piecewise graphs."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    return get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE


def fp8_view(kv_cache: torch.Tensor) -> torch.Tensor:
    """vLLM's uint8 KV cache as the platform's fp8 type, without a copy; other caches as they are."""
    if kv_cache.dtype != torch.uint8:
        return kv_cache
    from vllm.platforms import current_platform

    return kv_cache.view(current_platform.fp8_dtype())

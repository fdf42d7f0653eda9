"""vLLM's forward context, as an op that was given a layer's name sees it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


def layer_call(layer_name: Any) -> tuple[str, Any, Any, torch.Tensor, torch.Tensor | None]:
    """What vLLM's forward context holds for the layer: (name, metadata, module, cache, slots).

    The metadata is that of the layer's attention, None while profiling and in dummy runs; the module is vLLM's
    ``MLAAttention``; the cache [blocks, block_size, L+R] is as vLLM stores it, empty before it exists; the slots [S]
    are int64, None while profiling.
    """
    vllm = _vllm()
    name = vllm.resolve_name(layer_name)
    return name, *vllm.attention_context(name)


def layer_module(layer_name: Any) -> tuple[str, Any]:
    """The layer's dotted name and vLLM's ``MLAAttention`` module. Nothing of the batch is read."""
    vllm = _vllm()
    name = vllm.resolve_name(layer_name)
    return name, vllm.forward_context().no_compile_layers[name]


def is_piecewise() -> bool:
    """Whether this forward pass runs, or records, piecewise graphs."""
    vllm = _vllm()
    return bool(vllm.forward_context().cudagraph_runtime_mode == vllm.piecewise)


def fp8_view(kv_cache: torch.Tensor) -> torch.Tensor:
    """vLLM's uint8 KV cache as the platform's fp8 type, without a copy; other caches as they are."""
    if kv_cache.dtype != torch.uint8:
        return kv_cache
    return kv_cache.view(_vllm().platforms.current_platform.fp8_dtype())


def is_decode_only(metadata: Any, slots: torch.Tensor | None) -> bool:
    """Whether every real row of the batch is a decode row that has a slot for its KV row."""
    rows = metadata.num_actual_tokens
    return (
        slots is not None
        and metadata.decode is not None
        and metadata.num_prefills == 0
        and metadata.num_decode_tokens == rows
        and slots.shape[0] >= rows
    )


def layers_of_forward_context() -> dict[str, Any]:
    """The layers of the model in the current forward context by name; empty outside one."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return dict(get_forward_context().no_compile_layers) if is_forward_context_available() else {}


class _VLLM(NamedTuple):
    """What is called in every step. Looked up once: an import statement costs as much as the call behind it."""

    attention_context: Callable[[str], tuple[Any, Any, torch.Tensor, torch.Tensor | None]]
    resolve_name: Callable[[Any], str]
    forward_context: Callable[[], Any]
    piecewise: Any
    platforms: Any


@functools.cache
def _vllm() -> _VLLM:
    from vllm import platforms
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.attention.attention import get_attention_context
    from vllm.utils.torch_utils import _resolve_layer_name

    return _VLLM(get_attention_context, _resolve_layer_name, get_forward_context, CUDAGraphMode.PIECEWISE, platforms)

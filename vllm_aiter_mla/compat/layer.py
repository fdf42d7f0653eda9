"""vLLM's ``MLAAttention`` layer as admission sees it."""

from __future__ import annotations

from typing import Any

import torch

from vllm_aiter_mla.admission import LayerView
from vllm_aiter_mla.compat import kernels

KNOWN_IMPLS = {"AiterMLAImpl"}
"""Class names of the attention implementations that the fast path calls correctly; the sandbox adds its own."""

ATTRIBUTES = (
    "layer_name", "kv_cache", "kv_cache_dtype", "num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank",
    "v_head_dim", "sliding_window", "q_pad_num_heads", "hisparse_cache", "use_pcp", "dcp_q_replicate",
    "is_aiter_triton_fp4_bmm_enabled", "is_aiter_triton_fp8_bmm_enabled", "is_amx_bmm_enabled", "_vllm_config",
    "impl.is_sparse", "impl.dcp_world_size", "impl.supports_quant_query_input",
)  # fmt: skip
"""What ``MLAAttention`` and its implementation always have, in the sources of vLLM 0.30, 0.31, 0.32 and 0.33."""

KNOWN_LAYERS = {"MLAAttention"}
"""Class names of the layers whose ``forward_impl`` does for decode rows what the plugin's ops do in its place."""


def layer_view(
    layer: Any, cos_sin_dtype: torch.dtype | None = None, graph_dtype: torch.dtype | None = None
) -> LayerView:
    """Read the facts that admission decides on. What a known vLLM always has and this one lacks is a fact as well.

    Args:
        layer: the attention module, its weights loaded.
        cos_sin_dtype: dtype of the rotary table where the graph shows it.
        graph_dtype: activation dtype of the graph, where there is one.
    """
    missing = tuple(name for name in ATTRIBUTES if not _has(layer, name))
    if missing:
        return LayerView(name=getattr(layer, "layer_name", ""), missing=missing)
    impl, cache = layer.impl, layer.kv_cache
    act = activation_dtype(layer)
    return LayerView(
        name=layer.layer_name,
        impl=type(impl).__name__,
        known_impls=frozenset(KNOWN_IMPLS),
        own_forward=_own_forward(layer),
        is_sparse=bool(impl.is_sparse),
        q_pad_num_heads=layer.q_pad_num_heads,
        has_absorbed_weight=all(isinstance(getattr(layer, name, None), torch.Tensor) for name in _weight_names(layer)),
        amx_bmm=bool(layer.is_amx_bmm_enabled),
        has_rope_kernel=kernels.has_rope_and_write(),
        kv_cache_dtype=layer.kv_cache_dtype,
        model_dtype=str(act).removeprefix("torch.") if act is not None else "",
        kv_cache_ndim=cache.dim() if isinstance(cache, torch.Tensor) and cache.numel() else None,
        dcp_world_size=int(impl.dcp_world_size),
        pcp_world_size=2 if layer.use_pcp else 1,
        dcp_q_replicate=bool(layer.dcp_q_replicate),
        hisparse=layer.hisparse_cache is not None,
        graph_dtype="" if graph_dtype in (None, act) else str(graph_dtype).removeprefix("torch."),
        cos_sin_dtype_matches=cos_sin_dtype is None or act is None or cos_sin_dtype == act,
        sliding_window=layer.sliding_window is not None,
        num_heads=layer.num_heads,
        qk_nope_head_dim=layer.qk_nope_head_dim,
        qk_rope_head_dim=layer.qk_rope_head_dim,
        kv_lora_rank=layer.kv_lora_rank,
        v_head_dim=layer.v_head_dim,
    )


def activation_dtype(layer: Any) -> torch.dtype | None:
    """The dtype the layer computes in: that of its absorbed weight, or the model's where that is quantised."""
    if holds_codes(layer):
        dtype = layer._vllm_config.model_config.dtype
        return dtype if isinstance(dtype, torch.dtype) else None
    weight = getattr(layer, "W_UK_T", None)
    return weight.dtype if isinstance(weight, torch.Tensor) else None


def holds_codes(layer: Any) -> bool:
    """Whether vLLM holds the absorbed weight as ``W_K`` and ``W_K_scale``: in mxfp4, which it asks first, or fp8."""
    return bool(layer.is_aiter_triton_fp4_bmm_enabled or layer.is_aiter_triton_fp8_bmm_enabled)


def prepared_query_dtype(layer: Any, act: torch.dtype) -> torch.dtype:
    """What the layer's decode kernel reads: fp8 beside an fp8 cache where it takes a quantised query, else ``act``.

    The same test as in vLLM's ``MLAAttention.forward_impl``.
    """
    from vllm.platforms import current_platform

    quantised = layer.kv_cache_dtype.startswith("fp8") and bool(layer.impl.supports_quant_query_input)
    return current_platform.fp8_dtype() if quantised else act


def quantise(layer: Any, absorbed: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
    """absorbed [T, N, L] and q_pe [T, N, R] side by side in fp8, by the layer's own function."""
    quantised: torch.Tensor = layer._decode_concat_quant_fp8_op(absorbed, q_pe, layer._q_scale)
    return quantised


def absorb_tensors(layer: Any) -> dict[str, torch.Tensor]:
    """The tensors in which vLLM keeps W_UK, by vLLM's names. Read per call: reloading the model replaces them."""
    return {name: getattr(layer, name) for name in _weight_names(layer)}


def _weight_names(layer: Any) -> tuple[str, ...]:
    return ("W_K", "W_K_scale") if holds_codes(layer) else ("W_UK_T",)


def _own_forward(layer: Any) -> str:
    """Whose ``forward_impl`` the layer has, where it is none that is known: a class, or the instance."""
    if "forward_impl" in vars(layer):
        return "the instance"
    owner = next((cls.__name__ for cls in type(layer).__mro__ if "forward_impl" in vars(cls)), "nobody")
    return "" if owner in KNOWN_LAYERS else owner


def _has(layer: Any, path: str) -> bool:
    *owner, name = path.split(".")
    return hasattr(getattr(layer, owner[0], None) if owner else layer, name)


def config_of(layer: Any) -> Any:
    """The ``VllmConfig`` of the layer's engine, which it keeps."""
    return layer._vllm_config


def block_size(layer: Any) -> int:
    """Tokens in a block of the layer's KV cache, 16 where vLLM has not decided yet."""
    return int(config_of(layer).cache_config.block_size or 16)

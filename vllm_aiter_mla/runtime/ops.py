"""Registers the three ops. Done when the plugin loads: a warm start calls them without ever running a pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "vllm_aiter_mla"
ATTENTION_OP = f"{NAMESPACE}::mla_attention_with_prepared_q"

FAKES: dict[str, Callable[..., Any]] = {}
"""The fakes by qualified name of their op, once the ops are registered."""

_LIBRARY: list[torch.library.Library] = []


def register() -> None:
    """Define the ops under ``torch.ops.vllm_aiter_mla``. Idempotent."""
    if _LIBRARY:
        return
    from vllm.utils.torch_utils import LayerNameType, direct_register_custom_op

    from vllm_aiter_mla.runtime import attention, fused, q_prep

    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for function in (
        q_prep.mla_decode_q_prep,
        fused.fused_qk_rope_kv_cache_q_prep,
        attention.mla_attention_with_prepared_q,
    ):
        # How a layer is named depends on the torch release, and is known only now.
        function.__annotations__["layer_name"] = LayerNameType
    direct_register_custom_op(
        "mla_decode_q_prep", q_prep.mla_decode_q_prep, fake_impl=q_prep.mla_decode_q_prep_fake, target_lib=library
    )
    direct_register_custom_op(
        "fused_qk_rope_kv_cache_q_prep",
        fused.fused_qk_rope_kv_cache_q_prep,
        fake_impl=fused.fused_qk_rope_kv_cache_q_prep_fake,
        target_lib=library,
    )
    direct_register_custom_op(
        "mla_attention_with_prepared_q",
        _attention_with_hooks(attention.mla_attention_with_prepared_q),
        mutates_args=["output"],
        fake_impl=attention.mla_attention_with_prepared_q_fake,
        target_lib=library,
        tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),
    )
    FAKES[f"{NAMESPACE}::mla_decode_q_prep"] = q_prep.mla_decode_q_prep_fake
    FAKES[f"{NAMESPACE}::fused_qk_rope_kv_cache_q_prep"] = fused.fused_qk_rope_kv_cache_q_prep_fake
    _LIBRARY.append(library)


def _attention_with_hooks(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` under the two decorators that vLLM's own attention ops carry, applied at the first call.

    Their modules take over half a second to import, which a run with the flag off must not pay for. The layer name
    stays positional: the KV connector's hook finds it by its index.
    """

    @functools.cache
    def decorated() -> Callable[..., None]:
        from vllm.compilation.breakable_cudagraph import eager_break_during_capture
        from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer

        # Outermost: a KV connector's hooks must run in the eager segment of a breakable graph.
        return eager_break_during_capture(maybe_transfer_kv_layer(function))

    @functools.wraps(function)
    def attention(*args: Any, **kwargs: Any) -> None:
        decorated()(*args, **kwargs)

    return attention

"""Registers the three ops. Done when the plugin loads: a warm start calls them without ever running a pass."""

from __future__ import annotations

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
    from vllm_aiter_mla.compat import custom_ops
    from vllm_aiter_mla.runtime import attention, fused, q_prep

    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for function, fake in (
        (q_prep.mla_decode_q_prep, q_prep.mla_decode_q_prep_fake),
        (fused.fused_qk_rope_kv_cache_q_prep, fused.fused_qk_rope_kv_cache_q_prep_fake),
    ):
        custom_ops.define(library, function, fake)
        FAKES[f"{NAMESPACE}::{function.__name__}"] = fake
    custom_ops.define(
        library,
        custom_ops.with_attention_hooks(attention.mla_attention_with_prepared_q),
        attention.mla_attention_with_prepared_q_fake,
        mutates=["output"],
        tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),
    )
    _LIBRARY.append(library)

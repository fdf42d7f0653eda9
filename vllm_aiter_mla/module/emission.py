"""Which layers call the op: decided once, after the weights are loaded and the kernels are checked."""

from __future__ import annotations

import logging
from typing import Any

from vllm_aiter_mla import layers
from vllm_aiter_mla.admission import Refusal
from vllm_aiter_mla.census import state as census
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.compat import wrapper as compat_wrapper
from vllm_aiter_mla.module import rope, wrapper


def emit(modules: dict[str, Any]) -> None:
    """Let each admitted layer call the op; the others run vLLM's own forward, with the reason in the census.

    Args:
        modules: the model's MLA layers by name.
    """
    for name, attention in modules.items():
        refusal = _guarded(attention)
        if refusal is not None:
            census.refuse(name, refusal.code, refusal.message)
            log.say_once(logging.DEBUG, f"{name} stays stock: {refusal}")


def _guarded(attention: Any) -> Refusal | None:
    try:
        return _emit(attention)
    except Exception as error:
        return Refusal("not_evaluated", f"admission raised {type(error).__name__}: {error}")


def _emit(attention: Any) -> Refusal | None:
    found = wrapper.wrapper_of(attention)
    if found is None:
        return Refusal("unknown_forward", "the model's attention is not in vLLM's MultiHeadLatentAttentionWrapper")
    refusal = compat_wrapper.why_unknown(found) or rope.why_not(found)
    if refusal is not None:
        return refusal
    is_neox = bool(found.rotary_emb.is_neox_style)
    decision = layers.decide(attention, is_neox=is_neox, table_dtype=found.rotary_emb.cos_sin_cache.dtype)
    if decision.refusal is None:
        found.is_neox = is_neox
    return decision.refusal

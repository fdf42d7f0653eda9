"""Which layers call the op: decided after the weights are loaded and the kernels are checked."""

from __future__ import annotations

import logging
from typing import Any

from vllm_aiter_mla import layer as layers
from vllm_aiter_mla import status
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.compat import wrapper as compat_wrapper
from vllm_aiter_mla.module import rope, wrapper


def emit(modules: dict[str, Any]) -> tuple[str, ...]:
    """Let each admitted layer call the op; the others run vLLM's own forward, with the reason in the status file.

    Args:
        modules: the model's MLA layers by name.

    Returns:
        What became of each layer: a key for the compile cache, which holds what the layers called when it was filled.
    """
    found = []
    for name, attention in modules.items():
        skip = _guarded(attention)
        found.append(f"{name}: {'module' if skip is None else skip.code}")
        if skip is not None:
            status.skip(name, skip.code, skip.message)
            log.say_once(logging.DEBUG, f"{name} is left to vLLM: {skip}")
    return tuple(found)


def _guarded(attention: Any) -> Skip | None:
    try:
        found = wrapper.wrapper_of(attention)
        if found is not None:
            found.is_neox = None  # whatever was decided before
        return compat_wrapper.why_unknown_code() or _emit(attention, found)
    except Exception as error:
        return Skip("not_evaluated", f"admission raised {type(error).__name__}: {error}")


def _emit(attention: Any, found: Any) -> Skip | None:
    if found is None:
        return Skip("unknown_forward", "the model's attention is not in vLLM's MultiHeadLatentAttentionWrapper")
    if compat_wrapper.quantises_output(found):
        return Skip("fused_output_quant", "fuse_attn_quant is on, and vLLM's passes would not find the plugin's op")
    skip = compat_wrapper.why_unknown(found) or rope.why_not(found)
    if skip is not None:
        return skip
    is_neox = bool(found.rotary_emb.is_neox_style)
    decision = layers.of(attention).decide(table_dtype=found.rotary_emb.cos_sin_cache.dtype)
    if decision.skip is None:
        found.is_neox = is_neox
    return decision.skip

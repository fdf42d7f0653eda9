"""The self-check of every kernel that is about to run, on every rank, before the first graph is captured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from vllm_aiter_mla.compat import layer_view, log
from vllm_aiter_mla.kernels.aiter.selfcheck import LayerShape, self_check, synthetic_inputs
from vllm_aiter_mla.runtime import kernel
from vllm_aiter_mla.settings import SettingsError

# What the check compares with, and vLLM's own kernels: nothing to fall back to, and no new code of ours or AITER's.
TRUSTED = frozenset({"reference", "stock"})


def check_layers(layers: dict[str, Any], *, strict: bool, capture_sizes: Sequence[int] = ()) -> None:
    """Load each layer shape's kernel, compare it with the reference, and demote it to ``stock`` on a mismatch.

    Args:
        layers: the model's MLA layers by name.
        strict: whether a mismatch is an error.
        capture_sizes: token counts for which a kernel that compiles per count is compiled now.

    Raises:
        SettingsError: a mismatch in strict mode.
    """
    checked: set[tuple[int, LayerShape]] = set()
    for layer in layers.values():
        act = layer_view.activation_dtype(layer)
        if act is None:
            continue
        chooser = kernel.selector_of(layer)
        out_dtype = layer_view.prepared_query_dtype(layer, act)
        # The layer does not know its rotary style; both cost a few rows.
        for is_neox in (False, True):
            shape = kernel.shape_of(layer, is_neox=is_neox, act=act, out_dtype=out_dtype)
            if (id(chooser), shape) not in checked:
                checked.add((id(chooser), shape))
                _check(chooser, shape, strict, capture_sizes)


def _check(chooser: Any, shape: LayerShape, strict: bool, capture_sizes: Sequence[int]) -> None:
    inputs = synthetic_inputs(shape, tokens=1)
    backend = chooser.choose(inputs).backend
    if backend is None or backend.name in TRUSTED:
        return
    result = self_check(backend, shape)
    if result.ok:
        if capture_sizes and hasattr(backend, "warm_up"):
            backend.warm_up(inputs, capture_sizes)
        log.say_once(logging.DEBUG, result.message)
        return
    where = f"heads {shape.heads}, {shape.cache_dtype} cache, block size {shape.block_size}"
    if strict:
        raise SettingsError(f"{log.PREFIX}{result.message} ({where}; additional_config.aiter_mla.strict=true)")
    log.say_once(logging.ERROR, f"{result.message} ({where}); this layer shape falls back to vLLM's own kernels")
    chooser.demote(backend.name, inputs, result.message)

"""The self-check of every kernel that is about to run, on every rank, before the first graph is captured."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_aiter_mla.admission import admit_layer
from vllm_aiter_mla.compat import layer_view, log
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.select import Selector
from vllm_aiter_mla.kernels.selfcheck import self_check
from vllm_aiter_mla.kernels.shape import LayerShape, synthetic_inputs
from vllm_aiter_mla.runtime import kernel
from vllm_aiter_mla.settings import SettingsError


def check_layers(layers: dict[str, Any], *, strict: bool, capture_sizes: Sequence[int] = ()) -> None:
    """Load each layer shape's kernel, compare it with the reference, and demote it to ``stock`` where it fails.

    Args:
        layers: the model's MLA layers by name.
        strict: whether a kernel that fails is an error.
        capture_sizes: token counts for which a kernel that compiles per count is compiled now.

    Raises:
        SettingsError: a mismatch, or a kernel that raises, in strict mode.
    """
    for chooser, _, shape in _shapes(layers):
        _check(chooser, shape, strict, capture_sizes)


def _shapes(layers: dict[str, Any]) -> Iterator[tuple[Selector, str, LayerShape]]:
    """The chooser, the kernel asked for and the shape of every kind of layer that may be rewritten, once each."""
    seen: set[tuple[Selector, LayerShape]] = set()
    for name, layer in layers.items():
        try:
            kinds = _kinds(layer)
        except Exception as error:
            # The passes ask the same of it, and leave it alone; the layers after it still have to be checked.
            log.say_once(logging.DEBUG, f"{name} is not checked: {type(error).__name__}: {error}")
            continue
        for chooser, asked, shape in kinds:
            if (chooser, shape) not in seen:
                seen.add((chooser, shape))
                yield chooser, asked, shape


def _kinds(layer: Any) -> list[tuple[Selector, str, LayerShape]]:
    """Of one layer, for both rotary styles: it does not know its own, and both cost a few rows."""
    act = layer_view.activation_dtype(layer)
    if act is None or admit_layer(layer_view.layer_view(layer)) is not None:
        return []
    chooser, asked = kernel.selector_of(layer), kernel.settings_of(layer).kernel
    out_dtype = layer_view.prepared_query_dtype(layer, act)
    shapes = [kernel.shape_of(layer, is_neox=style, act=act, out_dtype=out_dtype) for style in (False, True)]
    for shape in shapes:
        kernel.plan_of(chooser, asked, shape)  # raises where the passes' own question would
    return [(chooser, asked, shape) for shape in shapes]


def verdicts(layers: dict[str, Any]) -> tuple[str, ...]:
    """What each layer shape will run on, or why it will not: a key for the compile cache.

    A graph is rewritten or not by this, and none of vLLM's own keys knows of AITER, the card or a failed check: without
    it an engine would start from the untouched graph of a run before AITER was mended.
    """
    found = set()
    for chooser, asked, shape in _shapes(layers):
        plan = kernel.plan_of(chooser, asked, shape)
        # The card by its type: its index differs from rank to rank, and may from start to start.
        kind = replace(shape, device=torch.device(shape.device).type)
        found.add(f"{kind}: {plan.kernel}; unavailable: {plan.unavailable}; refused: {plan.refused}")
    return tuple(sorted(found))


def _check(chooser: Selector, shape: LayerShape, strict: bool, capture_sizes: Sequence[int]) -> None:
    inputs = synthetic_inputs(shape, tokens=1)
    backend = chooser.choose(inputs).backend
    if backend is None or backend.trusted:
        return
    trouble = _trouble(backend, shape, inputs, capture_sizes)
    if trouble is None:
        return
    where = f"heads {shape.heads}, {shape.cache_dtype} cache, block size {shape.block_size}"
    if strict:
        raise SettingsError(f"{log.PREFIX}{trouble} ({where}; additional_config.aiter_mla.strict=true)")
    log.say_once(logging.ERROR, f"{trouble} ({where}); this layer shape falls back to vLLM's own kernels")
    chooser.demote(backend.name, inputs, trouble)
    kernel.plan_of.cache_clear()  # an engine before this one may have planned with the kernel


def _trouble(backend: Any, shape: LayerShape, inputs: DecodeInputs, capture_sizes: Sequence[int]) -> str | None:
    """Why the kernel must not serve this shape, or None; one that cannot be compiled or launched is as bad as wrong."""
    try:
        result = self_check(backend, shape)
        if result.ok and capture_sizes:
            backend.warm_up(inputs, capture_sizes)
    except Exception as error:
        return f"{backend.name}: self-check FAILED: {type(error).__name__}: {error}"
    log.say_once(logging.DEBUG, result.message)
    return None if result.ok else result.message

"""The self-check of every kernel that is about to run, on every rank, before the first graph is captured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_aiter_mla.admission import admit_layer
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.select import Selector
from vllm_aiter_mla.kernels.selfcheck import LayerShape, self_check, synthetic_inputs
from vllm_aiter_mla.runtime import kernel
from vllm_aiter_mla.settings import STRICT_OPTION, SettingsError

Kind = tuple[Selector, str, LayerShape]
"""The chooser, the kernel asked for and the shape of a layer: layers of one kind are checked once."""


def check_layers(layers: dict[str, Any], *, strict: bool, capture_sizes: Sequence[int] = ()) -> None:
    """Load each layer shape's kernel, compare it with the reference, and demote it to ``stock`` where it fails.

    A layer whose check cannot be made goes to ``stock`` too, and the layers after it are still checked.

    Args:
        layers: the model's MLA layers by name.
        strict: whether a kernel that fails its check, or cannot be checked, is an error.
        capture_sizes: token counts for which a kernel that compiles per count is compiled now.

    Raises:
        SettingsError: a mismatch, or anything that raises on the way, in strict mode.
    """
    checked: set[Kind] = set()

    def check(layer: Any) -> None:
        kinds = _kinds(layer)
        for kind in kinds:
            if kind not in checked:
                _check(kind[0], kind[2], strict, capture_sizes)
                checked.add(
                    kind
                )  # only now: if the check raises, the next layer of this kind must not pass for checked
        if not kinds:
            kernel.distrust("it was not admitted when the kernels were checked", layer)

    _each(layers, check, strict)


def verdicts(layers: dict[str, Any], *, strict: bool = False) -> tuple[str, ...]:
    """What each layer shape will run on, or why it will not: a key for the compile cache.

    A graph is rewritten or not by this, and none of vLLM's own keys knows of AITER, the card or a failed check: without
    it an engine would start from the untouched graph of a run before AITER was mended.

    Raises:
        SettingsError: a layer cannot be asked, in strict mode.
    """
    found: set[str] = set()

    def ask(layer: Any) -> None:
        for chooser, asked, shape in _kinds(layer):
            plan = kernel.plan_of(chooser, asked, shape)
            # The card by its type: its index differs from rank to rank, and may from start to start.
            kind = replace(shape, device=torch.device(shape.device).type)
            found.add(f"{kind}: {plan.kernel}; {plan.refusal}")

    _each({name: layer for name, layer in layers.items() if kernel.why_unchecked(layer) is None}, ask, strict)
    unchecked = {name: kernel.why_unchecked(layer) for name, layer in layers.items()}
    found.update(f"{name}: unchecked: {reason}" for name, reason in unchecked.items() if reason is not None)
    return tuple(sorted(found))


def _each(layers: dict[str, Any], step: Callable[[Any], None], strict: bool) -> None:
    """Do ``step`` for every layer; one for which it raises goes to vLLM's own kernels, all of them in one line."""
    failed: dict[str, str] = {}
    for name, layer in layers.items():
        try:
            step(layer)
        except Exception as error:
            if strict and isinstance(error, SettingsError):
                raise
            reason = f"its kernel could not be checked: {type(error).__name__}: {error}"
            kernel.distrust(reason, layer)
            if strict:
                raise SettingsError(f"{log.PREFIX}{name}: {reason} ({STRICT_OPTION})") from error
            failed[name] = reason
    if failed:
        name, reason = next(iter(failed.items()))
        what = f"{len(failed)} MLA layer(s) fall back to vLLM's own kernels"
        log.say_once(logging.ERROR, f"{what}: {name}: {reason}")


def _kinds(layer: Any) -> list[Kind]:
    """Of one layer, for both rotary styles: it does not know its own, and both cost a few rows."""
    act = compat_layer.activation_dtype(layer)
    if act is None or admit_layer(compat_layer.layer_view(layer)) is not None:
        return []
    chooser, asked = kernel.selector_of(layer), kernel.settings_of(layer).kernel
    out_dtype = compat_layer.prepared_query_dtype(layer, act)
    shapes = [kernel.shape_of(layer, is_neox=style, act=act, out_dtype=out_dtype) for style in (False, True)]
    for shape in shapes:
        kernel.plan_of(chooser, asked, shape)  # raises where the passes' own question would
    return [(chooser, asked, shape) for shape in shapes]


def _check(chooser: Selector, shape: LayerShape, strict: bool, capture_sizes: Sequence[int]) -> None:
    inputs = synthetic_inputs(shape, tokens=1)
    backend = chooser.choose(inputs).backend
    if backend is None or backend.name in kernel.TRUSTED:
        return
    trouble = _trouble(backend, shape, inputs, capture_sizes)
    if trouble is None:
        return
    where = f"heads {shape.heads}, {shape.cache_dtype} cache, block size {shape.block_size}"
    if strict:
        raise SettingsError(f"{log.PREFIX}{trouble} ({where}; {STRICT_OPTION})")
    log.say_once(logging.ERROR, f"{trouble} ({where}); this layer shape falls back to vLLM's own kernels")
    chooser.demote(backend.name, inputs, trouble)
    kernel.plan_of.cache_clear()  # an engine before this one may have planned with the kernel


def _trouble(backend: Any, shape: LayerShape, inputs: DecodeInputs, capture_sizes: Sequence[int]) -> str | None:
    """Why the kernel must not serve this shape, or None; one that cannot be compiled or launched is as bad as wrong."""
    try:
        result = self_check(backend, shape)
        if result.ok and capture_sizes and hasattr(backend, "warm_up"):
            backend.warm_up(inputs, capture_sizes)
    except Exception as error:
        return f"{backend.name}: self-check FAILED: {type(error).__name__}: {error}"
    log.say_once(logging.DEBUG, result.message)
    return None if result.ok else result.message

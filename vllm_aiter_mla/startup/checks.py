# SPDX-License-Identifier: Apache-2.0
"""Compare the kernels of a layer shape with the reference, before one of them runs."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from vllm_aiter_mla.admission import OVERFLOW
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import LayerShape, meta_inputs, synthetic_inputs
from vllm_aiter_mla.serving.decision import PASSED, Checked
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.startup import comparison, prefill
from vllm_aiter_mla.startup.comparison import Comparison


def check_kernels(
    layer: Layer, capture_sizes: Sequence[int], around_first_calls: Callable[[str], AbstractContextManager[None]]
) -> dict[str, Checked]:
    """Check the kernels that may run layers of this shape, vLLM's rotary kernel first; return the results by kernel.

    Tuned tiles that fail are forgotten, and their kernel is checked again with the tiles of its table.

    Args:
        layer: any layer of the shape.
        capture_sizes: token counts for which a kernel that compiles per count is compiled now.
        around_first_calls: surrounds the first calls of a kernel, by its name.

    Raises:
        RotationError: vLLM's rotary kernel does not rotate as vLLM's compiled graph.
        Exception: of any kind, if the shape, the kernels or the memory cannot be had.
    """
    prefill.check_rotation(layer)
    shape = layer.shape()
    in_words, row = shape.in_words(), meta_inputs(shape)
    checks: dict[str, Checked] = {}
    for name, backend in layer.kernels_to_check().items():
        with around_first_calls(name):
            result = self_check(name, backend, shape, capture_sizes, layer.limit)
        tuned = backend.tuned(row)
        if tuned and not result.ok:
            log.say_once(logging.WARNING, f"{result.message} ({in_words}); the tuned tiles {tuned} are left out")
            backend.untune(row)
            with around_first_calls(name):
                result = self_check(name, backend, shape, capture_sizes, layer.limit)
        elif tuned:
            layer.engine_status.add_tuned(in_words, tuned)
        if not result.ok:
            checks[name] = Checked(f"{result.message} ({in_words})")
        else:
            checks[name] = Checked(writes_nan=True) if result.writes_nan else PASSED
    return checks


def log_results(layer: Layer, end_strict_start: Callable[[str], None]) -> None:
    """Log which kernels failed the check of a layer's shape, and which turn an fp8 overflow into NaN.

    The status of the engine keeps the kernels that may run although they do so.

    Args:
        layer: any layer of the shape; it has been given the results of the check.
        end_strict_start: called with the reason if a kernel failed that would have served; raises in strict mode.
    """
    for name, found in layer.checks.items():
        if found.failed and not layer.would_serve(name):
            log.say_once(logging.WARNING, f"{found.failed}; it does not run")
        elif found.failed:
            end_strict_start(found.failed)
            log.say_once(logging.ERROR, f"{found.failed}; this layer shape falls back to other kernels")
        elif found.writes_nan:
            runs = name in layer.usable()
            log.say_once(logging.WARNING if runs else logging.INFO, f"{name} {OVERFLOW}; kernel=auto leaves it out")
            if runs:
                layer.engine_status.add_overflow(name)


def self_check(
    name: str, backend: KernelBackend, shape: LayerShape, capture_sizes: Sequence[int], limit: int
) -> Comparison:
    """Compare a kernel with the reference under both rotary styles, and compile what its graphs need.

    An error while the kernel is compiled or launched is a failure, like a wrong result.

    Args:
        name: of the kernel, for the message.
        backend: what is checked.
        shape: the layer; its rotary style does not count.
        capture_sizes: token counts for which the kernel is compiled; empty for none.
        limit: the decode limit in tokens.

    Returns:
        The first comparison that failed; otherwise the first one in which NaN was written; otherwise the first one.
    """
    results: list[Comparison] = []
    try:
        for is_neox in comparison.ROTARY_STYLES:
            styled = replace(shape, is_neox=is_neox)
            results.append(result := comparison.compare_with_reference(backend, styled, limit))
            if not result.ok:
                return result
            log.say_once(logging.DEBUG, result.message)
            if capture_sizes:
                for large in backend.caches:
                    backend.warm_up(synthetic_inputs(styled, tokens=1, large=large), capture_sizes)
        card().synchronize()  # a launch that faults does so here, while the first call is marked
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())  # Triton's errors have many lines
        return Comparison(False, f"{name}: self-check FAILED: {reason}")
    return next((result for result in results if result.writes_nan), results[0])

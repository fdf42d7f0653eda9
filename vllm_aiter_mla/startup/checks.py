# SPDX-License-Identifier: Apache-2.0
"""Compare the kernels of a layer shape with the reference, before one of them runs."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

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
    layer: Layer, capture_sizes: Sequence[int], mark_first_calls: Callable[[str], AbstractContextManager[None]]
) -> dict[str, Checked]:
    """Check the kernels that may run layers of this shape, and return the results by kernel.

    vLLM's rotary kernel is checked first. Tuned tiles that fail are forgotten, and their kernel is checked again with
    the tiles of its table.

    Args:
        layer: any layer of the shape.
        capture_sizes: token counts for which a kernel that compiles per count is compiled now.
        mark_first_calls: returns the context in which the first calls of the named kernel are made.

    Raises:
        RotationError: vLLM's rotary kernel does not rotate as vLLM's compiled graph.
        Exception: any other, if the shape is unknown, a kernel cannot be built, or the memory runs out.
    """
    prefill.check_rotation(layer)
    shape = layer.shape()
    shape_in_words, inputs = shape.in_words(), meta_inputs(shape)
    checks: dict[str, Checked] = {}
    for name, backend in layer.kernels_to_check().items():
        with mark_first_calls(name):
            result = check_kernel(name, backend, shape, capture_sizes, layer.limit)
        tuned_tiles = backend.tuned(inputs)
        if tuned_tiles and not result.has_passed:
            omission = f"the tuned tiles {tuned_tiles} are left out"
            log.say_once(logging.WARNING, f"{result.message} ({shape_in_words}); {omission}")
            backend.untune(inputs)
            with mark_first_calls(name):
                result = check_kernel(name, backend, shape, capture_sizes, layer.limit)
        elif tuned_tiles:
            layer.engine_status.add_tuned_tiles(shape_in_words, tuned_tiles)
        if not result.has_passed:
            checks[name] = Checked(f"{result.message} ({shape_in_words})")
        else:
            checks[name] = Checked(writes_nan=True) if result.writes_nan else PASSED
    return checks


def log_results(layer: Layer, end_strict_start: Callable[[str], None]) -> None:
    """Log which kernels failed the check of a layer's shape, and which turn an fp8 overflow into NaN.

    If a kernel that writes NaN may run, the status of the engine records the kernel.

    Args:
        layer: any layer of the shape, after the results of the check were given to it.
        end_strict_start: called with the reason if a kernel failed that would have served. It raises in strict mode.
    """
    for name, check in layer.checks.items():
        if check.failed and not layer.would_serve(name):
            log.say_once(logging.WARNING, f"{check.failed}; it does not run")
        elif check.failed:
            end_strict_start(check.failed)
            log.say_once(logging.ERROR, f"{check.failed}; this layer shape falls back to another kernel, or to vLLM's")
        elif check.writes_nan:
            can_run = name in layer.usable()
            log.say_once(logging.WARNING if can_run else logging.INFO, f"{name} {OVERFLOW}; kernel=auto leaves it out")
            if can_run:
                layer.engine_status.add_nan_kernel(name)


def check_kernel(
    name: str, backend: KernelBackend, shape: LayerShape, capture_sizes: Sequence[int], limit: int
) -> Comparison:
    """Compare a kernel with the reference under both rotary styles, and compile what its graphs need.

    An error while the kernel is compiled or launched is a failure, like a wrong result. Running out of memory raises.

    Args:
        name: the kernel's name, for the message.
        backend: the back end of the kernel.
        shape: the layer; its rotary style is ignored.
        capture_sizes: token counts for which the kernel is compiled. If empty, none is compiled.
        limit: the decode limit in tokens.

    Returns:
        The first comparison that failed. If all passed: the first in which the kernel wrote NaN, else the first.

    Raises:
        torch.OutOfMemoryError: the operands do not fit, which says nothing of the kernel.
    """
    results: list[Comparison] = []
    try:
        for is_neox in comparison.ROTARY_STYLES:
            styled_shape = replace(shape, is_neox=is_neox)
            results.append(result := comparison.compare_with_reference(backend, styled_shape, limit))
            if not result.has_passed:
                return result
            log.say_once(logging.DEBUG, result.message)
            if capture_sizes:
                for large in backend.caches:
                    backend.warm_up(synthetic_inputs(styled_shape, tokens=1, large=large), capture_sizes)
        card().synchronize()  # a launch that faults raises here, while the first call is still marked
    except torch.OutOfMemoryError:
        raise  # the kernel is not the cause
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())  # Triton's errors have many lines
        return Comparison(False, f"{name}: self-check FAILED: {reason}")
    return next((result for result in results if result.writes_nan), results[0])

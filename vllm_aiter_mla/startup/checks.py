# SPDX-License-Identifier: Apache-2.0
"""Compare the kernels of a layer shape with the reference, before one of them runs."""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from vllm_aiter_mla.admission import OVERFLOW
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.kernels import formats
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.inputs import LayerShape, meta_inputs, synthetic_inputs
from vllm_aiter_mla.serving.decision import PASSED, Checked
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.startup import rotation, selfcheck
from vllm_aiter_mla.startup.selfcheck import SelfCheckResult

PAIRINGS = (False, True)
"""Rotary styles that are checked, as ``is_neox``: a layer's own is known only when its graph is compiled."""


def check_kernels(
    layer: Layer, capture_sizes: Sequence[int], marked: Callable[[str], AbstractContextManager[None]]
) -> dict[str, Checked]:
    """Compare the kernels that may run layers of this shape with the reference; return what was found, by kernel.

    Args:
        layer: one of the shape.
        capture_sizes: token counts for which a kernel that compiles per count is compiled now.
        marked: surrounds the first calls of a kernel, by its name.

    Raises:
        Exception: of any kind, if shape, kernels or memory cannot be had.
    """
    rotation.check(layer)
    shape = layer.shape()
    named = shape.in_words()
    row = meta_inputs(shape)
    checks: dict[str, Checked] = {}
    for name, backend in layer.kernels_to_check().items():
        with marked(name):
            result, tuned = self_check(name, backend, shape, capture_sizes, layer.limit), backend.tuned(row)
        if tuned and result.ok:
            layer.engine_status.add_tuned(named, tuned)
        elif tuned:
            log.say_once(logging.WARNING, f"{result.message} ({named}); the tuned tiles {tuned} are left out")
            backend.untune(row)
            with marked(name):
                result = self_check(name, backend, shape, capture_sizes, layer.limit)
        if not result.ok:
            checks[name] = Checked(f"{result.message} ({named})")
        elif result.writes_nan:
            checks[name] = Checked(writes_nan=True)
        else:
            checks[name] = PASSED
    return checks


def say_found(layer: Layer, end_strict_start: Callable[[str], None]) -> None:
    """Say which kernels failed the check of a layer's shape, and which turn an fp8 overflow into NaN.

    Args:
        layer: one of the shape, which was given what the check found.
        end_strict_start: takes why a kernel that would have served cannot; it raises in strict mode.
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
    name: str, backend: KernelBackend, shape: LayerShape, capture_sizes: Sequence[int] = (), limit: int = sys.maxsize
) -> SelfCheckResult:
    """Run a kernel and the reference, under both pairings; a result that is not ok must not serve this shape.

    A kernel that cannot be compiled or launched is as bad as a wrong one.
    """
    results = []
    try:
        for is_neox in PAIRINGS:
            shaped = replace(shape, is_neox=is_neox)
            results.append(result := selfcheck.self_check(backend, shaped, limit))
            if not result.ok:
                return result
            log.say_once(logging.DEBUG, result.message)
            if capture_sizes:
                for large in backend.caches:
                    backend.warm_up(synthetic_inputs(shaped, tokens=1, large=large), capture_sizes)
    except Exception as error:
        return SelfCheckResult(False, f"{name}: self-check FAILED: {type(error).__name__}: {error}", {}, 0)
    return next((result for result in results if result.writes_nan), results[-1])


def compile_quantisation(layer: Layer) -> None:
    """Let vLLM compile the function with which its own attention quantises a query.

    vLLM compiles it in its warm-up, with decode batches. Those go to our op; without this the first batch that mixes
    prefill and decode rows would compile it while it serves.
    """
    shape = layer.shape()
    if not formats.is_fp8(shape.out_dtype):
        return
    for rows in (2, 1):  # torch compiles separately for one row, and once for all other counts
        absorbed, query = (
            torch.zeros(rows, shape.heads, width, dtype=shape.act, device=shape.device)
            for width in (shape.latent, shape.nope_dim + shape.rope)
        )
        with torch.inference_mode():
            layer.quantise(absorbed, query[..., shape.nope_dim :])

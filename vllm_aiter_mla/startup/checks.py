# SPDX-License-Identifier: Apache-2.0
"""Compare the kernels of each layer shape with the reference, and give up one step or one layer where that fails.

Both fail closed: a layer whose kernels could not be checked runs vLLM's own, and strict mode ends the start.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from vllm_aiter_mla.admission import OVERFLOW
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.inputs import LayerShape, meta_inputs, synthetic_inputs
from vllm_aiter_mla.serving.decision import PASSED, Checked
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import STRICT_OPTION, SettingsError
from vllm_aiter_mla.startup import rotation, selfcheck
from vllm_aiter_mla.startup.selfcheck import SelfCheckResult

PAIRINGS = (False, True)
"""Rotary styles that are checked, as ``is_neox``: a layer's own is known only when its graph is compiled."""
LAYER_CHECK = "its kernel could not be checked"


@contextmanager
def step(what: str, strict: bool, effect: str = "serving goes on", layers: Sequence[Layer] = ()) -> Iterator[None]:
    """Do something that may raise: an error in strict mode, otherwise one line.

    Args:
        what: what has failed, should it raise.
        strict: whether that stops the worker.
        effect: what happens then in the other mode.
        layers: run vLLM's own kernels from then on; the block may add to them.
    """
    try:
        yield
    except Exception as error:
        reason = _stopped(what, error, strict, layers)
        log.say_once(logging.ERROR, f"{reason}; {effect}")


@contextmanager
def each(layers: Sequence[Layer], strict: bool, failed: dict[str, str]) -> Iterator[None]:
    """Do something for a few of the layers: what raises stops these, and the others go on.

    ``failed`` takes the reason by layer name, for one line about all of them: ``say_failed``.
    """
    try:
        yield
    except Exception as error:
        reason = _stopped(LAYER_CHECK, error, strict, layers, layers[0].name)
        failed.update((layer.name, reason) for layer in layers)


def _stopped(what: str, error: Exception, strict: bool, layers: Sequence[Layer], name: str = "") -> str:
    """Stop the layers and return why.

    Raises:
        SettingsError: in strict mode.
    """
    reason = f"{what}: {type(error).__name__}: {error}"
    for layer in layers:
        layer.stop(reason)
    if strict and isinstance(error, SettingsError):
        raise error
    if strict:
        raise SettingsError(f"{log.PREFIX}{name and f'{name}: '}{reason} ({STRICT_OPTION})") from error
    return reason


def say_failed(failed: dict[str, str]) -> None:
    """Say in one line which layers could not be asked or checked."""
    if failed:
        name, reason = next(iter(failed.items()))
        log.say_once(logging.ERROR, f"{len(failed)} MLA layer(s) fall back to vLLM's own kernels: {name}: {reason}")


def check_layers(
    layers: Sequence[Layer],
    *,
    strict: bool,
    capture_sizes: Sequence[int] = (),
    limit: int = sys.maxsize,
    marked: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> None:
    """Compare the kernels of each layer shape with the reference; a layer does not run a kernel that fails.

    Layers whose check cannot be made run vLLM's own kernels, and the others are still checked.

    Args:
        layers: the model's MLA layers.
        strict: whether a kernel that fails its check, or cannot be checked, is an error.
        capture_sizes: token counts for which a kernel that compiles per count is compiled now.
        limit: the decode limit, the largest batch that a kernel will be given.
        marked: surrounds the first calls of a kernel, by its name.

    Raises:
        SettingsError: a mismatch, or anything that raises on the way, in strict mode.
    """
    failed: dict[str, str] = {}
    groups: dict[tuple[Any, ...], list[Layer]] = {}
    for layer in layers:
        layer.forget(limit)
        with each([layer], strict, failed):
            if layer.facts().skip is None:
                groups.setdefault((id(layer.backends), layer.shape()), []).append(layer)
    for group in groups.values():
        with each(group, strict, failed):
            checks = _check_group(group[0], strict, capture_sizes, marked)
            for layer in group:
                layer.checked(checks, group[0].shape())
    say_failed(failed)


def _check_group(
    first: Layer, strict: bool, capture_sizes: Sequence[int], marked: Callable[[str], AbstractContextManager[None]]
) -> dict[str, Checked]:
    """Check the kernels of layers of one engine and one shape."""
    rotation.check(first)
    shape = first.shape()
    named = shape.in_words()
    row = meta_inputs(shape)
    checks: dict[str, Checked] = {}
    for name, backend in first.kernels_to_check().items():
        with marked(name):
            result, tuned = self_check(name, backend, shape, capture_sizes, first.limit), backend.tuned(row)
        if tuned and result.ok:
            first.engine_status.tuned[named] = tuned
        elif tuned:
            log.say_once(logging.WARNING, f"{result.message} ({named}); the tuned tiles {tuned} are left out")
            backend.untune(row)
            with marked(name):
                result = self_check(name, backend, shape, capture_sizes, first.limit)
        if not result.ok:
            checks[name] = Checked(result.message)
            # Nobody named a later one, and the first still runs: no failure of the engine.
            _say_wrong(f"{result.message} ({named})", strict, is_first=len(checks) == 1)
        elif result.writes_nan:
            checks[name] = Checked(writes_nan=True)
            is_named = first.backends.settings.kernel == name
            log.say_once(logging.WARNING if is_named else logging.INFO, f"{name} {OVERFLOW}; kernel=auto leaves it out")
            if is_named:
                first.engine_status.overflows.add(name)
        else:
            checks[name] = PASSED
    return checks


def _say_wrong(trouble: str, strict: bool, is_first: bool) -> None:
    """Say that a kernel failed its check.

    Raises:
        SettingsError: it is the first of the static order, or the only one, in strict mode.
    """
    if not is_first:
        log.say_once(logging.WARNING, f"{trouble}; it does not run")
    elif strict:
        raise SettingsError(f"{log.PREFIX}{trouble} ({STRICT_OPTION})")
    else:
        log.say_once(logging.ERROR, f"{trouble}; this layer shape falls back to other kernels")


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

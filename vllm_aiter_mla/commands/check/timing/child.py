# SPDX-License-Identifier: Apache-2.0
"""The process that checks the kernels against the reference, and times those that are right.

A row has medians of replayed graphs. A kernel that turns an fp8 overflow into NaN is timed but does not count as ours.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.options import Weights
from vllm_aiter_mla.commands.check.timing import rivals
from vllm_aiter_mla.commands.check.timing.record import (
    TYPES_OF_16_BITS,
    VLLM,
    Measurement,
    Row,
    make_row,
    without_rivals,
)
from vllm_aiter_mla.commands.compat.vllm_options import load_plugins
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.kernels.aiter.contract import ARCHITECTURES
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.formats import is_fp8
from vllm_aiter_mla.kernels.inputs import LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.platform import detect_platform
from vllm_aiter_mla.kernels.vllm_own import may_take_parts
from vllm_aiter_mla.serving import decision
from vllm_aiter_mla.serving.backends import Backends, current_platform
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.startup import checks


@dataclass(frozen=True, slots=True)
class TimingRequest:
    """What to time: each number of tokens, at each number of heads and in each cache type, for one layer."""

    token_counts: tuple[int, ...]  # rows of a decode step; empty if ``tune`` chooses them
    head_counts: tuple[int, ...]  # query heads of a rank
    cache_types: tuple[str, ...]  # as ``Row.cache_type``
    weights: str = "bf16"  # format of the absorb weights, a value of ``Weights``
    nope: int = 128  # DeepSeek's widths and dtype
    rope: int = 64
    latent: int = 512
    act: str = "bfloat16"

    def layers(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the number of heads of each layer."""
        yield from product(self.cache_types, self.head_counts)

    def shape(self, cache_type: str, heads: int) -> LayerShape:
        """Return the shape of one of these layers on this GPU."""
        widths = {"nope": self.nope, "rope": self.rope, "latent": self.latent}
        return shape_of(heads, cache_type, self.weights, **widths, act=self.act)


@dataclass(frozen=True)
class Activity:
    """What the process does next; ``kernel`` is None if several kernels run."""

    kernel: str | None
    text: str


@dataclass(frozen=True)
class Contenders:
    """The kernels and rivals that are timed on one layer shape, by name."""

    runnable: dict[str, KernelBackend]
    untimed: dict[str, str]  # why each other kernel is not timed
    overflowing_kernels: list[str]  # turn an fp8 overflow into NaN, so they do not count as ours


def time_layers(request: TimingRequest, ended_checks: Mapping[str, str]) -> Measurement:
    """Time every size; return the record.

    A size that raises ends the run, and ``stopped`` says which and why. The rows before it stay in the record.
    ``wrong`` says for each kernel that failed its self-check where it failed. Send the caller the record without rows
    first, then each ``Activity`` and each row.

    Args:
        request: what to time.
        ended_checks: kernels that are not called, because an earlier process ended in their check, and how it ended.
    """
    load_plugins()  # as in a server: they may bring the platform, or kernels
    machine, rows, wrong_kernels, stopped = stopwatch.machine(), list[Row](), without_rivals(ended_checks), ""
    process.send_value(Measurement(machine, request.weights, (), dict(wrong_kernels), ""))
    backends = Backends(Settings(enabled=True), current_platform())
    with compat_config.as_current():
        for cache_type, heads in request.layers():
            try:
                for row in time_layer(
                    backends, request.shape(cache_type, heads), request.token_counts, wrong_kernels, ended_checks
                ):
                    rows.append(row)
                    process.send_value(row)
            except Exception as error:  # out of memory for a large size, or a build that fails
                stopped = f"{heads} heads, {cache_type}: {type(error).__name__}: {error}"
                break
    return Measurement(machine, request.weights, tuple(rows), wrong_kernels, stopped)


def time_layer(
    backends: Backends,
    shape: LayerShape,
    token_counts: Sequence[int],
    wrong_kernels: dict[str, str],
    ended_checks: Mapping[str, str],
) -> Iterator[Row]:
    """Check the contenders on one layer shape, then time those that are right; yield a row for each number of tokens.

    A kernel that fails its check is added to ``wrong_kernels``. A kernel in ``ended_checks`` is not called.
    """
    layer_label = f"{shape.heads} heads, {cache_type_of(shape)}"
    contenders = check_contenders(backends, shape, max(token_counts), layer_label, wrong_kernels, ended_checks)
    runnable = contenders.runnable
    padding_helper = compat_layer.padding_helper() if shape.out_heads else None
    pad_query = padding_helper and partial(padding_helper.get_mla_padded_q, shape.heads)
    for num_tokens in token_counts:
        process.send_value(Activity(None, f"the timing of {', '.join(runnable)} at {num_tokens} tokens, {layer_label}"))
        inputs = synthetic_inputs(shape, num_tokens)
        skip_reasons = {
            name: reason for name, backend in runnable.items() if (reason := backend.refuse(inputs)) is not None
        }
        weight, budget = synthetic_inputs(shape).weight, stopwatch.Budget(float("inf"))
        rounds = stopwatch.time_shape(runnable, shape, weight, [num_tokens], budget, pad=pad_query)[num_tokens]
        us = {name: statistics.median(times) for name, times in rounds.items()}
        untimed = contenders.untimed | skip_reasons
        yield make_row(num_tokens, shape.heads, cache_type_of(shape), us, untimed, contenders.overflowing_kernels)
        card().give_back()


def check_contenders(
    backends: Backends,
    shape: LayerShape,
    max_tokens: int,
    layer_label: str,
    wrong_kernels: dict[str, str],
    ended_checks: Mapping[str, str],
) -> Contenders:
    """Check the kernels and the rivals with up to ``max_tokens`` tokens; add those that fail to ``wrong_kernels``."""
    runnable, untimed, overflows = dict[str, KernelBackend](), dict[str, str](), dict[str, decision.Checked]()

    def begin_check(name: str) -> None:
        process.send_value(Activity(name, f"the check of {name} at {layer_label}"))

    for name in backends.names:
        begin_check(name)
        backend = ended_checks.get(name) or backends.get(name)
        if isinstance(backend, str):
            untimed[name] = backend
        elif backend.trusted:
            runnable[name] = backend
        elif (reason := backend.refuse(synthetic_inputs(shape, 1))) is not None:
            untimed[name] = reason
        elif not (checked := checks.check_kernel(name, backend, shape, (), max_tokens)).has_passed:
            untimed[name], wrong_kernels[name] = checked.message, f"{layer_label}: {checked.message}"
        else:
            runnable[name] = backend
            if checked.writes_nan:
                overflows[name] = decision.Checked(writes_nan=True)
    layer_facts = decision.LayerFacts(None, dict.fromkeys(overflows, decision.Offer()))
    usable_kernels = decision.usable(layer_facts, overflows, backends.settings)
    runnable_rivals, untimed_rivals = rivals.check_rivals(
        backends.platform, shape, max_tokens, VLLM in runnable, ended_checks, begin_check
    )
    overflowing_kernels = [name for name in overflows if name not in usable_kernels]
    return Contenders(runnable | runnable_rivals, untimed | untimed_rivals, overflowing_kernels)


def shape_of(
    heads: int,
    cache_type: str,
    weights: str,
    *,
    nope: int = 128,
    rope: int = 64,
    latent: int = 512,
    act: str = "bfloat16",
) -> LayerShape:
    """Return a layer of ``heads`` heads on this GPU, in blocks of 64 rows. The default widths are DeepSeek's.

    If vLLM pads the heads for AITER's decode kernels, a kernel may lay out the query for the padded number of heads.
    """
    fp8_dtype, arch, padded_heads = detect_platform().fp8, card().arch, heads
    stored_dtype = fp8_dtype if cache_type == "fp8" else getattr(torch, act)
    padding_helper = compat_layer.padding_helper()
    if padding_helper and arch in ARCHITECTURES and not may_take_parts(arch, heads, cache_type == "fp8"):
        padded_heads = padding_helper.get_actual_mla_num_heads(heads)
    return LayerShape(
        heads, nope, stored_dtype, stored_dtype, 64, False, getattr(torch, act), card().torch_device, latent, rope,
        Weights(weights).key(fp8_dtype), padded_heads if padded_heads != heads else 0,
    )  # fmt: skip


def cache_type_of(shape: LayerShape) -> str:
    """Return the type of the query and the cache, as ``Row.cache_type`` names it."""
    name = str(shape.cache_dtype).removeprefix("torch.")
    return "fp8" if is_fp8(shape.cache_dtype) else TYPES_OF_16_BITS.get(name, name)

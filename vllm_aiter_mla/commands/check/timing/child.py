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
from vllm_aiter_mla.commands.check.options import WeightFormat
from vllm_aiter_mla.commands.check.timing import rivals
from vllm_aiter_mla.commands.check.timing.record import (
    TYPES_OF_16_BITS,
    VLLM,
    Measurement,
    TimingRow,
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
from vllm_aiter_mla.verify.cases import REAL


@dataclass(frozen=True, slots=True)
class TimingRequest:
    """What to time: each number of tokens, at each number of heads and in each cache type, for one layer."""

    token_counts: tuple[int, ...]  # rows of a decode step; empty if ``tune`` chooses them
    head_counts: tuple[int, ...]  # query heads of a rank
    cache_types: tuple[str, ...]  # as ``TimingRow.cache_type``
    weight_format: str = "bf16"  # format of the absorb weights, a value of ``WeightFormat``
    # Widths of a layer, and the dtype of its activations as torch names it. The defaults are DeepSeek's.
    nope: int = REAL.nope
    rope: int = REAL.rope
    latent: int = REAL.latent
    activation_dtype: str = "bfloat16"

    @property
    def weights(self) -> str:
        """Format of the absorb weights, as ``Measurement.weights``: unquantised ones are named by their own type."""
        is_plain = WeightFormat(self.weight_format) is WeightFormat.bf16
        return TYPES_OF_16_BITS[self.activation_dtype] if is_plain else self.weight_format

    def layers(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the number of heads of each layer."""
        yield from product(self.cache_types, self.head_counts)

    def shape(self, cache_type: str, heads: int) -> LayerShape:
        """Return the shape of one of these layers on this GPU, in blocks of 64 rows."""
        fp8_dtype, activation_dtype = detect_platform().fp8, getattr(torch, self.activation_dtype)
        stored_dtype = fp8_dtype if cache_type == "fp8" else activation_dtype
        return LayerShape(
            heads, self.nope, stored_dtype, stored_dtype, 64, False, activation_dtype, card().torch_device, self.latent,
            self.rope, WeightFormat(self.weight_format).absorb_key(fp8_dtype),
            padded_heads(heads, cache_type == "fp8"),
        )  # fmt: skip


def padded_heads(heads: int, has_fp8_cache: bool) -> int:
    """Return the heads to which vLLM pads a query for AITER's decode kernels on this GPU; 0 if vLLM pads none.

    A kernel may lay out the query for that number of heads.
    """
    arch = card().arch
    if arch not in ARCHITECTURES or may_take_parts(arch, heads, has_fp8_cache):
        return 0
    padding_helper = compat_layer.padding_helper()
    padded = int(padding_helper.get_actual_mla_num_heads(heads)) if padding_helper else heads
    return padded if padded != heads else 0


@dataclass(frozen=True)
class Activity:
    """What the process does next; ``kernel`` is None if several kernels run."""

    kernel: str | None
    text: str


@dataclass(frozen=True)
class FailedKernel:
    """A kernel that failed its self-check, and where."""

    kernel: str
    text: str


@dataclass(frozen=True)
class Contender:
    """A kernel or a rival after its check on one layer shape."""

    name: str
    backend: KernelBackend | None  # None if it cannot be timed
    untimed_reason: str = ""  # why it cannot be timed
    is_wrong: bool = False  # it differs from the reference
    writes_nan: bool = False  # it turns an fp8 overflow into NaN


def time_layers(request: TimingRequest, ended_checks: Mapping[str, str]) -> Measurement:
    """Time every size; return the record.

    A size that raises ends the run, and ``stop_reason`` says which and why. The rows before it stay in the record.
    ``failed_kernels`` says for each kernel that failed its self-check where it failed. Send the caller the record
    without rows first, then each ``Activity``, ``FailedKernel`` and row.

    Args:
        request: what to time.
        ended_checks: kernels that are not called, because an earlier process ended in their check, and how it ended.
    """
    load_plugins()  # as in a server: they may bring the platform, or kernels
    machine, failed_kernels = stopwatch.machine(), without_rivals(ended_checks)
    rows, stop_reason = list[TimingRow](), ""
    process.send_value(Measurement(machine, request.weights, (), dict(failed_kernels), ""))
    backends = Backends(Settings(enabled=True), current_platform())
    with compat_config.as_current():
        for cache_type, heads in request.layers():
            contenders = list[Contender]()
            try:
                shape = request.shape(cache_type, heads)
                for contender in check_contenders(backends, shape, max(request.token_counts), ended_checks):
                    contenders.append(contender)
                    if contender.is_wrong:  # noted at once, because a later check may raise
                        failed = FailedKernel(contender.name, f"{layer_label(shape)}: {contender.untimed_reason}")
                        failed_kernels[failed.kernel] = failed.text
                        process.send_value(failed)
                for row in time_layer(contenders, backends.settings, shape, request.token_counts):
                    rows.append(row)
                    process.send_value(row)
            except Exception as error:  # out of memory for a large size, or a build that fails
                stop_reason = f"{heads} heads, {cache_type}: {type(error).__name__}: {error}"
                break
    return Measurement(machine, request.weights, tuple(rows), failed_kernels, stop_reason)


def check_contenders(
    backends: Backends, shape: LayerShape, max_tokens: int, ended_checks: Mapping[str, str]
) -> Iterator[Contender]:
    """Check the kernels and the rivals with up to ``max_tokens`` tokens; yield each after its check.

    A kernel or a rival in ``ended_checks`` is not called.
    """

    def begin_check(name: str) -> None:
        process.send_value(Activity(name, f"the check of {name} at {layer_label(shape)}"))

    is_vllm_here = False
    for name in backends.names:
        begin_check(name)
        contender = _check_kernel(name, ended_checks.get(name) or backends.get(name), shape, max_tokens)
        is_vllm_here |= name == VLLM and contender.backend is not None
        yield contender
    rival_backends, untimed_rivals = rivals.check_rivals(
        backends.platform, shape, max_tokens, is_vllm_here, ended_checks, begin_check
    )
    yield from (Contender(name, backend) for name, backend in rival_backends.items())
    yield from (Contender(name, None, reason) for name, reason in untimed_rivals.items())


def _check_kernel(name: str, backend: KernelBackend | str, shape: LayerShape, max_tokens: int) -> Contender:
    """Return a kernel after its check. ``backend`` is the reason if there is none."""
    if isinstance(backend, str):
        return Contender(name, None, backend)
    if backend.trusted:
        return Contender(name, backend)
    if (reason := backend.refuse(synthetic_inputs(shape, 1))) is not None:
        return Contender(name, None, reason)
    checked = checks.check_kernel(name, backend, shape, (), max_tokens)
    if not checked.has_passed:
        return Contender(name, None, checked.message, is_wrong=True)
    return Contender(name, backend, writes_nan=checked.writes_nan)


def time_layer(
    contenders: Sequence[Contender], settings: Settings, shape: LayerShape, token_counts: Sequence[int]
) -> Iterator[TimingRow]:
    """Time the contenders of one layer shape that are right; yield a row for each number of tokens."""
    runnable = {contender.name: contender.backend for contender in contenders if contender.backend is not None}
    untimed_reasons = {
        contender.name: contender.untimed_reason for contender in contenders if contender.backend is None
    }
    overflowing_kernels = _overflowing_kernels(contenders, settings)
    padding_helper = compat_layer.padding_helper() if shape.out_heads else None
    pad_query = padding_helper and partial(padding_helper.get_mla_padded_q, shape.heads)
    for num_tokens in token_counts:
        activity_text = f"the timing of {', '.join(runnable)} at {num_tokens} tokens, {layer_label(shape)}"
        process.send_value(Activity(None, activity_text))
        inputs = synthetic_inputs(shape, num_tokens)
        skip_reasons = {
            name: reason for name, backend in runnable.items() if (reason := backend.refuse(inputs)) is not None
        }
        weight, budget = synthetic_inputs(shape).weight, stopwatch.Budget(float("inf"))
        rounds = stopwatch.time_shape(runnable, shape, weight, [num_tokens], budget, pad=pad_query)[num_tokens]
        us = {name: statistics.median(times) for name, times in rounds.items()}
        yield make_row(
            num_tokens, shape.heads, cache_type_of(shape), us, untimed_reasons | skip_reasons, overflowing_kernels
        )
        card().give_back()


def _overflowing_kernels(contenders: Sequence[Contender], settings: Settings) -> list[str]:
    """Return the kernels that turn an fp8 overflow into NaN, and that start-up does not choose for that reason."""
    checked_by_name = {
        contender.name: decision.Checked(writes_nan=True) for contender in contenders if contender.writes_nan
    }
    layer_facts = decision.LayerFacts(None, dict.fromkeys(checked_by_name, decision.Offer()))
    usable_kernels = decision.usable(layer_facts, checked_by_name, settings)
    return [name for name in checked_by_name if name not in usable_kernels]


def layer_label(shape: LayerShape) -> str:
    """Return a layer in words, as in "16 heads, fp8"."""
    return f"{shape.heads} heads, {cache_type_of(shape)}"


def cache_type_of(shape: LayerShape) -> str:
    """Return the type of the query and the cache, as ``TimingRow.cache_type`` names it."""
    dtype_name = str(shape.cache_dtype).removeprefix("torch.")
    return "fp8" if is_fp8(shape.cache_dtype) else TYPES_OF_16_BITS.get(dtype_name, dtype_name)

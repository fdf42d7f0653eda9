# SPDX-License-Identifier: Apache-2.0
"""The process that checks the kernels and times them: each is first compared with the reference, and a wrong one is not
timed.

A row has medians of replayed graphs. A kernel that turns an fp8 overflow into NaN is timed, and does not count as ours.
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
from vllm_aiter_mla.commands.check.timing.record import TYPES_OF_16_BITS, VLLM, Measurement, Row, row_of
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
    """What is timed: each number of tokens, at each number of heads in each type, for one layer."""

    tokens: tuple[int, ...]  # rows of a decode step; empty for what ``tune`` chooses
    heads: tuple[int, ...]  # query heads of a rank
    kinds: tuple[str, ...]  # as ``Row.kind``
    weights: str = "bf16"  # format of the absorb weights, a value of ``Weights``
    nope: int = 128  # DeepSeek's widths and dtype
    rope: int = 64
    latent: int = 512
    act: str = "bfloat16"

    def layers(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the number of heads of each layer."""
        yield from product(self.kinds, self.heads)

    def shape(self, kind: str, heads: int) -> LayerShape:
        """Return one of the layers on this GPU."""
        widths = {"nope": self.nope, "rope": self.rope, "latent": self.latent}
        return shape_of(heads, kind, self.weights, **widths, act=self.act)


@dataclass(frozen=True)
class Activity:
    """What the process is about to do; ``kernel`` is None if several run."""

    kernel: str | None
    text: str


@dataclass(frozen=True)
class Contenders:
    """The kernels and rivals that are timed on one layer shape, by name."""

    runnable: dict[str, KernelBackend]
    untimed: dict[str, str]  # why the others are not timed
    overflowing: list[str]  # those that turn an fp8 overflow into NaN: they do not count as ours


def time_kernels(request: TimingRequest, left_out: Mapping[str, str]) -> Measurement:
    """Time every size; return the record.

    A size that raises ends the run, and ``stopped`` says which and why. What was timed before is kept. ``wrong`` says
    of each kernel that failed its self-check where it did. The caller is sent the record without rows, then each
    ``Activity`` and each row.

    Args:
        request: what is timed.
        left_out: why a kernel is not called, by name: an earlier process ended in its check.
    """
    load_plugins()  # as in a server: they may bring the platform, or kernels
    machine, rows, wrong, stopped = stopwatch.machine(), list[Row](), dict(left_out), ""
    process.send(Measurement(machine, request.weights, (), dict(wrong), ""))
    backends = Backends(Settings(enabled=True), current_platform())
    with compat_config.as_current():
        for kind, heads in request.layers():
            try:
                for row in rows_of(backends, request.shape(kind, heads), request.tokens, wrong, left_out):
                    rows.append(row)
                    process.send(row)
            except Exception as error:  # out of memory for a large size, or a build that fails
                stopped = f"{heads} heads, {kind}: {type(error).__name__}: {error}"
                break
    return Measurement(machine, request.weights, tuple(rows), wrong, stopped)


def rows_of(
    backends: Backends, shape: LayerShape, tokens: Sequence[int], wrong: dict[str, str], left_out: Mapping[str, str]
) -> Iterator[Row]:
    """Check the contenders on one layer shape, then time those that are right.

    A kernel that fails its check goes to ``wrong``; one that is ``left_out`` is not called.
    """
    where = f"{shape.heads} heads, {kind_of(shape)}"
    contenders = check_contenders(backends, shape, max(tokens), where, wrong, left_out)
    runnable = contenders.runnable
    helper = compat_layer.padding_helper() if shape.out_heads else None
    pad = helper and partial(helper.get_mla_padded_q, shape.heads)
    for count in tokens:
        process.send(Activity(None, f"the timing of {', '.join(runnable)} at {count} tokens, {where}"))
        inputs = synthetic_inputs(shape, count)
        declined = {name: why for name, backend in runnable.items() if (why := backend.refuse(inputs)) is not None}
        weight, budget = synthetic_inputs(shape).weight, stopwatch.Budget(float("inf"))
        rounds = stopwatch.time_shape(runnable, shape, weight, [count], budget, pad=pad)[count]
        us = {name: statistics.median(times) for name, times in rounds.items()}
        untimed = contenders.untimed | declined
        yield row_of(count, shape.heads, kind_of(shape), us, untimed, contenders.overflowing)
        card().give_back()


def check_contenders(
    backends: Backends, shape: LayerShape, most: int, where: str, wrong: dict[str, str], left_out: Mapping[str, str]
) -> Contenders:
    """Check the kernels and the rivals with up to ``most`` tokens."""
    runnable, untimed, overflows = dict[str, KernelBackend](), dict[str, str](), dict[str, decision.Checked]()
    for name in backends.names:
        process.send(Activity(name, f"the check of {name} at {where}"))
        backend = left_out.get(name) or backends.get(name)
        if isinstance(backend, str):
            untimed[name] = backend
        elif backend.trusted:
            runnable[name] = backend
        elif (why := backend.refuse(synthetic_inputs(shape, 1))) is not None:
            untimed[name] = why
        elif not (checked := checks.check_kernel(name, backend, shape, (), most)).has_passed:
            untimed[name], wrong[name] = checked.message, f"{where}: {checked.message}"
        else:
            runnable[name] = backend
            if checked.writes_nan:
                overflows[name] = decision.Checked(writes_nan=True)
    facts = decision.LayerFacts(None, dict.fromkeys(overflows, decision.Offer()))
    served = decision.usable(facts, overflows, backends.settings)
    process.send(Activity(None, f"the checks of the rivals at {where}"))
    runnable_rivals, untimed_rivals = rivals.check_rivals(backends.platform, shape, most, vllm_is_here=VLLM in runnable)
    not_served = [name for name in overflows if name not in served]
    return Contenders(runnable | runnable_rivals, untimed | untimed_rivals, not_served)


def shape_of(
    heads: int, kind: str, weights: str, *, nope: int = 128, rope: int = 64, latent: int = 512, act: str = "bfloat16"
) -> LayerShape:
    """Return a layer of so many heads on this GPU, in blocks of 64 rows; of DeepSeek's widths unless others are given.

    Where vLLM pads the heads for AITER's decode kernels, a kernel may lay the query out for as many.
    """
    fp8, arch, padded = detect_platform().fp8, card().arch, heads
    stored = fp8 if kind == "fp8" else getattr(torch, act)
    helper = compat_layer.padding_helper()
    if helper and arch in ARCHITECTURES and not may_take_parts(arch, heads, kind == "fp8"):
        padded = helper.get_actual_mla_num_heads(heads)
    return LayerShape(
        heads, nope, stored, stored, 64, False, getattr(torch, act), card().torch_device, latent, rope,
        Weights(weights).key(fp8), padded if padded != heads else 0,
    )  # fmt: skip


def kind_of(shape: LayerShape) -> str:
    """Return the type of the query and the cache, as a ``Row`` has it."""
    name = str(shape.cache_dtype).removeprefix("torch.")
    return "fp8" if is_fp8(shape.cache_dtype) else TYPES_OF_16_BITS.get(name, name)

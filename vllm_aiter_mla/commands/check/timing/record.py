# SPDX-License-Identifier: Apache-2.0
"""The record of the step ``timing``: median times by size and kernel, and the ratio to ours. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_aiter_mla import files
from vllm_aiter_mla.decided import VLLM

MAX_TIMED_TOKENS = 65536
"""More tokens would fill the memory of a card."""
STAND_IN, DECODE_TILE, ONE_LAUNCH = "vllm-stand-in", "aiter-decode-tile", "aiter-one-launch"
"""Names of kernels that are timed and never serve; ``rivals`` explains them."""
TYPES_OF_16_BITS = {"bfloat16": "bf16", "float16": "fp16"}
"""The name in ``TimingRow.cache_type`` and ``Measurement.weights`` by torch's name of the type."""
RIVALS = (VLLM, STAND_IN, DECODE_TILE, ONE_LAUNCH)
"""Kernels that ours are compared with: vLLM's own, a stand-in if vLLM's are not installed, and two uses of AITER's
kernels that never serve."""


@dataclass(frozen=True)
class TimingRow:
    """The figures of one size: a number of tokens, a number of heads and a type."""

    tokens: int  # of a decode step
    heads: int  # query heads of a rank
    cache_type: str  # "fp8", "bf16" or "fp16": the type of the query and the cache
    us: dict[str, float]  # median microseconds per call in a replayed graph, by kernel; includes ``RIVALS``
    # Why each other kernel was not timed: it does not take the call, cannot run here, or is wrong
    untimed_reasons: dict[str, str]
    # The fastest rival's time over our fastest kernel's time: above 1 ours is faster. If a stand-in for vLLM's kernels
    # was timed, the ratio is to a kernel that never serves.
    ratio: float | None
    # Kernels that were timed and do not count as ours. They turn an fp8 overflow into NaN, so ``kernel=auto`` does not
    # choose them.
    excluded_kernels: tuple[str, ...] = ()

    @property
    def our_times(self) -> list[float]:
        """The times of the kernels that count as ours."""
        return _times_of_ours(self.us, self.excluded_kernels)


@dataclass(frozen=True)
class Measurement:
    """The record of a run without ``--tune``. ``schemas.json`` explains the fields."""

    machine: dict[str, str]
    weights: str  # format of the absorb weights: "bf16", "fp16", "fp8" or "mxfp4"
    rows: tuple[TimingRow, ...]
    failed_kernels: dict[str, str]  # where and how each failed its check, by name
    stop_reason: str  # empty if the run was not stopped
    evidence: files.Stamp = files.stamp_field("timing")


def make_row(
    tokens: int, heads: int, cache_type: str, us: Mapping[str, float], untimed_reasons: Mapping[str, str],
    overflowing_kernels: Sequence[str] = (),
) -> TimingRow:  # fmt: skip
    """Return the figures of one size; ``us`` has the median microseconds of each kernel.

    The ratio is None without a kernel of ours, or without vLLM's or a stand-in.
    """
    overflowing_and_timed = tuple(name for name in overflowing_kernels if name in us)
    our_times = _times_of_ours(us, overflowing_and_timed)
    rival_times = [median_us for name, median_us in us.items() if name in RIVALS]
    ratio = min(rival_times) / min(our_times) if our_times and {VLLM, STAND_IN} & us.keys() else None
    return TimingRow(tokens, heads, cache_type, dict(us), dict(untimed_reasons), ratio, overflowing_and_timed)


def without_rivals(ended_checks: Mapping[str, str]) -> dict[str, str]:
    """Return the kernels of ours in whose check a process ended. A rival that ends it is not timed, and not wrong."""
    return {name: reason for name, reason in ended_checks.items() if name not in RIVALS}


def _times_of_ours(us: Mapping[str, float], overflowing_kernels: Sequence[str]) -> list[float]:
    return [median_us for name, median_us in us.items() if name not in (*RIVALS, *overflowing_kernels)]

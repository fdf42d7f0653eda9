# SPDX-License-Identifier: Apache-2.0
"""What the step ``timing`` measures: median times by size and kernel, and how much faster ours is. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_aiter_mla import files

MAX_TIMED_TOKENS = 65536
"""More tokens fill the memory of a card."""
VLLM, STAND_IN, DECODE_TILE, ONE_LAUNCH = "vllm", "vllm-stand-in", "aiter-decode-tile", "aiter-one-launch"
TYPES_OF_16_BITS = {"bfloat16": "bf16", "float16": "fp16"}
"""Types of the query and the cache: torch's name, and the name in ``Row.kind``."""
RIVALS = (VLLM, STAND_IN, DECODE_TILE, ONE_LAUNCH)
"""What ours is compared with: vLLM's own kernels, a stand-in where these are not here, and two uses of AITER's kernels
that never serve."""


@dataclass(frozen=True)
class Row:
    """The figures of one size."""

    tokens: int
    heads: int
    kind: str  # "fp8", "bf16" or "fp16": the type of the query and the cache
    us: dict[str, float]  # median microseconds per call in a replayed graph by kernel, ``RIVALS`` among them
    untimed: dict[str, str]  # why a kernel was not timed: it does not take the call, cannot run here, or is wrong
    # The fastest rival's time over that of our fastest kernel: above 1 ours is faster. Where a stand-in for vLLM's
    # kernels was timed, the ratio is to no kernel that serves.
    ratio: float | None
    # Kernels that were timed and do not count as ours, because they turn an fp8 overflow into NaN and ``kernel=auto``
    # does not choose them
    left_out: tuple[str, ...] = ()

    @property
    def ours(self) -> list[float]:
        """The times of the kernels that count as ours."""
        return _times_of_ours(self.us, self.left_out)


@dataclass(frozen=True)
class Measurement:
    """What was timed without ``--tune``; ``schemas.json`` says what the fields mean."""

    machine: dict[str, str]
    weights: str
    rows: tuple[Row, ...]
    wrong: dict[str, str]
    stopped: str
    evidence: files.Stamp = files.stamp_field("timing")


def row_of(
    tokens: int, heads: int, kind: str, us: Mapping[str, float], untimed: Mapping[str, str],
    overflowing: Sequence[str] = (),
) -> Row:  # fmt: skip
    """Return the figures of one size with their ratio, which is None without one of ours, or vLLM's or a stand-in."""
    left_out = tuple(name for name in overflowing if name in us)
    ours, of_rivals = _times_of_ours(us, left_out), [time for name, time in us.items() if name in RIVALS]
    ratio = min(of_rivals) / min(ours) if ours and {VLLM, STAND_IN} & us.keys() else None
    return Row(tokens, heads, kind, dict(us), dict(untimed), ratio, left_out)


def _times_of_ours(us: Mapping[str, float], left_out: Sequence[str]) -> list[float]:
    return [time for name, time in us.items() if name not in (*RIVALS, *left_out)]

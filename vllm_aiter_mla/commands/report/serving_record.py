# SPDX-License-Identifier: Apache-2.0
"""The record of ``tools/serving.py``: a served model with the flag off and on."""

from dataclasses import dataclass
from typing import Any

from vllm_aiter_mla import files
from vllm_aiter_mla.commands.check.engine.record import SIDES

OFF, ON = SIDES
LENGTHS = ("input", "prefix", "output")
METRICS = {"ttft": "mean_ttft_ms", "tpot": "mean_tpot_ms", "throughput": "output_throughput"}
"""The name in ``vllm bench serve`` by metric: milliseconds to the first and per further token, and tokens a second."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    stderr: float

    def show(self, digits: int) -> str:
        """Return ``mean ± stderr``."""
        return f"{self.mean:.{digits}f} ± {self.stderr:.{digits}f}"


@dataclass(frozen=True)
class PointResult:
    """The results at one point. ``point`` has the tokens of ``LENGTHS``, and ``rate`` in requests per second."""

    point: dict[str, float]
    estimates: dict[str, dict[str, Estimate]]  # by metric and side; empty if the row is invalid
    invalid: str | None  # why the row is invalid


@dataclass(frozen=True)
class Serving:
    """A comparison of times, or of answers."""

    tool: str
    model: str
    about: dict[str, str]  # versions, and the card
    status: str  # the status line of the servers with the flag on
    rows: tuple[PointResult, ...] = ()
    results: Any = None  # the client's result files, by side and run
    answers: Any = None  # by side and run: the figures by filter, and each answer
    evidence: files.Stamp = files.stamp_field("serving")

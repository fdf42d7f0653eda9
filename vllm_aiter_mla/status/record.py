# SPDX-License-Identifier: Apache-2.0
"""The records of what runs: the status file of a rank, the ranks of an engine as one, and kept reasons to skip.

``schemas.json`` says what the fields mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm_aiter_mla import files

Reason = tuple[str, str]
"""Code and reason of a layer that is left to vLLM."""


@dataclass(frozen=True)
class Timed:
    """What was timed for one layer shape at start-up, and chosen.

    Raises:
        ValueError: nothing was timed, or a count lacks the figure of vLLM's own kernels or of the chosen one.
    """

    shape: str  # in words
    layers: tuple[str, ...]
    chosen: tuple[tuple[int, int, str], ...]  # (first, last, kernel) in tokens
    us: dict[int, dict[str, float]]  # microseconds a layer by token count and candidate
    since: str = ""  # when an earlier start took the figures; empty if this one did

    def __post_init__(self) -> None:
        if not self.us or any({"vllm", self.runs(tokens)} - by.keys() for tokens, by in self.us.items()):
            raise ValueError("a figure is missing")

    def runs(self, tokens: int) -> str:
        """Return what runs at ``tokens``; empty beyond what was chosen."""
        return next((kernel for _, last, kernel in self.chosen if tokens <= last), "")


@dataclass(frozen=True)
class RankStatus:
    """What one rank's layers run on: the status file."""

    rank: int
    integration: str
    card: str
    total: int
    engaged: dict[str, str]
    skipped: dict[str, Reason]
    compiled: dict[str, dict[str, int]]
    measured: tuple[Timed, ...]
    overflows: tuple[str, ...]
    decode_limit: int
    kv_cache_dtype: str
    tuned: dict[str, str] = field(default_factory=dict)
    capture_sizes: tuple[int, ...] = ()
    partition: bool = False
    model_name: str | None = None
    engine: str | None = None
    run: str = ""
    evidence: files.Stamp = files.stamped("status")


@dataclass(frozen=True)
class Skips:
    """The reasons of a cold start, for warm ones."""

    skipped: dict[str, Reason]
    evidence: files.Stamp = files.stamped("skips")


@dataclass(frozen=True)
class Engine:
    """The ranks of an engine as one."""

    record: RankStatus  # the first rank's, with the layers of all
    ranks: int
    fallen: dict[int, Reason]  # ranks that skip a layer which another rank engages, with the reason
    silent: int  # ranks without a record

    @property
    def whole(self) -> bool:
        """Whether every rank runs what the others run."""
        return not self.fallen and not self.silent


def of_engine(ranks: Sequence[RankStatus | None]) -> Engine:
    """Return the records of all ranks of an engine as one.

    A layer counts as engaged if a rank runs it on one of our kernels. A rank that skips a layer which another rank
    engages has fallen back, and one without a record is silent; both are named.

    Args:
        ranks: their records; None of a rank that has failed. At least one is known.
    """
    known = [record for record in ranks if record is not None]
    engaged = {layer: kernel for record in known for layer, kernel in record.engaged.items()}
    skipped = {layer: why for record in known for layer, why in record.skipped.items()}
    fallen = {record.rank: why for record in known for layer, why in record.skipped.items() if layer in engaged}
    left = {layer: why for layer, why in skipped.items() if layer not in engaged}
    record = replace(known[0], total=len(engaged | skipped), engaged=engaged, skipped=left)
    return Engine(record, len(ranks), fallen, len(ranks) - len(known))

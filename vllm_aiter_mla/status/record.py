# SPDX-License-Identifier: Apache-2.0
"""The records of what runs: of one rank, and of all ranks of an engine as one. Pure: ``status_files`` has the files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import Field

from vllm_aiter_mla import files

Count = Annotated[int, Field(ge=0, lt=2**20)]
"""Of ranks; a file that claims more, or fewer than none, is broken."""
Reason = tuple[str, str]
"""Code and reason of a layer that is left to vLLM."""

NOT_RUN: Reason = ("not_run", "its fused op has not run")
"""Of a layer that nothing has skipped and that is not engaged."""
WHOLE_ENGINE = "engine"
"""Key of ``RankStatus.skipped`` for an engine to which vLLM gives no MLA layer; it counts as no layer."""


@dataclass(frozen=True)
class Timed:
    """What was timed for one layer shape at start-up, and chosen.

    Raises:
        ValueError: nothing was timed, or a count lacks the figure of vLLM's own kernels or of the chosen one.
    """

    shape: str  # in words
    layers: tuple[str, ...]
    chosen: tuple[tuple[int, int, str], ...]  # (first, last, kernel) in tokens
    us: dict[int, dict[str, float]]  # microseconds a layer by token count and candidate, on this rank
    since: str = ""  # when an earlier start took the figures; empty if this one did

    def __post_init__(self) -> None:
        if not self.us or any({"vllm", self.chosen_at(tokens)} - by.keys() for tokens, by in self.us.items()):
            raise ValueError("a figure is missing")

    def chosen_at(self, tokens: int) -> str:
        """Return what was chosen for ``tokens``; empty beyond the last span."""
        return next((kernel for _, last, kernel in self.chosen if tokens <= last), "")


@dataclass(frozen=True)
class Decided:
    """What was decided for layers that are decided alike; ``RankStatus.skipped`` says why one runs none of our kernels.

    The same as ``serving.decision.Decision``, for readers without torch.
    """

    layers: tuple[str, ...]
    kernels: tuple[tuple[int, int, str], ...]  # (first, last, kernel) in tokens; empty: vLLM's own
    passed_over: tuple[tuple[str, str], ...]  # (kernel, reason) of each that runs at no token count


@dataclass(frozen=True)
class RankStatus:
    """What one rank's layers run on: the status file."""

    rank: Count  # of the worker in its engine
    integration: str  # "passes" or "module"; empty for an engine that is skipped as a whole
    card: str  # its architecture, such as "gfx950", or "cpu"; empty like ``integration``
    total: int  # MLA layers of this rank
    engaged: dict[str, str]  # layer to the kernel of ours that runs it
    skipped: dict[str, Reason]  # layer to why it is left to vLLM; or only ``WHOLE_ENGINE``
    compiled: dict[str, dict[str, int]]  # compile range to counts by pass; empty after a warm start
    measured: tuple[Timed, ...]  # by layer shape; empty if nothing was timed
    overflows: tuple[str, ...]  # kernels that run although they turn an fp8 overflow into NaN: the user named them
    decode_limit: int  # in tokens; 0 for an engine that is skipped as a whole
    kv_cache_dtype: str  # of the engine, as vLLM spells it
    tuned: dict[str, str] = field(default_factory=dict)  # layer shape in words to its tuned tiles, if the kernel runs
    decided: tuple[Decided, ...] = ()  # empty for an engine that is skipped as a whole
    capture_sizes: tuple[int, ...] = ()  # token counts of the engine's CUDA graphs; empty without graphs
    full_graphs: tuple[int, ...] = ()  # those of full graphs of decode batches
    model_name: str | None = None  # this and ``engine`` as in vLLM's metrics; None if unknown
    engine: str | None = None  # data-parallel index
    run: str = ""  # of the server; empty before the status line
    writer: str = ""  # of several engines of one run, the one that wrote it; empty for one that is skipped as a whole
    ranks: Count = 0  # how many the engine has; 0 if unknown
    evidence: files.Stamp = files.stamped("status")


@dataclass(frozen=True)
class EngineRecord:
    """The ranks of an engine as one."""

    record: RankStatus  # the first rank's, with the layers of all
    ranks: int
    fell_back: dict[int, Reason]  # with the reason; see ``merge_ranks``
    silent: int  # ranks without a record

    @property
    def whole(self) -> bool:
        """Whether every rank runs what the others run."""
        return not self.fell_back and not self.silent


def merge_ranks(ranks: Sequence[RankStatus | None]) -> EngineRecord:
    """Return the records of all ranks of an engine as one.

    A layer counts as engaged if a rank runs it on one of our kernels. A rank has fallen back if it skips a layer which
    another rank engages, or all of its layers while another rank engages some, as a stage of a pipeline may. One
    without a record is silent. Both are named.

    Args:
        ranks: their records; None of a rank that has failed, or has its file elsewhere. At least one is known.
    """
    known = [record for record in ranks if record is not None]
    engaged = {layer: kernel for record in known for layer, kernel in record.engaged.items()}
    skipped = {layer: why for record in known for layer, why in record.skipped.items()}
    fell_back = {
        record.rank: why
        for record in known
        for layer, why in record.skipped.items()
        if layer in engaged or (engaged and not record.engaged)
    }
    left = {layer: why for layer, why in skipped.items() if layer not in engaged}
    record = replace(
        known[0], total=len((engaged | skipped).keys() - {WHOLE_ENGINE}), engaged=engaged, skipped=left,
        # The stages of a pipeline have layers of their own.
        measured=next((one.measured for one in known if one.measured), ()),
        overflows=tuple(dict.fromkeys(name for one in known for name in one.overflows)),
        tuned={layers: tiles for one in reversed(known) for layers, tiles in one.tuned.items()},
    )  # fmt: skip
    return EngineRecord(record, len(ranks), fell_back, len(ranks) - len(known))


def add_silent(ranks: Sequence[RankStatus]) -> list[RankStatus | None]:
    """Return the records of an engine's ranks, of which at least one is known, and None for each that has none here."""
    return [*ranks, *[None] * (max(one.ranks for one in ranks) - len(ranks))]


def group_by_engine(records: Iterable[RankStatus]) -> dict[tuple[str, str, str], list[RankStatus]]:
    """Return the records of the ranks of each engine, by (run, model name, engine); both in the order of their numbers.

    Files are named by run, engine and rank. Ranks that an earlier engine of the run has left behind are not among them:
    it was larger, or had another model.
    """
    found: dict[tuple[str, str], list[RankStatus]] = {}
    for record in sorted(records, key=_in_order):
        found.setdefault((record.run, record.engine or "0"), []).append(record)
    return {
        (run, ranks[0].model_name or "", engine): [one for one in ranks if _are_of_one_engine(ranks[0], one)]
        for (run, engine), ranks in found.items()
    }


def _are_of_one_engine(first: RankStatus, other: RankStatus) -> bool:
    return other.model_name == first.model_name and (not first.ranks or other.rank < first.rank + first.ranks)


def _in_order(record: RankStatus) -> tuple[str, int, str, int]:
    engine = record.engine or "0"
    return record.run, len(engine), engine, record.rank  # "2" comes before "10"


def record_of_skipped_engine(code: str, message: str, layers: Sequence[int], kv_cache_dtype: str) -> RankStatus:
    """Return a record for an engine that was skipped as a whole: its workers run nothing of ours.

    Args:
        code: of the reason.
        message: the reason in one line.
        layers: indices of the model's MLA layers; only the workers know their names.
        kv_cache_dtype: of the engine, as vLLM spells it.
    """
    skipped = dict.fromkeys([f"layer {index}" for index in layers] or [WHOLE_ENGINE], (code, message))
    return RankStatus(
        rank=0, integration="", card="", total=len(layers), engaged={}, skipped=skipped, compiled={}, measured=(),
        overflows=(), decode_limit=0, kv_cache_dtype=kv_cache_dtype, ranks=1,
    )  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""The record of one rank, and what the records of all ranks of an engine say together.

``engine_status`` makes records, ``status_files`` writes and reads them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar

from pydantic import Field

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.decided import VLLM, Decision, Spans, kernel_at

Count = Annotated[int, Field(ge=0, lt=2**20)]
"""The number of a rank, or how many ranks there are; a file with another value is broken."""

Key = TypeVar("Key")
Value = TypeVar("Value")

NOT_RUN = Skip("not_run", "its fused op has not run")
"""Reason of a layer that is not engaged and for which no other reason is known."""
WHOLE_ENGINE = "engine"
"""Key of ``RankStatus.skipped`` for an engine to which vLLM gives no MLA layer; it does not count as a layer."""


@dataclass(frozen=True)
class ShapeTiming:
    """What was timed for one layer shape at start-up, and which kernels were chosen.

    Raises:
        ValueError: nothing was timed, or a count lacks the figure of vLLM's own kernels or of the chosen kernel.
    """

    shape: str  # in words
    layers: tuple[str, ...]
    chosen: Spans
    us: dict[int, dict[str, float]]  # microseconds per layer by token count and kernel, on this rank
    since: str = ""  # when an earlier start took the figures; empty if this start did

    def __post_init__(self) -> None:
        required = {tokens: {VLLM, kernel_at(self.chosen, tokens)} for tokens in self.us}
        if not self.us or any(required[tokens] - figures.keys() for tokens, figures in self.us.items()):
            raise ValueError("a figure is missing")


@dataclass(frozen=True)
class DecisionGroup:
    """Layers for which the same was decided."""

    layers: tuple[str, ...]
    decision: Decision


@dataclass(frozen=True)
class RankStatus:
    """What the MLA layers of one rank run on: the status file.

    A worker knows the first fields before any layer runs, and these never change. ``EngineStatus`` fills the fields
    after ``run``, but for ``ranks``, which is 0 until the ranks have counted themselves. An engine that is skipped as a
    whole has one record for all ranks, with rank 0. In that record, fields that only a worker can fill are empty or 0.
    """

    rank: Count  # number of the worker in its engine
    integration: str  # "passes" or "module"
    card: str  # architecture, such as "gfx950", or "cpu"
    decode_limit: int  # in tokens
    kv_cache_dtype: str  # as vLLM spells it
    capture_sizes: tuple[int, ...] = ()  # token counts of the engine's CUDA graphs; empty without graphs
    full_graphs: tuple[int, ...] = ()  # token counts of full graphs of decode batches
    model_name: str | None = None  # this and ``dp_index`` as in vLLM's metrics; None if unknown
    dp_index: str | None = None  # data-parallel index
    run: str = ""  # name of the server's run
    num_layers: int = 0  # number of MLA layers of this rank
    engaged: dict[str, str] = field(default_factory=dict)  # layer to the kernel of ours that runs it
    # Layer, or ``WHOLE_ENGINE``, to why it runs vLLM's own code
    skipped: dict[str, Skip] = field(default_factory=dict)
    # Compile range to counts by pass; empty after a warm start
    compiled: dict[str, dict[str, int]] = field(default_factory=dict)
    shape_timings: tuple[ShapeTiming, ...] = ()  # by layer shape; empty if nothing was timed
    nan_kernels: tuple[str, ...] = ()  # kernels that run although they turn an fp8 overflow into NaN: the user's choice
    tuned: dict[str, str] = field(default_factory=dict)  # layer shape in words to its tuned tiles, if the kernel runs
    decision_groups: tuple[DecisionGroup, ...] = ()
    engine_id: str = ""  # random name of the engine: one process may start several, one after the other
    ranks: Count = 0  # number of ranks of the engine; 0 if unknown
    evidence: files.Stamp = files.stamp_field("status")


@dataclass(frozen=True)
class MergedStatus:
    """What the ranks of one engine say together."""

    # Of the first rank that has a record. Card, cache, limit and integration are equal on all ranks
    first_record: RankStatus
    num_layers: int  # number of MLA layers, each counted once
    engaged: dict[str, str]  # layers that some rank engages, with the kernel
    engaged_everywhere: frozenset[str]  # layers that every rank engages that has them
    skipped: dict[str, Skip]  # layers that no rank engages, and ``WHOLE_ENGINE``
    # One for each shape: the figures and the choice of the first rank that has timed it, the layers of all ranks
    shape_timings: tuple[ShapeTiming, ...]
    nan_kernels: tuple[str, ...]  # of all ranks
    tuned: dict[str, str]  # of all ranks
    num_ranks: int
    is_num_ranks_known: bool  # if False, the engine may have more ranks than ``num_ranks``
    fallback_skips_by_rank: dict[int, Skip]  # by the number of a rank that has fallen back
    # Kernel of each rank that engages a layer with another kernel than the first rank
    other_kernels_by_rank: dict[int, str]
    num_silent: int  # number of ranks without a record

    @property
    def num_agreeing(self) -> int:
        """Number of ranks that run what the first rank runs."""
        num_others = len(self.fallback_skips_by_rank.keys() | self.other_kernels_by_rank.keys())
        return self.num_ranks - num_others - self.num_silent

    @property
    def ranks_agree(self) -> bool:
        """Whether every rank is known to run what the first rank runs."""
        return self.is_num_ranks_known and self.num_agreeing == self.num_ranks


def merge_ranks(records: Sequence[RankStatus | None]) -> MergedStatus:
    """Return what the records of all ranks of an engine say together. If a key has several values, the first counts.

    Args:
        records: one for each rank, and None for a rank that has failed or has its file elsewhere. At least one is not
            None.
    """
    present = [record for record in records if record is not None]
    engaged = _first_values(item for record in present for item in record.engaged.items())
    skipped = _first_values(item for record in present for item in record.skipped.items())
    return MergedStatus(
        first_record=present[0],
        num_layers=len((engaged | skipped).keys() - {WHOLE_ENGINE}),
        engaged=engaged,
        engaged_everywhere=frozenset(engaged.keys() - skipped.keys()),
        skipped={layer: skip for layer, skip in skipped.items() if layer not in engaged},
        shape_timings=_merge_timings(present),
        nan_kernels=tuple(dict.fromkeys(kernel for record in present for kernel in record.nan_kernels)),
        tuned=_first_values(item for record in present for item in record.tuned.items()),
        num_ranks=len(records),
        is_num_ranks_known=any(record.ranks for record in present),
        fallback_skips_by_rank=_fallback_skips(present, engaged),
        other_kernels_by_rank=_other_kernels(present, engaged),
        num_silent=len(records) - len(present),
    )


def _merge_timings(records: Sequence[RankStatus]) -> tuple[ShapeTiming, ...]:
    """Return one timing for each layer shape. Each stage of a pipeline has layers, and perhaps shapes, of its own."""
    timings: dict[str, ShapeTiming] = {}
    for record in records:
        for timing in record.shape_timings:
            first = timings.setdefault(timing.shape, timing)
            timings[timing.shape] = replace(first, layers=tuple(dict.fromkeys((*first.layers, *timing.layers))))
    return tuple(timings.values())


def _fallback_skips(records: Sequence[RankStatus], engaged: Mapping[str, str]) -> dict[int, Skip]:
    """Return why each rank that has fallen back did so, by the number of the rank.

    A rank has fallen back if it skips a layer that another rank engages. A rank that skips all its layers, as a stage
    of a pipeline may, has fallen back if another rank engages some. A rank without MLA layers has not fallen back.

    Args:
        records: of the ranks that have one.
        engaged: the layers that some rank engages, with the kernel.
    """
    return _first_values(
        (record.rank, skip)
        for record in records
        for layer, skip in record.skipped.items()
        if layer in engaged or (engaged and not record.engaged)
    )


def _other_kernels(records: Sequence[RankStatus], engaged: Mapping[str, str]) -> dict[int, str]:
    """Return the kernel of each rank that engages a layer with another kernel than ``engaged`` has for the layer.

    Return nothing if kernels were timed, because then each rank chooses by its own figures.
    """
    if any(record.shape_timings for record in records):
        return {}
    return _first_values(
        (record.rank, kernel)
        for record in records
        for layer, kernel in record.engaged.items()
        if kernel != engaged[layer]
    )


def _first_values(items: Iterable[tuple[Key, Value]]) -> dict[Key, Value]:
    """Return the items as a dict in which the first value of each key counts."""
    first_values: dict[Key, Value] = {}
    for key, value in items:
        first_values.setdefault(key, value)
    return first_values


def records_of_all_ranks(records: Sequence[RankStatus]) -> list[RankStatus | None]:
    """Return the records of an engine's ranks, at least one, and None for each rank that has no record here."""
    return [*records, *[None] * (max(record.ranks for record in records) - len(records))]


def group_by_engine(records: Iterable[RankStatus]) -> dict[tuple[str, str, str], list[RankStatus]]:
    """Return the records of the ranks of each engine, by (run, model name, engine).

    Engines and ranks are in the order of their numbers. Files are named by run, engine and rank, so an earlier engine
    of the run may have left files of ranks that the last engine does not have: the earlier engine was larger, or had
    another model. Such records are not returned.
    """
    records_by_index: dict[tuple[str, str], list[RankStatus]] = {}
    for record in sorted(records, key=_sort_key):
        records_by_index.setdefault((record.run, record.dp_index or "0"), []).append(record)
    return {
        (run, candidates[0].model_name or "", engine): [
            record for record in candidates if _belong_to_one_engine(candidates[0], record)
        ]
        for (run, engine), candidates in records_by_index.items()
    }


def _belong_to_one_engine(first_record: RankStatus, record: RankStatus) -> bool:
    if record.model_name != first_record.model_name:
        return False
    if not first_record.ranks:  # unknown
        return True
    return record.ranks in (0, first_record.ranks) and record.rank < first_record.rank + first_record.ranks


def _sort_key(record: RankStatus) -> tuple[str, int, str, int]:
    """Return a sort key with which engine "2" comes before "10"."""
    engine = record.dp_index or "0"
    return record.run, len(engine), engine, record.rank

# SPDX-License-Identifier: Apache-2.0
"""The record of one rank, and what the records of all ranks of an engine say together.

``engine_status`` makes records, ``status_files`` writes and reads them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple, TypeVar

from pydantic import Field

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.decided import Decision, ShapeTiming

Count = Annotated[int, Field(ge=0, lt=2**20)]
"""The number of a rank, or how many ranks there are; a file with another value is broken."""

Key = TypeVar("Key")
Value = TypeVar("Value")

NOT_RUN = Skip("not_run", "its fused op has not run")
"""Reason of a layer that is not engaged and for which no other reason is known."""
WHOLE_ENGINE = "engine"
"""Key of ``RankRecord.skipped`` for an engine to which vLLM gives no MLA layer; it does not count as a layer."""
SKIPPED_ENGINE_ID = "skipped"
"""``RankRecord.engine_id`` of a fully skipped engine: each process that reads its config has an ``instance_id``."""


@dataclass(frozen=True)
class DecisionGroup:
    """Layers for which the same was decided."""

    layers: tuple[str, ...]
    decision: Decision


@dataclass(frozen=True)
class RankRecord:
    """What the MLA layers of one rank run on: the status file.

    A worker knows the first fields before any layer runs, and these never change. ``EngineStatus`` fills the fields
    after ``engine_id``, except ``num_ranks``, which is 0 until the ranks have counted themselves. An engine that is
    skipped as a whole has one record for all ranks, with rank 0. In that record, fields that only a worker can fill are
    empty or 0.
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
    # The ``instance_id`` of vLLM, which all ranks of an engine have. A run may start several engines
    engine_id: str = SKIPPED_ENGINE_ID
    num_layers: int = 0  # number of MLA layers of this rank
    engaged: dict[str, str] = field(default_factory=dict)  # layer to the kernel of ours that runs it
    # Layer, or ``WHOLE_ENGINE``, to why it runs vLLM's own code
    skipped: dict[str, Skip] = field(default_factory=dict)
    # Compile range to counts by pass; empty after a warm start
    pass_counts: dict[str, dict[str, int]] = field(default_factory=dict)
    shape_timings: tuple[ShapeTiming, ...] = ()  # by layer shape; empty if nothing was timed
    nan_kernels: tuple[str, ...] = ()  # kernels that run although they turn an fp8 overflow into NaN: the user's choice
    tuned_tiles: dict[str, str] = field(
        default_factory=dict
    )  # layer shape in words to its tuned tiles, if the kernel runs
    decision_groups: tuple[DecisionGroup, ...] = ()
    num_ranks: Count = 0  # number of ranks of the engine; 0 if unknown
    evidence: files.Stamp = files.stamp_field("status")


@dataclass(frozen=True)
class MergedRecord:
    """What the ranks of one engine say together."""

    # Of the first rank that has a record. Card, cache, limit and integration are equal on all ranks
    first_record: RankRecord
    num_layers: int  # number of MLA layers, each counted once
    engaged: dict[str, str]  # layers that some rank engages, with the kernel
    engaged_everywhere: frozenset[str]  # layers that are engaged on every rank that has them
    skipped: dict[str, Skip]  # layers that no rank engages, and ``WHOLE_ENGINE``
    # One for each shape: the figures and the choice of the first rank that has timed it, the layers of all ranks
    shape_timings: tuple[ShapeTiming, ...]
    nan_kernels: tuple[str, ...]  # of all ranks
    tuned_tiles: dict[str, str]  # of all ranks
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


def merge_ranks(records: Sequence[RankRecord | None]) -> MergedRecord:
    """Return what the records of all ranks of an engine say together. If a key has several values, the first counts.

    Args:
        records: one for each rank, and None for a rank that has failed or has its file elsewhere. At least one is not
            None.
    """
    present = [record for record in records if record is not None]
    engaged = _first_values(item for record in present for item in record.engaged.items())
    skipped = _first_values(item for record in present for item in record.skipped.items())
    return MergedRecord(
        first_record=present[0],
        num_layers=len((engaged | skipped).keys() - {WHOLE_ENGINE}),
        engaged=engaged,
        engaged_everywhere=frozenset(engaged.keys() - skipped.keys()),
        skipped={layer: skip for layer, skip in skipped.items() if layer not in engaged},
        shape_timings=_merge_timings(present),
        nan_kernels=tuple(dict.fromkeys(kernel for record in present for kernel in record.nan_kernels)),
        tuned_tiles=_first_values(item for record in present for item in record.tuned_tiles.items()),
        num_ranks=len(records),
        is_num_ranks_known=any(record.num_ranks for record in present),
        fallback_skips_by_rank=_fallback_skips(present, engaged),
        other_kernels_by_rank=_other_kernels(present, engaged),
        num_silent=len(records) - len(present),
    )


def _merge_timings(records: Sequence[RankRecord]) -> tuple[ShapeTiming, ...]:
    """Return one timing for each layer shape. Each stage of a pipeline has layers, and perhaps shapes, of its own."""
    timings: dict[str, ShapeTiming] = {}
    for record in records:
        for timing in record.shape_timings:
            first = timings.setdefault(timing.shape, timing)
            timings[timing.shape] = replace(first, layers=tuple(dict.fromkeys((*first.layers, *timing.layers))))
    return tuple(timings.values())


def _fallback_skips(records: Sequence[RankRecord], engaged: Mapping[str, str]) -> dict[int, Skip]:
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


def _other_kernels(records: Sequence[RankRecord], engaged: Mapping[str, str]) -> dict[int, str]:
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


def records_of_all_ranks(records: Sequence[RankRecord]) -> list[RankRecord | None]:
    """Return the records of an engine's ranks, at least one, and None for each rank that has no record here."""
    return [*records, *[None] * (max(record.num_ranks for record in records) - len(records))]


class EngineKey(NamedTuple):
    """The key of an engine. All its ranks share the key."""

    run: str
    engine_id: str
    dp_index: str  # "0" if it is unknown


def engine_key(record: RankRecord) -> EngineKey:
    """Return the key of a rank's engine."""
    return EngineKey(record.run, record.engine_id, record.dp_index or "0")


def group_by_engine(records: Iterable[RankRecord]) -> dict[EngineKey, list[RankRecord]]:
    """Return the records of the ranks of each engine. Engines and ranks are in the order of their indices.

    Of engines of a run with the same index, the one that was started last comes last: vLLM's ``instance_id`` is a time.
    """
    records_by_engine: dict[EngineKey, list[RankRecord]] = {}
    for record in sorted(records, key=_sort_key):
        records_by_engine.setdefault(engine_key(record), []).append(record)
    return records_by_engine


def _sort_key(record: RankRecord) -> tuple[str, int, str, str, int]:
    """Return a sort key with which the data-parallel index "2" comes before "10"."""
    run, engine_id, dp_index = engine_key(record)
    return run, len(dp_index), dp_index, engine_id, record.rank

# SPDX-License-Identifier: Apache-2.0
"""The status of one engine in one worker: how its record is made, and how it is corrected while the engine serves.

The ops tell which layers have run, because a warm start loads a compiled artifact and never runs a pass. Only the
passes know why a graph skips a layer, so they note the reason while they compile, and ``skips`` keeps the reason for
warm starts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock, Timer
from typing import Any, NamedTuple

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.decided import Decision, LayerState, ShapeTiming
from vllm_aiter_mla.status import liveness, status_files
from vllm_aiter_mla.status.record import NOT_RUN, WHOLE_ENGINE, DecisionGroup, RankRecord

REWRITE_DELAY_SECONDS = 1.0
"""Time from a correction to the corrected status file."""


class EngagementChanges(NamedTuple):
    """Which layers a correction of the record changed."""

    fell_back: dict[str, Skip]  # layers that are no longer engaged, with the reason
    reengaged: list[str]  # layers that were skipped for a reason other than ``NOT_RUN`` and are engaged now


@dataclass(slots=True)
class EngineStatus:
    """What is known of one engine in this process.

    ``engine.Engine`` makes this object. Passes, start-up and layers call its methods, and nothing else changes it.

    ``make_record`` makes the record after the warm-up. Once the number of ranks is known, ``set_record`` keeps the
    record and ``write`` writes its file. ``update`` corrects both while the engine serves.
    """

    # What the passes did in each compile range, summed over the graphs of the range: "start-end" to counts by pass
    pass_counts: dict[str, Counter[str]] = field(default_factory=dict)
    shape_timings: list[ShapeTiming] = field(default_factory=list)  # one for each layer shape that was timed
    tuned_tiles: dict[str, str] = field(default_factory=dict)  # layer shape in words to its tuned tiles by tokens
    # Kernels that the user named although they turn an fp8 overflow into NaN
    nan_kernels: set[str] = field(default_factory=set)
    # Why graphs that an earlier start compiled skip layers. Used for a layer that has no other reason
    kept_skips: dict[str, Skip] = field(default_factory=dict)
    layers: dict[str, LayerState] = field(default_factory=dict)  # by name, in the model's order
    record: RankRecord | None = None  # what the status line said, with later corrections; None before ``set_record``
    path: Path | None = None  # of the status file; None before ``write``
    _timer: Timer | None = None  # runs until the file is written again
    # Held during a write, so that the last record is written last. The garbage collector may call ``close`` meanwhile
    _write_lock: Any = field(default_factory=RLock)
    _is_closed: bool = False

    # What passes and start-up report.

    def add_pass_counts(self, compile_range: str, counts: dict[str, int]) -> None:
        """Add what the passes did to one graph of a range. A draft model has a second graph for the same range."""
        self.pass_counts.setdefault(compile_range, Counter()).update(counts)

    def add_timing(self, timing: ShapeTiming) -> None:
        """Add what was timed for one layer shape."""
        self.shape_timings.append(timing)

    def add_tuned_tiles(self, shape: str, tiles: str) -> None:
        """Add the tuned tiles that our Triton kernel has for a layer shape."""
        self.tuned_tiles[shape] = tiles

    def add_nan_kernel(self, kernel: str) -> None:
        """Add a kernel that may run although it turns an fp8 overflow into NaN."""
        self.nan_kernels.add(kernel)

    def add_kept_skips(self, skips: Mapping[str, Skip]) -> None:
        """Add why graphs that an earlier start compiled skip layers."""
        self.kept_skips.update(skips)

    # How the record is made.

    def make_record(self, layers: Mapping[str, LayerState], base: RankRecord) -> RankRecord:
        """Take the states of all layers and return this rank's record, without the number of ranks.

        Args:
            layers: the states of the model's MLA layers, by name, in the model's order.
            base: the record with the fields that do not depend on the layers.
        """
        self.layers = dict(layers)
        record = replace(
            base,
            pass_counts={compile_range: dict(counts) for compile_range, counts in self.pass_counts.items()},
            shape_timings=tuple(self.shape_timings),
        )
        return self._with_layers(record)

    def _with_layers(self, record: RankRecord) -> RankRecord:
        """Return a record with the present states of the layers: these decide all fields that may change later."""
        engaged = self._engaged_kernels()
        kernels = {
            *engaged.values(),
            *(kernel for name in engaged for kernel in self.layers[name].decision.our_kernels),
        }
        return replace(
            record,
            num_layers=len(self.layers),
            engaged=engaged,
            skipped=self._skips_by_layer(engaged),
            decision_groups=self._group_by_decision(),
            nan_kernels=tuple(sorted(self.nan_kernels & kernels)),
            tuned_tiles=dict(self.tuned_tiles) if "triton" in kernels else {},
        )

    def _engaged_kernels(self) -> dict[str, str]:
        """Return the kernel of each engaged layer. A kernel that has run for one layer may count for another."""
        active = {state.ran_kernel for state in self.layers.values()}
        active |= set() if self.record is None else {*self.record.engaged.values()}
        kernels = {
            name: state.ran_kernel
            or next((kernel for kernel in state.possible_kernels if not state.skip and kernel in active), "")
            for name, state in self.layers.items()
        }
        return {name: kernel for name, kernel in kernels.items() if kernel}

    def _skips_by_layer(self, engaged: Mapping[str, str]) -> dict[str, Skip]:
        """Return the reason of each layer that is not engaged."""
        return {
            name: state.skip or self.kept_skips.get(name, NOT_RUN)
            for name, state in self.layers.items()
            if name not in engaged
        }

    def _group_by_decision(self) -> tuple[DecisionGroup, ...]:
        names_by_decision: dict[Decision, list[str]] = {}
        for name, state in self.layers.items():
            names_by_decision.setdefault(state.decision, []).append(name)
        return tuple(DecisionGroup(tuple(names), decision) for decision, names in names_by_decision.items())

    def set_record(self, record: RankRecord) -> None:
        """Keep the record of the status line, with the number of ranks. From now on ``update`` corrects this record."""
        self.record = record

    def update(self, layers: Mapping[str, LayerState]) -> EngagementChanges:
        """Correct the record by the new states of some layers; do nothing before there is a record.

        The file is written ``REWRITE_DELAY_SECONDS`` later. So layers that fail in the same step cause one write, and
        that step does not wait for the write.
        """
        old_record = self.record
        if old_record is None:
            return EngagementChanges({}, [])
        self.layers.update(layers)
        self.record = record = replace(self._with_layers(old_record), evidence=files.stamp("status"))
        self._schedule_rewrite()
        return EngagementChanges(
            {name: skip for name, skip in record.skipped.items() if name in old_record.engaged},
            [name for name in record.engaged if old_record.skipped.get(name, NOT_RUN) != NOT_RUN],
        )

    # The file.

    def write(self, folder: Path) -> None:
        """Write the status file of the record. After a failure the next correction writes the file.

        Raises:
            OSError: the file cannot be written.
        """
        if self.record is not None:
            self.path = status_files.status_path(folder, self.record)
            with self._write_lock:
                status_files.write_status(folder, self.record)

    def close(self) -> None:
        """Let go of the lock of this rank, and do not write its file again: its engine has ended."""
        with self._write_lock:
            self._is_closed = True
            if self.path is not None and self.record is not None:
                liveness.let_go_of_rank_lock(self.path.parent, self.record)

    def _schedule_rewrite(self) -> None:
        if self._timer is not None:
            return
        self._timer = timer = Timer(REWRITE_DELAY_SECONDS, self._rewrite)
        timer.daemon = True
        with log.warned("the status file could not be corrected"):
            try:
                timer.start()
            except Exception:  # no thread could be started: the next correction tries again
                self._timer = None
                raise

    def _rewrite(self) -> None:
        """Write the record to its file again."""
        self._timer = None  # first, so that a layer that fails from now on starts another timer
        with log.warned("the status file could not be corrected"), self._write_lock:
            path, record = self.path, self.record
            if path is not None and record is not None and not self._is_closed:
                status_files.write_status(path.parent, record)


def record_of_skipped_engine(
    skip: Skip,
    layers: Sequence[int],
    *,
    kv_cache_dtype: str,
    model_name: str | None = None,
    dp_index: str | None = None,
    run: str = "",
) -> RankRecord:
    """Return the one record of an engine that is skipped as a whole. Its workers run none of the plugin's code.

    Args:
        skip: the reason.
        layers: indices of the model's MLA layers; only the workers know their names.
        kv_cache_dtype: as in ``RankRecord``, and so are the arguments after it.
        model_name: None if unknown.
        dp_index: None if unknown.
        run: "" if the server's run has no name.
    """
    names = [f"layer {index}" for index in layers] or [WHOLE_ENGINE]
    return RankRecord(
        rank=0, num_ranks=1, integration="", card="", decode_limit=0, kv_cache_dtype=kv_cache_dtype,
        model_name=model_name, dp_index=dp_index, run=run, num_layers=len(layers), skipped=dict.fromkeys(names, skip),
    )  # fmt: skip

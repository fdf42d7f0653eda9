# SPDX-License-Identifier: Apache-2.0
"""The status of one engine in one worker: what is known of it, and the record that is corrected while it serves.

The ops count the layers, because a warm start loads a compiled artifact and never runs a pass. Only the passes know why
a graph left a layer out, so they note the reason while it is compiled, and ``skips`` keeps it for warm starts.
"""

import secrets
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock, Timer
from typing import Any, NamedTuple

from vllm_aiter_mla import files
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.status import status_files
from vllm_aiter_mla.status.record import NOT_RUN, Decided, RankStatus, Reason, Timed

REWRITE_S = 1.0
"""Seconds from a correction to the corrected status file."""


class Outcome(NamedTuple):
    """What has become of one layer so far; ``serving.layer.Layer`` keeps it."""

    ran: str = ""  # the kernel that its fused op ran, or "" before
    # The kernels of a layer whose op was reached without a batch. vLLM runs no batch of a draft model while it starts;
    # its layers count as engaged if one of those has run for another layer.
    would_run: tuple[str, ...] = ()
    skip: Reason | None = None  # why the layer is left to vLLM
    # The decision's kernels as (first, last, kernel), and those that it passed over, each with the reason
    decided: tuple[tuple[tuple[int, int, str], ...], tuple[tuple[str, str], ...]] = ((), ())


@dataclass(slots=True)
class EngineStatus:
    """What is known of one engine in this process, besides what became of its layers.

    ``engine.Engine`` makes it; passes, start-up and layers tell it what they find. Only its methods change it.
    """

    # What the passes did in each compile range, over all graphs of it, as "start-end" -> counts by pass
    compiled: dict[str, Counter[str]] = field(default_factory=dict)
    measured: list[Timed] = field(default_factory=list)  # one for each layer shape that was timed
    tuned: dict[str, str] = field(default_factory=dict)  # layer shape in words to its tuned tiles by tokens
    # Kernels that the user named although they turn an fp8 overflow into NaN
    overflows: set[str] = field(default_factory=set)
    # Why graphs that an earlier start compiled leave layers out; it holds while a layer has no reason of its own
    kept: dict[str, Reason] = field(default_factory=dict)
    record: RankStatus | None = None  # what the status line said, corrected since; None before
    path: Path | None = None  # of the status file; None before ``write``
    writer: str = field(default_factory=partial(secrets.token_hex, 4))  # tells its file from that of another engine
    _timer: Timer | None = None  # until the file is written again
    _writing: Any = field(default_factory=Lock)  # held while the file is written: the last record is written last

    # What passes and start-up find.

    def count_graph(self, compile_range: str, counts: dict[str, int]) -> None:
        """Note what the passes did to one graph of a range; a draft model brings a second graph for the same range."""
        self.compiled.setdefault(compile_range, Counter()).update(counts)

    def add_timed(self, timed: Timed) -> None:
        """Note what was timed for one layer shape."""
        self.measured.append(timed)

    def add_tuned(self, shape: str, tiles: str) -> None:
        """Note the tuned tiles that our Triton kernel has for a layer shape."""
        self.tuned[shape] = tiles

    def add_overflow(self, kernel: str) -> None:
        """Note a kernel that may run although it turns an fp8 overflow into NaN."""
        self.overflows.add(kernel)

    def add_kept(self, kept: Mapping[str, Reason]) -> None:
        """Note why graphs that an earlier start compiled leave layers out."""
        self.kept.update(kept)

    # The record.

    def record_of(
        self,
        layers: Mapping[str, Outcome],
        limit: int,
        kv_cache_dtype: str,
        rank: int,
        integration: str,
        card: str,
    ) -> RankStatus:
        """Return what is known of the engine. A layer that is not engaged counts as skipped, with its reason if known.

        Args:
            layers: what became of the model's MLA layers, by name.
            limit: the decode limit in tokens.
            kv_cache_dtype: of the engine, as vLLM spells it.
            rank: of this worker.
            integration: "passes" or "module".
            card: its architecture, or "cpu".
        """
        engaged = _engaged(layers, {layer.ran for layer in layers.values()})
        record = RankStatus(
            rank=rank,
            integration=integration,
            card=card,
            total=len(layers),
            engaged=engaged,
            skipped=self._left(layers, engaged),
            compiled={compile_range: dict(counts) for compile_range, counts in self.compiled.items()},
            measured=tuple(self.measured),
            overflows=(),
            decode_limit=limit,
            kv_cache_dtype=kv_cache_dtype,
            decided=_decided(layers),
        )
        return self._with_kernels(record)

    def _left(self, layers: Mapping[str, Outcome], engaged: Collection[str]) -> dict[str, Reason]:
        """Return the layers that are left to vLLM, with the reason."""
        return {
            name: layer.skip or self.kept.get(name, NOT_RUN) for name, layer in layers.items() if name not in engaged
        }

    def _with_kernels(self, record: RankStatus) -> RankStatus:
        """Return the record with what holds for the kernels that run some layer."""
        run = set(record.engaged.values())
        tuned = dict(self.tuned) if "triton" in run else {}
        return replace(record, overflows=tuple(sorted(self.overflows & run)), tuned=tuned)

    def set_record(self, record: RankStatus) -> None:
        """Take the record that the status line tells; ``update`` corrects it from now on, with or without a file."""
        self.record = replace(record, run=status_files.start_run(), writer=self.writer)

    def write(self, folder: Path) -> None:
        """Write the status file of the record; see ``status_files.write``. The next correction makes up for a failure.

        Raises:
            OSError: it cannot be written.
        """
        if self.record is not None:
            self.path = status_files.path_of(folder, self.record)
            with self._writing:
                status_files.write(folder, self.record)

    def update(self, layers: Mapping[str, Outcome]) -> tuple[dict[str, Reason], list[str]]:
        """Correct the record, if there is one yet, by what became of some of the layers since.

        The file follows ``REWRITE_S`` later: once for all layers that fail in the same step, and not in that step.

        Returns:
            (the layers that are left to vLLM from now on, with the reason; those that are engaged again).
        """
        before = self.record
        if before is None:
            return {}, []
        now = _engaged(layers, {*before.engaged.values(), *(layer.ran for layer in layers.values())})
        left = self._left(layers, now)
        engaged = {name: kernel for name, kernel in before.engaged.items() if name not in layers} | now
        skipped = {name: why for name, why in before.skipped.items() if name not in layers} | left
        others = ((one, tuple(name for name in one.layers if name not in layers)) for one in before.decided)
        decided = (*(replace(one, layers=names) for one, names in others if names), *_decided(layers))
        self.record = self._with_kernels(replace(before, engaged=engaged, skipped=skipped, decided=decided))
        self._write_soon()
        again = [name for name in now if before.skipped.get(name, NOT_RUN) != NOT_RUN]
        return {name: why for name, why in left.items() if name in before.engaged}, again

    def _write_soon(self) -> None:
        if self._timer is None:
            self._timer = Timer(REWRITE_S, self._write_again)
            self._timer.daemon = True
            self._timer.start()

    def _write_again(self) -> None:
        """Write the record where it was written, unless the file is by now another engine's."""
        self._timer = None  # first: a layer that fails from now on needs another moment
        with log.warned("the status file could not be corrected"), self._writing:
            if self.path is not None and self.record is not None and not _is_of_another_engine(self.path, self.record):
                status_files.write(self.path.parent, self.record)


def _is_of_another_engine(path: Path, record: RankStatus) -> bool:
    """Return whether the status file of a record is by now another engine's: one run may start several."""
    try:
        return files.read(RankStatus, path).writer != record.writer
    except (OSError, ValueError):
        return False


def _decided(layers: Mapping[str, Outcome]) -> tuple[Decided, ...]:
    """Return what was decided for the layers, those that are decided alike as one."""
    alike: dict[Any, list[str]] = {}
    for name, layer in layers.items():
        alike.setdefault(layer.decided, []).append(name)
    return tuple(Decided(tuple(names), *decided) for decided, names in alike.items())


def _engaged(layers: Mapping[str, Outcome], ran: Collection[str]) -> dict[str, str]:
    """Return the layers that are engaged, with the kernel; ``ran`` are the kernels that have run in the engine."""
    kernels = {
        name: layer.ran or next((one for one in layer.would_run if layer.skip is None and one in ran), "")
        for name, layer in layers.items()
    }
    return {name: kernel for name, kernel in kernels.items() if kernel}

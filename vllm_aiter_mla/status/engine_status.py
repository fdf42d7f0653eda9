# SPDX-License-Identifier: Apache-2.0
"""The status of one engine in one worker: how its record comes to be, and how it is corrected while the engine serves.

The ops say which layers have run, because a warm start loads a compiled artifact and never runs a pass. Only the passes
know why a graph skips a layer, so they note the reason while they compile, and ``skips`` keeps it for warm starts.
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock, Timer
from typing import Any, NamedTuple

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.decided import Decision
from vllm_aiter_mla.status import status_files
from vllm_aiter_mla.status.record import NOT_RUN, WHOLE_ENGINE, DecisionGroup, RankStatus, Timed

REWRITE_S = 1.0
"""Seconds from a correction to the corrected status file."""


class LayerState(NamedTuple):
    """What has become of one layer so far; ``serving.layer.Layer`` tells it."""

    decision: Decision
    ran: str = ""  # the kernel that its fused op ran; "" if the op has run none
    # Kernels that may run the layer, if its op was reached without a batch. vLLM runs no batch of a draft model while
    # it starts, so a draft's layer counts as engaged if one of these kernels has run for another layer.
    would_run: tuple[str, ...] = ()
    skip: Skip | None = None  # why the layer runs vLLM's own code: by its decision, its graph or its last batch


@dataclass(slots=True)
class EngineStatus:
    """What is known of one engine in this process.

    ``engine.Engine`` makes it. Passes, start-up and layers tell it what they find; only its methods change it.

    ``make_record`` makes the record after the warm-up. Once the number of ranks is known, ``set_record`` keeps the
    record and ``write`` writes its file. ``update`` corrects both while the engine serves.
    """

    # What the passes did in each compile range, over all graphs of the range: "start-end" to counts by pass
    compiled: dict[str, Counter[str]] = field(default_factory=dict)
    measured: list[Timed] = field(default_factory=list)  # one for each layer shape that was timed
    tuned: dict[str, str] = field(default_factory=dict)  # layer shape in words to its tuned tiles by tokens
    # Kernels that the user named although they turn an fp8 overflow into NaN
    overflows: set[str] = field(default_factory=set)
    # Why graphs that an earlier start compiled skip layers; such a reason holds while its layer has none of its own
    kept_skips: dict[str, Skip] = field(default_factory=dict)
    layers: dict[str, LayerState] = field(default_factory=dict)  # by name, in the model's order
    record: RankStatus | None = None  # what the status line said, corrected since; None before the line
    path: Path | None = None  # of the status file; None before ``write``
    instance: str = field(default_factory=partial(secrets.token_hex, 4))  # as in ``RankStatus``
    _timer: Timer | None = None  # runs until the file is written again
    _write_lock: Any = field(default_factory=Lock)  # held while the file is written, so the last record is written last

    # What passes and start-up find.

    def count_graph(self, compile_range: str, counts: dict[str, int]) -> None:
        """Note what the passes did to one graph of a range; a draft model has a second graph for the same range."""
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

    def add_kept_skips(self, skips: Mapping[str, Skip]) -> None:
        """Note why graphs that an earlier start compiled skip layers."""
        self.kept_skips.update(skips)

    # How the record comes to be.

    def make_record(
        self,
        layers: Mapping[str, LayerState],
        *,
        rank: int,
        integration: str,
        card: str,
        decode_limit: int,
        kv_cache_dtype: str,
        capture_sizes: Iterable[int] = (),
        full_graphs: Iterable[int] = (),
        model_name: str | None = None,
        engine: str | None = None,
        run: str = "",
    ) -> RankStatus:
        """Take the states of all layers and return this rank's record, without the number of ranks.

        Args:
            layers: the states of the model's MLA layers, by name, in the model's order.
            rank: the number of this worker. This and what follows are the fields of ``RankStatus``.
            integration: "passes" or "module".
            card: its architecture, or "cpu".
            decode_limit: in tokens.
            kv_cache_dtype: of the engine, as vLLM spells it.
            capture_sizes: token counts of the engine's CUDA graphs.
            full_graphs: token counts of full graphs of decode batches.
            model_name: as in vLLM's metrics; None if unknown.
            engine: the data-parallel index, as in vLLM's metrics; None if unknown.
            run: the name of the server's run.
        """
        self.layers = dict(layers)
        return RankStatus(
            rank=rank,
            integration=integration,
            card=card,
            compiled={compile_range: dict(counts) for compile_range, counts in self.compiled.items()},
            measured=tuple(self.measured),
            decode_limit=decode_limit,
            kv_cache_dtype=kv_cache_dtype,
            capture_sizes=tuple(capture_sizes),
            full_graphs=tuple(full_graphs),
            model_name=model_name,
            engine=engine,
            run=run,
            instance=self.instance,
            **self._layer_fields(),
        )

    def _layer_fields(self) -> dict[str, Any]:
        """Return the fields of the record that change with the states of the layers."""
        engaged = self._engaged()
        return {
            "total": len(self.layers),
            "engaged": engaged,
            "skipped": self._skipped(engaged),
            "decided": self._group_by_decision(),
            **self._kernel_fields({*engaged.values()}),
        }

    def _engaged(self) -> dict[str, str]:
        """Return the engaged layers with their kernels; a kernel that ran for some layer counts for the others."""
        have_run = {state.ran for state in self.layers.values()}
        have_run |= set() if self.record is None else {*self.record.engaged.values()}
        kernels = {
            name: state.ran or next((kernel for kernel in state.would_run if not state.skip and kernel in have_run), "")
            for name, state in self.layers.items()
        }
        return {name: kernel for name, kernel in kernels.items() if kernel}

    def _skipped(self, engaged: Mapping[str, str]) -> dict[str, Skip]:
        """Return the layers that are not engaged, with the reason."""
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

    def _kernel_fields(self, running: set[str]) -> dict[str, Any]:
        """Return the fields of the record that concern kernels, for those that run some layer."""
        return {
            "overflows": tuple(sorted(self.overflows & running)),
            "tuned": dict(self.tuned) if "triton" in running else {},
        }

    def set_record(self, record: RankStatus, ranks: int) -> None:
        """Keep the record of the status line, with the number of ranks; ``update`` corrects it from now on."""
        self.record = replace(record, ranks=ranks)

    def update(self, layers: Mapping[str, LayerState]) -> tuple[dict[str, Skip], list[str]]:
        """Correct the record by the new states of some layers; do nothing before there is a record.

        The file follows ``REWRITE_S`` later: once for all layers that fail in the same step, and not in that step.

        Returns:
            (the layers that are engaged no longer, with the reason; those that were skipped for a reason other than
            ``NOT_RUN`` and are engaged now).
        """
        earlier = self.record
        if earlier is None:
            return {}, []
        self.layers.update(layers)
        self.record = record = replace(earlier, **self._layer_fields(), evidence=files.stamp("status"))
        self._write_soon()
        fell_back = {name: skip for name, skip in record.skipped.items() if name in earlier.engaged}
        return fell_back, [name for name in record.engaged if earlier.skipped.get(name, NOT_RUN) != NOT_RUN]

    # The file.

    def write(self, folder: Path) -> None:
        """Write the status file of the record; see ``status_files.write``. The next correction makes up for a failure.

        Raises:
            OSError: the file cannot be written.
        """
        if self.record is not None:
            self.path = status_files.path_of(folder, self.record)
            with self._write_lock:
                status_files.write(folder, self.record)

    def _write_soon(self) -> None:
        if self._timer is None:
            self._timer = Timer(REWRITE_S, self._write_again)
            self._timer.daemon = True
            self._timer.start()

    def _write_again(self) -> None:
        """Write the record where it was written before, unless the file there belongs to another engine by now."""
        self._timer = None  # first, so that a layer that fails from now on starts another timer
        with log.warned("the status file could not be corrected"), self._write_lock:
            if self.path is not None and self.record is not None and not _is_of_another_engine(self.path, self.record):
                status_files.write(self.path.parent, self.record)


def _is_of_another_engine(path: Path, record: RankStatus) -> bool:
    """Return whether another engine has written the status file of a record: one run may start several."""
    try:
        return files.read(RankStatus, path).instance != record.instance
    except (OSError, ValueError):
        return False


def record_of_skipped_engine(
    skip: Skip,
    layers: Sequence[int],
    *,
    kv_cache_dtype: str,
    model_name: str | None = None,
    engine: str | None = None,
    run: str = "",
) -> RankStatus:
    """Return the one record of an engine that is skipped as a whole: its workers run nothing of ours.

    Args:
        skip: the reason.
        layers: indices of the model's MLA layers; only the workers know their names.
        kv_cache_dtype: of the engine, as vLLM spells it. This and what follows are the fields of ``RankStatus``.
        model_name: as in vLLM's metrics; None if unknown.
        engine: the data-parallel index, as in vLLM's metrics; None if unknown.
        run: the name of the server's run.
    """
    names = [f"layer {index}" for index in layers] or [WHOLE_ENGINE]
    return RankStatus(
        rank=0, ranks=1, integration="", card="", total=len(layers), engaged={}, skipped=dict.fromkeys(names, skip),
        compiled={}, measured=(), overflows=(), decode_limit=0, kv_cache_dtype=kv_cache_dtype, model_name=model_name,
        engine=engine, run=run,
    )  # fmt: skip

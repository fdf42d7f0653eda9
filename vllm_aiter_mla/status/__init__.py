# SPDX-License-Identifier: Apache-2.0
"""What runs on the fast path, and why the rest does not: the status of an engine.

The ops count the layers, because a warm start loads a compiled artifact and never runs a pass. Only the passes know why
a graph left a layer out, so they note the reason while it is compiled, and a file keeps it for warm starts.
``record`` has the records and their files, ``line`` the status line, ``gauge`` the metric.
"""

import secrets
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

from vllm_aiter_mla import files
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.status import line as line
from vllm_aiter_mla.status import record as records
from vllm_aiter_mla.status.record import Decided, RankStatus, Reason, Skips, Timed

NOT_RUN: Reason = ("not_run", "its fused op has not run")
"""Of a layer that nothing has skipped and that is not engaged."""
REWRITE_S = 1.0
"""Seconds from a failure in a decode step to the corrected status file."""


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
    """What is known of one engine in this process, besides what became of its layers; ``engine.Engine`` owns it."""

    # What the passes did in each compile range, over all graphs of it, as "start-end" -> counts by pass
    compiled: dict[str, Counter[str]] = field(default_factory=dict)
    measured: list[Timed] = field(default_factory=list)  # one for each layer shape that was timed
    tuned: dict[str, str] = field(default_factory=dict)  # tuned tiles by tokens, for each layer shape that has them
    # Kernels that the user named although they turn an fp8 overflow into NaN
    overflows: set[str] = field(default_factory=set)
    record: RankStatus | None = None  # what the status line said, corrected since
    path: Path | None = None  # of the status file, once it was written
    writer: str = field(default_factory=partial(secrets.token_hex, 4))  # tells its file from that of another engine
    waiting: Timer | None = None  # until the file is written again, of ``rewrite_soon``

    def count(self, compile_range: str, counts: dict[str, int]) -> None:
        """Note what the passes did to one graph of a range; a draft model brings a second graph for the same range."""
        self.compiled.setdefault(compile_range, Counter()).update(counts)

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
        ran = {layer.ran for layer in layers.values()} - {""}
        engaged = _engaged(layers, ran)
        return RankStatus(
            rank=rank,
            integration=integration,
            card=card,
            total=len(layers),
            engaged=engaged,
            skipped={name: layer.skip or NOT_RUN for name, layer in layers.items() if name not in engaged},
            compiled={compile_range: dict(counts) for compile_range, counts in self.compiled.items()},
            measured=tuple(self.measured),
            overflows=tuple(sorted(self.overflows & ran)),
            decode_limit=limit,
            kv_cache_dtype=kv_cache_dtype,
            tuned=dict(self.tuned) if "triton" in ran else {},
            decided=_decided(layers),
        )

    def write(self, folder: Path, record: RankStatus) -> None:
        """Write the status file of one rank; see ``record.write``.

        Raises:
            OSError: it cannot be written.
        """
        self.path, self.record = records.write(folder, replace(record, writer=self.writer))

    def update(self, layers: Mapping[str, Outcome]) -> tuple[dict[str, Reason], list[str]]:
        """Correct the record, if there is one yet, by what became of some of the layers since; ``rewrite`` the file.

        Returns:
            (the layers that are left to vLLM from now on, with the reason; those that are engaged again).
        """
        before = self.record
        if before is None:
            return {}, []
        now = _engaged(layers, {*before.engaged.values(), *(layer.ran for layer in layers.values())})
        # A reason that only a file knew, as of a graph that an earlier start compiled, still holds.
        left = {
            name: layer.skip or before.skipped.get(name, NOT_RUN) for name, layer in layers.items() if name not in now
        }
        engaged = {name: kernel for name, kernel in before.engaged.items() if name not in layers} | now
        skipped = {name: why for name, why in before.skipped.items() if name not in layers} | left
        others = ((one, tuple(name for name in one.layers if name not in layers)) for one in before.decided)
        decided = (*(replace(one, layers=names) for one, names in others if names), *_decided(layers))
        self.record = replace(before, engaged=engaged, skipped=skipped, decided=decided)
        again = [name for name in now if before.skipped.get(name, NOT_RUN) != NOT_RUN]
        return {name: why for name, why in left.items() if name in before.engaged}, again

    def rewrite(self) -> None:
        """Write the record again where it was written, unless the file is by now another engine's.

        Raises:
            OSError: the file cannot be written.
        """
        if self.path is not None and self.record is not None and not _is_of_another_engine(self.path, self.record):
            files.write(self.path, self.record)

    def rewrite_soon(self) -> None:
        """Write the record again in a moment, once for all layers that fail in the same step, and not in that step."""
        if self.waiting is None:
            self.waiting = Timer(REWRITE_S, self._rewrite_now)
            self.waiting.daemon = True
            self.waiting.start()

    def _rewrite_now(self) -> None:
        self.waiting = None  # first: a layer that fails from now on needs another moment
        with log.warned("the status file could not be corrected"):
            self.rewrite()


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


def keep_skips(
    folder: Path, key: str, rank: int, skipped: Mapping[str, Reason] | None, called: Collection[str] = ()
) -> dict[str, Reason]:
    """Keep why the graphs of a cold start left layers out, for the warm starts that load them; return what was kept.

    A start that compiles some graphs and loads others, as with a draft model, adds its own reasons to those.

    Args:
        folder: where the plugin keeps its files; made if it is missing.
        key: identifies the configuration.
        rank: of this worker.
        skipped: the reasons by layer; None if this start has compiled no graph.
        called: layers whose op was reached: no graph leaves them out any more.

    Raises:
        OSError: the file cannot be written, or cannot be read.
        ValueError: it is too large or holds something else; not if this start writes it again.
    """
    path, kept = folder / f"skips-{key[:16]}-{rank}.json", dict[str, Reason]()
    try:
        kept = files.read(Skips, path).skipped
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        if skipped is None:
            raise
    if skipped is not None:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(path, Skips({name: why for name, why in {**kept, **skipped}.items() if name not in called}))
    return kept


def with_kept(record: RankStatus, kept: Mapping[str, Reason]) -> RankStatus:
    """Return the record with kept reasons for the layers that have none."""
    known = {name: kept[name] for name, why in record.skipped.items() if why == NOT_RUN and name in kept}
    return replace(record, skipped=record.skipped | known)

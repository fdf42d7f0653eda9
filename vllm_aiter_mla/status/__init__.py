# SPDX-License-Identifier: Apache-2.0
"""What runs on the fast path in this process, and why the rest does not.

The ops count the layers, because a warm start loads a compiled artifact and never runs a pass. Only the passes know why
a layer was skipped, so they note the reason while a graph is compiled, and a file keeps it for warm starts.
``record`` has the records and their files, ``line`` the status line, ``gauge`` the metric.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_aiter_mla import files
from vllm_aiter_mla.status import line
from vllm_aiter_mla.status import record as records
from vllm_aiter_mla.status.record import RankStatus, Reason, Skips, Timed

NOT_RUN: Reason = ("not_run", "its fused op has not run")
"""Of a layer that nothing has skipped and that is not engaged."""


@dataclass(slots=True)
class _Status:
    """What is known of the layers of this process, by layer name."""

    engaged: dict[str, str] = field(default_factory=dict)  # layers whose fused op has run, with the kernel that ran
    # Layers whose fused op was reached without a batch, with the kernel that will run. vLLM runs no batch of a draft
    # model while it starts; its layers count as engaged if that kernel has run for another layer.
    profiled: dict[str, str] = field(default_factory=dict)
    # Layers that are left to vLLM, with (code, reason)
    skipped: dict[str, Reason] = field(default_factory=dict)
    # What the passes did in each compile range, over all graphs of it, as "start-end" -> counts by pass
    compiled: dict[str, Counter[str]] = field(default_factory=dict)
    measured: list[Timed] = field(default_factory=list)  # one for each layer shape that was timed
    tuned: dict[str, str] = field(default_factory=dict)  # tuned tiles by tokens, for each layer shape that has them
    # Kernels that the user named although they turn an fp8 overflow into NaN
    overflows: set[str] = field(default_factory=set)
    written: tuple[Path, RankStatus] | None = None  # the status file and its record, once it was written


_status = _Status()


def current() -> _Status:
    """Return the status of this process."""
    return _status


def reset() -> None:
    """Forget everything: one process may build several engines, one after the other."""
    global _status
    _status = _Status()


def engage(layer_name: str, kernel: str) -> None:
    """Note that the fused op of a layer ran with ``kernel``. Cheap enough for every call."""
    _status.engaged[layer_name] = kernel


def skip(layer_name: str, code: str, reason: str) -> None:
    """Note that a layer is left to vLLM."""
    _status.skipped[layer_name] = (code, reason)


def fall_back(layer_name: str, code: str, reason: str) -> None:
    """Note that an engaged layer runs vLLM's own kernels from now on, and correct the status file.

    Raises:
        OSError: the file cannot be written.
    """
    _status.engaged.pop(layer_name, None)
    skip(layer_name, code, reason)
    if _status.written is not None:
        path, record = _status.written
        engaged = {name: kernel for name, kernel in record.engaged.items() if name != layer_name}
        record = replace(record, engaged=engaged, skipped=record.skipped | {layer_name: (code, reason)})
        _status.written = (path, record)
        files.write(path, record)


def count(compile_range: str, counts: dict[str, int]) -> None:
    """Note what the passes did to one graph of a range; a draft model brings a second graph for the same range."""
    _status.compiled.setdefault(compile_range, Counter()).update(counts)


def record_of(
    names: Sequence[str], limit: int, kv_cache_dtype: str, rank: int, integration: str = "passes", card: str = "cpu"
) -> RankStatus:
    """Return what this process has counted. A layer that is not engaged counts as skipped, with its reason if known.

    Args:
        names: of the model's MLA layers.
        limit: the decode limit in tokens.
        kv_cache_dtype: of the engine, as vLLM spells it.
        rank: of this worker.
        integration: "passes" or "module".
        card: its architecture, or "cpu".
    """
    ran = set(_status.engaged.values())
    engaged = {
        name: kernel for name, kernel in _status.profiled.items() if kernel in ran and name not in _status.skipped
    }
    engaged |= _status.engaged
    return RankStatus(
        rank=rank,
        integration=integration,
        card=card,
        total=len(names),
        engaged={name: engaged[name] for name in names if name in engaged},
        skipped={name: _status.skipped.get(name, NOT_RUN) for name in names if name not in engaged},
        compiled={compile_range: dict(counts) for compile_range, counts in _status.compiled.items()},
        measured=tuple(_status.measured),
        overflows=tuple(sorted(_status.overflows & set(_status.engaged.values()))),
        decode_limit=limit,
        kv_cache_dtype=kv_cache_dtype,
        tuned=dict(_status.tuned) if "triton" in _status.engaged.values() else {},
    )


def write(folder: Path, record: RankStatus) -> None:
    """Write the status file of one rank, which ``fail`` corrects; see ``record.write``.

    Raises:
        OSError: it cannot be written.
    """
    _status.written = records.write(folder, record)


def keep_skips(folder: Path, key: str, rank: int) -> dict[str, Reason]:
    """Keep the reasons of a cold start for the warm starts that load its graphs; return what earlier ones have kept.

    A start that compiles some graphs and loads others, as with a draft model, adds its own to those.

    Args:
        folder: where the plugin keeps its files; made if it is missing.
        key: identifies the configuration.
        rank: of this worker.

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
        if not _status.compiled:
            raise
    if _status.compiled:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(path, Skips(kept | _status.skipped))
    return kept


def with_kept(record: RankStatus, kept: Mapping[str, Reason]) -> tuple[RankStatus, str | None]:
    """Return the record with kept reasons for the layers that have none, and the first of these."""
    known = {name: kept[name] for name, why in record.skipped.items() if why == NOT_RUN and name in kept}
    return replace(record, skipped=record.skipped | known), line.first_reason(known) if known else None

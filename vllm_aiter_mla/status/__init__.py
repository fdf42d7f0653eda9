# SPDX-License-Identifier: Apache-2.0
"""What runs on the fast path in this process, and why the rest does not: the status line, the status file, the gauge.

The ops count the layers, because a warm start loads a compiled artifact and never runs a pass. Only the passes know why
a layer was skipped, so they note the reason while a graph is compiled, and a file keeps it for warm starts.
"""

import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import OVERFLOW
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.status.record import RankStatus, Reason, Skips, Timed, of_engine

NOT_RUN: Reason = ("not_run", "its fused op has not run")
"""Of a layer that nothing has skipped and that is not engaged."""
SHOWN = 64
"""The status line gives the measured time of a step of this many tokens, or of the nearest count that was timed."""
GAUGE = "aiter_mla_layers"
"""vLLM clears every metric whose name holds "vllm" when it builds its own, so this one must not."""
GAUGE_HELP = "MLA layers of vllm-aiter-mla by state: on the fast path (engaged) or left to vLLM (skipped)."
RUN = "AITER_MLA_RUN"
"""Environment variable that names this server's run; the front end sets it and its workers inherit it."""
LOCK = "lock-status-"
"""Start of the name of a run's lock file, which its front end holds."""
REFRESH_S = 15.0
"""How often the gauge reads the status files where prometheus_client cannot call back (several API servers)."""


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


def fail(layer_name: str, reason: str) -> None:
    """Note that the kernel of an engaged layer raised while it served, and correct the status file.

    Raises:
        OSError: the file cannot be written.
    """
    _status.engaged.pop(layer_name, None)
    skip(layer_name, "kernel_failed", reason)
    if _status.written is not None:
        path, record = _status.written
        engaged = {name: kernel for name, kernel in record.engaged.items() if name != layer_name}
        record = replace(record, engaged=engaged, skipped=record.skipped | {layer_name: ("kernel_failed", reason)})
        _status.written = (path, record)
        files.write(path, record)


def count(compile_range: str, counts: dict[str, int]) -> None:
    """Note what the passes did to one graph of a range; a draft model brings a second graph for the same range."""
    _status.compiled.setdefault(compile_range, Counter()).update(counts)


# The record of one rank, and the status line.


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


def record_of_skipped_engine(code: str, message: str, layers: Sequence[int], kv_cache_dtype: str) -> RankStatus:
    """Return a record as ``record_of`` does for an engine that was skipped as a whole: its workers run nothing of ours.

    Args:
        code: of the reason.
        message: the reason in one line.
        layers: indices of the model's MLA layers; only the workers know their names.
        kv_cache_dtype: of the engine, as vLLM spells it.
    """
    skipped = {f"layer {index}": (code, message) for index in layers}
    return RankStatus(
        rank=0, integration="", card="", total=len(layers), engaged={}, skipped=skipped, compiled={}, measured=(),
        overflows=(), decode_limit=0, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip


def line(*ranks: RankStatus | None, replica: int | None = None) -> str:
    """Return the status line: how many layers are engaged, by which kernels, and why the others are not.

    Args:
        ranks: the records of an engine's ranks, as ``of_engine`` takes them.
        replica: index of the data-parallel engine that the line speaks for; None if there is one.
    """
    found = of_engine(ranks)
    record, engaged = found.record, len(found.record.engaged)
    of = "" if replica is None else f", data-parallel engine {replica}"
    if not engaged:
        kept = "; graph partition stays on" if record.partition else ""
        return f"0/{record.total}: {first_reason(record.skipped)}{kept} (run: vllm-aiter-mla doctor){of}"
    by = ", integration module" if record.integration == "module" else ""
    whole = found.ranks - len(found.fallen) - found.silent
    on = f" on {whole} of {found.ranks} ranks" if found.ranks > 1 else ""
    text = (
        f"{engaged}/{record.total} MLA layers engaged{on} ({_measured(record) or _kernels(record)}{_tuned(record)}{by})"
    )
    for rank, why in found.fallen.items():
        text += f"; rank {rank} fell back: {_printable(why)}"
    text += f"; {found.silent} without a status" if found.silent else ""
    left = record.total - engaged
    text += f"; {left} skipped: {first_reason(record.skipped)}" if left else ""
    return text + "".join(f"; {name} {OVERFLOW}" for name in record.overflows) + of


def _kernels(record: RankStatus) -> str:
    cache = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(record.kv_cache_dtype, "fp8")
    names = "+".join(sorted(set(record.engaged.values())))
    return f"{names}, {cache} KV, decode limit {record.decode_limit}{unmeasured(record.card)}"


def _tuned(record: RankStatus) -> str:
    """Return which tiles of the Triton kernel `measure --tune` has chosen; nothing for the table's."""
    return "".join(f"; tuned tiles {tiles}" for tiles in dict.fromkeys(record.tuned.values()))


def unmeasured(card: str) -> str:
    """Return what is said once of a card, because nobody has timed the plugin on one yet; nothing for a CPU."""
    return "" if card == "cpu" else f"; speed on {card} not measured"


def _measured(record: RankStatus) -> str | None:
    """Return what runs where and what it gains, for the shape of most layers; None if nothing was measured."""
    if not record.measured:
        return None
    most, *others = sorted(record.measured, key=lambda one: -len(one.layers))
    where = ", ".join(f"{name} {first}..{last}" for first, last, name in most.chosen)
    tokens = min(most.us, key=lambda count: abs(count - SHOWN))
    ours, theirs = most.us[tokens][most.runs(tokens)], most.us[tokens]["vllm"]
    step = f"{tokens} token{'s' * (tokens != 1)}"
    since = f" on {most.since[:10]}" if most.since else ""
    more = f"; {len(others)} more layer shape{'s' * (len(others) != 1)} in the status file" if others else ""
    return f"{where}; {ours:.1f} us a layer at {step} against vLLM's own {theirs:.1f}, measured here{since}{more}"


def first_reason(skipped: Mapping[str, Reason]) -> str:
    """Return code and reason of one skipped layer, on one line that cannot drive a terminal."""
    return _printable(next(iter(skipped.values()), ("the model has no MLA layer",)))


def _printable(why: Sequence[str]) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in ": ".join(why))


# Files. What is wrong with one is raised to the caller, who has said the status line by then.


def write(folder: Path, record: RankStatus) -> None:
    """Write the status file of one rank, ``status-RUN-ENGINE-RANK.json``. ``schemas.json`` lists the fields.

    Removes the files of this machine's servers that have ended.

    Args:
        folder: where the plugin keeps its files; made if it is missing.
        record: of ``record_of`` or ``record_of_skipped_engine``.

    Raises:
        OSError: it cannot be written.
    """
    record = replace(record, run=join_run(folder))
    path = folder / f"status-{record.run}-{record.engine or 0}-{record.rank}.json"
    files.write(path, record)
    _status.written = (path, record)
    for old in folder.glob("status-*-*.json"):
        with suppress(Exception):  # another program's file, or one that is being written: leave it
            known = files.read(RankStatus, old)
            # A lock may mean nothing to another machine that shares the folder.
            if known.evidence.host == record.evidence.host and has_ended(folder, known.run):
                old.unlink(missing_ok=True)
    for lock in folder.glob(f"{LOCK}*"):
        with suppress(Exception):
            files.is_held(lock, remove=True)


def read_all(folder: Path, run: str, bad: Callable[[str], None]) -> list[RankStatus]:
    """Return the status files in a folder, sorted by name.

    Args:
        folder: where the plugin keeps its files.
        run: of one server, or "*" for all.
        bad: takes one line for each file that cannot be read, or holds something else.
    """
    found = []
    for path in sorted(folder.glob(f"status-{run}-*.json")):
        try:
            found.append(files.read(RankStatus, path))
        except FileNotFoundError:
            continue  # removed since the folder was listed
        except (OSError, ValueError) as error:
            bad(str(error))
    return found


def by_engine(records: Sequence[RankStatus]) -> dict[tuple[str, str, str], list[RankStatus]]:
    """Return the records of the ranks of each engine, by (run, model name, engine)."""
    found: dict[tuple[str, str, str], list[RankStatus]] = {}
    for record in records:
        found.setdefault((record.run, record.model_name or "", record.engine or "0"), []).append(record)
    return found


def start_run() -> str:
    """Name this server's run in the environment, unless a parent process has, and return the name."""
    return os.environ.setdefault(RUN, f"{os.getpid()}-{secrets.token_hex(4)}")


def join_run(folder: Path) -> str:
    """Return the name of this server's run; hold its lock to the end of this process, unless another process does.

    The front end comes first, so the lock lives as long as it does. Workers of another machine (Ray) have a folder of
    their own, where the first of them holds it.

    Args:
        folder: where the plugin keeps its files; made if it is missing.

    Raises:
        OSError: the lock cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = start_run()
    files.hold(_lock_of(folder, run))
    return run


def has_ended(folder: Path, run: str) -> bool:
    """Return whether no process of a run lives any more; False if that cannot be told."""
    return not files.is_held(_lock_of(folder, run))


def _lock_of(folder: Path, run: str) -> Path:
    return folder / f"{LOCK}{Path(run).name}"


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
    return replace(record, skipped=record.skipped | known), first_reason(known) if known else None


# The gauge. Workers write status files; the front end, which serves the metrics, reads those of its run at each scrape.


@dataclass(frozen=True)
class _Collector:
    """Answers a scrape with what the status files of this run hold at that moment."""

    folder: Path

    def collect(self) -> Iterator[Any]:
        """Yield the gauge; without a sample before the workers have written their status. Never raises."""
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(GAUGE, GAUGE_HELP, labels=["model_name", "engine", "state"])
        try:
            for labels, value in samples(self.folder):
                family.add_metric(labels, value)
        except Exception as error:  # every other metric of the server would be lost with this one
            _left_out(f"{self.folder}: {type(error).__name__}: {error}")
        yield family


_shown: list[Any] = []


def show_gauge(folder: Path) -> None:
    """Put the gauge into prometheus_client's registry, which vLLM's /metrics serves. Idempotent.

    With several API servers prometheus_client works through shared files and takes no callback. There a thread of each
    front end sets the gauge every ``REFRESH_S`` seconds. Workers on another machine (Ray) are not counted.
    """
    with suppress(OSError):  # a worker that cannot write its status there says so
        join_run(folder)
    if _shown:
        return
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        from prometheus_client import Gauge

        gauge = Gauge(GAUGE, GAUGE_HELP, ["model_name", "engine", "state"], multiprocess_mode="mostrecent")
        _shown.append(gauge)
        Thread(target=_refresh, args=(gauge, folder), daemon=True).start()
    else:
        from prometheus_client import REGISTRY

        _shown.append(_Collector(folder))
        REGISTRY.register(_shown[0])


def _left_out(why: str) -> None:
    log.say_once(logging.WARNING, f"left out of the gauge {GAUGE}: {why}")


def _refresh(gauge: Any, folder: Path) -> None:
    while True:
        with suppress(Exception):
            for labels, value in samples(folder):
                gauge.labels(*labels).set(value)
        sleep(REFRESH_S)


def samples(folder: Path) -> list[tuple[list[str], int]]:
    """Return ([model name, engine, state], layers) of every engine of this run.

    A layer counts as engaged only if every rank that holds it says so. Ranks of a tensor-parallel group hold the same
    layers and those of a pipeline different ones; both come out right. A file that cannot be read is left out, and
    named once in the log.
    """
    found = []
    for (_, *engine), records in by_engine(read_all(folder, start_run(), _left_out)).items():
        skipped = {name for record in records for name in record.skipped}
        engaged = {name for record in records for name in record.engaged} - skipped
        found += [([*engine, "engaged"], len(engaged)), ([*engine, "skipped"], len(skipped))]
    return found

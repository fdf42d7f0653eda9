# SPDX-License-Identifier: Apache-2.0
"""What runs on the fast path in this process, and why the rest does not: the status line, the status file, the gauge.

The ops count the layers, because a warm start loads a compiled artifact and never runs a pass. Only the passes know why
a layer was skipped, so they note the reason while a graph is compiled, and a file keeps it for warm starts.
"""

import json
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import OVERFLOW

NOT_RUN = ("not_run", "its fused op has not run")
"""Code and reason of a layer that nothing has skipped and that is not engaged."""
SHOWN = 64
"""The status line gives the measured time of a step of this many tokens, or of the nearest count that was timed."""
GAUGE = "aiter_mla_layers"
"""vLLM clears every metric whose name holds "vllm" when it builds its own, so this one must not."""
GAUGE_HELP = "MLA layers of vllm-aiter-mla by state: on the fast path (engaged) or left to vLLM (skipped)."
RUN = "AITER_MLA_RUN"
"""Environment variable that names this server's run; the front end sets it and its workers inherit it."""
LARGEST = 2**22
"""Bytes of a file that are read; the skips of 61 layers take some 10 kB."""
REFRESH_S = 15.0
"""How often the gauge reads the status files where prometheus_client cannot call back (several API servers)."""


@dataclass(slots=True)
class Status:
    """What is known of the layers of this process, by layer name."""

    engaged: dict[str, str] = field(default_factory=dict)  # layers whose fused op has run, with the kernel that ran
    # Layers whose fused op was reached without a batch, with the kernel that will run. vLLM runs no batch of a draft
    # model while it starts; its layers count as engaged if that kernel has run for another layer.
    profiled: dict[str, str] = field(default_factory=dict)
    # Layers that are left to vLLM, with (code, reason)
    skipped: dict[str, tuple[str, str]] = field(default_factory=dict)
    # What the passes did in each compile range, over all graphs of it, as "start-end" -> counts by pass
    compiled: dict[str, Counter[str]] = field(default_factory=dict)
    # Per layer shape what was timed at start-up and chosen: "shape" in words, "layers" by name, "chosen" as [first,
    # last, kernel] in tokens, "us" a layer by token count and candidate, "since" when an earlier start took them
    measured: list[dict[str, Any]] = field(default_factory=list)
    # Kernels that the user named although they turn an fp8 overflow into NaN
    overflows: set[str] = field(default_factory=set)
    written: tuple[Path, dict[str, Any]] | None = None  # the status file and its record, once it was written


_status = Status()


def current() -> Status:
    """Return the status of this process."""
    return _status


def reset() -> None:
    """Forget everything: one process may build several engines, one after the other."""
    global _status
    _status = Status()


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
        record["engaged"].pop(layer_name, None)
        record["skipped"][layer_name] = ["kernel_failed", reason]
        files.write(path, record)


def count(compile_range: str, counts: dict[str, int]) -> None:
    """Note what the passes did to one graph of a range; a draft model brings a second graph for the same range."""
    _status.compiled.setdefault(compile_range, Counter()).update(counts)


# The record of one rank, and the status line.


def record_of(
    names: Sequence[str], limit: int, kv_cache_dtype: str, rank: int, integration: str = "passes", card: str = "cpu"
) -> dict[str, Any]:
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
    return {
        "rank": rank,
        "integration": integration,
        "card": card,
        "total": len(names),
        "engaged": {name: engaged[name] for name in names if name in engaged},
        "skipped": {name: list(_status.skipped.get(name, NOT_RUN)) for name in names if name not in engaged},
        "compiled": _status.compiled,
        "measured": _status.measured,
        "overflows": sorted(_status.overflows & set(_status.engaged.values())),
        "decode_limit": limit,
        "capture_sizes": [],
        "partition": False,
        "kv_cache_dtype": kv_cache_dtype,
    }


def record_of_skipped_engine(code: str, message: str, layers: Sequence[int], kv_cache_dtype: str) -> dict[str, Any]:
    """Return a record as ``record_of`` does for an engine that was skipped as a whole: its workers run nothing of ours.

    Args:
        code: of the reason.
        message: the reason in one line.
        layers: indices of the model's MLA layers; only the workers know their names.
        kv_cache_dtype: of the engine, as vLLM spells it.
    """
    empty = record_of((), 0, kv_cache_dtype, 0, "", "") | {"compiled": {}, "measured": []}
    return empty | {"total": len(layers), "skipped": {f"layer {index}": [code, message] for index in layers}}


def of_engine(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the records of all ranks of an engine as one, with the first one's fields.

    A layer counts as engaged if a rank runs it on one of our kernels. A rank that skips a layer which another rank
    engages has fallen back, and one without a record is silent; both are named.

    Args:
        ranks: their records, each as ``record_of`` returns it; an empty one of a rank that has failed.
    """
    known = [record for record in ranks if record]
    engaged = {layer: kernel for record in known for layer, kernel in record["engaged"].items()}
    skipped = {layer: why for record in known for layer, why in record["skipped"].items()}
    fallen = {record["rank"]: why for record in known for layer, why in record["skipped"].items() if layer in engaged}
    return known[0] | {
        "total": len(engaged | skipped),
        "engaged": engaged,
        "skipped": {layer: why for layer, why in skipped.items() if layer not in engaged},
        "ranks": len(ranks),
        "whole_ranks": len(known) - len(fallen),
        "fallen_ranks": fallen,
    }


def line(record: dict[str, Any]) -> str:
    """Return the status line: how many layers are engaged, by which kernels, and why the others are not."""
    engaged, total = record["engaged"], record["total"]
    if not engaged:
        kept = "; graph partition stays on" if record.get("partition") else ""
        return f"0/{total}: {first_reason(record)}{kept} (run: vllm-aiter-mla doctor){_replica(record)}"
    by = ", integration module" if record.get("integration") == "module" else ""
    ranks, whole = record.get("ranks", 1), record.get("whole_ranks", 1)
    on = f" on {whole} of {ranks} ranks" if ranks > 1 else ""
    text = f"{len(engaged)}/{total} MLA layers engaged{on} ({_measured(record) or _kernels(record)}{by})"
    for rank, why in record.get("fallen_ranks", {}).items():
        text += f"; rank {rank} fell back: {_printable(why)}"
    silent = ranks - whole - len(record.get("fallen_ranks", {}))
    text += f"; {silent} without a status" if silent else ""
    text += f"; {total - len(engaged)} skipped: {first_reason(record)}" if len(engaged) < total else ""
    text += "".join(f"; {name} {OVERFLOW}" for name in record.get("overflows", ()))
    return text + _replica(record)


def _replica(record: dict[str, Any]) -> str:
    """Return which data-parallel engine the line speaks for; nothing if there is one."""
    return "" if record.get("replica") is None else f", data-parallel engine {record['replica']}"


def _kernels(record: dict[str, Any]) -> str:
    cache = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(record["kv_cache_dtype"], "fp8")
    names = "+".join(sorted(set(record["engaged"].values())))
    return f"{names}, {cache} KV, decode limit {record['decode_limit']}{unmeasured(record.get('card', 'cpu'))}"


def unmeasured(card: str) -> str:
    """Return what is said once of a card, because nobody has timed the plugin on one yet; nothing for a CPU."""
    return "" if card == "cpu" else f"; speed on {card} not measured"


def _measured(record: dict[str, Any]) -> str | None:
    """Return what runs where and what it gains, for the shape of most layers; None if nothing was measured."""
    if not record["measured"]:
        return None
    most, *others = sorted(record["measured"], key=lambda one: -len(one["layers"]))
    where = ", ".join(f"{name} {first}..{last}" for first, last, name in most["chosen"])
    tokens = min(most["us"], key=lambda count: abs(count - SHOWN))
    chosen = next(name for _, last, name in most["chosen"] if tokens <= last)
    ours, theirs = most["us"][tokens][chosen], most["us"][tokens]["vllm"]
    step = f"{tokens} token{'s' * (tokens != 1)}"
    since = f" on {most['since'][:10]}" if most.get("since") else ""
    more = f"; {len(others)} more layer shape{'s' * (len(others) != 1)} in the status file" if others else ""
    return f"{where}; {ours:.1f} us a layer at {step} against vLLM's own {theirs:.1f}, measured here{since}{more}"


def first_reason(record: dict[str, Any]) -> str:
    """Return code and reason of one layer that is not engaged, on one line that cannot drive a terminal."""
    return _printable(next(iter(record["skipped"].values()), ("the model has no MLA layer",)))


def _printable(why: Sequence[str]) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in ": ".join(why))


# Files. What is wrong with one is raised to the caller, who has said the status line by then.


def write(folder: Path, record: dict[str, Any]) -> None:
    """Write the status file of one rank, ``status-RUN-ENGINE-RANK.json``. ``schemas.json`` lists the fields.

    Removes the files of this machine's servers that have ended.

    Args:
        folder: where the plugin keeps its files; made if it is missing.
        record: of ``record_of`` or ``record_of_skipped_engine``.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = os.environ.get(RUN) or start_run()
    path = folder / f"status-{run}-{record.get('engine') or 0}-{record['rank']}.json"
    stamped = record | {"run": run} | files.stamp("status")
    files.write(path, stamped)
    _status.written = (path, stamped)
    for old in folder.glob("status-*-*.json"):
        with suppress(Exception):  # another program's file, or one that is being written: leave it
            known = files.read(old, LARGEST)
            if known[files.KEY]["host"] == stamped[files.KEY]["host"] and has_ended(known["run"], run):
                old.unlink(missing_ok=True)


def start_run() -> str:
    """Name this server's run in the environment, unless a parent process has, and return the name."""
    return os.environ.setdefault(RUN, f"{os.getpid()}-{secrets.token_hex(4)}")


def has_ended(run: str, current_run: str) -> bool:
    """Whether the front end of a run on this machine has ended: its process id is free, or the current run has it."""
    pid = run.partition("-")[0]
    if pid == current_run.partition("-")[0]:
        return run != current_run
    try:
        os.kill(int(pid), 0)
    except OSError as error:  # PermissionError: it is another user's
        return isinstance(error, ProcessLookupError)
    return False


def keep_skips(folder: Path, key: str, record: dict[str, Any]) -> str | None:
    """Keep the reasons of a cold start for the warm starts that load its graphs; read what earlier ones have kept.

    A start that compiles some graphs and loads others, as with a draft model, adds its own to those.

    Args:
        folder: where the plugin keeps its files; made if it is missing.
        key: identifies the configuration.
        record: of ``record_of``; layers that have no reason yet gain theirs.

    Returns:
        The first reason that this start has read, if any.

    Raises:
        OSError: the file cannot be written.
        ValueError: it cannot be read, is too large, or holds something else.
    """
    path = folder / f"skips-{key[:16]}-{record['rank']}.json"
    kept: dict[str, list[str]] = {}
    try:
        found = files.read(path, LARGEST)["skipped"]
        for why in dict.values(found):
            if not isinstance(why, list) or [type(part) for part in why] != [str, str]:
                raise TypeError(f"[code, reason] expected, not {why!r:.60}")
        kept = found
    except FileNotFoundError:
        pass
    except Exception as error:
        if not _status.compiled:  # otherwise it is written again
            raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    if _status.compiled:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(path, {"skipped": kept | _status.skipped} | files.stamp("skips"))
    known = {name: kept[name] for name, why in record["skipped"].items() if why == list(NOT_RUN) and name in kept}
    record["skipped"] |= known
    return first_reason({"skipped": known}) if known else None


# The gauge. Workers write status files; the front end, which serves the metrics, reads those of its run at each scrape.


@dataclass(frozen=True)
class _Collector:
    """Answers a scrape with what the status files of this run hold at that moment."""

    folder: Path

    def collect(self) -> Iterator[Any]:
        """Yield the gauge; without a sample before the workers have written their status."""
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(GAUGE, GAUGE_HELP, labels=["model_name", "engine", "state"])
        for labels, value in samples(self.folder):
            family.add_metric(labels, value)
        yield family


_shown: list[Any] = []


def show_gauge(folder: Path) -> None:
    """Put the gauge into prometheus_client's registry, which vLLM's /metrics serves. Idempotent.

    With several API servers prometheus_client works through shared files and takes no callback. There a thread of each
    front end sets the gauge every ``REFRESH_S`` seconds. Workers on another machine (Ray) are not counted.
    """
    start_run()
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


def _refresh(gauge: Any, folder: Path) -> None:
    while True:
        with suppress(Exception):
            for labels, value in samples(folder):
                gauge.labels(*labels).set(value)
        sleep(REFRESH_S)


def samples(folder: Path) -> list[tuple[list[str], int]]:
    """Return ([model name, engine, state], layers) of every engine of this run.

    A layer counts as engaged only if every rank that holds it says so. Ranks of a tensor-parallel group hold the same
    layers and those of a pipeline different ones; both come out right.
    """
    found = []
    for (_, *engine), records in by_engine(folder, os.environ.get(RUN)).items():
        skipped = {name for record in records for name in record["skipped"]}
        engaged = {name for record in records for name in record["engaged"]} - skipped
        found += [([*engine, "engaged"], len(engaged)), ([*engine, "skipped"], len(skipped))]
    return found


def by_engine(folder: Path, run: str | None) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Return the records of the ranks of each engine, by (run, model name, engine).

    Args:
        folder: where the plugin keeps its files.
        run: of one server, or "*" for all.

    Raises:
        OSError: a file cannot be read.
        ValueError: it holds something else.
    """
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob(f"status-{run}-*.json")):
        record = json.loads(path.read_text())
        key = (record["run"], record.get("model_name") or "", record.get("engine") or "0")
        found.setdefault(key, []).append(record)
    return found

"""``vllm:aiter_mla_layers{state="engaged|refused"}`` and ``vllm:aiter_mla_saved_microseconds{tokens="64"}``: how their
figures get from the workers to the front end.

The status file is taken in worker processes; metrics are served by the front end, which is another process, and with
several API servers by several. So each worker writes its status lines to a folder of this run that it finds through the
environment, and the front end reads them when vLLM builds its Prometheus metrics, after the engines have warmed up.

Limits: workers on another machine (Ray) share neither the folder nor the variable; a run whose workers wrote nothing
has no gauge rather than a wrong one.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_aiter_mla import files
from vllm_aiter_mla.status.file import has_ended, process
from vllm_aiter_mla.status.record import saved_us

NAME = "vllm:aiter_mla_layers"
HELP = "MLA layers by status line of vllm-aiter-mla: on the fast path (engaged) or left as they are (refused)."
SAVED = "vllm:aiter_mla_saved_microseconds"
SAVED_HELP = (
    "Microseconds that one decode step saves in its MLA layers against vLLM's own kernels, by tokens in the step: "
    "measured at start-up, not while serving."
)
FOLDER = "AITER_MLA_GAUGE_DIR"
"""Environment variable that leads workers to this run's folder; set by ``prepare``, inherited by spawned processes."""

_DECLINED = "declined.json"
_folder: tempfile.TemporaryDirectory[str] | None = None


def prepare() -> None:
    """Make this run's folder, unless a parent process has; it goes with the process that made it. Idempotent.

    Raises:
        OSError: there is no place for it.
    """
    global _folder
    if not os.environ.get(FOLDER):
        _folder = tempfile.TemporaryDirectory(prefix="aiter-mla-gauge-", ignore_cleanup_errors=True)
        os.environ[FOLDER] = _folder.name


def publish(record: dict[str, Any], declined: bool = False) -> None:
    """Leave one worker's status for the front end; nothing happens where no run was prepared.

    Args:
        record: of ``record.as_record``.
        declined: the record is of an engine that was declined as a whole; it counts only where no worker has
            written, because the process may build another engine after it.

    Raises:
        OSError: it cannot be written.
    """
    folder = os.environ.get(FOLDER)
    if folder and Path(folder).is_dir():
        name = _DECLINED if declined else f"{os.getpid()}-{record['rank']}.json"
        layers: dict[str, Any] = {key: sorted(record[key]) for key in ("engaged", "skipped")}
        layers["saved_us"] = saved_us(record)
        about = {"engine": record.get("engine") or "0", "process": process(os.getpid())}
        files.write(Path(folder) / name, layers | about | files.stamp("gauge", 1))


def layers_of(engine: str) -> dict[str, int]:
    """Layers of one engine by state, of the workers that run now; empty where there are none.

    Args:
        engine: vLLM's index of it, as its metrics label it.
    """
    return counts(_records(engine))


def saved_of(engine: str) -> dict[str, float]:
    """Microseconds saved in one step by its tokens, over the layers of one engine; empty where nothing was measured.

    Each layer counts once: ranks of a tensor-parallel group hold the same layers, and agree on the figures.
    """
    by_layer: dict[str, dict[str, float]] = {}
    for record in _records(engine):
        for tokens, layers in record.get("saved_us", {}).items():
            by_layer.setdefault(tokens, {}).update(layers)
    return {tokens: round(sum(layers.values()), 1) for tokens, layers in by_layer.items()}


def _records(engine: str) -> list[dict[str, Any]]:
    """What the workers of one engine wrote that run now; where there are none of any, that of a declined engine."""
    folder = os.environ.get(FOLDER)
    found = {path.name: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))} if folder else {}
    declined = found.pop(_DECLINED, None)
    workers = [record for record in found.values() if not has_ended(record["process"])]
    if not workers:
        return [] if declined is None else [declined]
    return [record for record in workers if record["engine"] == engine]


def counts(records: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Layers by state over all ranks: engaged only where every rank that holds the layer says so.

    Ranks of a tensor-parallel group hold the same layers, those of a pipeline different ones; both come out right.
    """
    if not records:
        return {}
    engaged = {name for record in records for name in record["engaged"]}
    skipped = {name for record in records for name in record["skipped"]}
    return {"engaged": len(engaged - skipped), "skipped": len(skipped)}

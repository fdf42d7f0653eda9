"""``vllm:aiter_mla_layers{state="engaged|refused"}`` among vLLM's own metrics.

The census is taken in worker processes; metrics are served by the front end, which is another process, and with
several API servers by several. So each worker writes its verdicts to a folder of this run that it finds through the
environment, and the front end reads them when vLLM builds its Prometheus metrics: after the engines have warmed up,
and only where metrics are on (``--disable-log-stats`` is not given). There the gauge is made by vLLM's own gauge class,
so it lands in the registry, or the multiprocess folder, or Ray's metrics, with all the others.

Limits: workers on another machine (Ray) do not share the folder, nor its variable; a run whose workers wrote nothing
has no gauge rather than a wrong one. Nothing here raises into vLLM, and nothing imports ``prometheus_client``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_aiter_mla.compat import log
from vllm_aiter_mla.compat.patches.patch import Patch

NAME = "vllm:aiter_mla_layers"
HELP = "MLA layers by verdict of vllm-aiter-mla: on the fast path (engaged) or left as they are (refused)."
FOLDER = "AITER_MLA_GAUGE_DIR"
"""Environment variable that leads workers to this run's folder; set by ``install``, inherited by spawned processes."""

_LOGGERS = "vllm.v1.metrics.loggers"
_MARK = "_aiter_mla_gauge"
_DECLINED = "declined.json"
_folder: tempfile.TemporaryDirectory[str] | None = None


def install() -> None:
    """Prepare this run; call it where the fast path engages, in the front end, before engines start. Idempotent.

    Makes the folder, unless a parent process has, and hooks vLLM's ``PrometheusStatLogger``: at once where its module
    is loaded, else when vLLM loads it. Never raises.
    """
    _guarded(_install)


def publish(record: dict[str, Any], declined: bool = False) -> None:
    """Leave one worker's census for the front end. Never raises; does nothing where no run was prepared.

    Args:
        record: of ``announce.as_record``.
        declined: it speaks for an engine that was declined as a whole; it counts only where no worker has written,
            because the process may build another engine after it.
    """
    _guarded(lambda: _publish(record, declined))


def counts(records: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Layers by state over all ranks: engaged only where every rank that holds the layer says so.

    Ranks of a tensor-parallel group hold the same layers, those of a pipeline different ones; both come out right.
    """
    engaged = {name for record in records for name in record["engaged"]}
    refused = {name for record in records for name in record["refused"]}
    return {"engaged": len(engaged - refused), "refused": len(refused)}


def _install() -> None:
    global _folder
    if not os.environ.get(FOLDER):
        _folder = tempfile.TemporaryDirectory(prefix="aiter-mla-gauge-", ignore_cleanup_errors=True)
        os.environ[FOLDER] = _folder.name
    loaded = sys.modules.get(_LOGGERS)
    if loaded is not None:
        _wrap(loaded)
    elif not any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenLoaded())


def _publish(record: dict[str, Any], declined: bool) -> None:
    folder = os.environ.get(FOLDER)
    if folder and Path(folder).is_dir():
        path = Path(folder) / (_DECLINED if declined else f"{os.getpid()}-{record['rank']}.json")
        new = path.with_suffix(".new")
        new.write_text(json.dumps({key: sorted(record[key]) for key in ("engaged", "refused")}))
        new.replace(path)


def _read() -> list[dict[str, Any]]:
    folder = os.environ.get(FOLDER)
    found = sorted(Path(folder).glob("*.json")) if folder else []
    workers = [path for path in found if path.name != _DECLINED and _is_alive(int(path.stem.partition("-")[0]))]
    declined = [path for path in found if path.name == _DECLINED]
    return [json.loads(path.read_text()) for path in workers or declined]


def _is_alive(pid: int) -> bool:
    """Whether a worker still runs: a process may have built, and shut down, another engine before this one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it runs, under another user
    return True


def _wrap(module: ModuleType) -> None:
    """Let vLLM's Prometheus logger make our gauge with its own class, right after its own metrics."""
    cls: Any = module.PrometheusStatLogger
    inner = cls.__init__
    if getattr(inner, _MARK, False):
        return

    @wraps(inner)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        _guarded(lambda: _set(self._gauge_cls))

    setattr(init, _MARK, True)
    cls.__init__ = init


def _set(gauge_cls: Any) -> None:
    records = _read()
    if not records:
        return
    # The newest value of a process counts: every API server of a run reads the same files.
    gauge = gauge_cls(name=NAME, documentation=HELP, labelnames=["state"], multiprocess_mode="mostrecent")
    for state, layers in counts(records).items():
        gauge.labels(state).set(layers)


class _WhenLoaded(importlib.abc.MetaPathFinder):
    """Wraps the module of vLLM's loggers once it is loaded: loading it for them would import prometheus_client."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that wraps what it has loaded; for other modules None."""
        if fullname != _LOGGERS:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _guarded(lambda: _wrap_when_executed(spec.loader))
        return spec


def _wrap_when_executed(loader: Any) -> None:
    inner = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        inner(module)
        _guarded(lambda: _wrap(module))

    loader.exec_module = exec_module


def _guarded(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception as error:
        log.say_once(logging.WARNING, f"the gauge {NAME} is not available: {type(error).__name__}: {error}")


PATCH = Patch(
    name="gauge",
    what="PrometheusStatLogger.__init__, in front ends whose fast path is on",
    why="the gauge vllm:aiter_mla_layers has to live in vLLM's own registry, and vLLM offers plugins none",
    how="wrapped when vLLM imports the module; the gate installs it, never registration",
    link="https://docs.vllm.ai/en/latest/design/metrics/",
    probe="test_gauge_hook_fits_the_installed_vllm",
    remove_when="vLLM lets plugins add metrics",
    apply=lambda calls: None,
    required=False,
)

"""Gauges of the plugin's among vLLM's own metrics.

vLLM keeps its metrics in a registry of its own, in a multiprocess folder or in Ray's, and clears what is named
``vllm:`` when it builds them. So ``PrometheusStatLogger.__init__`` is wrapped: at once where its module is loaded, else
when vLLM loads it, which it does only where metrics are on. A gauge is made there with vLLM's own gauge class, so it
stands among vLLM's metrics and carries their labels. Where the class looks different there is one warning and no gauge.
Nothing here raises into vLLM, and nothing imports ``prometheus_client``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

from vllm_aiter_mla.compat import log
from vllm_aiter_mla.compat.patches.patch import Patch

_LOGGERS = "vllm.v1.metrics.loggers"
_MARK = "_aiter_mla_gauge"


@dataclass(frozen=True, slots=True)
class Gauge:
    """What is shown.

    Attributes:
        name: of the gauge.
        help: its description.
        label: what its figures are told apart by.
        values: gives the figures by that label for an engine, vLLM's index of it as a string; empty for none.
    """

    name: str
    help: str
    label: str
    values: Callable[[str], Mapping[str, float]]


def install(*gauges: Gauge) -> None:
    """Show ``gauges``; call it in the front end, before engines start. Idempotent, and never raises."""
    with log.warned(_missing(gauges)):
        loaded = sys.modules.get(_LOGGERS)
        if loaded is not None:
            _wrap(loaded, gauges)
        elif not any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path):
            sys.meta_path.insert(0, _WhenLoaded(gauges))


def _missing(gauges: Sequence[Gauge]) -> str:
    return f"the gauge {' or '.join(gauge.name for gauge in gauges)} is not available"


def _wrap(module: ModuleType, gauges: Sequence[Gauge]) -> None:
    """Let vLLM's Prometheus logger make our gauges with its own class, right after its own metrics."""
    cls: Any = module.PrometheusStatLogger
    inner = cls.__init__
    if getattr(inner, _MARK, False):
        return

    @wraps(inner)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        for gauge in gauges:
            with log.warned(_missing([gauge])):
                _set(self, gauge)

    setattr(init, _MARK, True)
    cls.__init__ = init


def _set(logger: Any, gauge: Gauge) -> None:
    """Label the gauge as vLLM labels its own: the served name, then the engine's index, then what is counted by."""
    found = {str(index): gauge.values(str(index)) for index in logger.engine_indexes}
    if not any(found.values()):
        return
    model = logger.vllm_config.model_config.served_model_name
    # The newest value of a process counts: every API server of a run reads the same files.
    made = logger._gauge_cls(
        name=gauge.name,
        documentation=gauge.help,
        labelnames=["model_name", "engine", gauge.label],
        multiprocess_mode="mostrecent",
    )
    for engine, values in found.items():
        for label, value in values.items():
            made.labels(model, engine, label).set(value)


class _WhenLoaded(importlib.abc.MetaPathFinder):
    """Wraps the module of vLLM's loggers once it is loaded: loading it for them would import prometheus_client."""

    def __init__(self, gauges: Sequence[Gauge]) -> None:
        self.gauges = gauges

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that wraps what it has loaded; for other modules None."""
        if fullname != _LOGGERS:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            with log.warned(_missing(self.gauges)):
                _wrap_when_executed(spec.loader, self.gauges)
        return spec


def _wrap_when_executed(loader: Any, gauges: Sequence[Gauge]) -> None:
    inner = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        inner(module)
        with log.warned(_missing(gauges)):
            _wrap(module, gauges)

    loader.exec_module = exec_module


PATCH = Patch(
    name="gauge",
    what="PrometheusStatLogger.__init__, in front ends whose fast path is on",
    why="the gauges vllm:aiter_mla_* have to live in vLLM's own registry, and vLLM offers plugins none",
    how="wrapped when vLLM imports the module; the gate installs it, never registration",
    link="https://docs.vllm.ai/en/latest/design/metrics/",
    probe="test_gauge_hook_fits_the_installed_vllm",
    remove_when="vLLM lets plugins add metrics",
    apply=lambda calls: None,
    required=False,
)

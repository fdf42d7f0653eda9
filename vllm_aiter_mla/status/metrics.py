# SPDX-License-Identifier: Apache-2.0
"""The metrics: workers write status files, and the front end reads those of its run at each scrape."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

from vllm_aiter_mla.compat import log
from vllm_aiter_mla.status.line import aborted_kernels
from vllm_aiter_mla.status.record import RankStatus, group_by_engine, merge_ranks, with_silent_ranks
from vllm_aiter_mla.status.status_files import is_serving, read_all, renew_run_lock, run_name

LAYERS = "aiter_mla_layers"
"""Name of the metric that counts layers. vLLM clears every metric whose name holds "vllm" when it builds its own."""
ENGINE_LABELS = ("model_name", "engine")
"""Labels of every metric, as vLLM has them."""
REFRESH_S = 15.0
"""How often the metrics follow the status files where prometheus_client cannot call back (several API servers)."""

Samples = dict[tuple[str, ...], int]
"""Values of one metric, by the values of its labels."""


@dataclass(frozen=True)
class Metric:
    """A gauge: its help text, and its labels after ``ENGINE_LABELS``."""

    help: str
    labels: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all labels."""
        return (*ENGINE_LABELS, *self.labels)


METRICS: Mapping[str, Metric] = {
    LAYERS: Metric(
        "MLA layers of vllm-aiter-mla by state: on the fast path (engaged) or left to vLLM (skipped).", ("state",)
    ),
    "aiter_mla_kernel_layers": Metric("Engaged MLA layers by kernel and batch size in tokens.", ("kernel", "tokens")),
    "aiter_mla_ranks": Metric(
        "Ranks: agreeing, fell_back (skips a layer that another engages, or has another kernel), silent (has no file).",
        ("state",),
    ),
    "aiter_mla_aborted_before": Metric("1 if an earlier start ended in this kernel's first call.", ("kernel",)),
    "aiter_mla_info": Metric("1; its labels say what runs.", ("version", "integration")),
}


@dataclass(frozen=True)
class _Collector:
    """Answers a scrape from the status files of this run."""

    folder: Path

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, which have no sample before the workers have written their status. Never raises."""
        from prometheus_client.core import GaugeMetricFamily

        found: Mapping[str, Samples] = {}
        try:
            found = samples(self.folder)
        except Exception as error:  # raised, it would cost the server every other metric of the scrape
            _say_left_out(f"{self.folder}: {type(error).__name__}: {error}")
        for name, metric in METRICS.items():
            family = GaugeMetricFamily(name, metric.help, labels=metric.names)
            for labels, value in found.get(name, {}).items():
                family.add_metric(labels, value)
            yield family


# What this process has put into prometheus_client's registry, of which each process has one.
_registered: list[Any] = []


def register_metrics(folder: Path) -> None:
    """Put the metrics into prometheus_client's registry, which vLLM's /metrics serves. Idempotent.

    With several API servers prometheus_client works through shared files and takes no callback. There a thread of each
    front end sets the metrics every ``REFRESH_S`` seconds. Workers on another machine (Ray) are not counted.
    """
    if _registered:
        return
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        from prometheus_client import Gauge

        gauges = {
            name: Gauge(name, metric.help, metric.names, multiprocess_mode="mostrecent")
            for name, metric in METRICS.items()
        }
        _registered.append(gauges)
        Thread(target=_refresh, args=(gauges, folder), daemon=True).start()
    else:
        from prometheus_client import REGISTRY

        _registered.append(_Collector(folder))
        REGISTRY.register(_registered[0])


def _say_left_out(why: str) -> None:
    log.say_once(logging.WARNING, f"left out of the metrics: {why}")


def _refresh(gauges: Mapping[str, Any], folder: Path) -> None:
    ever_set: dict[str, Samples] = {name: {} for name in gauges}
    while True:
        try:
            found = samples(folder)
            for name, gauge in gauges.items():
                # The shared files forget no sample, so a sample that has gone is set to 0.
                for labels, value in (dict.fromkeys(ever_set[name], 0) | found[name]).items():
                    gauge.labels(*labels).set(value)
                ever_set[name] |= found[name]
        except Exception as error:
            _say_left_out(f"{folder}: {type(error).__name__}: {error}")
        sleep(REFRESH_S)


def samples(folder: Path) -> dict[str, Samples]:
    """Return the samples of each of ``METRICS``, of every engine of this run.

    A layer counts as engaged only if every rank that holds the layer says so: ranks of a tensor-parallel group hold the
    same layers, stages of a pipeline different ones. An engine to which vLLM gives no MLA layer counts as one skipped
    layer. A rank without a file, which may be on another node, counts as silent and in no other sample. An engine that
    has ended has no sample. A file that cannot be read is left out, and named once in the log.

    The front end takes its run's lock again here if somebody has removed the lock: else its engines would count as
    ended.
    """
    with suppress(OSError):  # a worker that cannot write its status there says so
        renew_run_lock(folder)
    found: dict[str, Samples] = {name: {} for name in METRICS}
    for (_, *engine), records in group_by_engine(read_all(folder, run_name(), _say_left_out)).items():
        of_engine = {} if is_serving(folder, records) is False else _samples_of_engine(records)
        for name, values in of_engine.items():
            found[name] |= {(*engine, *labels): value for labels, value in values.items()}
    return found


def _samples_of_engine(records: Sequence[RankStatus]) -> dict[str, Samples]:
    """Return the samples of one engine, whose labels lack ``ENGINE_LABELS``."""
    merged = merge_ranks(with_silent_ranks(records))
    engaged = merged.engaged_everywhere
    skipped = (merged.engaged | merged.skipped).keys() - engaged
    layers_by_span: dict[tuple[str, ...], set[str]] = {}
    for group in (group for record in records for group in record.decided):
        for span in group.decision.kernels:
            layers_by_span.setdefault((span.kernel, span.tokens), set()).update(engaged.intersection(group.layers))
    agreeing, silent = merged.agreeing, merged.silent
    fell_back = merged.ranks - agreeing - silent
    return {
        LAYERS: {("engaged",): len(engaged), ("skipped",): len(skipped)},
        "aiter_mla_kernel_layers": {labels: len(layers) for labels, layers in layers_by_span.items() if layers},
        "aiter_mla_ranks": {("agreeing",): agreeing, ("fell_back",): fell_back, ("silent",): silent},
        "aiter_mla_aborted_before": {(kernel,): 1 for kernel in aborted_kernels(records)},
        "aiter_mla_info": {(merged.first.evidence.plugin, merged.first.integration): 1},
    }

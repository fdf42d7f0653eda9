# SPDX-License-Identifier: Apache-2.0
"""The metrics: workers write status files, and the front end reads those of its run at each scrape."""

import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

from vllm_aiter_mla.compat import log
from vllm_aiter_mla.decided import Decision
from vllm_aiter_mla.status.line import aborted_kernels
from vllm_aiter_mla.status.liveness import ServerLocks, ensure_run_name, renew_run_lock
from vllm_aiter_mla.status.record import RankRecord, group_by_engine, merge_ranks, records_of_all_ranks
from vllm_aiter_mla.status.status_files import read_records

# Names of the metrics. When vLLM builds its metrics, it clears all whose names contain "vllm".
LAYERS = "aiter_mla_layers"
KERNEL_LAYERS = "aiter_mla_kernel_layers"
RANKS = "aiter_mla_ranks"
ABORTED_BEFORE = "aiter_mla_aborted_before"
INFO = "aiter_mla_info"
ENGINE_LABELS = ("model_name", "engine")
"""Labels of every metric, as vLLM has them."""
REFRESH_SECONDS = 15.0
"""Time between two updates of the metrics where prometheus_client cannot call back (several API servers)."""

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
        "MLA layers of vllm-aiter-mla by state: on the fast path on every rank (engaged), or skipped.",
        ("state",),
    ),
    KERNEL_LAYERS: Metric("Engaged MLA layers by kernel and batch size in tokens.", ("kernel", "tokens")),
    RANKS: Metric(
        "Ranks by state: agreeing, fell_back (skips a layer that another rank engages, or all its own), differing (has "
        "another kernel than the first rank), silent (has no file).",
        ("state",),
    ),
    ABORTED_BEFORE: Metric("1 if an earlier start ended while this kernel was first called or timed.", ("kernel",)),
    INFO: Metric("1; its labels say what runs.", ("version", "integration")),
}


@dataclass(frozen=True)
class _Collector:
    """Answers a scrape from the status files of this run."""

    folder: Path

    def collect(self) -> Iterator[Any]:
        """Yield the metrics. Before the workers have written their status, no metric has a sample. Never raises."""
        from prometheus_client.core import GaugeMetricFamily

        samples_by_name: Mapping[str, Samples] = {}
        try:
            samples_by_name = read_samples(self.folder)
        except Exception as error:  # an error here would cost the server every other metric of the scrape
            _warn_left_out(f"{self.folder}: {type(error).__name__}: {error}")
        for name, metric in METRICS.items():
            family = GaugeMetricFamily(name, metric.help, labels=metric.names)
            for labels, value in samples_by_name.get(name, {}).items():
                family.add_metric(labels, value)
            yield family


# Whether this process has put the metrics into the registry of prometheus_client. Each process has one registry.
_is_registered = False


def register_metrics(folder: Path) -> None:
    """Put the metrics into prometheus_client's registry, which vLLM's /metrics serves. Idempotent.

    With several API servers prometheus_client works through shared files and takes no callback. There a thread of each
    front end sets the metrics every ``REFRESH_SECONDS`` seconds. Workers on another machine (Ray) are not counted.
    """
    global _is_registered
    if _is_registered:
        return
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        from prometheus_client import Gauge

        gauges = {
            name: Gauge(name, metric.help, metric.names, multiprocess_mode="mostrecent")
            for name, metric in METRICS.items()
        }
        Thread(target=_refresh, args=(gauges, folder), daemon=True).start()
    else:
        from prometheus_client import REGISTRY

        REGISTRY.register(_Collector(folder))
    _is_registered = True


def _warn_left_out(reason: str) -> None:
    log.say_once(logging.WARNING, f"left out of the metrics: {reason}")


def _refresh(gauges: Mapping[str, Any], folder: Path) -> None:
    earlier: dict[str, Samples] = {name: {} for name in gauges}
    while True:
        try:
            current = read_samples(folder)
            for name, gauge in gauges.items():
                # The shared files keep every sample, so a sample that is gone is set to 0.
                for labels, value in (dict.fromkeys(earlier[name], 0) | current[name]).items():
                    gauge.labels(*labels).set(value)
                earlier[name] |= current[name]
        except Exception as error:
            _warn_left_out(f"{folder}: {type(error).__name__}: {error}")
        sleep(REFRESH_SECONDS)


def read_samples(folder: Path) -> dict[str, Samples]:
    """Return the samples of each of ``METRICS``, of the engines of this run; of engines with equal labels, of the last.

    A layer counts as engaged only if every rank that has the layer engages it. Ranks of a tensor-parallel group have
    the same layers, stages of a pipeline different layers. An engine to which vLLM gives no MLA layer counts as one
    skipped layer. A rank without a file, which may be on another node, counts as silent and in no other sample. An
    engine that has ended has no sample. A file that cannot be read is left out, and named once in the log.

    If somebody has removed the lock of the run, the front end takes the lock again here. Otherwise its engines would
    count as ended.
    """
    with suppress(OSError):  # the workers warn if they cannot write their status there
        renew_run_lock(folder)
    records = read_records(folder, ensure_run_name(), _warn_left_out)
    # No wait: with one API server a scrape stops every token stream. For one scrape an engine that ends may look alive.
    server_locks = ServerLocks(folder, records, waits=False)
    samples_by_name: dict[str, Samples] = {name: {} for name in METRICS}
    records_by_labels = {
        (engine_records[0].model_name or "", engine.dp_index): engine_records
        for engine, engine_records in group_by_engine(records).items()
        if server_locks.is_serving(engine_records) is not False
    }
    for engine_labels, engine_records in records_by_labels.items():
        for name, samples in _engine_samples(engine_records).items():
            samples_by_name[name] |= {(*engine_labels, *labels): value for labels, value in samples.items()}
    return samples_by_name


def _engine_samples(records: Sequence[RankRecord]) -> dict[str, Samples]:
    """Return the samples of one engine, by labels without ``ENGINE_LABELS``."""
    merged = merge_ranks(records_of_all_ranks(records))
    engaged = merged.engaged_everywhere
    skipped = (merged.engaged | merged.skipped).keys() - engaged
    num_fallen = len(merged.fallback_skips_by_rank)
    ranks: Samples = {
        ("agreeing",): merged.num_agreeing,
        ("fell_back",): num_fallen,
        ("differing",): merged.num_ranks - merged.num_agreeing - num_fallen - merged.num_silent,
        ("silent",): merged.num_silent,
    }
    return {
        LAYERS: {("engaged",): len(engaged), ("skipped",): len(skipped)},
        KERNEL_LAYERS: _kernel_layers(records, engaged),
        RANKS: ranks,
        ABORTED_BEFORE: {(kernel,): 1 for kernel in aborted_kernels(records)},
        INFO: {(merged.first_record.evidence.plugin, merged.first_record.integration): 1},
    }


def _kernel_layers(records: Sequence[RankRecord], engaged: Collection[str]) -> Samples:
    """Return how many of the engaged layers run a kernel at so many tokens. If ranks differ, the first rank counts."""
    decisions: dict[str, Decision] = {}
    for record in records:
        for group in record.decision_groups:
            for layer in group.layers:
                decisions.setdefault(layer, group.decision)
    return Counter(
        (span.kernel, span.tokens_text)
        for layer, decision in decisions.items()
        if layer in engaged
        for span in decision.kernel_spans
    )

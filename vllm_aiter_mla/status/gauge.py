# SPDX-License-Identifier: Apache-2.0
"""The gauge: workers write status files, and the front end reads those of its run at each scrape."""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

from vllm_aiter_mla.compat import log
from vllm_aiter_mla.status.record import by_engine, join_run, read_all, start_run

NAME = "aiter_mla_layers"
"""vLLM clears every metric whose name holds "vllm" when it builds its own, so this one must not."""
HELP = "MLA layers of vllm-aiter-mla by state: on the fast path (engaged) or left to vLLM (skipped)."
REFRESH_S = 15.0
"""How often the gauge reads the status files where prometheus_client cannot call back (several API servers)."""


@dataclass(frozen=True)
class _Collector:
    """Answers a scrape with what the status files of this run hold at that moment."""

    folder: Path

    def collect(self) -> Iterator[Any]:
        """Yield the gauge; without a sample before the workers have written their status. Never raises."""
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(NAME, HELP, labels=["model_name", "engine", "state"])
        try:
            for labels, value in samples(self.folder):
                family.add_metric(labels, value)
        except Exception as error:  # every other metric of the server would be lost with this one
            _left_out(f"{self.folder}: {type(error).__name__}: {error}")
        yield family


# Of the process, as prometheus_client's registry is.
_shown: list[Any] = []


def show(folder: Path) -> None:
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

        gauge = Gauge(NAME, HELP, ["model_name", "engine", "state"], multiprocess_mode="mostrecent")
        _shown.append(gauge)
        Thread(target=_refresh, args=(gauge, folder), daemon=True).start()
    else:
        from prometheus_client import REGISTRY

        _shown.append(_Collector(folder))
        REGISTRY.register(_shown[0])


def _left_out(why: str) -> None:
    log.say_once(logging.WARNING, f"left out of the gauge {NAME}: {why}")


def _refresh(gauge: Any, folder: Path) -> None:
    while True:
        with suppress(Exception):
            for labels, value in samples(folder):
                gauge.labels(*labels).set(value)
        sleep(REFRESH_S)


def samples(folder: Path) -> list[tuple[list[str], int]]:
    """Return ([model name, engine, state], layers) of every engine of this run.

    A layer counts as engaged only if every rank that holds it says so. Ranks of a tensor-parallel group hold the same
    layers and those of a pipeline different ones; both come out right. An engine to which vLLM gives no MLA
    layer counts as one skipped layer. A rank without a file is not counted: it may be another node's. A file that
    cannot be read is left out, and named once in the log.
    """
    found = []
    for (_, *engine), records in by_engine(read_all(folder, start_run(), _left_out)).items():
        skipped = {name for record in records for name in record.skipped}
        engaged = {name for record in records for name in record.engaged} - skipped
        found += [([*engine, "engaged"], len(engaged)), ([*engine, "skipped"], len(skipped))]
    return found

"""Records of engines whose layers have become what a test says."""

import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.support.decisions import decision
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.decided import LayerState
from vllm_aiter_mla.status import liveness
from vllm_aiter_mla.status.engine_status import EngineStatus, record_of_skipped_engine
from vllm_aiter_mla.status.record import RankRecord

if TYPE_CHECKING:  # the import takes seconds, and some processes of tests only write records
    from vllm_aiter_mla.serving.layer import Layer

NOTHING = LayerState(decision())
"""A layer that has not run, and for which nothing was decided."""


def record_of(
    names: Iterable[str], limit: int = 16, cache: str = "fp8", rank: int = 0, card: str = "cpu"
) -> RankRecord:
    """The record of layers that have not run."""
    return with_layers(EngineStatus(), dict.fromkeys(names, NOTHING), limit, cache, rank, card=card)


def record_with(layer: "Layer", ran: str, limit: int = 16, card: str = "cpu") -> RankRecord:
    """The record of the engine of a layer, once that has run a kernel."""
    layer.ran_kernel = ran
    return with_layers(layer.engine_status, {layer.name: layer.state()}, limit, card=card)


def with_layers(
    status: EngineStatus,
    layers: dict[str, LayerState],
    limit: int = 512,
    cache: str = "fp8",
    rank: int = 0,
    integration: str = "module",
    card: str = "cpu",
) -> RankRecord:
    """The record of an engine of one rank whose layers have these states, in this process's run if it has one."""
    run = os.environ.get(liveness.RUN_VARIABLE, "")
    return status.make_record(layers, RankRecord(rank, integration, card, limit, cache, run=run, num_ranks=1))


def skipped_engine(code: str, message: str, layers: tuple[int, ...]) -> RankRecord:
    """The record of an engine that is skipped as a whole, in this process's run if it has one."""
    run = os.environ.get(liveness.RUN_VARIABLE, "")
    return record_of_skipped_engine(Skip(code, message), layers, kv_cache_dtype="fp8", run=run)


def wait_for_the_file() -> None:
    """Wait until the status files of this process hold what was corrected."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()

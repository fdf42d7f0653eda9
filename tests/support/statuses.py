"""Records of engines whose layers have become what a test says."""

import threading
from collections.abc import Iterable

from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.status.engine_status import EngineStatus, Outcome
from vllm_aiter_mla.status.record import RankStatus


def record_of(
    names: Iterable[str], limit: int = 16, cache: str = "fp8", rank: int = 0, card: str = "cpu"
) -> RankStatus:
    """The record of layers that have not run."""
    return EngineStatus().record_of(dict.fromkeys(names, Outcome()), limit, cache, rank, "module", card)


def record_with(layer: Layer, ran: str, limit: int = 16, card: str = "cpu") -> RankStatus:
    """The record of the engine of a layer, once that has run a kernel."""
    layer.ran = ran
    return layer.engine_status.record_of({layer.name: layer.outcome()}, limit, "fp8", 0, "module", card)


def wait_for_the_file() -> None:
    """Wait until the status files of this process hold what was corrected."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()

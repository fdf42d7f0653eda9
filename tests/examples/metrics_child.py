"""A server as far as its /metrics go: vLLM's own metrics and the plugin's in one process.

``python -m tests.examples.metrics_child FOLDER`` prints its port, and what /metrics says in each of ``SCENARIOS``, as
JSON. Then it serves /metrics, with all that the alerts are for at once, until it is ended.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

# vLLM reads it when its metrics are made; the canary has it.
os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = "1"

from prometheus_client import REGISTRY, generate_latest, start_http_server
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

from tests.sandbox.model import TinyDeepseek, save_config
from tests.support.decisions import decision
from tests.support.statuses import skipped_engine, with_layers
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.decided import LayerState, RejectedKernel
from vllm_aiter_mla.status import liveness, metrics, status_files
from vllm_aiter_mla.status.engine_status import EngineStatus

MODEL = "tiny"
DECISION = decision((1, 32, "triton"), (33, 512, "vllm"))
ABORTED = (RejectedKernel("aiter", "a start ended in its first call", aborted=True),)
ENGAGED = LayerState(DECISION, "triton")
ON_AITER = LayerState(DECISION, "aiter")
AFTER_ABORT = LayerState(replace(DECISION, rejected_kernels=ABORTED), "triton")
WINDOW = Skip("sliding_window", "the layer has a sliding window")
SKIPPED = LayerState(decision(skip=WINDOW), skip=WINDOW)


def write(folder: Path, *ranks: Sequence[LayerState]) -> None:
    """Write a status file for each rank; layers are named by their place."""
    for rank, states in enumerate(ranks):
        layers = {f"layers.{place}": state for place, state in enumerate(states)}
        record = with_layers(EngineStatus(), layers, rank=rank, card="gfx942")
        status_files.write_status(folder, replace(record, model_name=MODEL, dp_index="0", num_ranks=len(ranks)))


def write_skipped_engine(folder: Path) -> None:
    record = skipped_engine("dcp", "why", (0, 1))
    status_files.write_status(folder, replace(record, model_name=MODEL, dp_index="0"))


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "without the plugin": lambda folder: None,
    "healthy": lambda folder: write(folder, [ENGAGED] * 2, [ENGAGED] * 2),
    "a skipped layer": lambda folder: write(folder, [ENGAGED, SKIPPED], [ENGAGED, SKIPPED]),
    "a skipped engine": write_skipped_engine,
    "an aborted kernel": lambda folder: write(folder, [AFTER_ABORT] * 2),
    "a rank that fell back": lambda folder: write(folder, [ENGAGED] * 2, [ENGAGED, SKIPPED]),
    "a rank with another kernel": lambda folder: write(folder, [ENGAGED] * 2, [ON_AITER] * 2),
    "corrupted": lambda folder: write(folder, [ENGAGED] * 2),
    "all at once": lambda folder: write(folder, [AFTER_ABORT] * 2, [AFTER_ABORT, SKIPPED]),
}


def step(logger: PrometheusStatLogger, corrupted: int = 0) -> None:
    """Record a decode step of eight requests, one of which has ended."""
    stats = IterationStats()
    stats.num_generation_tokens, stats.inter_token_latencies_iter = 8, [0.02] * 8
    stats.finished_requests = [FinishedRequestStats(FinishReason.STOP, mean_time_per_output_token=0.02)]
    stats.num_corrupted_reqs = corrupted
    logger.record(SchedulerStats(), stats)


def said(folder: Path, scenario: str) -> str:
    """Return what /metrics says; each scenario is a run of its own."""
    os.environ[liveness.RUN_VARIABLE] = f"{os.getpid()}-{scenario.replace(' ', '-')}"
    SCENARIOS[scenario](folder)
    return generate_latest(REGISTRY).decode()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    model = save_config(TinyDeepseek().config(), folder / "model")
    arguments = EngineArgs(model=str(model), served_model_name=MODEL, skip_tokenizer_init=True, load_format="dummy")
    logger = PrometheusStatLogger(arguments.create_engine_config())
    liveness.ensure_run_lock(folder)
    metrics.register_metrics(folder)
    step(logger)
    told = {one: said(folder, one) for one in SCENARIOS if one not in ("corrupted", "all at once")}
    step(logger, corrupted=1)
    told |= {one: said(folder, one) for one in ("corrupted", "all at once")}
    server, _ = start_http_server(0, "127.0.0.1")
    print(json.dumps({"port": server.server_port, "scrapes": told}), flush=True)
    while True:
        step(logger)
        time.sleep(0.1)

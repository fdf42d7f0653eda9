"""Files for the report, from the code that writes them; the figures are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.support import plans
from tests.support.decisions import decision, spans
from tests.support.statuses import record_of
from vllm_aiter_mla import files, locks
from vllm_aiter_mla.commands.check.record import CheckRun, StepResult
from vllm_aiter_mla.commands.check.timing.record import Measurement, make_row
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.commands.report.serving_record import METRICS, Estimate, PointResult, Serving
from vllm_aiter_mla.decided import ShapeTiming
from vllm_aiter_mla.status import liveness
from vllm_aiter_mla.status.record import DecisionGroup

LAYERS = [f"model.layers.{n}.self_attn.attn" for n in range(4)]


def status(**changes: Any) -> dict[str, Any]:
    """A worker's status as JSON: four layers engaged."""
    engaged: dict[str, Any] = {"engaged": dict.fromkeys(LAYERS, "reference"), "skipped": {}}
    groups = (DecisionGroup(tuple(LAYERS), decision((1, 64, "triton"), (65, 256, "vllm"))),)
    made = {"card": "gfx942", "run": "1-a", "engine_id": "1", "decision_groups": groups}
    found = replace(
        record_of(LAYERS, 16, "bfloat16", 0), **engaged | made | {"pass_counts": {"1-16": {"matched": 4}}} | changes
    )
    return dict(json.loads(files.to_json(found)))


def ended(folder: Path, run: str = "1-a") -> None:
    """Leave the locks of a run and of its ranks behind, as a server does that has ended."""
    for name in (run, *(f"{run}-1-0-{rank}" for rank in range(3))):
        (folder / f"{liveness.LOCK_PREFIX}{name}").touch()


def front_end(folder: Path, run: str = "1-a") -> None:
    """Hold the lock of a run, and none of its ranks, as a script does that has shut its engine down."""
    ended(folder, run)
    locks.try_hold(folder / f"{liveness.LOCK_PREFIX}{run}")


def living(folder: Path, run: str = "1-a") -> None:
    """Hold the locks of a run and of its ranks, as its front end and its workers do."""
    front_end(folder, run)
    for rank in range(3):
        locks.try_hold(folder / f"{liveness.LOCK_PREFIX}{run}-1-0-{rank}")


def measured() -> ShapeTiming:
    """One layer shape that was timed at start-up."""
    us = {t: {"aiter": 3.2 + t / 60, "vllm": 5.4 + t / 55, "triton": 2.2 + t / 90} for t in (1, 16, 64, 256)}
    return ShapeTiming("16 heads", tuple(LAYERS), spans((1, 64, "triton"), (65, 256, "aiter")), us)


def checked(path: Path, name: str, data: Any, status: int) -> Path:
    """Write a check of one step."""
    state: Any = {0: "passed", 1: "failed"}[status]
    step = StepResult(state, "made up", data=data, name=name)
    files.write_record(path, CheckRun(None, status, (step,), on_a_card=None if name == "plan" else True))
    return path


def run_kernels(folder: Path) -> Path:
    """A real run of the kernels' cases on this CPU: one case."""
    out = folder / "kernels.json"
    options = ["--backend", "reference", "--case", "fresh-data", "--quick", "--device", "cpu", "--json", str(out)]
    assert CliRunner().invoke(app, ["check", "--only", "kernels", *options]).exit_code == 0
    return out


def write_plan(folder: Path) -> Path:
    """A plan of an engine that is skipped for two reasons, from an answer of vLLM's that is made up."""
    plan = plans.made_up(dcp=2, kv_cache_dtype="fp8_e5m2")
    return checked(folder / "plan.json", "plan", replace(plan, model=replace(plan.model, name="a model")), 1)


def write_timing(folder: Path) -> Path:
    """Made-up timings: one size is slower, one kernel was wrong, the run stopped early."""
    wrong, rows = {"aiter": "16 heads, fp8: aiter: self-check FAILED"}, []
    for heads in (16, 128):
        for tokens in (1, 64, 256):
            us = {"triton": 4.0 + tokens / 30, "vllm": 8.0, "aiter-opt": 1.0}
            rows.append(make_row(tokens, heads, "fp8", us, {"aiter": "self-check FAILED"}, ["aiter-opt"]))
    machine, stopped = {"card": "made up for a test"}, "16 heads, bf16: OutOfMemoryError"
    return checked(folder / "timing.json", "timing", Measurement(machine, "fp8", tuple(rows), wrong, stopped), 1)


def write_serving(folder: Path) -> Path:
    """A made-up comparison of two servers: two rates."""
    estimates = {metric: {"off": Estimate(10.0, 0.2), "on": Estimate(8.0, 0.1)} for metric in METRICS}
    lengths = {"input": 1024, "prefix": 0, "output": 256}
    rows = (
        PointResult({**lengths, "rate": 1.0}, estimates, None),
        PointResult({**lengths, "rate": 5.0}, estimates, None),
    )
    about = {"card": "8 x made up for a test", "torch": "2.13"}
    files.write_record(
        folder / "serving.json", Serving("serving speed", "a/model", about, "4/4 MLA layers engaged", rows)
    )
    return folder / "serving.json"

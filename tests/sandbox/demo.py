"""The demo: run the engines, hold them against each other, print and keep what came out."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tests.sandbox import engine
from tests.sandbox.compare import Figures, compare, op_count
from tests.sandbox.demo_tables import layer_table, scenario_table
from tests.sandbox.runs import Options, Run, describe, runs, why_not
from tests.sandbox.spec import EngineResult, EngineSpec
from vllm_aiter_mla import files


@dataclass(slots=True)
class Outcome:
    """One run beside its baseline."""

    run: Run
    base: EngineResult
    result: EngineResult
    figures: dict[str, Figures]

    @property
    def ok(self) -> bool:
        """Every layer engaged where the flag is on, and the bounds hold where they are gated."""
        return self.layers_ok and all(self.scenario_ok(name) for name in self.figures)

    @property
    def layers_ok(self) -> bool:
        """Every MLA layer of every rank engaged."""
        records = self.result.status
        return not self.run.spec.enabled or (
            bool(records) and all(len(r["engaged"]) == r["total"] > 0 for r in records)
        )

    def scenario_ok(self, name: str) -> bool:
        """Whether a scenario holds its bounds; a run without bounds holds them."""
        return self.run.bound is None or self.run.bound.holds(self.figures[name])

    def ops_per_layer(self) -> tuple[float, float] | None:
        """Computing calls below the limit's graph per layer, vLLM and fused; None where the flag is off."""
        start, end = self.result.ranges[0]
        key = f"{start}-{end}"
        graphs = (self.base.graphs.get(key), self.result.graphs.get(key))
        if not self.run.spec.enabled or None in graphs:
            return None
        layers = max(self.result.status[0]["total"], 1)
        return op_count(graphs[0] or "") / layers, op_count(graphs[1] or "") / layers

    def as_dict(self) -> dict[str, Any]:
        """The JSON of this run."""
        records = self.result.status
        first = records[0] if records else {"engaged": {}, "total": 0, "skipped": {}, "decode_limit": None}
        skipped = {name: why for record in records for name, why in record["skipped"].items()}
        return {
            "name": self.run.name,
            "kv_cache_dtype": self.run.spec.kv_cache_dtype,
            "numerics": self.run.numerics,
            "gated": self.run.bound is not None,
            "bound": None if self.run.bound is None else str(self.run.bound),
            "device": self.result.versions["device"],
            "flag": self.run.spec.enabled,
            "tensor_parallel_size": self.run.spec.tensor_parallel_size,
            "decode_limit": first["decode_limit"],
            "ranges": [list(r) for r in self.result.ranges],
            "layers": {"engaged": len(first["engaged"]), "total": first["total"], "skipped": skipped},
            "kernels": sorted({kernel for record in records for kernel in record["engaged"].values()}),
            "ops_per_layer": self.ops_per_layer(),
            "scenarios": {name: figures.as_dict() for name, figures in self.figures.items()},
            "seconds": {"off": self.base.seconds, "on": self.result.seconds},
            "ok": self.ok,
        }


def main(options: Options, console: Console | None = None) -> int:
    """Run the demo; 0 when every bound holds, 1 when one is missed, 2 when it cannot run."""
    console = console or _console()
    problem = why_not(options)
    if problem is not None:
        console.print(problem, style="red", highlight=False)
        return 2
    try:
        outcomes = _run(runs(options), console)
    except engine.EngineFailedError as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        return 1
    _print(outcomes, console)
    record = {"runs": [outcome.as_dict() for outcome in outcomes], "ok": all(outcome.ok for outcome in outcomes)}
    record["versions"] = outcomes[0].result.versions
    if options.json is not None:
        files.write(options.json, record | files.stamp("demo", 1))
        console.print(f"figures written to {options.json}")
    if options.keep is not None:
        _keep(options.keep, outcomes, record)
        console.print(f"graphs and results kept in {options.keep}")
    return 0 if record["ok"] else 1


def _console() -> Console:
    # Names of layers and messages may hold brackets: none of them is markup.
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=150, markup=False)


def _run(plan: list[Run], console: Console) -> list[Outcome]:
    """Run every distinct engine once and compare each of them with its baseline."""
    wanted: list[EngineSpec] = []
    for run in plan:
        wanted += [spec for spec in (run.base, run.spec) if spec not in wanted]
    results = _results(wanted, console)
    pairs = [(run, results[wanted.index(run.base)], results[wanted.index(run.spec)]) for run in plan]
    return [Outcome(run, base, result, compare(base, result)) for run, base, result in pairs]


def _results(wanted: list[EngineSpec], console: Console) -> list[EngineResult]:
    """Run the engines, two at a time where one takes one core; each has a bar that names its step."""
    alone = any(spec.device == "gpu" or spec.tensor_parallel_size > 1 for spec in wanted)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        TextColumn("{task.fields[step]}", markup=False),
        TimeElapsedColumn(),
    )
    with (
        tempfile.TemporaryDirectory(prefix="aiter-mla-") as inductor,
        Progress(*columns, console=console, transient=not console.is_terminal) as progress,
        ThreadPoolExecutor(1 if alone else 2) as pool,
    ):

        def result(task: TaskID, spec: EngineSpec) -> EngineResult:
            label = f"engine {task + 1}/{len(wanted)} ({describe(spec)})"
            if not console.is_terminal:
                console.print(f"demo: {label}", highlight=False)
            progress.start_task(task)
            progress.update(task, step="importing vLLM")
            passed: set[str] = set()

            def on_line(line: str) -> None:
                step = _step(line)
                if step:
                    passed.add(step)
                    progress.update(task, completed=len(passed), step=step)

            found = engine.run(spec, inductor=Path(inductor), on_step=on_line)
            progress.update(task, completed=len(_STEPS) + len(spec.scenarios) + 1, step="done")
            return found

        tasks = [
            progress.add_task(
                describe(spec), total=len(_STEPS) + len(spec.scenarios) + 1, step="waiting", start=False
            )
            for spec in wanted
        ]  # fmt: skip
        return list(pool.map(result, tasks, wanted))


# What the engine prints, and what it does next.
_STEPS = {
    "non-default args": "loading the model",
    "Loading weights took": "tracing",
    "Dynamo bytecode transform": "compiling the decode limit's graph",
    "Compiling a graph for compile range (1, ": "compiling the graph above it",
    "sandbox: engine is up": "serving",
}


def _step(line: str) -> str | None:
    if line.startswith("sandbox: scenario "):
        return line.removeprefix("sandbox: ")
    return next((step for needle, step in _STEPS.items() if needle in line), None)


def _print(outcomes: list[Outcome], console: Console) -> None:
    console.print(layer_table(outcomes))
    console.print(scenario_table(outcomes))
    for outcome in outcomes:
        for line in outcome.result.log:
            if "engaged" in line:
                console.print(f"{outcome.run.name}: {line[line.index('aiter-mla:') :]}", highlight=False)
    outcome = "every bound holds" if all(outcome.ok for outcome in outcomes) else "A BOUND IS MISSED"
    console.print(f"demo: {outcome}", style="green" if "holds" in outcome else "red")


def _keep(folder: Path, outcomes: list[Outcome], record: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / "demo.json", record | files.stamp("demo", 1))
    for number, outcome in enumerate(outcomes):
        for state, result in (("off", outcome.base), ("on", outcome.result)):
            files.write(folder / f"run{number}-{state}.json", asdict(result) | files.stamp("engine", 1))

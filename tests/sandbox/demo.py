"""Serve a small random DeepSeek-V2 with vLLM, flag off and flag on, and compare them: on this CPU, or on a GPU.

Over vLLM's default options, where the module is the integration, and over graph partition, where the three passes are.
Prints which layers engaged, what is left of each layer's graph, and per scenario how many tokens are equal and how far
the log-probabilities are apart. It starts eight engines, two at a time, over a bf16 cache and over an fp8 one; --full
starts ten, which do more. Exit status: 0 when every bound holds, 1 when one is missed, 2 for a wrong option. Results on
a CPU say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from tests.sandbox import engine
from tests.sandbox.compare import TokenComparison, compare, op_count
from tests.sandbox.runs import Options, Run, describe, runs, why_no_gpu
from tests.sandbox.spec import EngineResult, EngineSpec
from vllm_aiter_mla import files
from vllm_aiter_mla.admission import INTEGRATIONS

SIMULATED = "simulated-aiter"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"demo: {message}\n")


def parse(arguments: Sequence[str]) -> Options:
    """Return the options of a command line, or exit: 2 with one line where an option cannot be served here."""
    parser = _Parser(
        prog="python -m tests.sandbox",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")
    add("--keep", type=Path, metavar="DIR", help="keep FX graphs and results in this folder")
    add("--full", action="store_true", help="all scenarios and numerics, four layers")
    add("--tensor-parallel-size", "-tp", type=int, default=1, choices=(1, 2), help="workers")
    add("--kernel", default="reference", choices=("reference", SIMULATED, "triton"), help="triton needs a GPU")
    add("--arch", choices=("gfx942", "gfx950"), help=f"card of --kernel {SIMULATED}; gfx942 by default")
    add(
        "--attention",
        choices=("aiter", "sandbox"),
        help=f"attention under --kernel {SIMULATED}: vLLM's own AITER class (default), or the sandbox's",
    )
    add("--integration", default="both", choices=("both", *INTEGRATIONS), help="both by default")
    given = parser.parse_args(arguments)
    for name in ("arch", "attention"):
        if getattr(given, name) and given.kernel != SIMULATED:
            parser.error(f"--{name} {getattr(given, name)}: only with --kernel {SIMULATED}")
    if given.json and not given.json.parent.is_dir():
        parser.error(f"--json {given.json}: its folder does not exist")
    if given.keep and given.keep.exists() and not given.keep.is_dir():
        parser.error(f"--keep {given.keep}: is not a folder")
    problem = why_no_gpu(given.tensor_parallel_size) if given.kernel == "triton" else None
    if problem:
        parser.error(problem)
    return Options(**{name: value for name, value in vars(given).items() if value is not None})


@dataclass(slots=True)
class Outcome:
    """One run: what the engine gave with the flag off and on, and the distances between the two."""

    run: Run
    off: EngineResult
    on: EngineResult
    figures: dict[str, TokenComparison]

    @property
    def ok(self) -> bool:
        """Every layer engaged by the integration of the run, and every bound holds."""
        return self.layers_ok and all(self.scenario_ok(name) for name in self.figures)

    @property
    def layers_ok(self) -> bool:
        """Every MLA layer of every rank engaged, by the integration that the run names."""
        wanted = self.run.spec.plugin.integration
        records = self.on.status
        return bool(records) and all(
            len(record["engaged"]) == record["num_layers"] > 0 and record["integration"] == wanted for record in records
        )

    def scenario_ok(self, name: str) -> bool:
        """Whether a scenario holds the run's bound; True for a run without one."""
        return self.run.bound is None or self.run.bound.holds(self.figures[name])

    def ops_per_layer(self) -> tuple[float, float] | None:
        """Return the computing calls per layer in the graph of decode steps, flag off and on; None without graphs."""
        graphs = [found.decode_graph() for found in (self.off, self.on)]
        if not all(graphs):
            return None
        layers = max(self.on.status[0]["num_layers"], 1)
        return op_count(graphs[0]) / layers, op_count(graphs[1]) / layers

    def as_dict(self) -> dict[str, Any]:
        """The JSON of this run."""
        records = self.on.status
        first = records[0] if records else {"engaged": {}, "num_layers": 0, "skipped": {}, "decode_limit": None}
        skipped = {name: skip for record in records for name, skip in record["skipped"].items()}
        return {
            "name": self.run.name,
            "kv_cache_dtype": self.run.spec.vllm.kv_cache_dtype,
            "numerics": self.run.numerics,
            "gated": self.run.bound is not None,
            "bound": None if self.run.bound is None else str(self.run.bound),
            "device": self.on.versions["device"],
            "integration": self.run.spec.plugin.integration,
            "tensor_parallel_size": self.run.spec.vllm.tensor_parallel_size,
            "decode_limit": first["decode_limit"],
            "ranges": [list(r) for r in self.on.ranges],
            "layers": {"engaged": len(first["engaged"]), "total": first["num_layers"], "skipped": skipped},
            "kernels": sorted({kernel for record in records for kernel in record["engaged"].values()}),
            "ops_per_layer": self.ops_per_layer(),
            "scenarios": {name: figures.as_dict() for name, figures in self.figures.items()},
            "seconds": {"off": self.off.seconds, "on": self.on.seconds},
            "ok": self.ok,
        }


def main(options: Options, console: Console | None = None) -> int:
    """Run the demo; 0 when every bound holds, 1 when one is missed or an engine fails."""
    console = console or _console()
    try:
        outcomes = _run(runs(options), console)
    except engine.EngineFailedError as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        return 1
    ok = all(outcome.ok for outcome in outcomes)
    console.print(_layer_table(outcomes))
    console.print(_scenario_table(outcomes))
    for outcome in outcomes:
        for line in outcome.on.log:
            if "engaged" in line:
                console.print(f"{outcome.run.name}: {line[line.index('aiter-mla:') :]}", highlight=False)
    console.print(f"demo: {'every bound holds' if ok else 'A BOUND IS MISSED'}", style="green" if ok else "red")
    record = {"runs": [outcome.as_dict() for outcome in outcomes], "ok": ok, "versions": outcomes[0].on.versions}
    if options.json is not None:
        files.write_record(options.json, record | {files.STAMP_KEY: files.stamp("demo", 1)})
        console.print(f"figures written to {options.json}")
    if options.keep is not None:
        _keep(options.keep, outcomes, record)
        console.print(f"graphs and results kept in {options.keep}")
    return 0 if ok else 1


def _console() -> Console:
    # Names of layers and messages may hold brackets, which are no markup.
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=150, markup=False)


def _run(plan: list[Run], console: Console) -> list[Outcome]:
    """Run every distinct engine once, two at a time where one takes one core, and compare flag on with flag off."""
    wanted = list({str(spec): spec for run in plan for spec in (run.off, run.spec)}.values())
    one_by_one = any(spec.emulation.device == "gpu" or spec.vllm.tensor_parallel_size > 1 for spec in wanted)
    with tempfile.TemporaryDirectory(prefix="aiter-mla-") as inductor, ThreadPoolExecutor(2 - one_by_one) as pool:

        def start(spec: EngineSpec) -> EngineResult:
            label = f"demo: engine {wanted.index(spec) + 1}/{len(wanted)} ({describe(spec)})"
            console.print(f"{label} starts", highlight=False)
            found = engine.run(spec, inductor=Path(inductor))
            console.print(f"{label} is done after {found.seconds:.0f} s", highlight=False)
            return found

        results = list(pool.map(start, wanted))
    found = []
    for run in plan:
        off, on = (results[wanted.index(spec)] for spec in (run.off, run.spec))
        found.append(Outcome(run, off, on, compare(off, on)))
    return found


def _layer_table(outcomes: list[Outcome]) -> Table:
    """What engaged, up to which decode limit, and what is left of a layer's graph."""
    devices = sorted({outcome.on.versions["device"] for outcome in outcomes})
    headings = ("run", "numerics", "decode limit", "compile ranges", "engaged", "skipped", "graph ops per layer")
    table = Table(*headings, title=f"Layers (real vLLM engine; device: {', '.join(devices)})")
    for outcome in outcomes:
        record = outcome.as_dict()
        ops, layers = record["ops_per_layer"], record["layers"]
        table.add_row(
            record["name"],
            record["numerics"],
            str(record["decode_limit"] or "-"),
            " ".join(f"{start}-{end}" for start, end in record["ranges"]),
            f"{layers['engaged']}/{layers['total']}",
            "; ".join(sorted({f"{skip['code']}: {skip['message']}" for skip in layers["skipped"].values()})) or "none",
            "-" if ops is None else f"{ops[0]:.1f} -> {ops[1]:.1f}",
        )
    return table


def _scenario_table(outcomes: list[Outcome]) -> Table:
    """Tokens and log-probabilities, per run and scenario."""
    bounds = "; ".join(f"{o.run.name}: {o.run.bound}" for o in outcomes if o.run.bound is not None)
    table = Table(title="Flag on against flag off (greedy)", caption=bounds)
    headings = ("run", "scenario", "tokens", "equal", "top-1", "max |dlogprob|", "mean", "outcome")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("run", "scenario", "outcome") else "right")
    for outcome in outcomes:
        for name, found in outcome.figures.items():
            table.add_row(
                outcome.run.name,
                name,
                str(found.tokens),
                str(found.tokens_equal),
                f"{found.top1_agreement:.1%}",
                f"{found.max_abs_dlogprob:.2g}",
                f"{found.mean_abs_dlogprob:.2g}",
                "reported" if outcome.run.bound is None else "ok" if outcome.scenario_ok(name) else "MISSED",
            )
    return table


def _keep(folder: Path, outcomes: list[Outcome], record: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files.write_record(folder / "demo.json", record | {files.STAMP_KEY: files.stamp("demo", 1)})
    for number, outcome in enumerate(outcomes):
        for side, result in (("off", outcome.off), ("on", outcome.on)):
            files.write_record(
                folder / f"run{number}-{side}.json", asdict(result) | {files.STAMP_KEY: files.stamp("engine", 1)}
            )

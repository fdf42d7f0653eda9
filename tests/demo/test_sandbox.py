"""The sandbox: only its processes see its vLLM plugin, and its mended parts of vLLM do what vLLM would on a GPU."""

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import distributions, entry_points
from types import SimpleNamespace

import pytest
import torch

from tests.sandbox import check, engine, knobs, platform, plugin
from tests.sandbox.card import PageIndices
from tests.sandbox.spec import Emulation, EngineSpec, PluginOptions, VllmOptions
from tests.support import plans, waiting
from tests.support.statuses import record_of
from vllm_aiter_mla.commands.check import steps
from vllm_aiter_mla.commands.check.engine import steps as engine_steps
from vllm_aiter_mla.commands.check.engine.record import EngineAnswer
from vllm_aiter_mla.commands.plan import planner
from vllm_aiter_mla.status import liveness

GROUP = "vllm.general_plugins"


def test_make_demo_runs_its_engine_by_both_integrations_and_over_both_caches_each_with_a_plan(monkeypatch):
    ran = []

    def made_up_plans(source, asked, *_):
        return tuple(plans.made_up(kv_cache_dtype="fp8" if "fp8" in arguments else "auto") for arguments in asked)

    def engine_of(context):
        arguments = context.options.serve_arguments
        partition = "-cc.use_inductor_graph_partition=true" in arguments
        *_, integration = (one for one in arguments if one.startswith(f"{check.PLUGIN}integration="))
        ran.append((context.plan.options.kv_cache_dtype, integration.rpartition("=")[2], partition))
        assert context.answers == {}
        return steps.StepResult("passed", "")

    monkeypatch.setattr(planner, "make_plans", made_up_plans)
    passing = dict.fromkeys(steps.STEPS, steps.StepSpec(lambda context: steps.StepResult("passed", "")))
    with_plan = passing | {"plan": steps.STEPS["plan"]} | dict.fromkeys(check.ENGINE, steps.StepSpec(engine_of))
    monkeypatch.setattr(steps, "STEPS", with_plan)
    monkeypatch.setattr(check, "engines_on_this_cpu", lambda variables: nullcontext())
    check.main()
    ways = [("fp8", "module", False), ("auto", "passes", True)]
    assert ran == [way for way in ways for _ in check.ENGINE]


def test_the_sandbox_runs_both_sides_on_this_cpu_with_its_variables(monkeypatch, tmp_path):
    """``check`` itself skips the engine without a card."""
    rank = replace(record_of(["layer"], 16, "fp8", 0), engaged={"layer": "reference"}, skipped={})
    sides = []

    def run_engine(options, environment):
        sides.append((options.side, environment["A_SANDBOX"], options.num_random_layers, options.serve_arguments[-1]))
        return EngineAnswer({}, {}, {}, {}, 0, rank_records=(rank,))

    monkeypatch.setattr(engine_steps, "run_engine", run_engine)
    asked = check.context(tmp_path)
    asked.plan = plans.made_up()
    assert steps.STEPS["engine"].run(asked).status == "skipped"
    with check.engines_on_this_cpu({"A_SANDBOX": "1"}):
        assert steps.STEPS["engine"].run(asked).status == "passed"
    assert sorted(sides) == [("off", "1", 4, "512"), ("on", "1", 4, "512")]
    assert set(asked.answers) == {"off", "on"}


def test_no_installed_package_lists_the_sandbox():
    assert plugin.NAME not in entry_points(group=GROUP).names


@pytest.mark.parametrize(
    "spec",
    [EngineSpec(), EngineSpec(emulation=Emulation(device="gpu")), EngineSpec(plugin=PluginOptions(loaded=False))],
)
def test_an_engine_finds_the_sandboxs_plugin_and_inherits_the_path_but_not_the_gauge(spec, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "given")
    monkeypatch.setenv(liveness.RUN_VARIABLE, str(tmp_path))
    environment = engine.environment_for(spec, tmp_path, tmp_path)
    assert liveness.RUN_VARIABLE not in environment
    first, *rest = environment["PYTHONPATH"].split(os.pathsep)
    assert rest == [str(plugin.CHECKOUT), "given"]
    (found,) = distributions(path=[first])
    loaded = {entry.group: entry.load() for entry in found.entry_points if entry.name == plugin.NAME}
    assert loaded == {GROUP: plugin.activate, "vllm.platform_plugins": platform.find}
    assert environment["VLLM_PLUGINS"].split(",") == ["aiter_mla", plugin.NAME][not spec.plugin.loaded :]


def engine_of(spec, **dropped):
    """What ``knobs.check_kept`` reads of an engine, with the options of the spec but for those dropped."""
    has = {"async_scheduling": False, "enable_prefix_caching": False, "mode": 3, "cudagraph_mode": "NONE",
           "use_inductor_graph_partition": False,
           "kv_cache_dtype_skip_layers": []} | spec.vllm.extra | spec.vllm.compilation | dropped  # fmt: skip
    graphs = SimpleNamespace(name=has.pop("cudagraph_mode"))
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(**has), cache_config=SimpleNamespace(**has),
        compilation_config=SimpleNamespace(**has, cudagraph_mode=graphs),
    )  # fmt: skip
    answers = {"runner_module": [knobs.RUNNERS[has.get("runner", spec.vllm.runner)]]}
    return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config), collective_rpc=answers.__getitem__)


ASKED = EngineSpec(vllm=VllmOptions(
    extra={"async_scheduling": True, "enable_prefix_caching": True, "block_size": 16},
    compilation={"mode": 2, "cudagraph_mode": "PIECEWISE", "use_inductor_graph_partition": True},
))  # fmt: skip


def test_an_engine_runs_with_the_options_of_its_spec():
    knobs.check_kept(ASKED, engine_of(ASKED))


@pytest.mark.mutation
@pytest.mark.parametrize(
    "dropped",
    [
        {"async_scheduling": False}, {"enable_prefix_caching": False}, {"mode": 0}, {"cudagraph_mode": "NONE"},
        {"use_inductor_graph_partition": False}, {"runner": "v1"},
    ],
    ids=str,
)  # fmt: skip
def test_mutation_an_option_that_the_platform_drops_in_silence_ends_the_engine(dropped):
    with pytest.raises(RuntimeError, match=next(iter(dropped))):
        knobs.check_kept(ASKED, engine_of(ASKED, **dropped))


def test_an_option_that_the_platform_changes_without_a_reason_is_named():
    asked = {"scheduler_config.async_scheduling": "True", "parallel_config.worker_cls": "auto"}
    platform.check_unchanged(asked, asked | {"parallel_config.worker_cls": "the CPU's"}, platform.CHANGED)
    with pytest.raises(RuntimeError, match="async_scheduling"):
        platform.check_unchanged(asked, asked | {"scheduler_config.async_scheduling": "False"}, platform.CHANGED)


class Interrupted:
    def readline(self):
        raise KeyboardInterrupt


def test_an_interrupted_run_leaves_no_process_behind(tmp_path):
    importer = engine.Importer(dict(os.environ))
    importer._process.stdout = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        importer.engine(engine.Request("", "", str(tmp_path / "log"), {}))
    assert importer._process.poll() is not None


SERVES = """
import os, sys, time, types
sys.modules["vllm.plugins"] = types.SimpleNamespace(load_general_plugins=lambda: print("loaded"))
from tests.sandbox import child
child.load = lambda path: path
def main(spec, result):
    print(os.environ["A_CACHE"], os.getpid(), flush=True)
    time.sleep(600 if str(spec) == "sleeps" else 0)
    sys.exit(3 if str(spec) == "fails" else 0)
child.main = main
child.serve()
"""


@pytest.fixture
def importer(monkeypatch):
    """One whose engines print a variable and their process, and then sleep, fail or end."""
    start = subprocess.Popen
    monkeypatch.setattr(engine.subprocess, "Popen", lambda words, **how: start([words[0], "-c", SERVES], **how))
    one = engine.Importer({**os.environ, "PYTHONPATH": str(plugin.CHECKOUT)})
    yield one
    one.end()


@pytest.mark.slow
def test_an_importer_forks_an_engine_for_each_request_and_gives_its_status_and_what_both_printed(importer, tmp_path):
    for spec, status in (("ends", 0), ("fails", 3), ("ends", 0)):
        log = tmp_path / f"{spec}-{status}"
        log.unlink(missing_ok=True)
        found, printed = importer.engine(engine.Request(spec, "", str(log), {"A_CACHE": spec}))
        loaded, (cache, process) = printed.splitlines()[0], printed.splitlines()[1].split()
        assert (found, loaded, cache) == (status, "loaded", spec)
        assert int(process) != importer._process.pid


def test_an_engine_ends_with_its_importer(importer, tmp_path):
    log = tmp_path / "log"
    request = engine.Request("sleeps", "", str(log), {"A_CACHE": "a"})
    thread = threading.Thread(target=importer.engine, args=(request,))
    thread.start()
    assert waiting.happened(lambda: log.exists() and log.read_text().endswith("\n"))
    process = int(log.read_text().split()[1])
    assert waiting.runs(process)
    importer.end()
    thread.join()
    assert waiting.happened(lambda: not waiting.runs(process))


POOL = """
import subprocess, sys, time
from tests.engine import engine_pool
engine_pool.end_with_caller()
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""
TESTS = """
import subprocess, sys, time
PIPE = subprocess.PIPE
pool = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=PIPE, stdout=PIPE, text=True, start_new_session=True)
print(pool.pid, pool.stdout.readline(), flush=True)
time.sleep(600)
"""


def test_the_pool_of_engines_ends_with_what_it_has_started_if_its_tests_are_killed():
    with subprocess.Popen([sys.executable, "-c", TESTS, POOL], stdout=subprocess.PIPE, text=True) as tests:
        processes = [int(number) for number in tests.stdout.readline().split()]
        assert all(map(waiting.runs, processes))
        tests.kill()
    assert waiting.happened(lambda: not any(map(waiting.runs, processes)))


@pytest.mark.parametrize("real", [None, [3, 6]])
def test_vllm_033_repeats_the_first_page_past_a_requests_real_length(real):
    table = torch.tensor([[5, 2], [7, 1]], dtype=torch.int32)
    bounds = torch.tensor([0, 5, 11], dtype=torch.int32)
    found = torch.full((12,), -1, dtype=torch.int32)
    more = () if real is None else (torch.tensor(real, dtype=torch.int32),)
    tail = {} if real is None else {"CLAMP_TAIL": True}
    PageIndices()[(2, 1)](found, table, *table.stride(), bounds, *more, KERNEL_BLOCK_SIZE=4, BLOCK_SIZE=1024, **tail)
    first = [20, 21, 22, 23, 8] if real is None else [20, 21, 22, 20, 20]
    assert found.tolist() == [*first, 28, 29, 30, 31, 4, 5, -1]

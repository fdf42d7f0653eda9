"""``check --only``: which steps run, on idle cards, what a process that aborts leaves, and what long work says."""

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from typer.testing import CliRunner

from tests.sandbox import check
from tests.sandbox.rehearsal_card import RehearsalCard, Scenario
from tests.support import in_process, plans
from tests.support.planted import raising
from tests.support.waiting import LONG_S, happened
from vllm_aiter_mla import files
from vllm_aiter_mla.commands import outputs, process
from vllm_aiter_mla.commands.check import idle, show, steps
from vllm_aiter_mla.commands.check import run as command
from vllm_aiter_mla.commands.check.context import CheckOptions, StepContext, WrongOptionError
from vllm_aiter_mla.commands.check.kernels import step as kernels_step
from vllm_aiter_mla.commands.check.options import build_plan_environment, split_deployments
from vllm_aiter_mla.commands.check.record import CheckRun, StepResult, StepStatus, has_run_card_step
from vllm_aiter_mla.commands.check.timing import child as timing_child
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.commands.plan import config_source, planner, printout
from vllm_aiter_mla.verify.results import Result, Verification

ROOT = Path(__file__).parents[2]
EVERY = tuple(steps.STEPS)
CONFIG = config_source.examples()["deepseek-r1"]["config"]


@pytest.mark.parametrize(
    ("only", "with_model", "run"),
    [
        ((), True, EVERY),
        (("machine",), True, ("machine",)),
        (("machine",), False, ("machine",)),
        (("timing", "kernels"), False, ("kernels", "timing")),
        (("kernels",), True, ("plan", "kernels")),
        (("issues",), True, ("plan", "issues")),
        (("launches",), True, ("plan", "engine", "launches")),
    ],
)
def test_only_runs_what_is_named_and_what_that_needs_in_order(only, with_model, run):
    assert steps.select_steps(only, with_model) == run


@pytest.mark.parametrize(("only", "named"), [((), "MODEL is missing"), (("engine",), "engine"), (("plan",), "plan")])
def test_only_some_steps_run_without_a_model(only, named):
    with pytest.raises(WrongOptionError, match=named):
        steps.select_steps(only, has_model=False)


def test_only_what_was_asked_for_by_name_gives_3_where_it_could_not_look():
    found = [StepResult("passed", "", name="machine"), StepResult("skipped", "no GPU", name="launches")]
    assert command.exit_status_of([*found, StepResult("passed", "", name="engine")], uses_cpu=False) == outputs.EXIT_OK
    assert command.exit_status_of(found, uses_cpu=True, require_all=True) == outputs.EXIT_INCOMPLETE


@pytest.mark.parametrize("device", [(), ("--device", "cpu")])
def test_a_step_that_was_asked_for_and_skipped_is_said_and_no_option_that_was_given_is_advised(device):
    done = CliRunner().invoke(app, ["check", "--only", "timing", *device])
    assert done.exit_code == outputs.EXIT_INCOMPLETE
    assert "skipped: 1" in done.output.splitlines()[-1]
    assert "--device cpu" not in done.output.splitlines()[-1]
    assert ("--device cpu is given" in done.output) is bool(device), "the reason is not the machine's"


@pytest.mark.parametrize("status", get_args(StepStatus))
def test_a_step_that_could_not_look_did_not_run_on_the_card(status):
    ran = status not in ("skipped", "unknown", "cut off")
    assert has_run_card_step([StepResult(status, "", name="timing")]) is ran


# What ends a process in the middle of a case: two back ends, of which the first aborts in its second case.
ABORTS = """
import os, sys
sys.path.insert(0, {root!r})
from vllm_aiter_mla.verify import session
found, run = session.FINDERS["reference"], session.run
session.FINDERS.clear()
session.FINDERS.update(first=found, second=found)
def aborting(item, engine):
    if (item.backend, item.case.name) == ("first", "other-slots"):
        print("a check of a kernel's failed", flush=True)
        os.abort()
    return run(item, engine)
session.run = aborting
"""
SOME = ("--case", "fresh-data", "--case", "other-slots", "--case", "scales-changed", "--variant", "bf16")


@pytest.fixture
def aborted(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ABORTS.format(root=str(ROOT)))
    path = tmp_path / "check.json"
    line = ["check", "--only", "kernels", "--device", "cpu", "--quick", *SOME, "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_aiter_mla", *line], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "COLUMNS": "200"},
    )  # fmt: skip
    return done, files.read_record(CheckRun, path)


@pytest.mark.slow
@pytest.mark.wide  # tests/verify/test_kernels_step.py in one process, tests/cli/test_process.py with a real SIGABRT
def test_a_back_end_that_aborts_fails_in_its_case_and_the_next_one_runs(aborted):
    done, found = aborted
    (step,) = found.steps
    assert (done.returncode, found.exit, step.status) == (1, 1, "failed"), done.stdout + done.stderr
    results = {(one["backend"], one["case"]): one for one in step.data["results"]}
    assert {name: one["status"] for name, one in results.items()} == {
        ("first", "fresh-data"): "passed", ("first", "other-slots"): "failed",
        **{("second", case): "passed" for case in ("fresh-data", "other-slots", "scales-changed")},
    }  # fmt: skip
    (finding,) = results["first", "other-slots"]["findings"]
    assert "SIGABRT in other-slots: a check of a kernel's failed" in finding["message"]
    assert "--case other-slots" in results["first", "other-slots"]["command"]
    assert "FAILED first other-slots" in done.stdout


def kernels_result(status):
    from vllm_aiter_mla.verify.results import Result

    return Result("fresh-data", "bf16", "first", "eager", status=status)


def of_a_card(monkeypatch, **scenario):
    RehearsalCard(Scenario(**scenario)).install(monkeypatch)
    in_process.install(monkeypatch)
    monkeypatch.setattr(idle, "processes_with_open_card", lambda: iter(["vllm (process 4711)"]))
    monkeypatch.setattr(timing_child, "time_layers", raising(RuntimeError("timed")))
    return CliRunner().invoke(app, ["check", "--only", "timing"])


def test_a_card_that_a_server_uses_is_said_before_anything_runs_on_it(monkeypatch):
    done = of_a_card(monkeypatch, in_use_gib=[170])
    assert done.exit_code == outputs.EXIT_INCOMPLETE
    said = re.sub(r"[\s|]+", " ", done.stdout)
    assert "card 0 is not idle: 170 of 192 GiB are in use; processes that have a card open: vllm (process 4711)" in said


@pytest.mark.mutation
def test_mutation_a_card_in_use_that_nobody_looks_at_is_caught(monkeypatch):
    monkeypatch.setitem(steps.STEPS, "timing", replace(steps.STEPS["timing"], needs_idle_cards=False))
    with pytest.raises(AssertionError, match="1 == 3"):
        test_a_card_that_a_server_uses_is_said_before_anything_runs_on_it(monkeypatch)


def test_a_process_that_holds_a_cards_device_file_is_named_and_this_one_is_not(tmp_path, monkeypatch):
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(idle, "DEVICE_FILES", re.compile(rf"{tmp_path}/kfd$"))
    line = "import sys, time; held = open(sys.argv[1]); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", line, tmp_path / "kfd"], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with open(tmp_path / "kfd"):
            found = [*idle.processes_with_open_card()]
        other.kill()
    assert [one.rpartition("process ")[2] for one in found] == [f"{other.pid})"]


def says_what_it_does(monkeypatch, capfd, seconds=LONG_S):
    """Check that a step is told of at its begin and twice more before it ends."""
    beats, say = threading.Semaphore(0), show._print_to_stderr

    def noted(text):
        say(text)
        beats.release()

    def works(context):
        beats.acquire()
        context.progress.show_activity("the third case")
        assert all(beats.acquire(timeout=seconds) for _ in range(2)), "it is mute"
        return StepResult("passed", "")

    monkeypatch.setattr(show, "_print_to_stderr", noted)
    monkeypatch.setitem(steps.STEPS, "kernels", steps.StepSpec(works))
    ((status, detail),) = [(step.status, step.detail) for step in command.run_steps(StepContext(), ("kernels",))]
    assert status == "passed", detail
    first, *lines = capfd.readouterr().err.splitlines()
    assert first == "1/1 kernels ..."
    assert all(re.fullmatch(r"kernels, \d+ s: the third case", one) for one in lines)


def test_a_long_step_says_what_it_does_also_without_a_terminal(monkeypatch, capfd):
    monkeypatch.setattr(show, "HEARTBEAT_SECONDS", 0.01)
    says_what_it_does(monkeypatch, capfd)


@pytest.mark.mutation
def test_mutation_a_long_step_that_is_mute_is_caught(monkeypatch, capfd):
    monkeypatch.setattr(show, "HEARTBEAT_SECONDS", LONG_S)
    with pytest.raises(AssertionError, match="it is mute"):
        says_what_it_does(monkeypatch, capfd, seconds=0.1)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a step puts forward."""
    made = SimpleNamespace(seconds=10.0)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: made.seconds))
    return made


@pytest.mark.parametrize("error", [None, RuntimeError("planted")])
def test_a_step_has_the_seconds_that_it_took_also_in_the_demo(monkeypatch, clock, error):
    def works(context):
        clock.seconds += 2.34
        if error:
            raise error
        return StepResult("passed", "", seconds=99.0)

    monkeypatch.setitem(steps.STEPS, "machine", steps.StepSpec(works, needs=()))
    status = "failed" if error else "passed"
    for name, run in (("machine", command.run_steps), ("machine, fp8 cache", demo_of("fp8 cache"))):
        assert [(one.name, one.status, one.seconds) for one in run(StepContext(), ("machine",))] == [
            (name, status, 2.3)
        ]


def demo_of(what):
    return lambda asked, names: check.run_steps(asked, what, *names)


def test_a_run_that_is_cut_off_keeps_the_cases_that_ended(monkeypatch, tmp_path):
    """As by Ctrl-C in the second case: what a process has told is in the file before it ends."""
    path = tmp_path / "check.json"

    def call(function, request, backend, environment, on_value, expected_errors):
        on_value(kernels_result("started"))
        on_value(kernels_result("passed"))
        raise process.SignalError(process.signal.SIGINT)

    monkeypatch.setattr(process, "call", call)
    with pytest.raises(process.SignalError, match="0 of 1 steps ended"):
        app(["check", "--only", "kernels", "--device", "cpu", "--json", str(path)], standalone_mode=False)
    found = files.read_record(CheckRun, path)
    (step,) = found.steps
    assert (found.exit, step.name, step.status) == (None, "kernels", "cut off")
    assert [one["case"] for one in step.data["results"]] == ["fresh-data"]


def test_a_run_that_is_cut_off_at_once_leaves_no_older_record(monkeypatch, tmp_path):
    path = tmp_path / "check.json"
    files.write_record(path, CheckRun("another", 0, (StepResult("passed", "", name="machine"),)))
    interrupted = steps.StepSpec(raising(process.SignalError(process.signal.SIGINT)), needs_model=False)
    monkeypatch.setitem(steps.STEPS, "machine", interrupted)
    with pytest.raises(process.SignalError, match="0 of 1 steps ended"):
        app(["check", "--only", "machine", "--json", str(path)], standalone_mode=False)
    found = files.read_record(CheckRun, path)
    assert (found.model, found.exit, found.steps) == (None, None, ())


def test_a_package_that_is_missing_fails_its_step_and_only_a_rocm_images_own_skips_it(monkeypatch):
    for name, status in (("ray", "failed"), ("torch", "skipped")):
        missing = raising(ModuleNotFoundError(f"No module named {name!r}", name=name))
        monkeypatch.setitem(steps.STEPS, "machine", steps.StepSpec(missing))
        assert [step.status for step in command.run_steps(StepContext(), ("machine",))] == [status]


def runs_until(released):
    process.send_value("it runs")
    return happened(Path(released).exists)


@pytest.mark.slow
def test_a_side_that_fails_ends_the_other(tmp_path):
    runs, off, released = threading.Event(), [], str(tmp_path / "released")

    def answer(side):
        if side == "on":
            assert runs.wait(LONG_S)
            raise RuntimeError("planted")
        try:
            off.append(process.call(runs_until, released, on_value=lambda value: runs.set()))
        except process.EndedError as error:
            off.append(error.ending)

    with pytest.raises(RuntimeError, match="planted"):
        check.both(answer)
    assert off == ["was ended by SIGKILL"]


def test_a_side_that_has_not_started_its_process_when_the_other_fails_is_ended_too(monkeypatch, tmp_path):
    """It is between two of its own processes, or about to start the first."""
    looked, off, end_calls = threading.Event(), [], process.end_calls

    def noted():
        end_calls()
        looked.set()

    def answer(side):
        if side == "on":
            raise RuntimeError("planted")
        assert looked.wait(LONG_S)
        try:
            off.append(process.call(runs_until, str(tmp_path / "released")))
        except process.EndedError as error:
            off.append(error.ending)

    monkeypatch.setattr(process, "end_calls", noted)
    monkeypatch.setattr(process, "POLL_SECONDS", 0.05)
    with pytest.raises(RuntimeError, match="planted"):
        check.both(answer)
    assert off == ["was ended by SIGKILL"]


@pytest.mark.slow
@pytest.mark.mutation
def test_mutation_one_look_for_processes_of_the_other_side_is_caught(monkeypatch, tmp_path):
    waits, wait = [], check.wait

    def once(sides, **how):
        waits.append(how)
        if len(waits) == 1:
            return wait(sides, **how)
        (tmp_path / "released").touch()
        return wait(sides)

    monkeypatch.setattr(check, "wait", once)
    with pytest.raises(AssertionError, match=r"\[True\] == "):
        test_a_side_that_has_not_started_its_process_when_the_other_fails_is_ended_too(monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.mutation
def test_mutation_a_side_that_goes_on_is_caught(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "end_calls", (tmp_path / "released").touch)
    with pytest.raises(AssertionError, match=r"\[True\] == "):
        test_a_side_that_fails_ends_the_other(tmp_path)


@pytest.mark.parametrize("typed", [("-tp", "1,2,4,8"), ("--tensor-parallel-size=1,2,4,8",), ("-tp=1, 2,4,8",)])
def test_several_sizes_of_tensor_parallelism_are_as_many_deployments(typed):
    sizes, found = split_deployments(("--kv-cache-dtype", "fp8", *typed, "--port", "1"))
    assert sizes == ["1", "2", "4", "8"]
    name = typed[0].partition("=")[0]
    assert found[3] == ("--kv-cache-dtype", "fp8", name, "8", "--port", "1")


@pytest.mark.parametrize("typed", [("-tp", "8"), ("-tp",), (), ("--served-model-name", "a,b"), ("-tp", "[1, 2]"),
                                   ("-tp", "1,2", "-tp", "4")])  # fmt: skip
def test_one_deployment_keeps_its_options_as_they_are(typed):
    assert split_deployments(typed) == ([""], [typed])


def test_several_plans_are_a_table_with_a_row_for_each(monkeypatch):
    def made_up_plans(source, deployments, *_):
        made = plans.made_up()
        sizes = [options[options.index("-tp") + 1] for options in deployments]
        return tuple(replace(made, options=replace(made.options, tp=int(size))) for size in sizes)

    monkeypatch.setattr(planner, "make_plans", made_up_plans)
    done = CliRunner().invoke(app, ["check", "deepseek-r1", "--only", "plan", "-tp", "1,2"])
    rows = [line.split()[0] for line in done.stdout.splitlines() if re.match(r" *\d+ ", line)]
    assert rows[:2] == ["1", "2"]
    refused = CliRunner().invoke(app, ["check", "deepseek-r1", "-tp", "1,2", "--only", "plan,issues"])
    assert (refused.exit_code, "-tp 1,2" in refused.stderr) == (2, True)


@pytest.mark.parametrize(("outcome", "told"), [("unknown", "-tp 1: not known"), ("engaged", "-tp 1: 0/61")])
def test_of_several_plans_one_that_is_not_known_engages_no_number_of_layers(monkeypatch, outcome, told):
    monkeypatch.setattr(planner, "make_plans", lambda *_: (replace(plans.made_up(), outcome=outcome),) * 2)
    options = CheckOptions(config_source.find_config("deepseek-r1"), ("-tp", "1,2"))
    assert told in steps.plan_model(StepContext(options)).detail


COUNTING = """
import os, sys
if "vllm_aiter_mla.commands.process" in getattr(sys, "orig_argv", ()):
    class Counting:
        def find_spec(self, name, path=None, target=None):
            if name == "vllm":
                open({log!r}, "a").write("imported\\n")
    sys.meta_path.insert(0, Counting())
"""


@pytest.mark.slow
@pytest.mark.wide  # tests/support/plan_child.py makes every plan of tests/plan in one process for each card
def test_a_plan_after_another_in_one_process_is_that_of_a_process_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    log = tmp_path / "log"
    (tmp_path / "sitecustomize.py").write_text(COUNTING.format(log=str(log)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    source, variables = config_source.find_config(str(tmp_path)), build_plan_environment((), {})
    options = [("-tp", size, "--kv-cache-dtype", "fp8") for size in ("1", "4")]
    together = planner.make_plans(source, options, "gfx942", variables, False)
    assert log.read_text().count("imported") == 1
    alone = planner.make_plans(source, options[1:], "gfx942", variables, False)
    assert without_time(together[1]) == without_time(alone[0]), "nothing is left of the first"
    assert [plan.heads_per_rank for plan in together] == [128, 32]
    assert printout.format_plans(together)


def without_time(plan):
    return {name: value for name, value in json.loads(files.to_json(plan)).items() if name != "evidence"}


def test_a_record_without_a_result_does_not_pass():
    assert kernels_step._judge(StepContext(), Verification(3, {}, "eager", None, {}, ())).status == "skipped"


def test_a_step_that_compared_no_kernel_of_ours_says_why():
    record = Verification(0, {}, "graph capture", None, {"triton": "no Triton"}, (REFERENCE_PASSED,))
    step = kernels_step._judge(StepContext(), record)
    assert (step.status, "back end triton: no Triton" in step.detail) == ("skipped", True)


REFERENCE_PASSED = Result("fresh-data", "fp8", "reference", "graph capture")


def test_an_empty_model_is_no_model_that_was_left_out():
    done = CliRunner().invoke(app, ["check", "", "--only", "machine"])
    assert (done.exit_code, "MODEL" in done.stderr) == (2, True)


def test_a_step_is_kept_before_it_is_printed(tmp_path, monkeypatch):
    """Standard output may be a pipe that nobody reads any more."""
    monkeypatch.setattr(command, "run_step", lambda *_: StepResult("failed", "planted"))
    monkeypatch.setattr(command.show, "print_findings", raising(BrokenPipeError()))
    one = command.CheckRunner(StepContext(), ("machine",), None, tmp_path / "check.json")
    with pytest.raises(BrokenPipeError):
        one.run_and_record()
    (kept,) = json.loads((tmp_path / "check.json").read_text())["steps"]
    assert (kept["name"], kept["status"]) == ("machine", "failed")


def test_a_torch_that_does_not_load_sees_no_card_and_costs_no_record(monkeypatch):
    device = "vllm_aiter_mla.kernels.device"
    monkeypatch.setitem(sys.modules, device, None)
    assert (CheckOptions().can_use_gpu, "ModuleNotFoundError" in CheckOptions().no_gpu_reason) == (False, True)
    monkeypatch.delitem(sys.modules, device)
    monkeypatch.delattr("vllm_aiter_mla.kernels.device", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        CheckOptions().can_use_gpu  # noqa: B018


def test_a_warning_is_in_the_last_line():
    passed, warned = StepResult("passed", ""), StepResult("warning", "slower with the flag on")
    assert "warning" in show.summary_line([passed, warned], 0)
    assert "warning" not in show.summary_line([passed, passed], 0)

"""The demo's status line: what counts as equal, what exits 1, and what the JSON holds. No engine is started."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from tests.sandbox import demo, engine
from tests.sandbox.compare import compare, op_count
from tests.sandbox.runs import EXACT
from tests.sandbox.spec import EngineResult, EngineSpec, load, save

STEPS = [[(3, {3: -0.5, 4: -1.0}), (4, {4: -0.2, 5: -2.0}), (5, {5: -0.1, 6: -3.0})]]


def result(scenarios=("short", "mixed"), steps=None, engaged=2, total=2):
    record = {
        "rank": 0,
        "total": total,
        "engaged": {f"layers.{i}": "reference" for i in range(engaged)},
        "skipped": {f"layers.{i}": ["impl", "unknown"] for i in range(engaged, total)},
        "partial": {},
        "compiled": {},
        "decode_limit": [1, 16],
        "kv_cache_dtype": "bfloat16",
    }
    return EngineResult(
        scenarios={name: steps or STEPS for name in scenarios},
        status=[record],
        ranges=[(1, 16), (17, 64)],
        graphs={"1-16": "%a = call_function[target=torch.ops.aten.mm.default](args = ())"},
        code={},
        branches={},
        pieces=0,
        log=["INFO aiter-mla: 2/2 MLA layers engaged"],
        versions={"vllm": "0", "device": "CPU"},
        seconds=1.0,
    )


@pytest.fixture
def run_demo(monkeypatch, tmp_path):
    """Run ``demo`` with these results for flag off and on; (exit status, JSON, printed text)."""

    def run(off, on):
        monkeypatch.setattr(engine, "run", lambda spec, **_: on if spec.enabled else off)
        console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
        path = tmp_path / "out.json"
        status = demo.main(demo.Options(json=path), console)
        return status, json.loads(path.read_text()), console.export_text()

    return run


def test_equal_runs_exit_0_and_the_json_holds_the_promised_figures(run_demo):
    status, record, text = run_demo(result(), result())
    assert status == 0
    assert record["ok"] is True
    assert [run["kv_cache_dtype"] for run in record["runs"] if run["gated"]] == ["auto", "fp8"]
    for run in record["runs"]:
        assert run["layers"] == {"engaged": 2, "total": 2, "skipped": {}}
        assert run["decode_limit"] == [1, 16]
        assert run["ranges"] == [[1, 16], [17, 64]]
        for found in (run["scenarios"]["short"], run["scenarios"]["mixed"]):
            assert found["tokens"] == found["tokens_equal"] == 3
            assert found["top1_agreement"] == 1.0
            assert found["max_abs_dlogprob"] == 0.0
    assert "2/2" in text


@pytest.mark.mutation
@pytest.mark.parametrize(
    "on",
    [
        pytest.param(result(steps=[[STEPS[0][0], (9, {9: -0.1}), STEPS[0][2]]]), id="a token differs"),
        pytest.param(result(steps=[[(3, {3: -0.5, 4: -1.1}), *STEPS[0][1:]]]), id="a log-probability is off by 0.1"),
        pytest.param(result(engaged=1), id="a layer is refused"),
        pytest.param(result(engaged=0, total=0), id="no layer at all"),
    ],
)
def test_mutation_demo_exits_1_where(run_demo, on):
    status, record, text = run_demo(result(), on)
    assert status == 1
    assert record["ok"] is False
    assert "A BOUND IS MISSED" in text


def test_the_bar_of_an_engine_names_each_step_that_it_prints():
    """The lines are those of a real engine of vLLM 0.32; nothing here starts one."""
    lines = [
        "INFO [api_utils.py:286] non-default args: {'skip_tokenizer_init': True}",
        "INFO [default_loader.py:501] Loading weights took 0.15 seconds",
        "INFO [backends.py:1166] Dynamo bytecode transform time: 3.34 s",
        "INFO [backends.py:398] Compiling a graph for compile range (1, 16) takes 41 s",
        "INFO [backends.py:398] Compiling a graph for compile range (17, 64) takes 4 s",
        "sandbox: engine is up",
        "sandbox: scenario short",
    ]
    steps = [step for step in map(demo._step, lines) if step]
    assert steps == [*demo._STEPS.values(), "scenario short"]


def test_after_the_first_difference_nothing_more_is_compared():
    other = result(steps=[[(3, {3: -0.5, 4: -1.0}), (9, {4: -0.2, 5: -2.0}), (5, {5: -9.0, 6: -9.0})]])
    found = compare(result(), other)["mixed"]
    assert (found.tokens, found.tokens_equal, found.compared, found.agreed) == (3, 1, 2, 1)
    assert found.max_abs_dlogprob == 0.0


@pytest.mark.parametrize("probs", [{3: float("nan"), 4: -1.0}, {7: -0.5}], ids=["not a number", "nothing in common"])
def test_fail_closed_figures_that_cannot_be_compared_hold_no_bound(probs):
    found = compare(result(), result(steps=[[(3, probs), *STEPS[0][1:]]]))["mixed"]
    assert found.max_abs_dlogprob == float("inf")
    assert not EXACT.holds(found)


def test_different_scenarios_are_not_compared():
    with pytest.raises(ValueError, match="different scenarios"):
        compare(result(), result(scenarios=("long",)))


def test_views_and_getitems_do_not_count_as_ops():
    text = "\n".join(
        f"%n{i} = call_function[target={target}](args = ())"
        for i, target in enumerate(
            (
                "torch.ops.aten.reshape.default",
                "operator.getitem",
                "torch.ops.aten.mm.default",
                "torch.ops.aten.slice.Tensor",
            )
        )
    )
    assert op_count(text) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (demo.Options(kernel="cutlass"), "--kernel: expected reference, simulated-aiter or triton, got 'cutlass'"),
        (demo.Options(kernel="simulated-aiter", arch="gfx90a"), "--arch: expected gfx942 or gfx950, got 'gfx90a'"),
        (demo.Options(kernel="triton"), "--kernel triton needs a GPU"),
        (demo.Options(integration="graph"), "--integration: expected passes or module, got 'graph'"),
    ],
)
def test_bad_options_exit_2_and_name_the_option_before_an_engine_starts(options, says, monkeypatch):
    monkeypatch.setattr(engine, "run", lambda *_, **__: pytest.fail("an engine was started"))
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    assert demo.main(options, console) == 2
    assert says in console.export_text()


def test_the_demo_runs_four_engines_which_are_held_to_equality():
    runs = demo.runs(demo.Options())
    assert [(run.spec.kv_cache_dtype, str(run.bound)) for run in runs] == [
        ("auto", "all tokens equal, max |dlogprob| <= 0.001"),
        ("fp8", "all tokens equal, max |dlogprob| <= 0.001"),
    ]
    assert {run.spec.scenarios for run in runs} == {("short", "mixed")}


def test_the_full_demo_runs_both_caches_and_all_numerics():
    runs = demo.runs(demo.Options(full=True))
    assert {run.spec.kv_cache_dtype for run in runs} == {"auto", "fp8"}
    assert [run.numerics for run in runs if run.bound] == ["activation dtype", "two-rounding"]
    assert {"aiter", "unmodified vLLM, one step perturbed"} <= {run.numerics for run in runs if not run.bound}
    assert all(not run.base.enabled and not run.base.vllm_pass for run in runs)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_demo_over_the_simulated_aiter_runs_vllms_own_attention_class_with_every_kind_of_head_count(arch):
    runs = demo.runs(demo.Options(kernel="simulated-aiter", arch=arch, full=True))
    assert {(run.spec.attention, run.spec.fake_arch) for run in runs} == {("aiter", arch)}
    assert {run.spec.model["num_attention_heads"] for run in runs} == {8, 16, 128}
    assert {(run.spec.kv_cache_dtype, bool(run.spec.drafts)) for run in runs if run.bound} == {
        ("auto", False),
        ("fp8", True),
    }
    sandbox = demo.runs(demo.Options(kernel="simulated-aiter", attention="sandbox"))
    assert {run.spec.attention for run in sandbox} == {"sandbox"}


def test_a_spec_and_a_result_survive_their_journey_through_files(tmp_path):
    spec = replace(EngineSpec(), scales=(0.5, 0.7), model={"num_hidden_layers": 2}, scenarios=("short", "long"))
    for record in (spec, result()):
        save(record, tmp_path / "record")
        assert load(tmp_path / "record") == record

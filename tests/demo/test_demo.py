"""The demo: options, what counts as equal, exit status, JSON, and runs on a GPU. No engine is started."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from tests.sandbox import child, demo, engine, integrations, plugin, runs
from tests.sandbox.compare import compare, op_count
from tests.sandbox.runs import EXACT, Options
from tests.sandbox.spec import Emulation, EngineResult, EngineSpec, PluginOptions
from tests.support.statuses import record_of
from vllm_aiter_mla import files
from vllm_aiter_mla.compat import layer as compat_layer

STEPS = [[(3, {3: -0.5, 4: -1.0}), (4, {4: -0.2, 5: -2.0}), (5, {5: -0.1, 6: -3.0})]]
GPU = EngineSpec(plugin=PluginOptions(kernel="triton"), emulation=Emulation(device="gpu"))


def result(scenarios=runs.SHORT_SCENARIOS, steps=None, engaged=2, total=2, integration="module"):
    names = [f"layers.{index}" for index in range(total)]
    record = files.to_plain(record_of(names, 16, "bfloat16", 0)) | {
        "engaged": dict.fromkeys(names[:engaged], "reference"),
        "skipped": {name: {"code": "impl", "message": "unknown"} for name in names[engaged:]},
        "integration": integration,
    }
    return EngineResult(
        scenarios={name: steps or STEPS for name in scenarios}, status=[record], ranges=[(1, 16), (17, 64)],
        graphs={"1-16": "%a = call_function[target=torch.ops.aten.mm.default](args = ())"}, seconds=1.0,
        log=["INFO aiter-mla: 2/2 MLA layers engaged"], versions={"vllm": "0", "device": "A Card"},
    )  # fmt: skip


def by_its_integration(spec, found):
    """The result as an engine of this spec gives it."""
    records = [record | {"integration": spec.plugin.integration} for record in found.status]
    return replace(found, status=records)


@pytest.fixture
def run_demo(monkeypatch, tmp_path):
    """Run ``demo`` with these results for flag off and on; (exit status, JSON, printed text)."""

    def run(off, on, named=by_its_integration, **options):
        monkeypatch.setattr(engine, "run", lambda spec, **_: off if spec.side == "off" else named(spec, on))
        console = Console(record=True, width=160, file=open(os.devnull, "w"))  # noqa: SIM115
        path = tmp_path / "out.json"
        status = demo.main(Options(json=path, **options), console)
        return status, json.loads(path.read_text()), console.export_text()

    return run


def test_equal_runs_exit_0_and_the_json_holds_the_promised_figures(run_demo):
    status, record, text = run_demo(result(), result())
    assert (status, record["ok"]) == (0, True)
    gated = [(run["integration"], run["kv_cache_dtype"]) for run in record["runs"] if run["gated"]]
    assert gated == [(way, cache) for way in ("module", "passes") for cache in ("auto", "fp8")]
    for run in record["runs"]:
        assert run["layers"] == {"engaged": 2, "total": 2, "skipped": {}}
        assert (run["decode_limit"], run["ranges"]) == (16, [[1, 16], [17, 64]])
        for found in run["scenarios"].values():
            assert found["tokens"] == found["tokens_equal"] == 3
            assert (found["top1_agreement"], found["max_abs_dlogprob"]) == (1.0, 0.0)
    assert "2/2" in text


@pytest.mark.mutation
@pytest.mark.parametrize(
    "on",
    [
        pytest.param(result(steps=[[STEPS[0][0], (9, {9: -0.1}), STEPS[0][2]]]), id="a token differs"),
        pytest.param(result(steps=[[(3, {3: -0.5, 4: -1.1}), *STEPS[0][1:]]]), id="a log-probability is off by 0.1"),
        pytest.param(result(engaged=1), id="a layer is skipped"),
        pytest.param(result(engaged=0, total=0), id="no layer"),
    ],
)
def test_mutation_demo_exits_1_where(run_demo, on):
    status, record, text = run_demo(result(), on)
    assert (status, record["ok"]) == (1, False)
    assert "A BOUND IS MISSED" in text


@pytest.mark.mutation
def test_mutation_a_demo_whose_layers_engage_by_another_integration_exits_1(run_demo):
    status, record, _ = run_demo(result(), result(), named=lambda spec, found: found)
    assert status == 1
    assert {run["integration"]: run["ok"] for run in record["runs"]} == {"module": True, "passes": False}


def test_the_demo_starts_at_most_eight_engines_two_for_each_comparison():
    found = runs.runs(Options())
    engines = {str(spec) for run in found for spec in (run.off, run.spec)}
    assert len(engines) == 2 * len(found) <= 8


def test_the_table_of_integrations_compares_each_engine_with_the_flag_off_and_the_same_options():
    code = "    buf0 = extern_kernels.mm(a)\n    cpp_fused_add_0(buf0)\n    torch.ops.vllm.attention.default(buf0)\n"
    same = replace(result(), code={"1-16": code}, compilations=2, step_us=7.4)
    other = replace(same, scenarios=result(steps=[[STEPS[0][0], (9, {9: -0.1}), STEPS[0][2]]]).scenarios)
    moved = "graph partition, flag on"
    rows = integrations.table({name: other if name == moved else same for name in integrations.ENGINES})
    found = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in row.split(" | ")] for row in rows[2:])}
    assert found["| default options, flag on"] == ["6 of 6", "0", "3", "2", "7 |"]
    assert {name.removeprefix("| ") for name, cells in found.items() if cells[0] != "6 of 6"} == {moved}
    assert [spec.plugin.integration for spec, _ in integrations.ENGINES.values() if spec.side == "on"] == [
        "module", "passes", "module",
    ]  # fmt: skip


def test_after_the_first_difference_nothing_more_is_compared():
    other = result(steps=[[(3, {3: -0.5, 4: -1.0}), (9, {4: -0.2, 5: -2.0}), (5, {5: -9.0, 6: -9.0})]])
    found = compare(result(), other)["mixed"]
    assert (found.tokens, found.tokens_equal, found.compared, found.top1_agreement) == (3, 1, 2, 0.5)
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
    aten = "torch.ops.aten."
    targets = (f"{aten}reshape.default", "operator.getitem", f"{aten}mm.default", f"{aten}slice.Tensor")
    assert op_count("\n".join(f"%n = call_function[target={target}](args = ())" for target in targets)) == 1
    inside = "%n = call_function[target=torch.ops.higher_order.auto_functionalized](args = ({},), kwargs = {{}})"
    assert [op_count(inside.format(op)) for op in ("vllm.attention.default", "aten.reshape.default")] == [1, 0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such", "1"],
        ["--json", "no/such/x.json"],
        ["--keep", __file__],
        ["--kernel", "nonsense"],
        ["--kernel", "triton"],
        ["--arch", "gfx950"],
        ["--kernel", "simulated-aiter", "--arch", "gfx90a"],
        ["--attention", "aiter"],
        ["--kernel", "simulated-aiter", "--attention", "x"],
        ["--integration", "graph"],
        ["-tp", "3"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_one_line_on_stderr_that_names_it_and_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        demo.parse(arguments)
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith("demo: ")
    assert arguments[-2] in said.err


SHORT = [("auto", "activation dtype", EXACT), ("fp8", "two-rounding", EXACT)]


@pytest.mark.parametrize(("full", "wanted"), [(False, SHORT), (True, [*SHORT, ("fp8", "aiter", None)])])
def test_the_demo_holds_both_caches_to_equality_and_the_full_one_runs_all_numerics(full, wanted):
    found = runs.runs(Options(full=full))
    assert [(run.spec.vllm.kv_cache_dtype, run.numerics, run.bound) for run in found] == 2 * wanted
    assert full or {run.spec.scenarios for run in found} == {("short", "mixed")}


@pytest.mark.parametrize("integration", ["module", "passes"])
def test_both_sides_of_the_demo_have_the_same_options_and_partition_where_the_passes_need_it(integration):
    found = runs.runs(Options(integration=integration))
    for run in found:
        assert (run.off.side, run.off.vllm) == ("off", run.spec.vllm)
        compiled = [child.compilation(spec) for spec in (run.off, run.spec)]
        assert compiled[0] == compiled[1]
        assert ("use_inductor_graph_partition" in compiled[0]) is (integration == "passes")
    assert {run.spec.plugin.integration for run in found} == {integration}


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_demo_over_the_simulated_aiter_runs_vllms_own_attention_class_with_every_kind_of_head_count(arch):
    found = runs.runs(Options(kernel="simulated-aiter", arch=arch, full=True))
    assert {(run.spec.emulation.attention, run.spec.emulation.arch) for run in found} == {("aiter", arch)}
    assert {run.spec.vllm.model["num_attention_heads"] for run in found} == {8, 16, 128}
    held = {(run.spec.vllm.kv_cache_dtype, bool(run.spec.vllm.drafts)) for run in found if run.bound}
    assert held == {("auto", False), ("fp8", True)}


@pytest.fixture
def a_gpu(monkeypatch):
    """torch sees two GPUs; vLLM's platform is CUDA."""
    import vllm.platforms

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    platform = SimpleNamespace(is_cuda_alike=lambda: True, is_cpu=lambda: False, device_type="cuda")
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
    monkeypatch.setattr(compat_layer, "KNOWN_IMPLS", set(compat_layer.KNOWN_IMPLS))
    return platform


def test_on_a_gpu_the_triton_kernel_meets_vllm_over_both_caches(a_gpu, run_demo):
    options = demo.parse(["--kernel", "triton", "-tp", "2"])
    found = runs.runs(options)
    wanted = [("auto", runs.SUM_ORDER), ("fp8", None)]
    assert [(run.spec.vllm.kv_cache_dtype, run.bound) for run in found] == 2 * wanted
    assert {(run.spec.emulation.device, run.spec.plugin.kernel) for run in found} == {("gpu", "triton")}
    status, _, text = run_demo(result(), result(), kernel="triton")
    assert status == 0
    assert "device: A Card" in text


@pytest.mark.parametrize(
    ("devices", "cuda_alike", "says"), [(1, True, "--tensor-parallel-size 2"), (2, False, "although torch sees a GPU")]
)
def test_gpus_that_cannot_serve_the_demo_are_a_reason(a_gpu, monkeypatch, devices, cuda_alike, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(a_gpu, "is_cuda_alike", lambda: cuda_alike)
    assert says in runs.why_no_gpu(2)


def test_the_options_for_a_gpu_are_options_of_this_vllm(tmp_path):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    arguments = EngineArgs(model=str(tmp_path), **child.on_device(GPU))
    assert arguments.kv_cache_memory_bytes == child.GPU_KV_BYTES
    backend, implementation = plugin.GPU_ATTENTION
    assert AttentionBackendEnum[arguments.attention_backend].name == backend
    assert AttentionBackendEnum[backend].get_class().get_impl_cls().__name__ == implementation
    environment = engine.environment_for(GPU, Path(tmp_path), Path(tmp_path))
    # With fp8 absorb weights there would be no W_UK_T for the kernel.
    assert environment["VLLM_ROCM_USE_AITER_FP8BMM"] == "0"


def test_only_the_gpu_sandbox_admits_vllms_triton_attention(a_gpu):
    assert plugin.GPU_ATTENTION[1] not in compat_layer.KNOWN_IMPLS
    plugin.activate()
    assert plugin.GPU_ATTENTION[1] in compat_layer.KNOWN_IMPLS
    with pytest.raises(RuntimeError, match="for a CPU, vLLM's platform is cuda"):
        plugin.check_device("cpu")


def test_an_engine_for_a_gpu_on_a_cpu_build_is_an_error():
    with pytest.raises(RuntimeError, match="for a GPU, vLLM's platform is cpu"):
        plugin.check_device("gpu")

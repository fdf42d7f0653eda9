"""Each code has one remedy, and the status line, ``status`` and ``check`` say the same."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support import plans
from tests.support.statuses import record_of
from vllm_aiter_mla import admission
from vllm_aiter_mla.admission import REMEDIES, Skip
from vllm_aiter_mla.commands.machine import check_name, run_checks
from vllm_aiter_mla.commands.machine import checks as looks
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.commands.plan import printout
from vllm_aiter_mla.compat import release
from vllm_aiter_mla.kernels.aiter import op
from vllm_aiter_mla.status import line, liveness, status_files
from vllm_aiter_mla.status.line import status_line

CODES = sorted(admission.REASON_CODES)


def skipped(code: str, message: str = "why") -> Any:
    return replace(record_of(["layer"], 16, "fp8", 0), skipped={"layer": Skip(code, message)}, run="7-a")


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_remedy_every_code_has_exactly_one_and_a_cause() -> None:
    listed = [code for codes in admission.CODES_BY_LEVEL.values() for code in codes]
    assert sorted(listed) == CODES, "a code in two tables may have two remedies"
    assert all(cause for codes in admission.CODES_BY_LEVEL.values() for cause, _ in codes.values())
    for code, remedy in REMEDIES.items():
        assert remedy.strip() == remedy != "", code
        assert "`" not in remedy, code


@pytest.mark.parametrize("code", CODES)
def test_remedy_line_and_log_and_plan_say_the_same(code: str) -> None:
    assert status_line(skipped(code)) == f"0/1: {code}: why -> {REMEDIES[code]}"
    assert str(Skip(code, "why")).endswith(f" -> {REMEDIES[code]}"), "of the gate's line"
    text = printout.format_plan(replace(plans.made_up(), reasons=(Skip(code, "why"),)))
    assert f"{code}: why\n    -> {REMEDIES[code]}" in text


@pytest.mark.parametrize("message", ["why", "why " * 60], ids=["short", "long"])
def test_remedy_is_what_status_prints_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, message: str) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv(liveness.RUN_VARIABLE, "7-a")
    liveness.ensure_run_lock(tmp_path / "aiter_mla")
    status_files.write_status(tmp_path / "aiter_mla", skipped("impl", message))
    said = CliRunner().invoke(app, ["status"]).stdout
    assert one_line(said).count(REMEDIES["impl"]) == 1


def test_remedy_of_a_code_of_another_version_is_left_out() -> None:
    assert status_line(skipped("of_tomorrow")) == "0/1: of_tomorrow: why"


@pytest.mark.mutation("I8")
def test_mutation_remedy_of_another_code_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "REMEDIES", dict.fromkeys(REMEDIES, "planted"))
    with pytest.raises(AssertionError, match="planted"):
        test_remedy_line_and_log_and_plan_say_the_same("impl")


def on_rocm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(looks, "rocm_version", lambda: "7.2")
    patch.setattr(looks, "gpu_arch", lambda: "gfx942")


def atom(patch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("atom", "atom.plugin.register:register", looks.PLATFORM_PLUGINS_GROUP)]
    patch.setattr(importlib.metadata, "entry_points", lambda group: [one for one in points if one.group == group])


def no_aiter(patch: pytest.MonkeyPatch) -> None:
    on_rocm(patch)
    patch.setattr(op, "locate_aiter", lambda: op.AiterInstall("none"))


FOUND: dict[str, tuple[str, dict[str, str], Any]] = {
    "platform": ("gpu", {}, lambda patch: patch.setattr(looks, "gpu_arch", lambda: "sm90")),
    "aiter_off": ("switches", {}, on_rocm),
    "mla_disabled": ("switches", {"VLLM_ROCM_USE_AITER": "1", "VLLM_MLA_DISABLE": "1"}, on_rocm),
    "vllm_version": ("vllm", {}, lambda patch: patch.setattr(looks, "vllm_version", lambda: "0.34.0")),
    "capability": ("surface", {}, lambda patch: patch.setattr(release, "missing_capabilities", lambda: ["x"])),
    "op_schema": ("surface", {}, lambda patch: patch.setattr(release, "op_differences", lambda fused: ["x"])),
    "atom": ("atom", {}, atom),
    "kernel_unavailable": ("aiter", {}, no_aiter),
}  # fmt: skip


@pytest.mark.parametrize("code", FOUND)
def test_remedy_of_what_the_machine_step_finds_is_that_of_its_code(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    name, env, plant = FOUND[code]
    checks = {check_name(check): check for check in looks.CHECKS}
    plant(monkeypatch)
    (found,) = run_checks([checks[name]], env)
    assert (found.status, found.remedy) == ("problem", REMEDIES[code])


def test_remedy_on_a_machine_that_the_plugin_is_not_for_names_the_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "gpu_arch", lambda: None)
    (found,) = run_checks([looks.check_gpu], {})
    assert found.remedy == REMEDIES["platform"]
    assert {"gfx942", "gfx950", "ROCm"} <= set(found.detail.split())

"""Single checks of machine and installation, on simulated machines."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.support.planted import raising
from vllm_aiter_mla import locks
from vllm_aiter_mla.commands.machine import CheckResult, check_name, checks, run_checks
from vllm_aiter_mla.kernels.aiter import op as locate

CHECKS = {check_name(check): check for check in checks.CHECKS}


def run_check(name: str, **env: str) -> CheckResult:
    return run_checks([CHECKS[name]], env)[0]


def status(name: str, **env: str) -> str:
    return run_check(name, **env).status


@pytest.fixture
def rocm_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "rocm_version", lambda: "7.0.2")
    monkeypatch.setattr(checks, "gpu_arch", lambda: "gfx950")


@pytest.mark.usefixtures("rocm_card")
@pytest.mark.parametrize(
    ("bundles", "expected"),
    [((b"gfx942", b"gfx950"), "ok"), ((b"gfx942",), "problem"), ((), "unknown")],
    ids=["both cards", "the other card", "no AMD code"],
)
def test_a_module_without_code_for_this_card_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bundles: tuple[bytes, ...], expected: str
) -> None:
    library = tmp_path / "module_cache.so"
    library.write_bytes(b"ELF" + b"".join(b"hipv4-amdgcn-amd-amdhsa--%b\0code" % name for name in bundles))
    monkeypatch.setattr(checks, "compiled_modules", lambda: [library])
    check = run_check("code-objects")
    assert check.status == expected
    assert ("module_cache.so" in check.detail) == (expected == "problem")


def test_releases_that_this_project_has_run_are_ok_and_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.platform, "python_version", lambda: "3.11.7")
    monkeypatch.setattr(checks, "rocm_version", lambda: None)
    monkeypatch.setattr(checks, "vllm_version", lambda: "0.32.0")
    assert status("verified") == "ok"
    monkeypatch.setattr(checks, "rocm_version", lambda: "7.2.1")
    monkeypatch.setattr(checks, "vllm_version", lambda: "0.33.1+rocm")
    check = run_check("verified")
    assert check.status == "warning"
    assert "ROCm 7.2" in check.detail
    assert "vLLM" not in check.detail


def test_every_release_with_a_lock_is_among_the_verified_ones() -> None:
    locks = Path(__file__).resolve().parents[2] / "requirements" / "releases"
    known = json.loads(checks.VERIFIED.read_text())
    assert {path.stem for path in locks.glob("*.lock")} <= set(known["vLLM"])
    assert set(known) == {"vLLM", "torch", "Python", "ROCm", "AITER"}


def stub_torch(build: str) -> Any:
    """Return a stub of torch and of ``kernels.device``, on a machine without a card."""
    rocm = build.removeprefix("ROCm ") if build.startswith("ROCm") else None
    here = SimpleNamespace(is_there=lambda: False, built_for=build, rocm=rocm)
    return SimpleNamespace(__version__="2.13.0", card=lambda: here)


def let_import(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Let the checks import the result of ``stub_torch``, or raise an error."""
    is_error = isinstance(module, Exception)
    monkeypatch.setattr(checks, "import_module", raising(module) if is_error else lambda name: module)
    monkeypatch.setattr(checks, "installed_device", lambda: None if is_error else module.card())


AITER_ON = {"VLLM_ROCM_USE_AITER": "1"}


@pytest.mark.usefixtures("rocm_card")
@pytest.mark.parametrize(
    ("name", "env", "remedy"),
    [
        ("switches", {}, "VLLM_ROCM_USE_AITER=1"),
        ("switches", AITER_ON | {"VLLM_ROCM_USE_AITER_MLA": "0"}, "VLLM_ROCM_USE_AITER_MLA=1"),
        ("switches", {"VLLM_ROCM_USE_AITER": "True"}, ""),
        ("switches", AITER_ON | {"VLLM_BATCH_INVARIANT": "1"}, "VLLM_BATCH_INVARIANT=0"),
        ("switches", AITER_ON | {"VLLM_MLA_DISABLE": "1"}, "VLLM_MLA_DISABLE=0"),
        ("plugin", {"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS"),
        ("plugin", {"VLLM_PLUGINS": ""}, "VLLM_PLUGINS"),
        ("plugin", {"VLLM_PLUGINS": "other,aiter_mla"}, ""),
        ("plugin", {}, ""),
    ],
)
def test_a_variable_that_keeps_the_fast_path_off_is_a_problem(name: str, env: dict[str, str], remedy: str) -> None:
    check = run_check(name, **env)
    assert (check.status, remedy in check.detail + check.remedy) == ("problem" if remedy else "ok", True)


PLUGINS_WITH_BLANKS = ("other, aiter_mla", " aiter_mla", "aiter_mla ", "aiter_mla\n", "aiter_mla,other ", "aiter_mla")


def plugins_of_vllm(allowed: str) -> list[str]:
    """Return the plugins that vLLM itself reads from the variable."""
    from vllm import envs

    with mock.patch.dict(os.environ, {"VLLM_PLUGINS": allowed}):
        names: list[str] = envs.environment_variables["VLLM_PLUGINS"]()
    return names


@pytest.mark.parametrize("allowed", PLUGINS_WITH_BLANKS)
def test_plugins_with_blanks_are_read_as_vllm_reads_them(allowed: str) -> None:
    loads = "aiter_mla" in plugins_of_vllm(allowed)
    assert status("plugin", VLLM_PLUGINS=allowed) == ("ok" if loads else "problem")


@pytest.mark.mutation
def test_mutation_plugins_with_blanks_that_are_stripped_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checks.vllm_options, "allowed_plugins", lambda allowed: [name.strip() for name in allowed.split(",")]
    )
    assert status("plugin", VLLM_PLUGINS="other, aiter_mla") == "ok"
    with pytest.raises(AssertionError, match="'ok' == 'problem'"):
        test_plugins_with_blanks_are_read_as_vllm_reads_them("other, aiter_mla")


def test_field_without_rocm_the_switches_of_aiter_are_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "rocm_version", lambda: None)
    assert status("switches") == "warning", "AITER is off"
    assert status("switches", **AITER_ON) == "ok"
    assert status("switches", VLLM_MLA_DISABLE="1") == "problem"


@pytest.mark.parametrize("value", ["2", "true", "no"])
def test_a_switch_is_read_as_vllm_reads_it(value: str) -> None:
    """vLLM reads these two as numbers. All but 0 are on, and it does not start with a word."""
    for name in ("VLLM_MLA_DISABLE", "VLLM_BATCH_INVARIANT"):
        assert status("switches", **AITER_ON, **{name: value}) == "problem"
        assert status("switches", **AITER_ON, **{name: "0"}) == "ok"


def install_entry_points(monkeypatch: pytest.MonkeyPatch, *installed: EntryPoint) -> None:
    of_group = lambda group: [point for point in installed if point.group == group]  # noqa: E731
    monkeypatch.setattr(importlib.metadata, "entry_points", of_group)


def test_atom_is_a_problem_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    group = checks.PLATFORM_PLUGINS_GROUP
    install_entry_points(monkeypatch, EntryPoint("atom", "atom.plugin.register:register", group))
    assert (status("atom"), status("atom", ATOM_DISABLE_VLLM_PLUGIN="1")) == ("problem", "ok")
    install_entry_points(monkeypatch)
    assert status("atom") == "ok"


def test_the_plugins_entry_point_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = EntryPoint("aiter_mla", "vllm_aiter_mla.plugin:register", checks.GENERAL_PLUGINS_GROUP)
    other = EntryPoint("else", "someone.else:register", checks.GENERAL_PLUGINS_GROUP)
    install_entry_points(monkeypatch, other)
    assert status("plugin") == "problem"
    install_entry_points(monkeypatch, ours, other)
    plugin = run_check("plugin")
    assert (plugin.status, plugin.detail.endswith(": else")) == ("ok", True)
    install_entry_points(monkeypatch, ours, EntryPoint("aiter_mla", "copy:register", checks.GENERAL_PLUGINS_GROUP))
    assert status("plugin") == "warning"


@pytest.mark.parametrize(
    ("version", "expected"), [("0.32.0", "ok"), ("0.34.0", "problem"), ("0.29.1", "problem"), (None, "problem")]
)
def test_vllms_release_is_held_against_the_window(
    monkeypatch: pytest.MonkeyPatch, version: str | None, expected: str
) -> None:
    monkeypatch.setattr(checks, "vllm_version", lambda: version)
    assert status("vllm") == expected
    if version is None:
        assert {status(name) for name in ("surface", "patches")} == {"unknown"}


@pytest.mark.parametrize(
    ("install", "rocm", "expected"),
    [
        (("AITER is not installed: install it",), "7.0", "problem"),
        (("AITER is not installed: install it",), None, "unknown"),
        (("`aiter` is a namespace",), None, "unknown"),
        (("no `compute_all_q_rope`", Path("aiter"), "amd-aiter 0.1.19"), "7.0", "problem"),
        ((None, Path("aiter"), "amd-aiter 0.1.20", ("q",) * 15), "7.0", "warning"),
        ((None, Path("aiter"), "amd-aiter 0.1.20", ("q",) * 15, True), "7.0", "ok"),
    ],
)
def test_aiter_is_judged_by_its_files(
    monkeypatch: pytest.MonkeyPatch, install: tuple[Any, ...], rocm: str | None, expected: str
) -> None:
    monkeypatch.setattr(checks, "rocm_version", lambda: rocm)
    monkeypatch.setattr(locate, "locate_aiter", lambda: locate.AiterInstall(*install))
    check = run_check("aiter")
    assert check.status == expected
    assert ("not installed" in check.detail) == ("not installed" in str(install[0]))


@pytest.mark.parametrize(
    ("error", "absent"),
    [
        (ModuleNotFoundError("No module named 'triton'", name="triton"), True),
        (ModuleNotFoundError("No module named 'triton._C'", name="triton._C"), False),
        (ModuleNotFoundError("No module named 'setuptools'", name="setuptools"), False),
        (ImportError("libtriton.so: undefined symbol"), False),
    ],
)
def test_a_triton_that_cannot_be_imported_is_not_called_absent(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, absent: bool
) -> None:
    monkeypatch.setattr(checks, "import_module", raising(error))
    check = run_check("triton")
    assert check.status == "warning"
    assert ("not installed" in check.detail, str(error) in check.detail) == (absent, not absent)


@pytest.mark.parametrize("build", ["", "CUDA 13.0"])
def test_a_torch_without_rocm_beside_a_card_is_a_problem(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    let_import(monkeypatch, stub_torch(build))
    monkeypatch.setattr(checks, "gpu_arch", lambda: "gfx942")
    assert status("torch") == "problem"


@pytest.mark.parametrize(
    ("torch_module", "rocm_file", "statuses"),
    [
        (stub_torch("ROCm 7.0.51831"), None, ("ok", "ok")),
        (stub_torch("ROCm 6.4.1"), None, ("ok", "problem")),
        (stub_torch("CUDA 13.0"), None, ("warning", "unknown")),
        (stub_torch(""), None, ("warning", "unknown")),
        (ModuleNotFoundError("No module named 'torch'"), "7.1.0", ("problem", "ok")),
    ],
)
def test_torch_and_rocm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torch_module: Any, rocm_file: str | None, statuses: tuple[str, str]
) -> None:
    let_import(monkeypatch, torch_module)
    monkeypatch.setattr(checks, "ROCM_VERSION", tmp_path / "version")
    if rocm_file is not None:
        (tmp_path / "version").write_text(rocm_file + "\n")
    assert (status("torch"), status("rocm")) == statuses


@pytest.mark.parametrize(
    ("versions", "expected", "arch"),
    [((), "unknown", ""), ((0, 90402), "ok", "gfx942"), ((90500,), "ok", "gfx950"), ((90010,), "problem", "gfx90a"),
     ((110000,), "problem", "gfx1100")],
)  # fmt: skip
def test_the_card_is_read_from_the_driver_if_torch_sees_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, versions: tuple[int, ...], expected: str, arch: str
) -> None:
    let_import(monkeypatch, stub_torch(""))
    monkeypatch.setattr(checks, "KFD_NODES", tmp_path)
    for node, version in enumerate(versions):
        (tmp_path / str(node)).mkdir()
        text = f"cpu_cores_count 0\ngfx_target_version {version}\n"
        (tmp_path / str(node) / "properties").write_text(text)
    gpu = run_check("gpu")
    assert (gpu.status, gpu.detail.startswith(arch)) == (expected, True), gpu


# -- the folder of the plugin's files


def marker(folder: Path, *, alive: bool) -> str:
    """A marker of a start in a kernel's first call, which this process holds if ``alive``."""
    name = "first-call-0123-ab"
    (folder / "aiter_mla").mkdir(parents=True, exist_ok=True)
    (folder / "aiter_mla" / f"{name}.json").write_text("{}")
    lock = folder / "aiter_mla" / f"lock-{name}"
    locks.try_hold(lock) if alive else lock.touch()
    return name


@pytest.mark.parametrize("exists", [True, False])
def test_a_cache_root_that_takes_files_and_locks_is_fine_and_stays_as_it_is(tmp_path: Path, exists: bool) -> None:
    root = tmp_path / "cache"
    if exists:
        (root / "aiter_mla").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    found = run_check("cache-root", VLLM_CACHE_ROOT=str(root))
    assert (found.status, sorted(tmp_path.rglob("*"))) == ("ok", before)


@pytest.mark.parametrize("kind", ["a link that leads nowhere", "a file"])
def test_a_cache_root_in_which_a_start_makes_no_folder_is_a_problem(tmp_path: Path, kind: str) -> None:
    """As of a volume that is not mounted."""
    root = tmp_path / "cache"
    if kind == "a file":
        root.touch()
    else:
        root.symlink_to(tmp_path / "volume")
    assert run_check("cache-root", VLLM_CACHE_ROOT=str(root)).status == "problem"


def test_a_cache_root_without_locks_is_a_problem_before_a_server_leaves_its_kernels_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks, "try_hold", no_locks)
    found = run_check("cache-root", VLLM_CACHE_ROOT=str(tmp_path))
    assert (found.status, "No locks available" in found.detail) == ("problem", True)
    assert "VLLM_CACHE_ROOT" in found.remedy


def test_a_note_whose_lock_cannot_be_read_is_not_called_a_start_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, is_held = marker(tmp_path, alive=False), locks.is_held
    monkeypatch.setattr(locks, "is_held", lambda lock: None if name in lock.name else is_held(lock))
    found = run_check("cache-root", VLLM_CACHE_ROOT=str(tmp_path))
    assert (found.status, found.detail.partition(":")[0]) == ("warning", "not_marked")


@pytest.mark.parametrize("alive", [False, True])
def test_a_note_of_a_start_that_ended_in_a_first_call_is_named_and_one_of_a_living_start_is_not(
    tmp_path: Path, alive: bool
) -> None:
    name = marker(tmp_path, alive=alive)
    found = run_check("cache-root", VLLM_CACHE_ROOT=str(tmp_path))
    assert (found.status, name in found.detail) == (("ok", False) if alive else ("warning", True))

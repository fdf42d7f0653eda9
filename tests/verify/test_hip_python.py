"""Finding hip-python: packages laid out like releases 7 and 10, and each way of being here without being usable."""

import re
import sys
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from tests.support.planted import raising
from vllm_aiter_mla.commands.machine import checks as machine
from vllm_aiter_mla.kernels import device
from vllm_aiter_mla.verify import hip_python, launches

CALLS = "".join(f"def {name}(*arguments): return (0, 1)\n" for name in hip_python.CALLS)
SEVEN = {"hip/__init__.py": "from . import hip\n", "hip/hip.py": CALLS}
# Release 10 re-exports a module of another name.
TEN = {"hip/__init__.py": "from bindings import hip\n", "bindings/__init__.py": "", "bindings/hip.py": CALLS}
LIKE = {"7.2.2.562.43": SEVEN, "10.0.0.0.1.2": TEN}
UNUSABLE = {
    "its dependency is missing": ({"hip/__init__.py": "from rocm.bindings import hip\n"}, "'rocm'"),
    "its package is gone": ({}, "'hip'"),
    "it has no module of calls": ({"hip/__init__.py": ""}, "cannot import name 'hip'"),
    "a call is gone": (
        SEVEN | {"hip/hip.py": CALLS.replace("hipGraphDebugDotPrint", "other")},
        "hipGraphDebugDotPrint",
    ),
    "it cannot be loaded": ({"hip/__init__.py": "raise OSError('GLIBC\\nnot found')\n"}, "GLIBC not found"),
}


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Puts files on the path, with the metadata of a version if one is given, and takes every hip-python away first."""

    def install(written, version=None):
        for name in [name for name in sys.modules if name.partition(".")[0] in ("hip", "bindings")]:
            monkeypatch.delitem(sys.modules, name)
        folder = tmp_path / str(version)
        if version is not None:
            metadata = f"Metadata-Version: 2.1\nName: hip-python\nVersion: {version}\n"
            written = written | {f"hip_python-{version}.dist-info/METADATA": metadata}
        for name, text in written.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("hip", "bindings")}
    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] in ("hip", "bindings")]:
        del sys.modules[name]
    sys.modules.update(kept)


def dump_error():
    with pytest.raises(launches.DumpError) as caught:
        launches.hip_dot(1)
    return str(caught.value)


def checked(monkeypatch, rocm):
    monkeypatch.setattr(machine, "rocm_version", lambda: rocm)
    return machine.check_hip_python({})


@pytest.mark.parametrize(("version", "layout"), LIKE.items())
def test_hip_python_is_found_in_both_layouts(installed, monkeypatch, version, layout):
    installed(layout, version)
    found = hip_python.find()
    assert found.hipGetDeviceCount() == (0, 1)
    assert hip_python.version() == version
    check = checked(monkeypatch, version[: version.index(".") + 2])
    assert (check.status, version in check.detail, check.remedy) == ("ok", True, "")


@pytest.mark.mutation
def test_mutation_the_old_import_finds_no_hip_python_10(installed, monkeypatch):
    planted = lambda: __import__("hip.hip").hip  # noqa: E731
    monkeypatch.setattr(hip_python, "_load", planted)
    installed(TEN, "10.0.0.0.1.2")
    assert "hip.hip" in hip_python.find()
    assert "hip-python 10.0.0.0.1.2 cannot be used" in dump_error()
    assert checked(monkeypatch, "10.0.0").status == "warning"


@pytest.mark.parametrize("version", LIKE)
@pytest.mark.parametrize(("written", "fails"), UNUSABLE.values(), ids=UNUSABLE)
@pytest.mark.parametrize("rocm", ["7.2.2", "10.0.0", None])
def test_hip_python_that_cannot_be_used_is_named_and_not_installed_again(
    installed, monkeypatch, version, written, fails, rocm
):
    installed(written, version)
    monkeypatch.setattr(device, "installed", SimpleNamespace(rocm=rocm))
    check, error = checked(monkeypatch, rocm), dump_error()
    assert check.status == "warning"
    for text in (check.detail, error):
        assert version in text
        assert fails in text
        assert "not installed" not in text
        assert "\n" not in text
    assert check.remedy in error
    if rocm is not None:
        wanted = Requirement(re.search(r'pip install "(.+?)"', check.remedy)[1]).specifier
        assert not wanted.contains(version)
        assert wanted.contains(f"{rocm.partition('.')[0]}.0.1")


def test_hip_python_that_is_absent_is_pinned_to_the_rocm_of_this_machine(monkeypatch):
    monkeypatch.setattr(hip_python, "version", lambda: None)
    monkeypatch.setitem(sys.modules, "hip", None)
    for rocm, wanted in (("7.2.2", "7"), ("10.0.0", "10")):
        check = checked(monkeypatch, rocm)
        assert (check.status, f'"hip-python=={wanted}.*"' in check.remedy) == ("warning", True)
    assert checked(monkeypatch, None).status == "ok", "not needed without ROCm"
    assert dump_error().startswith(hip_python.ABSENT)


def test_a_hip_python_for_another_rocm_is_a_warning_that_names_both(installed, monkeypatch):
    installed(TEN, "10.0.0.0.1.2")
    check = checked(monkeypatch, "7.2.2")
    assert check.status == "warning"
    assert {"10.0.0.0.1.2", "7.2.2"} <= set(check.detail.split())
    assert '"hip-python==7.*"' in check.remedy


def test_another_package_of_the_name_hip_is_not_called_absent(installed, monkeypatch):
    installed({"hip/__init__.py": "", "hip/replacement.py": ""})
    monkeypatch.setattr(hip_python, "version", lambda: None)
    assert hip_python.find() != hip_python.ABSENT
    assert checked(monkeypatch, None).status == "warning"


def test_a_hip_python_call_with_other_arguments_is_one_sentence(installed, monkeypatch):
    installed(SEVEN, "7.2.2.562.43")
    monkeypatch.setattr(hip_python.find(), "hipGetDeviceCount", raising(TypeError("takes 1 argument\n(0 given)")))
    assert "7.2.2.562.43 cannot call hipGetDeviceCount: takes 1 argument" in dump_error()

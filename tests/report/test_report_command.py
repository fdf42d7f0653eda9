"""``vllm-aiter-mla report`` on the command line, and what it does not take."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.report.report_support import DATA
from vllm_aiter_mla.commands.main import app

runner = CliRunner()


def test_report_command_writes_one_file(kept: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = runner.invoke(app, ["report", str(kept), str(DATA / "verify.json"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert out.read_text().startswith("<!doctype html>")
    assert str(out) in done.output


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("list.json", [1, 2], "not recognised (found: list)"),
        ("other.json", {"graph": 1, "apples": 2}, "not recognised (found: apples, graph)"),
        ("broken.json", "{", "no JSON"),
    ],
)
def test_report_command_names_the_file_and_the_reason(
    written: Any, tmp_path: Path, name: str, content: Any, reason: str
) -> None:
    path, out = written(name, content), tmp_path / "page.html"
    done = runner.invoke(app, ["report", str(path), "--out", str(out)])
    assert done.exit_code == 2
    assert str(path) in done.output
    assert reason in done.output
    assert not out.exists()


def test_report_command_on_what_is_not_there_or_empty(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "gone.json", "No such file"), (tmp_path, "no JSON file in this folder")):
        done = runner.invoke(app, ["report", str(path), "--out", str(tmp_path / "page.html")])
        assert done.exit_code == 2
        assert f"{path}: {reason}" in done.output


def test_report_command_looks_where_it_will_write_before_it_draws(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vllm_aiter_mla.commands.report.render.html_of", lambda inputs: pytest.fail("drawn all the same")
    )
    for out, reason in ((tmp_path / "no" / "page.html", "its folder does not exist"), (tmp_path, "is a folder")):
        done = runner.invoke(app, ["report", str(kept), "--out", str(out)])
        assert done.exit_code == 2
        assert f"--out {out}: {reason}" in done.output


def test_report_command_of_a_graph_that_is_no_graph(kept: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    for file in kept.iterdir():
        (folder / file.name).write_text(file.read_text().replace("%", "?"))
    done = runner.invoke(app, ["report", str(folder), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 2
    assert f"{folder / 'run0-off.json'}: graph of 1-16: no node found" in done.output


def test_report_command_without_jinja_names_the_extra(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    done = runner.invoke(app, ["report", str(kept), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 2
    assert "'.[report]'" in done.output


def test_report_command_names_the_file_of_an_older_version(kept: Path, written: Any, tmp_path: Path) -> None:
    verify = json.loads((DATA / "verify.json").read_text())
    del verify["results"][0]["status"]
    path = written("old.json", verify)
    done = runner.invoke(app, ["report", str(kept), str(path), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 2
    assert f"{path}: results[0].status: missing" in done.output

"""The command ``report``: what it writes, and the one line that it says where it cannot."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.planted import break_import
from vllm_aiter_mla import commands
from vllm_aiter_mla.commands.check import steps
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.commands.report.page import render_page


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_report_writes_one_file(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = report(files["status"].parent, files["timing"], "--out", out)
    assert (done.exit_code, str(out) in done.output) == (0, True), done.output
    assert out.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("list.json", [1, 2], "not recognised"),
        ("other.json", {"evidence": {"schema": "vllm-aiter-mla/apples"}}, "not recognised (apples)"),
        ("old.json", {"evidence": {"schema": "vllm-aiter-mla/check"}, "steps": []}, "of no version"),
        ("broken.json", "{", "no JSON"),
        ("deep.json", "[" * 200_000, "no JSON"),
        ("nan.json", '{"a": NaN}', "no JSON"),
        ("bad\x1b[2J\n.json", "{", "bad\\x1b[2J\\n.json: no JSON"),
        ("gone.json", None, "gone.json: No such file"),
        (".", None, "no JSON file in this folder"),
        ("pipe.json", os.mkfifo, "pipe.json: not a regular file"),
    ],
)
def test_a_file_that_cannot_be_shown_is_one_line_and_2(
    written: Any, tmp_path: Path, name: str, content: Any, reason: str
) -> None:
    path = tmp_path / name if content is None or callable(content) else written(name, content)
    if callable(content):
        content(path)
    done = report(path, "--out", tmp_path / "page.html")
    assert done.exit_code == 2
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_without_its_packages_the_command_names_the_extra(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    # The import below puts another package in the place of this one.
    monkeypatch.setattr(commands, "report", commands.report)
    for name in [name for name in sys.modules if name.startswith("vllm_aiter_mla.commands.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    done = report(files["timing"], "--out", tmp_path / "page.html")
    assert (done.exit_code, f"{package} is not installed" in done.output) == (2, True), done.output
    assert "'.[report]'" in done.output


@pytest.mark.parametrize(
    "error",
    [ImportError("numpy.core.multiarray failed to import"), AttributeError("_ARRAY_API not found"),
     ModuleNotFoundError("No module named 'jinja2._x'", name="jinja2._x")],
)  # fmt: skip
@pytest.mark.parametrize("command", ["report", "check"])
def test_packages_of_the_page_that_cannot_be_imported_are_named_with_their_versions(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, command: str
) -> None:
    monkeypatch.setattr(steps, "STEPS", {})
    break_import(monkeypatch, "jinja2", error)
    monkeypatch.delitem(sys.modules, render_page.__module__)
    given = {
        "report": ["report", str(files["timing"]), "--out", str(tmp_path / "page.html")],
        "check": ["check", "deepseek-r1", "--html", str(tmp_path / "page.html")],
    }
    done = CliRunner().invoke(app, given[command])
    assert done.exit_code == 2, done.output
    assert str(error) in done.output
    assert metadata.version("matplotlib") in done.output
    assert "not installed" not in done.output

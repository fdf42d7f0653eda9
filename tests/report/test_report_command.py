"""``vllm-aiter-mla report`` on the command line, and what it does not take."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vllm_aiter_mla.commands.main import app


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_report_writes_one_file(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = report(files["kept"], files["speed"], "--out", out)
    assert (done.exit_code, str(out) in done.output) == (0, True), done.output
    assert out.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("list.json", [1, 2], "not recognised"),
        ("other.json", {"evidence": {"schema": "vllm-aiter-mla/apples"}}, "not recognised (apples)"),
        ("old.json", {"evidence": {"schema": "vllm-aiter-mla/verify"}, "results": []}, "KeyError"),
        ("broken.json", "{", "no JSON"),
        ("deep.json", "[" * 200_000, "no JSON"),
        ("nan.json", '{"a": NaN}', "no JSON"),
        ("bad\x1b[2J\n.json", "{", "bad\\x1b[2J\\n.json: no JSON"),
    ],
)
def test_a_file_that_cannot_be_shown_is_one_line_and_2(
    written: Any, tmp_path: Path, name: str, content: Any, reason: str
) -> None:
    done = report(written(name, content), "--out", tmp_path / "page.html")
    assert done.exit_code == 2
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_what_is_not_there_or_empty_is_2(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "gone.json", "No such file"), (tmp_path, "no JSON file in this folder")):
        done = report(path, "--out", tmp_path / "page.html")
        assert (done.exit_code, f"{path}: {reason}" in done.output) == (2, True), done.output


@pytest.mark.parametrize("out", ["no/page.html", "."])
def test_the_output_path_is_checked_before_the_page_is_drawn(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.setattr("vllm_aiter_mla.commands.report.page.html_of", lambda inputs: pytest.fail("drawn"))
    done = report(files["speed"], "--out", tmp_path / out)
    assert (done.exit_code, f"--out {tmp_path / out}" in done.output) == (2, True), done.output


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_without_its_packages_the_command_names_the_extra(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [name for name in sys.modules if name.startswith("vllm_aiter_mla.commands.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    done = report(files["speed"], "--out", tmp_path / "page.html")
    assert (done.exit_code, f"{package} is not installed" in done.output) == (2, True), done.output
    assert "'.[report]'" in done.output


def test_a_model_config_cannot_steer_the_terminal_of_plan(tmp_path: Path) -> None:
    import vllm_aiter_mla

    (source,) = Path(vllm_aiter_mla.__file__).parent.rglob("models/deepseek-v2-lite.json")
    config = json.loads(source.read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v2\x1b[2J\r\nfine"}))
    done = CliRunner().invoke(app, ["plan", str(tmp_path)])
    assert "fine" in done.output
    assert "\x1b" not in done.output
    assert "\nfine" not in done.output

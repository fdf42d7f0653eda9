"""tools/serving.py from option to page, with other commands in place of `vllm` and `lm_eval`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.signals import heard
from tests.support.waiting import happened, runs
from tools import serving
from vllm_aiter_mla.commands.report.page import render_page

HERE = Path(__file__).parent
TOOL = HERE.parents[1] / "tools" / "serving.py"


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the fakes, written once: a file that was just written may be too busy to run."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("vllm", "lm_eval"):
        (folder / name).write_text(f"#!{sys.executable}\n" + (HERE / "fake_vllm.py").read_text())
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, commands: Path) -> Iterator[SimpleNamespace]:
    """Run the tool over the fakes. ``how`` tells them how to behave, ``calls`` what they were called with."""
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(serving, "about", lambda: {"card": "fake card", "vllm": "0.32.0"})
    out, record = tmp_path / "out.md", tmp_path / "out.json"

    def run(what: str, *more: str) -> int:
        files = ["--out", str(out), "--json", str(record), "--work", str(tmp_path / "work")]
        short = ["--rates", "50"] if what == "speed" else []
        return serving.main([what, "MODEL", *short, "--servers", "per-side", *files, *more])

    def calls(kind: str) -> list[dict[str, Any]]:
        lines = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").is_file() else []
        return [call for call in map(json.loads, lines) if kind in call]

    before = signal.getsignal(signal.SIGINT)
    yield SimpleNamespace(run=run, calls=calls, out=out, record=record, how=monkeypatch.setenv)
    signal.signal(signal.SIGINT, before)


def test_two_sides_the_page_holds_each_side_the_ratio_and_what_ran(fakes: SimpleNamespace) -> None:
    assert fakes.run("speed", "--servers", "per-run", "--", "-tp", "8") == 0
    page = fakes.out.read_text()
    row = "| 1024 | 0 | 256 | 50 | 100.00 ± 5.77 | 100.00 ± 6.66 | 1.000 ± 0.088 | not distinguishable "
    assert row + "| 10.00 ± 0.10 | 8.00 ± 0.20 | 1.250 ± 0.034 | on faster | 100.0" in page
    assert "| throughput on/off | throughput: outcome |" in page
    assert page.count("| on faster |") == 2
    served = "    vllm serve MODEL -tp 8"
    flag = " --additional-config.aiter_mla.enabled=true --additional-config.aiter_mla.strict=true"
    for part in ("Flag on: 4/4 MLA layers engaged", "fake card", f"{served}\n", f"{served}{flag}\n", "per-run"):
        assert part in page
    record = json.loads(fakes.record.read_text())
    assert record["status"].startswith("4/4 MLA layers engaged")
    assert (list(record["results"]), record["evidence"]["schema_version"]) == (["off", "on"], 3)
    assert record["results"]["on"]["2"][0]["mean_tpot_ms"] == 8.3464
    assert record["rows"][0]["point"] == {"input": 1024, "prefix": 0, "output": 256, "rate": 50.0}


def test_the_report_draws_what_the_tool_wrote(fakes: SimpleNamespace) -> None:
    assert fakes.run("speed", "--rates", "1,50") == 0
    page = render_page([fakes.record])
    assert [cell in page for cell in ("10.00 ± 0.10", "8.00 ± 0.20", "fake card")] == [True] * 3
    assert "TPOT off / on 1.250 to 1.250 over 2 rates, lengths 1024/0/256" in page
    assert len(re.findall(r"<svg ", page)) == 2


@pytest.mark.slow
def test_the_report_shows_shares_of_right_answers(fakes: SimpleNamespace) -> None:
    assert fakes.run("accuracy") == 0
    page = render_page([fakes.record])
    assert "shares of right answers, run 1" in page
    for figures in (of["0"]["figures"] for of in json.loads(fakes.record.read_text())["answers"].values()):
        assert figures
        assert all(f"{one['mean']:.4f} ± {one['stderr']:.4f}" in page for one in figures.values())


def test_sides_alternate_and_get_the_same_seeds_with_other_ones_per_run(fakes: SimpleNamespace) -> None:
    assert fakes.run("speed", "--servers", "per-run", "--rates", "1,50") == 0
    assert [call["server"] for call in fakes.calls("server")] == ["on", "off", "off", "on", "on", "off"]
    seeds = {
        side: [(one["run"], one["bench"]["--seed"]) for one in fakes.calls("bench") if one["side"] == side]
        for side in ("on", "off")
    }
    assert seeds["off"] == seeds["on"]
    assert len({seed for _, seed in seeds["on"]}) == 6


@pytest.mark.parametrize(
    ("how", "said", "started"),
    [
        ("dies", "fp8_bmm: the absorb weight is fp8", ["on"]),
        ("silent", "flag on: 0 lines about engaged layers", ["on"]),
        ("all-engage", "flag off: 1 lines about engaged layers", ["on", "off"]),
    ],
)
def test_sides_that_are_not_what_they_are_called_give_no_page(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str], how: str, said: str, started: list[str]
) -> None:
    fakes.how("FAKE_SERVER", how)
    assert fakes.run("speed") == 1
    assert said in capsys.readouterr().err
    assert [call["server"] for call in fakes.calls("server")] == started
    assert not fakes.out.exists()


@pytest.mark.parametrize(
    ("how", "said"),
    [("failed", "flag on, run 2: {'failed': 3"), ("short", "'total_output_tokens': 51199"), ("no-tpot", "")],
)
def test_a_missing_answer_invalidates_its_row(fakes: SimpleNamespace, how: str, said: str) -> None:
    fakes.how("FAKE_CLIENT", how)
    assert fakes.run("speed") == 1
    assert said in json.loads(fakes.record.read_text())["rows"][0]["invalid"]
    assert "**invalid**" in fakes.out.read_text()
    assert "on faster" not in fakes.out.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_lets_the_sweep_end_its_server(fakes: SimpleNamespace, number: signal.Signals) -> None:
    fakes.how("FAKE_SERVER", "hangs")
    line = [sys.executable, str(TOOL), "speed", "MODEL"]
    tool = subprocess.Popen(line, stderr=subprocess.DEVNULL, preexec_fn=heard)
    assert happened(lambda: fakes.calls("server"))
    tool.send_signal(number)
    assert tool.wait(60) == 130
    assert fakes.calls("stopped")


@pytest.mark.slow
def test_an_interruption_ends_what_the_client_has_started(fakes: SimpleNamespace) -> None:
    """``vllm bench sweep`` kills its client, which can end nothing any more."""
    fakes.how("FAKE_CLIENT", "hangs")
    tool = subprocess.Popen(
        [sys.executable, str(TOOL), "accuracy", "MODEL"], stderr=subprocess.DEVNULL, preexec_fn=heard
    )
    assert happened(lambda: fakes.calls("ask"))
    tool.send_signal(signal.SIGINT)
    assert tool.wait(60) == 130
    assert happened(lambda: not runs(fakes.calls("ask")[0]["process"]))


def test_a_group_of_tasks_gives_no_page(fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """lm-eval numbers the questions of each task from 0."""
    fakes.how("FAKE_CLIENT", "two-tasks")
    assert fakes.run("accuracy") == 1
    assert "--task names a group of 2 tasks" in capsys.readouterr().err
    assert not fakes.out.exists()


@pytest.mark.slow
def test_answers_are_paired_question_by_question(fakes: SimpleNamespace) -> None:
    fakes.how("FAKE_CLIENT", "better")
    assert fakes.run("accuracy", "--limit", "10") == 0
    page = fakes.out.read_text()
    assert "| 1 | strict-match | 0.5000 ± 0.1667 | 1.0000 ± 0.0000 |" in page
    assert "| strict-match | 0.5000 ± 0.1667 | on higher | 0 | 15 |" in page
    assert "Texts: 15 of 30 answers differ between flag off and on." in page
    assert "**partial**: the first 10 questions" in page
    figures = json.loads(fakes.record.read_text())["answers"]["on"]["0"]["figures"]
    assert figures["flexible-extract"] == {"mean": 1.0, "stderr": 0.0}


@pytest.mark.slow
def test_sides_that_were_asked_other_prompts_give_no_page(fakes: SimpleNamespace) -> None:
    fakes.how("FAKE_CLIENT", "other-prompts")
    assert fakes.run("accuracy") == 1
    assert not fakes.out.exists()


def test_hostile_text_reaches_the_page_as_text(fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "x|y`z` <script>alert(1)</script> [a](javascript:b) \x1b[2J\nnext"
    monkeypatch.setattr(serving, "about", lambda: {"card": hostile})
    assert fakes.run("speed", "--", "--revision", hostile, "--tag=1\n# heading") == 0
    shown = fakes.out.read_text()
    assert "\x1b" not in shown
    assert "# heading" not in shown.splitlines()
    outside = "\n".join(line for line in shown.splitlines() if not line.startswith("    "))
    assert "<script>" not in outside
    assert "[a](" not in outside


@pytest.mark.parametrize(
    "argv",
    [
        ["speed"], ["quickly", "M"], ["speed", "M", "--runs", "2"], ["speed", "M", "--start-timeout", "0"],
        ["speed", "M", "--out", "no/such/folder/x.md"], ["speed", "M", "--json", "."], ["speed", "M", "--runs", "x"],
        ["speed", "M", "--rates", "1,x"], ["speed", "M", "--rates", "1,inf"], ["speed", "M", "--rates", "0"],
        ["speed", "M", "--lengths", "1024/256"], ["speed", "M", "--lengths", "1024/0/1"],
        ["speed", "M", "--prompts", "0"], ["accuracy", "M", "--limit", "1"], ["accuracy", "M", "--max-gen-toks", "0"],
        ["accuracy", "M", "--task", "gsm8k,mmlu"], ["speed", "M", "--work", __file__], ["speed", "M", "--json", "-"],
        ["speed", "M", "--", "--port", "8000"], ["speed", "M", "--", "--served_model_name=x"],
        ["speed", "M", "--", "--additional-config", "{}"], ["speed", "M", "--", "-cc={}"],
        ["speed", "M", "--", "--additional-config.aiter_mla.enabled=false"],
        ["speed", "M", "--", "-cc.pass_config.fuse_aiter_qk_rope_kvcache_mla=true"],
    ],
)  # fmt: skip
def test_a_wrong_option_is_named_before_a_server_starts(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert serving.main(argv) == 2
    named = next((word for word in reversed(argv) if word[:1] == "-" and word != "--"), "")
    assert named.partition("=")[0] in capsys.readouterr().err
    assert not fakes.calls("server")


@pytest.mark.mutation
def test_mutation_a_flag_on_every_side_is_caught(
    fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = serving.server
    monkeypatch.setattr(serving, "server", lambda given, side: own(given, "on"))
    assert fakes.run("speed") == 1
    assert "flag off: 1 lines about engaged layers" in capsys.readouterr().err
    assert not fakes.out.exists()


@pytest.mark.mutation
def test_mutation_uncounted_failures_are_caught(fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_invalid", lambda values, point, given: None)
    with pytest.raises(AssertionError, match=r"^assert 0 == 1"):
        test_a_missing_answer_invalidates_its_row(fakes, "failed", "")

"""Both tools end to end: real servers, vLLM's own benchmark, lm-eval, the small model on a CPU.

Two server starts and six clients each, minutes: the second tool is wide. In eager mode: what a server compiles is not
their business.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools import accuracy, serve_bench
from tools.serving import small
from vllm_aiter_mla.commands.report.page import html_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def served(work: Path) -> tuple[int, str, dict[str, Any]]:
    given = ["--small-model", "--rates", "8", "--lengths", "24/8/8", "--prompts", "8", "--warmups", "2"]
    return _run(serve_bench, work, "bench", given)


@pytest.fixture(scope="module")
def answered(work: Path) -> tuple[int, str, dict[str, Any]]:
    return _run(accuracy, work, "accuracy", ["--small-model", "--limit", "6"])


def _run(tool: Any, work: Path, name: str, given: list[str], *served: str) -> tuple[int, str, dict[str, Any]]:
    page, record = work / f"{name}.md", work / f"{name}.json"
    files = ["--work", str(work), "--out", str(page), "--json", str(record)]
    status = tool.main([*given, *files, "--", "--enforce-eager", *served])
    return status, page.read_text() if page.is_file() else "", json.loads(record.read_text())


def test_both_served_sides_make_a_table(served: tuple[int, str, dict[str, Any]]) -> None:
    status, page, record = served
    assert status == 0
    (row,) = record["rows"]
    assert row["invalid"] is None
    for metric in ("ttft", "tpot"):
        off, on = row["estimates"][metric]
        assert min(off["mean"], on["mean"]) > 0
        assert f"{off['mean']:.2f} ± {off['stderr']:.2f} | {on['mean']:.2f} ± {on['stderr']:.2f}" in page
        assert f"| {off['mean'] / on['mean']:.3f} ± " in page
    for part in ("| 24 | 8 | 8 | 8 |", "## Not claimed", "CPU", "Anything about a GPU", "not judged"):
        assert part in page
    assert "faster" not in page


@pytest.mark.wide
def test_report_takes_what_both_tools_wrote(
    served: tuple[int, str, dict[str, Any]], answered: tuple[int, str, dict[str, Any]], work: Path
) -> None:
    page = html_of([work / "bench.json", work / "accuracy.json"])
    assert "Serving: flag off against on" in page
    assert page.count("MLA layers engaged (reference") == 2


def test_every_request_was_answered_in_full_in_three_runs_of_each_side(
    served: tuple[int, str, dict[str, Any]],
) -> None:
    results = served[2]["results"]
    for side in ("off", "on"):
        assert [(one["completed"], one["failed"]) for run in results[side].values() for one in run] == [(8, 0)] * 3


def test_gauge_stands_on_the_metrics_page_of_a_really_served_model_with_the_flag_on(
    served: tuple[int, str, dict[str, Any]],
) -> None:
    record = served[2]
    assert record["gauges"] == {"off": {}, "on": {"engaged": small.LAYERS, "skipped": 0}}
    assert record["status"].startswith(f"{small.LAYERS}/{small.LAYERS} MLA layers engaged (reference")


@pytest.mark.wide
def test_both_sides_answer_every_question_with_the_same_text(answered: tuple[int, str, dict[str, Any]]) -> None:
    status, page, record = answered
    assert status == 0
    texts = {
        side: [[one["text"] for one in run["answers"].values()] for run in record["answers"][side].values()]
        for side in ("off", "on")
    }
    assert [len(run) for run in texts["off"]] == [6, 6, 6]
    assert texts["off"] == texts["on"]
    assert all(text for run in texts["on"] for text in run)
    assert "Texts: 0 of 18 answers differ" in page
    assert "not distinguishable" in page
    assert "**partial**: --limit 6" in page


@pytest.mark.wide
def test_topology_of_two_data_parallel_engines_gives_vllms_texts_and_a_outcome_of_each(tmp_path: Path) -> None:
    given = ["--small-model", "--limit", "6"]
    status, page, _ = _run(accuracy, tmp_path, "accuracy", given, "--data-parallel-size", "2")
    assert status == 0
    assert "Texts: 0 of 18 answers differ" in page
    (log,) = tmp_path.glob("accuracy-*/server-on.log")
    outcomes = [line for line in log.read_text().splitlines() if "MLA layers engaged" in line]
    engaged = f"{small.LAYERS}/{small.LAYERS} MLA layers engaged"
    assert [engaged in line for line in outcomes] == [True, True]
    assert sorted(line.rpartition(", ")[2] for line in outcomes) == ["data-parallel engine 0", "data-parallel engine 1"]


@pytest.mark.wide
def test_runs_ask_with_other_examples(answered: tuple[int, str, dict[str, Any]]) -> None:
    runs = answered[2]["answers"]["on"].values()
    assert len({tuple(one["prompt"] for one in run["answers"].values()) for run in runs}) == 3


@pytest.mark.parametrize("ended", ["served", pytest.param("answered", marks=pytest.mark.wide)])
def test_no_server_is_left(ended: str, request: pytest.FixtureRequest, work: Path) -> None:
    request.getfixturevalue(ended)
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(work / "model") not in shown

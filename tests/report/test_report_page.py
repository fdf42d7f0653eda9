"""The page's content, without a browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.report.report_support import DATA, engine_result
from tests.sandbox.compare import op_count
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.commands.report import graphs
from vllm_aiter_mla.commands.report.render import html_of

STAGES = (graphs.VLLM, *graphs.STAGES.values())
ROPE_AND_WRITE = "vllm.fused_rope_unified_mla_kv_cache_update"
EARLY = {
    STAGES[3]: (ROPE_AND_WRITE, "vllm.unified_mla_attention_with_output"),
    STAGES[2]: (ROPE_AND_WRITE, "vllm_aiter_mla.mla_decode_q_prep", "vllm_aiter_mla.mla_attention_with_prepared_q"),
}
"""What stands at the end of a graph whose passes ended early."""


def text_of(recorded: dict[str, str], stage: str) -> str:
    """The graph of a stage; those of runs that stop after a pass are made from the recorded ones."""
    if stage in EARLY:
        *before, _ = recorded["fused"].splitlines()
        calls = (f"call_function[target=torch.ops.{op}.default](args = (), kwargs = {{}})" for op in EARLY[stage])
        return "\n".join([*before, *(f"    %op_{n} : [num_users=1] = {call}" for n, call in enumerate(calls))])
    return recorded["vllm" if stage == STAGES[0] else "fused"]


@pytest.fixture(scope="module")
def recorded() -> dict[str, str]:
    return {name: (DATA / f"{name}.fx.txt").read_text() for name in ("vllm", "fused")}


def labels(recorded: dict[str, str], stage: str) -> dict[str, str]:
    return graphs.boxes(graphs.ops(text_of(recorded, stage)))


def test_report_graph_marks_what_the_passes_took_away_and_put_in(recorded: dict[str, str]) -> None:
    vllm_own, fused = labels(recorded, STAGES[0]), labels(recorded, STAGES[1])

    def marked(one: dict[str, str], other: dict[str, str]) -> list[str]:
        return [mark["text"] for mark in graphs.draw(one, other, "x", "a layer").marks if mark["css"] == "strong"]

    gone = ["unified_mla_kv_cache_update", graphs.ROPE, "unified_mla_attention_with_output"]
    assert sorted(marked(vllm_own, fused)) == sorted(gone)
    assert marked(fused, vllm_own) == ["mla_attention_with_rope"]
    assert marked(vllm_own, vllm_own) == []


def test_report_counts_ops_as_the_demo_does(recorded: dict[str, str]) -> None:
    for text in recorded.values():
        assert graphs.ops(text).total() == op_count(text)


def test_report_graph_counts_the_op_inside_auto_functionalized(recorded: dict[str, str]) -> None:
    found = graphs.ops(recorded["fused"])
    assert found["mla_attention_with_rope"] == 1
    assert found["onednn_mm"] == 2
    assert "auto_functionalized" not in found


@pytest.mark.parametrize("stage", STAGES)
def test_report_drawing_shows_a_stage_without_overlap_and_no_edge_points_up(
    recorded: dict[str, str], stage: str
) -> None:
    found = graphs.ops(text_of(recorded, stage))
    assert graphs.stage_of(found) == stage
    names = labels(recorded, stage)
    reached = [name for op, name in graphs.STAGES.items() if op in names or op in names.values()]
    assert (reached or [graphs.VLLM])[0] == stage
    chart = graphs.draw(names, {}, "x", "a layer")
    boxes = [mark["attributes"] for mark in chart.marks if mark["tag"] == "rect"]
    assert len(boxes) == len(names)
    for number, box in enumerate(boxes):
        assert 0 <= box["x"] <= box["x"] + box["width"] <= chart.width
        assert 0 <= box["y"] <= box["y"] + box["height"] <= chart.height
        for other in boxes[number + 1 :]:
            beside = box["x"] + box["width"] <= other["x"] or other["x"] + other["width"] <= box["x"]
            assert beside or box["y"] + box["height"] <= other["y"] or other["y"] + other["height"] <= box["y"]
    for mark in chart.marks:
        if mark["css"] == "edge":
            (x, start), (end_x, end) = (map(float, point.split(",")) for point in mark["attributes"]["points"].split())
            assert x == end_x
            assert start < end


def test_report_names_the_ops_whose_number_differs(kept: Path) -> None:
    page = html_of([kept])
    assert "<tr><td>aten.neg</td>" in page
    assert "<td>mla_attention_with_rope</td>" in page
    assert "<td>aten.rsqrt</td>" not in page


class Page(HTMLParser):
    """Loads, ids and charts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.charts: list[dict[str, str | None]] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.add(tag)
        self.loads += [str(found[key]) for key in ("src", "href", "srcset", "data") if key in found]
        self.ids += [str(found["id"])] if "id" in found else []
        if tag == "svg":
            self.charts.append(found)


def test_report_is_self_contained_and_its_charts_have_text_alternatives(page: str) -> None:
    found = Page(page)
    assert all(load.startswith("#") or load == "data:," for load in found.loads)
    assert not found.tags & {"script", "iframe", "object", "embed", "img"}
    assert "@import" not in page
    assert "url(" not in re.sub(r"url\(#", "", page)
    assert len(found.ids) == len(set(found.ids))
    assert found.charts
    for chart in found.charts:
        assert chart["role"] == "img"
        assert chart["aria-label"]
        assert chart["aria-describedby"] in found.ids


def test_report_of_a_kept_demo_shows_status_ranges_and_both_graphs(kept: Path) -> None:
    page = html_of([kept])
    assert "4/4 engaged" in page
    assert "CPU, reference kernels" in page
    assert "L = 16" in page
    assert "identical to unmodified vLLM, byte for byte" in page
    assert page.count('class="before"') == page.count('class="after"') == 1
    for what in ("bench --json", "verify --json"):
        assert f"Not measured: no <code>{what}" in page
    assert "2.13.0+cpu" in page


def test_report_draws_a_run_that_stops_after_a_pass_between_the_two(
    kept: Path, recorded: dict[str, str], written: Any
) -> None:
    lifted = text_of(recorded, STAGES[2])
    stopped = written("stop-after-2.json", engine_result({"1-16": lifted}, []))
    page = html_of([kept, stopped])
    stages = re.findall(r"<figcaption><strong>([^<]+)</strong>", page)
    assert stages == ["vllm", "after pass 2: q_prep lift", "after pass 3: AITER fusion"]


def test_report_of_a_status_names_each_reason_and_its_layers(written: Any) -> None:
    status = json.loads((DATA / "status.json").read_text())
    del status["engaged"]["model.layers.3.self_attn.attn"]
    status["skipped"] = {"model.layers.3.self_attn.attn": ["sparse", "<b>sparse</b> MLA"]}
    page = html_of([written("status-1-0.json", status)])
    assert "3/4 engaged" in page
    assert "sparse: &lt;b&gt;sparse&lt;/b&gt; MLA (1)" in page
    assert "model.layers.3.self_attn.attn" in page
    assert "not recorded in a status file" in page


def test_report_of_bench_says_what_was_slower_and_what_was_not_measured(bench_json: Path) -> None:
    page = html_of([bench_json])
    assert "slower than the unfused sequence" in page
    assert "aiter: not measured: no ROCm here" in page
    assert "broken" in page
    assert ">n/m<" in page


def test_report_of_verify_on_a_cpu_claims_no_capture_and_no_launches(written: Any) -> None:
    data = json.loads((DATA / "verify.json").read_text())
    data["results"][0] |= {"status": "failed", "findings": [{"oracle": "runs", "message": "broke", "step": "replay 2"}]}
    page = html_of([written("verify.json", data)])
    assert "no graph was captured on this machine" in page
    assert "no GPU launches" in page
    assert "Launches on a GPU: not measured" in page
    assert not re.search(r"\d launches:", page)
    assert "runs at replay 2: broke" in page
    assert data["results"][0]["command"] in page


def test_report_of_two_runs_folds_the_second_and_keeps_ids_apart(kept: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    for file in kept.glob("run0-*.json"):
        for number in (0, 1):
            (folder / file.name.replace("run0", f"run{number}")).write_text(file.read_text())
    demo = json.loads((kept / "demo.json").read_text())
    demo["runs"].append(
        demo["runs"][0] | {"name": "second", "ops_per_layer": None, "decode_limit": None, "flag": False}
    )
    (folder / "demo.json").write_text(json.dumps(demo))
    page = html_of([folder])
    assert "<summary>second</summary>" in page
    assert "flag off" in page
    found = Page(page)
    assert len(found.ids) == len(set(found.ids))


def test_report_of_a_run_without_graphs_says_so(kept: Path) -> None:
    assert "Not recorded: give the folder of" in html_of([kept / "demo.json"])


def test_report_shows_every_reason_of_a_plan(written: Any) -> None:
    options = ["--kv-cache-dtype", "fp8_e5m2", "-dcp", "2", "-tp", "8"]
    done = CliRunner().invoke(app, ["plan", "deepseek-r1", *options, "--json"])
    codes = {reason["code"] for reason in json.loads(done.stdout)["reasons"]}
    assert len(codes) > 1
    page = html_of([written("plan.json", done.stdout)])
    assert all(f"{code}: " in page for code in codes)


def test_report_shows_the_plan_as_static(written: Any) -> None:
    done = CliRunner().invoke(app, ["plan", "deepseek-r1", "--max-num-seqs", "256", "--json"])
    page = html_of([written("plan.json", done.stdout)])
    assert "plan, static: nothing was run" in page
    assert "by formula, static" in page
    assert "L = 256" in page

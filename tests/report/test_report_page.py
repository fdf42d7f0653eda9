"""The page's content, without a browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_support import DATA, engine_result
from typer.testing import CliRunner

from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.commands.report import fx, layers
from vllm_aiter_mla.commands.report.render import html_of


def layer(text: str) -> layers.Layer:
    nodes = fx.parse(text)
    return layers.cut(nodes, layers.attentions(nodes)[0])


def test_report_graph_marks_what_the_passes_took_away_and_put_in(graphs: dict[str, str]) -> None:
    stock, fused = layer(graphs["stock"]), layer(graphs["fused"])
    layers.mark(stock, fused)
    assert (stock.stage, fused.stage) == (layers.STOCK, "after pass 3: AITER fusion")
    assert sorted(box.label for box in fused.boxes.values() if box.changed) == [
        "fused_qk_rope_kv_cache_q_prep",
        "mla_attention_with_prepared_q",
    ]
    assert [box.label for box in stock.boxes.values() if box.changed] == [
        "RoPE and other ops",
        "unified_mla_kv_cache_update",
        "unified_mla_attention_with_output",
    ]
    for one in (stock, fused):
        kept = {(box.label, box.ops.total()) for box in one.boxes.values() if not box.changed}
        assert kept == {("GEMM", 2), ("RMS norm", 8)}
    assert {"aten.neg", "aten.slice_scatter", "aten.index"} <= {name for name, _ in stock.boxes[layers.OTHERS].ops}
    assert (stock.ops, stock.changed, fused.ops, fused.changed) == (25, 17, 10, 2)


def test_report_graph_of_a_layer_against_itself_has_no_mark(graphs: dict[str, str]) -> None:
    one, two = layer(graphs["stock"]), layer(graphs["stock"].replace("%mul_75", "%renamed"))
    layers.mark(one, two)
    assert not one.changed
    assert not two.changed


def test_report_graph_sees_a_changed_constant(graphs: dict[str, str]) -> None:
    one, two = layer(graphs["stock"]), layer(graphs["stock"].replace("1e-06", "1e-05"))
    layers.mark(one, two)
    assert [box.label for box in two.boxes.values() if box.changed] == ["RMS norm"]


def test_report_graph_text_need_not_be_in_topological_order(graphs: dict[str, str]) -> None:
    lines = graphs["stock"].splitlines()
    turned = layer("\n".join([lines[0], *reversed(lines[1:])]))
    assert {box.label for box in turned.boxes.values()} == {box.label for box in layer(graphs["stock"]).boxes.values()}
    assert turned.ops == layer(graphs["stock"]).ops


def rewritten(graphs: dict[str, str], stage: str) -> str:
    """The graph of a run that stops after a pass, made from the recorded ones."""
    if stage == "after pass 1: RoPE + KV write":
        return (
            graphs["fused"]
            .replace("mla_attention_with_prepared_q", "unified_mla_attention_with_output")
            .replace("vllm_aiter_mla.fused_qk_rope_kv_cache_q_prep", "vllm.fused_rope_unified_mla_kv_cache_update")
        )
    return graphs["fused"].replace("fused_qk_rope_kv_cache_q_prep", "mla_decode_q_prep")


@pytest.mark.parametrize("stage", [layers.STOCK, *(stage for _, stage in layers.STAGES)])
def test_report_drawing_has_a_place_for_every_op_of_a_stage_and_no_overlap(graphs: dict[str, str], stage: str) -> None:
    text = graphs["stock" if stage == layers.STOCK else "fused"]
    one = layer(rewritten(graphs, stage) if stage.startswith(("after pass 1", "after pass 2")) else text)
    assert one.stage == stage
    chart = layers.draw(one, "x", "a layer")
    boxes = [mark["attributes"] for mark in chart.marks if mark["tag"] == "rect"]
    assert len(boxes) == len(one.boxes)
    for number, box in enumerate(boxes):
        assert 0 <= box["x"] <= box["x"] + box["width"] <= chart.width
        assert 0 <= box["y"] <= box["y"] + box["height"] <= chart.height
        for other in boxes[number + 1 :]:
            beside = box["x"] + box["width"] <= other["x"] or other["x"] + other["width"] <= box["x"]
            assert beside or box["y"] + box["height"] <= other["y"]
    for mark in chart.marks:
        if mark["css"] == "edge":
            (x, start), (end_x, end) = (map(float, point.split(",")) for point in mark["attributes"]["points"].split())
            assert x == end_x
            assert start < end


def test_report_drawing_shows_an_op_that_it_does_not_know(graphs: dict[str, str]) -> None:
    line = "%mul_tensor_29 : [num_users=2] = call_function[target=torch.ops."
    text = graphs["fused"].replace(f"{line}aten.mul.Tensor]", f"{line}vllm.something_new]")
    assert [name for name, _ in layer(text).boxes[layers.OTHERS].ops] == ["something_new"]


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


def test_report_of_a_kept_demo_shows_census_ranges_and_both_graphs(kept: Path) -> None:
    page = html_of([kept])
    assert "4/4 engaged" in page
    assert "CPU, reference kernels" in page
    assert "L = 16" in page
    assert "identical to stock, byte for byte" in page
    assert page.count('class="before"') == page.count('class="after"') == 1
    for what in ("bench --json", "verify --json"):
        assert f"Not measured: no <code>{what}" in page
    assert "2.13.0+cpu" in page


def test_report_draws_a_run_that_stops_after_a_pass_between_the_two(
    kept: Path, graphs: dict[str, str], written: Any
) -> None:
    lifted = graphs["fused"].replace("fused_qk_rope_kv_cache_q_prep", "mla_decode_q_prep")
    stopped = written("stop-after-2.json", engine_result({"1-16": lifted}, []))
    page = html_of([kept, stopped])
    stages = re.findall(r"<figcaption><strong>([^<]+)</strong>", page)
    assert stages == ["stock", "after pass 2: q_prep lift", "after pass 3: AITER fusion"]


def test_report_of_a_census_names_each_reason_and_its_layers(written: Any) -> None:
    census = json.loads((DATA / "census.json").read_text())
    del census["engaged"]["model.layers.3.self_attn.attn"]
    census["refused"] = {"model.layers.3.self_attn.attn": ["sparse", "<b>sparse</b> MLA"]}
    page = html_of([written("census-1-0.json", census)])
    assert "3/4 engaged" in page
    assert "sparse: &lt;b&gt;sparse&lt;/b&gt; MLA (1)" in page
    assert "model.layers.3.self_attn.attn" in page
    assert "not recorded in a census" in page


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
    demo["runs"].append(demo["runs"][0] | {"name": "second", "ops_per_layer": None, "bucket": None, "flag": False})
    (folder / "demo.json").write_text(json.dumps(demo))
    page = html_of([folder])
    assert "<summary>second</summary>" in page
    assert "flag off" in page
    found = Page(page)
    assert len(found.ids) == len(set(found.ids))


def test_report_of_a_run_without_graphs_says_so(kept: Path) -> None:
    assert "Not recorded: give the folder of" in html_of([kept / "demo.json"])


def test_report_shows_the_plan_as_static(written: Any) -> None:
    done = CliRunner().invoke(app, ["plan", "deepseek-r1", "--max-num-seqs", "256", "--json"])
    page = html_of([written("plan.json", done.stdout)])
    assert "plan, static: nothing was run" in page
    assert "by formula, static" in page
    assert "L = 256" in page

"""What the page says of the layers of an engine, from the status of its workers and from plans."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report import made_files
from tests.report.pages import Write, data_of, rows_of, summaries, tables
from tests.support.decisions import decision
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.commands.report.page import render_page
from vllm_aiter_mla.status.record import DecisionGroup


@pytest.mark.parametrize(
    ("lives", "host", "card", "word"),
    [
        (made_files.living, None, "gfx942", "engaged"),
        (made_files.ended, None, "gfx942", "ended"),
        (None, None, "gfx942", "unknown"),
        (made_files.front_end, None, "gfx942", "ended"),
        (made_files.living, "another", "gfx942", "unknown"),
        (made_files.living, None, "cpu", "engaged on a CPU"),
        (made_files.living, None, "", "unknown"),
    ],
)
def test_only_an_engine_that_lives_and_has_a_card_is_green(
    written: Write, tmp_path: Path, lives: Callable[[Path], None] | None, host: str | None, card: str, word: str
) -> None:
    data = made_files.status(card=card)
    data["evidence"]["host"] = host or data["evidence"]["host"]
    if lives is not None:
        lives(tmp_path)
    page = render_page([written("status-1-a-0-0.json", data)])
    ((said, _, facts),) = summaries(page)
    assert (said, "4/4 MLA layers engaged" in facts["Means"]) == (word, True)
    assert ('class="input-summary good' in page) is (word == "engaged")


def test_the_ranks_of_a_server_share_a_summary_that_says_what_each_says(written: Write, tmp_path: Path) -> None:
    skipped = {made_files.LAYERS[3]: Skip("sparse_mla", "sparse")}
    some = {"engaged": dict.fromkeys(made_files.LAYERS[:3], "triton"), "skipped": skipped}
    changes: list[dict[str, Any]] = [{}, {"rank": 1}, {"rank": 2} | some, {"run": "2-b"}]
    for run in ("1-a", "2-b"):
        made_files.living(tmp_path, run)
    made = (made_files.status(**{"run": "1-a"} | one) for one in changes)
    page = render_page([written(f"{number}.json", data) for number, data in enumerate(made)])
    assert [(word, facts["Input"]) for word, _, facts in summaries(page)] == [
        ("partly", "0.json; 1.json; 2.json"), ("engaged", "3.json"),
    ]  # fmt: skip


def test_the_ranks_that_run_the_same_kernels_share_a_strip(written: Write) -> None:
    other = [DecisionGroup(tuple(made_files.LAYERS), decision((1, 256, "aiter")))]
    changes: list[dict[str, Any]] = [{"rank": 0}, {"rank": 1}, {"rank": 2, "decision_groups": other}]
    page = render_page([written(f"{one['rank']}.json", made_files.status(**one)) for one in changes])
    strips = {
        title: text for title, text in re.findall(r"<h3>(Which kernel runs[^<]*?)\s*</h3>(.*?)<table>", page, re.DOTALL)
    }
    assert [*strips] == ["Which kernel runs: triton 1..64, vllm 65..256", "Which kernel runs: aiter 1..256"]
    assert [[f"rank {rank}: " in text for rank in range(3)] for text in strips.values()] == [
        [True, True, False], [False, False, True],
    ]  # fmt: skip


def test_ranks_that_measured_the_same_share_one_table(written: Write) -> None:
    paths = [
        written(f"status-{rank}-{rank}.json", made_files.status(rank=rank, shape_timings=[made_files.measured()]))
        for rank in range(2)
    ]
    page = render_page(paths)
    assert page.count("<h3>Timed at start-up") == 1
    assert "rank 0: 4 layers" in page
    assert "rank 1: 4 layers" in page
    assert [row for row in rows_of(page) if row[0] == "64"] == [["64", "4.267", "2.911", "6.564", "triton"]]


def test_a_status_names_each_reason_and_its_layers(written: Write) -> None:
    skipped = {made_files.LAYERS[3]: Skip("sparse_mla", "<b>sparse</b> MLA")}
    engaged = dict.fromkeys(made_files.LAYERS[:3], "triton")
    page = render_page([written("status-1-0.json", made_files.status(engaged=engaged, skipped=skipped))])
    (row,) = (row for row in rows_of(page) if "3/4" in row)
    assert row[7].strip().endswith(f"sparse_mla: <b>sparse</b> MLA (1): {made_files.LAYERS[3]}")


def test_a_plan_shows_every_reason(files: dict[str, Path]) -> None:
    plan = data_of(json.loads(files["plan"].read_text()))
    page = render_page([files["plan"]])
    codes = {reason["code"] for reason in plan["reasons"]}
    assert len(codes) > 1
    assert all(f"{code}: " in page for code in codes)
    assert "nothing was run" in page


def test_one_layer_is_drawn_launch_after_launch(files: dict[str, Path]) -> None:
    launches = dict(tables(render_page([files["plan"]])))
    (rows,) = (rows for title, rows in launches.items() if title.startswith("One layer at 64 tokens by formula"))
    launches = Counter(row[0] for row in rows)
    assert (launches["vLLM, unfused"], launches["aiter"], launches["triton"]) == (4, 2, 1)


@pytest.mark.parametrize(("given", "word"), [([0], "unknown"), ([0, 1, 2], "engaged"), ([0, 0, 1], "unknown")])
def test_a_server_is_engaged_only_if_each_of_its_ranks_says_so(
    written: Write, tmp_path: Path, given: list[int], word: str
) -> None:
    made_files.living(tmp_path)
    data = [made_files.status(rank=rank, num_ranks=3, model_name="r1", dp_index="0") for rank in given]
    page = render_page([written(f"{number}.json", one) for number, one in enumerate(data)])
    assert {said for said, *_ in summaries(page)} == {word}
    assert ('class="input-summary good' in page) is (word == "engaged")


def ranges_of(page: str) -> list[str]:
    """The rewritten ranges of each row of layers."""
    rows = next(rows for title, rows in tables(page) if title.startswith("MLA layers"))
    return [row[rows[0].index("rewritten ranges")] for row in rows[1:]]


def test_a_range_counts_as_rewritten_only_where_a_layer_matched(written: Write) -> None:
    pass_counts = {"1-8": {"matched": 0, "skipped": 4}, "9-16": {"matched": 4}, "17-32": {"matched": 1}}
    assert ranges_of(render_page([written("status.json", made_files.status(pass_counts=pass_counts))])) == [
        "9-16, 17-32"
    ]


@pytest.mark.parametrize(("inside", "shown"), [(0, "-"), (1, "1-16")])
def test_a_plan_names_only_ranges_that_its_integration_rewrites(
    files: dict[str, Path], written: Write, inside: int, shown: str
) -> None:
    """The module integration rewrites none, also where a range ends at the decode limit."""
    read = json.loads(files["plan"].read_text())
    data_of(read).update(
        limit=16, compile_ranges={"ranges": [[1, 16], [17, 32]], "num_within_limit": inside, "note": ""}
    )
    assert ranges_of(render_page([written("plan.json", read)])) == [shown]


def test_a_plan_that_could_not_tell_shows_no_number_of_layers(files: dict[str, Path], written: Write) -> None:
    read = json.loads(files["plan"].read_text())
    data_of(read)["outcome"] = "unknown"
    page = render_page([written("plan.json", read)])
    rows = next(rows for title, rows in tables(page) if title.startswith("MLA layers"))
    assert rows[1][1] == "not known"

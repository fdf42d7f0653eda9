"""What was measured, on the page: kernels at start-up, traces, serving times, accuracy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.report.report_support import DATA, measured_shape
from vllm_aiter_mla.commands.report.render import html_of


def cells(page: str) -> list[str]:
    return [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page)]


def test_report_draws_the_measured_choice_once_for_all_ranks(written: Callable[[str, Any], Path]) -> None:
    status = json.loads((DATA / "status.json").read_text()) | {"measured": [measured_shape()]}
    page = html_of([written(f"status-{rank}.json", status | {"rank": rank}) for rank in range(2)])
    assert page.count("Measured at start-up: triton 1..128, aiter 129..1024</h3>") == 1
    assert "rank 0: 61 layers; status-1.json, rank 1: 61 layers" in page
    drawn = re.findall(r'<polyline class="series s(\d)"', page)
    assert drawn == ["0", "1", "2"], "one line per candidate"
    found = cells(page)
    at = found.index("64")
    assert found[at + 1 : at + 5] == ["4.27", "6.56", "3.05", "triton"]


def test_report_of_traces_counts_launches_side_by_side(measured: list[Path]) -> None:
    (path,) = (one for one in measured if one.name == "traces.json")
    page = html_of([path])
    found = cells(page)
    at = found.index("all of them")
    assert found[at + 1 : at + 3] == ["2.00", "1.00"]
    assert found[found.index("KV writes that are fused") + 1 :][:2] == ["0 of 122", "122 of 122"]
    assert "Launches on a GPU: not measured" not in page


def test_report_of_serving_shows_ratios_and_what_is_invalid(measured: list[Path]) -> None:
    (path,) = (one for one in measured if one.name == "serving.json")
    page = html_of([path])
    found = cells(page)
    at = found.index("1024/0/256")
    assert found[at : at + 8] == [
        "1024/0/256", "2.5", "20.00 ± 0.50", "10.00 ± 0.50", "2.000", "20.00 ± 0.50", "20.00 ± 0.50", "1.000",
    ]  # fmt: skip
    assert "invalid: on, run 2: 3 of 200 requests failed" in found
    assert "made up for a test" in page
    assert "61/61 MLA layers engaged (aiter)" in page


def test_report_of_accuracy_shows_every_run(measured: list[Path]) -> None:
    (path,) = (one for one in measured if one.name == "gsm8k.json")
    found = cells(html_of([path]))
    assert found.count("0.9000 ± 0.0100") == 3 * 2 * 2
    assert [found.count(name) for name in ("strict-match", "flexible-extract")] == [3, 3]


def test_report_without_measurements_has_no_serving_section(kept: Path) -> None:
    assert 'id="serving"' not in html_of([kept])

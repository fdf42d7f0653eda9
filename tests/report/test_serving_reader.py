"""What the page says of servers with the flag off and on."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.report.pages import Write, rows_of, summaries
from vllm_aiter_mla.commands.report.page import render_page


def test_served_times_are_drawn_with_their_errors(files: dict[str, Path]) -> None:
    page = render_page([files["serving"]])
    assert ["1024", "0", "256", "5", *["10.00 ± 0.20", "8.00 ± 0.10"] * 3] in rows_of(page)
    drawn = re.findall(r'<svg [^>]*aria-label="([^"]+)"', page)
    assert [title.partition(", lengths ")[0] for title in drawn] == [
        "serving.json: ms per output token", "serving.json: output tokens per second",
    ]  # fmt: skip
    ((_, what, facts),) = summaries(page)
    assert what == "serving speed of a/model"
    assert "1.250 to 1.250 over 2 rates" in facts["Means"]
    assert "torch 2.13" in facts["Versions"]


def test_a_served_point_that_is_invalid_is_named_and_not_drawn(files: dict[str, Path], written: Write) -> None:
    data = json.loads(files["serving"].read_text())
    data["rows"][0] |= {"invalid": "200 failed", "estimates": {}}
    page = render_page([written("serving.json", data)])
    assert (summaries(page)[0][0], "rate 1: invalid: 200 failed" in page) == ("failed", True)
    assert "over 1 rates" in page

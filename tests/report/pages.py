"""What stands on a page of the report, and the checks that the tests draw."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_aiter_mla import files
from vllm_aiter_mla.commands.check.record import CheckRun, StepResult

Write = Callable[[str, Any], Path]


def rows_of(page: str) -> list[list[str]]:
    """The text of every table row."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    cells = [re.findall(r"<t[dh]>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]
    return [[html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in row] for row in cells]


def sections_of(page: str) -> list[str]:
    """Titles of the sections."""
    return re.findall(r'<section id="[^"]*"><h2>([\w ]+)</h2>', page)


def summaries(page: str) -> list[tuple[str, str, dict[str, str]]]:
    """The first screen: outcome, what was done, and the facts of each input."""
    found = re.findall(r'<section class="input-summary[^"]*"><h2>(.*?)</h2>\s*<dl>(.*?)</dl>', page, re.DOTALL)
    facts = [dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text, re.DOTALL)) for _, text in found]
    heads = [re.fullmatch(r"<span[^>]*>(.*?)</span> (.*)", head, re.DOTALL) for head, _ in found]
    return [(head[1], head[2], facts) for head, facts in zip(heads, facts, strict=True) if head]


def tables(page: str) -> list[tuple[str, list[list[str]]]]:
    """Title and rows of each table, its head first."""
    parts = [part.partition("</h3>") for part in page.split("<h3>")[1:]]
    return [(html.unescape(re.sub(r"<[^>]+>", "", title)), rows_of(text)) for title, _, text in parts]


def data_of(read: Any) -> Any:
    """The record in the only step of a check."""
    (step,) = read["steps"]
    return step["data"]


def check_run(*done: StepResult, status: int | None, on_a_card: bool | None = None) -> Any:
    """The JSON of a check that ended so."""
    return json.loads(files.to_json(CheckRun("a-model", status, done, on_a_card)))

# SPDX-License-Identifier: Apache-2.0
"""Render a page from files: the reader of each file adds it to one ``Page``, which the template prints.

The template escapes every value except the SVG of ``charts``, because names and messages in the files may contain
anything.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from vllm_aiter_mla import __version__, files
from vllm_aiter_mla.commands.check.record import CheckRun
from vllm_aiter_mla.commands.outputs import escape_unprintable
from vllm_aiter_mla.commands.report.blocks import OUTCOMES, PLAN, InputSummary, Page, PageInput
from vllm_aiter_mla.commands.report.check_reader import add_check
from vllm_aiter_mla.commands.report.serving_reader import add_serving
from vllm_aiter_mla.commands.report.serving_record import Serving
from vllm_aiter_mla.commands.report.status_reader import add_status
from vllm_aiter_mla.status.record import RankRecord, engine_key

READERS: dict[str, tuple[type[Any], Callable[[Page, PageInput, Any], InputSummary]]] = {
    "check": (CheckRun, add_check),
    "status": (RankRecord, add_status),
    "serving": (Serving, add_serving),
}
"""The record type and its reader, by the schema in the stamp of a file."""
MAX_INPUT_BYTES = 2**25
"""Size of the largest file that the page shows: the answers of two runs of GSM8K take 5.3 MB."""
MIN_DIGITS, MAX_DIGITS = 4, 17
"""Significant digits of a number on the page, and those of a float."""


def render_page(paths: Sequence[Path]) -> str:
    """Return the page for these files and folders.

    Raises:
        OSError: names a file that cannot be read.
        ValueError: names a file that is not JSON, is of an unknown kind, or has other fields than this version writes.
    """
    page, records = Page(), [*_load_records(paths)]
    for path, name, record in records:
        page_input = PageInput(name, path.parent, _ranks_of_engine(record, (other for *_, other in records)))
        _, add_record = READERS[files.schema_of(type(record))]
        try:
            page.add_summary(page_input, add_record(page, page_input, record), record.evidence)
        except Exception as error:  # a file that was edited by hand may raise anything
            raise ValueError(f"{path}: not what this version writes: {type(error).__name__}: {error}") from error
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_cell_text)
    template = environment.from_string(Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8"))
    html = template.render(
        summaries=page.summaries, outcomes=OUTCOMES, sections=page.sections, plan_section=PLAN, plugin=__version__
    )
    return html + "\n"


def _cell_text(value: Any) -> Any:
    """Return the printed form of a value of the page."""
    return "-" if value is None else _float_text(value) if isinstance(value, float) else value


def _float_text(value: float) -> str:
    """Return a number with ``MIN_DIGITS`` significant digits, and with more where it would look like 0 or 1."""
    if math.isfinite(value) and abs(float(f"{value:.{MIN_DIGITS}g}")) >= 10**MIN_DIGITS:
        return f"{value:.0f}"  # not 1e+04
    texts = (f"{value:.{num_digits}g}" for num_digits in range(MIN_DIGITS, MAX_DIGITS))
    return next((text for text in texts if abs(float(text)) not in (0, 1)), f"{value:.{MAX_DIGITS}g}")


def _load_records(paths: Sequence[Path]) -> Iterator[tuple[Path, str, Any]]:
    """Yield each file, its name on the page, and its record.

    Raises:
        ValueError: a file is of an unknown kind or another version.
    """
    names = Counter[str]()
    for path, name, schema, data in _load_files(paths):
        if schema not in READERS:
            raise ValueError(f"{path}: not recognised ({schema}); expected JSON of {', '.join(READERS)}")
        names[name] += 1
        yield path, name if names[name] == 1 else f"{name} ({names[name]})", files.parse(READERS[schema][0], path, data)


def _ranks_of_engine(record: Any, records: Iterable[Any]) -> list[RankRecord]:
    """Return one record for each rank of a status's engine; none for a record of another kind."""
    if not isinstance(record, RankRecord):
        return []
    rank_records = (other for other in records if isinstance(other, RankRecord))
    return [*{other.rank: other for other in rank_records if engine_key(other) == engine_key(record)}.values()]


def _load_files(paths: Sequence[Path]) -> Iterator[tuple[Path, str, str, Any]]:
    """Yield each file, its name on the page (never a full path), the schema in its stamp, and its content.

    In a folder, files of kinds that the page cannot show are skipped: a worker writes such files next to its status.
    """
    for path in paths:
        if not path.is_dir():
            # The user may name a link. ``files.load`` follows none, because others may write to the plugin's folder.
            target = Path(os.path.realpath(path)) if path.is_symlink() else path
            yield path, escape_unprintable(path.name), *_read_file(target)
            continue
        all_files = [
            (file, escape_unprintable(f"{path.name}/{file.stem}"), *_read_file(file))
            for file in sorted(path.glob("*.json"))
        ]
        files_to_show = [file for file in all_files if file[2] in READERS]
        if not files_to_show:
            raise ValueError(f"{path}: no JSON file in this folder that can be shown")
        yield from files_to_show


def _read_file(path: Path) -> tuple[str, Any]:
    """Return the schema in the stamp of a file, and its content."""
    data = _escape_strings(files.load(path, MAX_INPUT_BYTES))
    return files.layout_of(data)[0], data


def _escape_strings(value: Any) -> Any:
    """Return the value with the control characters in its strings and keys as escapes."""
    if isinstance(value, dict):
        return {escape_unprintable(key): _escape_strings(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escape_strings(inner) for inner in value]
    return escape_unprintable(value) if isinstance(value, str) else value

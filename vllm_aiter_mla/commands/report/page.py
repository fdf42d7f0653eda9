# SPDX-License-Identifier: Apache-2.0
"""From files to a page: each file's reader adds it to the ``blocks`` of one page, which the template prints.

The template escapes every value but the SVG of ``charts``: names and messages in the files may hold anything.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from vllm_aiter_mla import __version__, files
from vllm_aiter_mla.commands.check.record import CheckRun
from vllm_aiter_mla.commands.outputs import printable
from vllm_aiter_mla.commands.report.blocks import OUTCOMES, PLAN, Glance, Input, Page
from vllm_aiter_mla.commands.report.check_reader import check
from vllm_aiter_mla.commands.report.engine_reader import status
from vllm_aiter_mla.commands.report.serving_reader import serving
from vllm_aiter_mla.commands.report.serving_record import Serving
from vllm_aiter_mla.status.record import RankStatus

READERS: dict[str, tuple[type[Any], Callable[[Page, Any], Glance]]] = {
    "check": (CheckRun, check),
    "status": (RankStatus, status),
    "serving": (Serving, serving),
}
"""Record and reader by the schema that a file's stamp names."""


def html_of(paths: Sequence[Path]) -> str:
    """Return the page for these files and folders.

    Raises:
        OSError: names a file that cannot be read.
        ValueError: names a file that is no JSON, of no known kind, or with other fields than are written here.
    """
    page, records = Page(), [*_records(paths)]
    for path, name, record in records:
        page.input = Input(name, path.parent, _ranks_given(record, (other for *_, other in records)))
        _, reader = READERS[files.schema_of(type(record))]
        try:
            page.begin(reader(page, record), record.evidence)
        except Exception as error:  # whatever another hand wrote
            raise ValueError(f"{path}: not what this version writes: {type(error).__name__}: {error}") from error
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_shown)
    template = environment.from_string(Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8"))
    text = template.render(
        glances=page.glances, outcomes=OUTCOMES, sections=page.sections, planned=PLAN, plugin=__version__
    )
    return text + "\n"


def _shown(value: Any) -> Any:
    """Return what a value of the page is printed as."""
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else value


def _records(paths: Sequence[Path]) -> Iterator[tuple[Path, str, Any]]:
    """Yield each file, its name on the page, and its record.

    Raises:
        ValueError: a file is of another kind or version.
    """
    names = Counter[str]()
    for path, name, schema, data in _files(paths):
        if schema not in READERS:
            raise ValueError(f"{path}: not recognised ({schema}); expected JSON of {', '.join(READERS)}")
        names[name] += 1
        yield path, name if names[name] == 1 else f"{name} ({names[name]})", files.parse(READERS[schema][0], path, data)


def _ranks_given(record: Any, records: Iterable[Any]) -> int:
    """Return how many ranks of a status' engine are among the records; 0 for a record of another kind."""
    if not isinstance(record, RankStatus):
        return 0
    statuses = (other for other in records if isinstance(other, RankStatus))
    return len({other.rank for other in statuses if (other.run, other.engine) == (record.run, record.engine)})


def _files(paths: Sequence[Path]) -> Iterator[tuple[Path, str, str, Any]]:
    """Yield each file, its name for the reader (never a full path), its kind as its stamp names it, and its content.

    Of a folder, records that the page does not show are left out: a worker keeps others next to its status.
    """
    for path in paths:
        if not path.is_dir():
            yield path, printable(path.name), *_read(path)
            continue
        all_files = [
            (file, printable(f"{path.name}/{file.stem}"), *_read(file)) for file in sorted(path.glob("*.json"))
        ]
        shown = [file for file in all_files if file[2] in READERS]
        if not shown:
            raise ValueError(f"{path}: no JSON file in this folder that can be shown")
        yield from shown


def _read(path: Path) -> tuple[str, Any]:
    """Return a file's kind, as its stamp names it, and its content."""
    data = _clean(files.load(path))
    return files.layout_of(data)[0], data


def _clean(value: Any) -> Any:
    """Return the value with control characters in its strings and keys written out."""
    if isinstance(value, dict):
        return {printable(key): _clean(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_clean(inner) for inner in value]
    return printable(value) if isinstance(value, str) else value

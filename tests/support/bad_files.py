"""Ways in which a file of ours can be bad: each takes the path of a good one and spoils it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_aiter_mla import files


def changed(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda path: files.write_record(path, change(json.loads(path.read_text())))


def replaced(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        path.rename(path.with_name("elsewhere"))
        make(path)

    return spoil


def of_stamp(**fields: Any) -> Callable[[Path], None]:
    return changed(lambda data: data | {files.STAMP_KEY: data[files.STAMP_KEY] | fields})


BAD: dict[str, Callable[[Path], Any]] = {
    "another version": of_stamp(schema_version=99),
    "another record": of_stamp(schema="vllm-aiter-mla/apples"),
    "half a stamp": changed(lambda data: data | {files.STAMP_KEY: {"schema": data[files.STAMP_KEY]["schema"]}}),
    "no stamp": changed(lambda data: {name: value for name, value in data.items() if name != files.STAMP_KEY}),
    "a field is missing": changed(lambda data: {files.STAMP_KEY: data[files.STAMP_KEY]}),
    "lists for values": changed(lambda data: {n: one if n == files.STAMP_KEY else [[1]] for n, one in data.items()}),
    "a list": lambda path: path.write_text("[]"),
    "a number": lambda path: path.write_text("1"),
    "empty": lambda path: path.write_text(""),
    "cut off": lambda path: path.write_text(path.read_text()[:-20]),
    "no text": lambda path: path.write_bytes(b"\x00\xff\xfe"),
    "no JSON": lambda path: path.write_text('{"rank": NaN}'),
    "too deep": lambda path: path.write_text("[" * 200_000),
    "too large": lambda path: os.truncate(path, files.MAX_BYTES + 1),
    "a link": replaced(lambda path: path.symlink_to(path.with_name("elsewhere"))),
    "a link to nothing": replaced(lambda path: path.symlink_to("nowhere")),
    "a pipe": replaced(os.mkfifo),
    "a folder": replaced(Path.mkdir),
}

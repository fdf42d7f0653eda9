"""Output paths, looked at before a run starts: a run of minutes must not end in a traceback over its last step.

Neither typer nor torch is imported, so the tools use it too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from vllm_aiter_mla.files import is_device


class OutputError(ValueError):
    """Nothing can be written there; one line that names the option and the path."""


def check(files: Mapping[str, Path | None], folders: Mapping[str, Path | None] | None = None) -> None:
    """Raise unless every path can be written.

    Args:
        files: path by option, ``--json`` and the like; None where the option is not given. A file may exist, its
            folder must.
        folders: likewise; a folder that does not exist yet must be one that can be made.

    Raises:
        OutputError: for the first that cannot.
    """
    for paths, problem in ((files, file_problem), (folders or {}, folder_problem)):
        for option, path in paths.items():
            reason = None if path is None else _asked(problem, path)
            if reason is not None:
                raise OutputError(f"{option} {path}: {reason}")


def file_problem(path: Path) -> str | None:
    """Why no file can be written at ``path``, or None."""
    if is_device(path):
        return None if os.access(path, os.W_OK) else "not writable"
    if path.is_dir():
        return "is a folder"
    # The file, or a link in its place, is replaced in its folder.
    if path.exists() and not path.is_symlink() and not os.access(path, os.W_OK):
        return "not writable"
    if not path.parent.is_dir():
        return "its folder does not exist"
    return None if os.access(path.parent, os.W_OK | os.X_OK) else "its folder is not writable"


def folder_problem(path: Path) -> str | None:
    """Why ``path`` cannot be used as a folder, made with its parents where it is missing, or None."""
    nearest = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not nearest.is_dir():
        return "is not a folder" if nearest == path.absolute() else f"{nearest} is not a folder"
    if os.access(nearest, os.W_OK | os.X_OK):
        return None
    return "not writable" if nearest == path.absolute() else f"{nearest} is not writable"


def _asked(problem: Callable[[Path], str | None], path: Path) -> str | None:
    try:
        return problem(path)
    # Too long a name, a loop of links.
    except (OSError, RuntimeError) as error:
        return getattr(error, "strerror", None) or str(error)

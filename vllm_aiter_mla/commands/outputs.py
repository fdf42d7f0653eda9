# SPDX-License-Identifier: Apache-2.0
"""What the commands write: files, lines of progress and of errors, text from elsewhere. Imports no torch."""

from __future__ import annotations

import os
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from vllm_aiter_mla.files import is_device

PATIENCE = 2.0
"""Seconds before a command says which step it has reached."""

Step = Callable[[str], None]
"""Takes the name of the step that begins."""


class OutputError(ValueError):
    """A path cannot be written; the message names the option and the path."""


def check(files: Mapping[str, Path | None], folders: Mapping[str, Path | None] | None = None) -> None:
    """Check before a run of minutes that its output can be written.

    Args:
        files: path by option; None if the option is not given. The folder of a file must exist.
        folders: likewise; a missing folder is made later, with its parents.

    Raises:
        OutputError: for the first path that cannot be written.
    """
    for problem, paths in ((_file_problem, files), (_folder_problem, folders or {})):
        for option, path in paths.items():
            try:
                reason = None if path is None else problem(path)
            except OSError as error:
                reason = error.strerror
            if reason is not None:
                raise OutputError(f"{option} {path}: {reason}")


def _file_problem(path: Path) -> str | None:
    if is_device(path) or path.is_symlink():  # a link is replaced
        path = path.parent if path.is_symlink() else path
    elif path.is_dir():
        return "is a folder"
    elif not path.exists():
        path = path.parent
        if not path.is_dir():
            return "its folder does not exist"
    return None if os.access(path, os.W_OK) else "not writable"


def _folder_problem(path: Path) -> str | None:
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    return None if os.access(nearest, os.W_OK) else f"{nearest} is not writable"


def fail(message: str, status: int = 2) -> NoReturn:
    """End the command with one line on stderr and this exit status."""
    typer.echo(line(message), err=True)
    raise typer.Exit(status)


@contextmanager
def progress(command: str) -> Iterator[Step]:
    """Print to stderr which step a block has reached after ``PATIENCE`` seconds, and every later step."""
    steps, late = ["starting"], threading.Event()

    def say() -> None:
        late.set()
        print(f"{command}: {steps[-1]} ...", file=sys.stderr, flush=True)

    def begin(step: str) -> None:
        steps.append(step)
        if late.is_set():
            say()

    timer = threading.Timer(PATIENCE, say)
    timer.daemon = True
    timer.start()
    try:
        yield begin
    finally:
        timer.cancel()


def printable(text: str) -> str:
    """Return the text with control, format and unassigned characters written out (``\\x1b``), so that none of them
    moves the cursor or turns the line round; line ends and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c)[0] == "C" and c not in "\n\t" else c
        for c in text
    )


def line(text: str) -> str:
    """Return ``printable(text)`` on one line."""
    return printable(text).replace("\n", "\\n").replace("\t", " ")

# SPDX-License-Identifier: Apache-2.0
"""What the commands write: files, lines of errors, text from elsewhere; and their exit statuses. Imports no torch."""

import contextlib
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from vllm_aiter_mla import files

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INCOMPLETE, EXIT_NO_GAIN = range(5)
"""Exit statuses of every command, as ``EXIT_STATUSES`` explains them."""
HOST = ("torch", "vllm", "triton", "numpy")
"""Packages that the plugin needs and that come with a ROCm image: the plugin's metadata does not require them."""
SIGNALS = 128
"""The exit status of a command that a signal ended is this number plus the signal's."""
EXIT_STATUSES = """\b
Exit status of every command:
  0  all is well
  1  something was found
  2  an option, the model or a file is wrong
  3  it could not look, or not at everything (check --require-all)
  4  check only: the flag gains nothing on this card
  128+n  signal n ended it (130: Ctrl-C, 143: SIGTERM)"""
STDOUT = Path("-")
WIDTH, NARROWEST = 80, 60
"""Characters in a line where there is no terminal, and the fewest that a narrow terminal gets."""
LAST_COLUMN = 32
"""The last column of a line that is aligned in columns begins before this character."""


class Stdout(Console):
    """rich's console on standard output. Like ``print`` it raises if the reader of a pipe has gone."""

    def on_broken_pipe(self) -> None:
        """Leave the error to ``main``. rich's own method ends the command with exit status 1."""
        raise


def width() -> int:
    """Return the columns of the terminal."""
    return max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROWEST)


@contextlib.contextmanager
def text_on_stderr(path: Path | None) -> Iterator[None]:
    """If ``path`` is standard output, send what is printed meanwhile to standard error: a program reads the JSON.

    The descriptor is redirected too, because vLLM, libraries and compilers do not print through ``sys.stdout``.
    """
    if path != STDOUT:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def write(command: str, path: Path, text: str, status: int = EXIT_USAGE) -> None:
    """Write a file of a command, or to standard output if ``path`` is "-".

    If the file cannot be written, the command ends with one line and the exit status ``status``.

    Raises:
        OSError: standard output takes no more.
    """
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        files.write_text(path, text)
    except OSError as error:
        fail(f"{command}: {path}: {error.strerror or error}", status)


def why_not_writable(path: Path | None) -> str | None:
    """Return why an option's file cannot be written, or None. The folder of the file must exist."""
    if path is None or path == STDOUT:
        return None
    if str(path).startswith("-"):
        return "an option in the place of a file; for a file of that name give ./ before it"
    try:
        if not files.is_device(path):
            if path.is_dir() and not path.is_symlink():
                return "is a folder"
            path = path.parent  # a file is replaced, and so is a link
            if not path.is_dir():
                return "its folder does not exist"
        return None if os.access(path, os.W_OK) else "not writable"
    except OSError as error:
        return error.strerror


def fail(message: str, status: int = EXIT_USAGE) -> NoReturn:
    """End the command with one line on stderr and this exit status."""
    typer.echo(one_line(message), err=True)
    raise typer.Exit(status)


def writable(context: typer.Context, option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the path; end the command at once if the option's file cannot be written. For typer, as a callback."""
    if (why := why_not_writable(path)) is not None:
        fail(f"{context.info_name}: {option.opts[0]} {path}: {why}")
    return path


Json = Annotated[
    Path | None,
    typer.Option(metavar="FILE", callback=writable, help="Write the outcome to this JSON file; - for stdout."),
]


def printable(text: str) -> str:
    """Return the text with control, format and unassigned characters as escapes (``\\x1b``): none of them can move the
    cursor or reverse the line. Line ends and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(c.encode("unicode_escape").decode() if _moves_the_cursor(c) and c not in "\n\t" else c for c in text)


def _moves_the_cursor(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] == "C" or category in ("Zl", "Zp")  # control, format, ...; ends of lines and paragraphs


def folded(text: str) -> str:
    """Return the text in lines of ``width`` characters. The rest of a long line is indented as its last column is.

    Columns are set apart by two blanks, and "- " begins one: the rest of "  heads   128 / TP 8" is indented by 10.
    """
    return "\n".join("\n".join(_fold(each)) for each in text.removesuffix("\n").split("\n"))


def _fold(text: str) -> list[str]:
    """Return one line as several."""
    columns = re.match(r" *(\S.*  )?(- )?", text[:LAST_COLUMN])
    indent = columns.end() if columns and columns.end() else 2
    fold = textwrap.TextWrapper(
        width(),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return fold.wrap(text) or [""]


def one_line(text: str) -> str:
    """Return ``printable(text)`` on one line: a line end is shown as ``\\n``."""
    return printable(text).replace("\n", "\\n").replace("\t", " ")

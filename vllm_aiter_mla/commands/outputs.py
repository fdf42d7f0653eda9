# SPDX-License-Identifier: Apache-2.0
"""The output of the commands: files, error lines, text from other sources, and exit statuses. Imports no torch."""

import contextlib
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn

import typer
from rich.console import Console

from vllm_aiter_mla import files

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INCOMPLETE, EXIT_NO_GAIN = range(5)
"""Exit statuses of every command, as ``EXIT_MEANINGS`` explains them."""
HOST_PACKAGES = ("torch", "vllm", "triton", "numpy")
"""Packages that the plugin needs and a ROCm image has. The plugin's metadata does not require them."""
SIGNAL_EXIT_OFFSET = 128
"""The exit status of a command that a signal ended is this number plus the number of the signal."""


class ExitMeaning(NamedTuple):
    """What an exit status means: in the help of every command, and after a run of ``check``."""

    help_text: str
    check_outcome: str  # a word of ``report.blocks.OUTCOMES``
    check_text: str  # what a run of ``check`` showed, and what to do


EXIT_MEANINGS = {
    EXIT_OK: ExitMeaning("all is well", "passed", "every step that ran passed"),
    EXIT_FAILED: ExitMeaning(
        "a problem was found", "failed", "do not switch the fast path on before the failed steps pass"
    ),
    EXIT_USAGE: ExitMeaning(
        "an option, the model or a file is wrong",
        "failed",
        "an option or the model was wrong, and the other steps did not run",
    ),
    EXIT_INCOMPLETE: ExitMeaning(
        "not everything could be checked (check --require-all)",
        "skipped",
        "a step gave no result, no step ran on a card, or a step that was asked for was skipped",
    ),
    EXIT_NO_GAIN: ExitMeaning(
        "check only: the flag gains nothing on this card",
        "no gain",
        "the flag gains nothing on this card: vLLM's own kernels are the fastest for this model; leave it off",
    ),
}
EXIT_STATUSES = "\n".join((
    "\b",
    "Exit status of every command:",
    *(f"  {exit_status}  {meaning.help_text}" for exit_status, meaning in EXIT_MEANINGS.items()),
    f"  {SIGNAL_EXIT_OFFSET}+n  signal n ended the command (130: Ctrl-C, 143: SIGTERM)",
))  # fmt: skip
"""The end of the help."""
STDOUT = Path("-")
DEFAULT_WIDTH, MIN_WIDTH = 80, 60
"""Characters in a line if there is no terminal, and the least on a narrow terminal."""
MAX_LAST_COLUMN_START = 32
"""The last column of an aligned line begins before this character."""


class Stdout(Console):
    """A rich console on standard output. Like ``print`` it raises if the reader of a pipe has gone."""

    def on_broken_pipe(self) -> None:
        """Raise the error again, for ``main``. rich's own method would end the command with exit status 1."""
        raise


def terminal_width() -> int:
    """Return the width of the terminal in characters."""
    return max(shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns, MIN_WIDTH)


@contextlib.contextmanager
def text_on_stderr(path: Path | None) -> Iterator[None]:
    """During the block, send all printed text to standard error if the JSON goes to standard output, for a program.

    The descriptor is redirected too, because vLLM, libraries and compilers do not print through ``sys.stdout``.
    """
    if path != STDOUT:
        yield
        return
    sys.stdout.flush()
    saved_stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


def write_output(command: str, path: Path, text: str, exit_status: int = EXIT_USAGE) -> None:
    """Write ``text`` to a file, or to standard output if ``path`` is "-".

    If the file cannot be written, end the command with one line on stderr and ``exit_status``.

    Raises:
        OSError: standard output is full or closed.
    """
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        files.write_text(path, text)
    except OSError as error:
        fail(f"{command}: {path}: {error.strerror or error}", exit_status)


def unwritable_reason(path: Path | None) -> str | None:
    """Return why the file of an option cannot be written, or None. The folder of the file must exist."""
    if path is None or path == STDOUT:
        return None
    if str(path).startswith("-"):
        return "an option in the place of a file; for a file of that name give ./ before it"
    try:
        if not files.is_stream(path):
            if path.is_dir() and not path.is_symlink():
                return "is a folder"
            path = path.parent  # a file or a link is replaced, so its folder must be writable
            if not path.is_dir():
                return "its folder does not exist"
        return None if os.access(path, os.W_OK) else "not writable"
    except OSError as error:
        return error.strerror


def same_file_reason(*options: tuple[str, Path | None]) -> str | None:
    """Return why two options that write would write to the same file, or None. Each is a name and its path."""
    name_by_written_path: dict[str, str] = {}
    for name, path in options:
        if path is None or (written_path := _written_path(path)) == os.devnull:
            continue
        if written_path in name_by_written_path:
            return f"{name_by_written_path[written_path]} and {name} name the same file {path}"
        name_by_written_path[written_path] = name
    return None


def overwritten_input_reason(inputs: Iterable[Path], out: Path) -> str | None:
    """Return why the output would replace an input, or None. An input is a file, or a folder of JSON files."""
    written_path = _written_path(out)
    for path in inputs:
        for input_file in path.glob("*.json") if os.path.isdir(path) else (path,):
            if os.path.realpath(input_file) == written_path:
                return f"{input_file} is an input and would be replaced"
    return None


def _written_path(path: Path) -> str:
    """Return the path of the file or the stream that ``files.write_text`` writes. It replaces a link."""
    if path == STDOUT:
        path = Path("/dev/stdout")
    return os.path.realpath(path) if files.is_stream(path) else str(path.parent.resolve() / path.name)


def fail(message: str, exit_status: int = EXIT_USAGE) -> NoReturn:
    """End the command with one line on stderr and this exit status."""
    typer.echo(one_line(message), err=True)
    raise typer.Exit(exit_status)


def check_writable(ctx: typer.Context, option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the path, or end the command if the option's file cannot be written. This is a callback for typer."""
    if (reason := unwritable_reason(path)) is not None:
        fail(f"{ctx.info_name}: {option.opts[0]} {path}: {reason}")
    return path


Json = Annotated[
    Path | None,
    typer.Option(metavar="FILE", callback=check_writable, help="Write the outcome to this JSON file; - for stdout."),
]


def escape_unprintable(text: str) -> str:
    """Return the text with control, format and unassigned characters as escapes (``\\x1b``).

    Such characters could move the cursor or reverse the line. Line ends and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if _can_move_cursor(character) and character not in "\n\t"
        else character
        for character in text
    )


def _can_move_cursor(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] == "C" or category in ("Zl", "Zp")  # control, format, ...; ends of lines and paragraphs


def fold_text(text: str) -> str:
    """Return the text in lines of at most ``terminal_width`` characters.

    A line that continues a long one is indented to the last column. Two blanks separate columns, and "- " begins one:
    "  heads   128 / TP 8" continues with an indent of 10.
    """
    return "\n".join("\n".join(_fold_line(line)) for line in text.removesuffix("\n").split("\n"))


def _fold_line(text: str) -> list[str]:
    """Return the lines that one long line is folded into."""
    last_column = re.match(r" *(\S.*  )?(- )?", text[:MAX_LAST_COLUMN_START])
    indent = last_column.end() if last_column and last_column.end() else 2
    wrapper = textwrap.TextWrapper(
        terminal_width(),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return wrapper.wrap(text) or [""]


def one_line(text: str) -> str:
    """Return ``escape_unprintable(text)`` on one line: a line end becomes ``\\n``."""
    return escape_unprintable(text).replace("\n", "\\n").replace("\t", " ")

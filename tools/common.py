"""Shared by the tools: failures and their exit status, option checks, pip, and tables."""

import argparse
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vllm_aiter_mla.commands import outputs


class UsageError(ValueError):
    """A wrong option or a missing package. The message names it. Exit status 2, before anything starts."""


class RunError(RuntimeError):
    """The tool could not do what was asked. Exit status 1."""


class Parser(argparse.ArgumentParser):
    """argparse with the tool's docstring as its help; a wrong option raises ``UsageError``."""

    def __init__(self, description: str | None, usage: str) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, usage=usage, formatter_class=form, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise instead of ending the process."""
        raise UsageError(message)


def guarded(tool: str, body: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run ``body`` over ``argv``, by default the command line.

    Return its exit status, or that of its failure: 2 usage, 1 run, 130 interrupted. SIGTERM and SIGHUP act like Ctrl-C,
    so that they stop what was started too; one that is ignored, as under nohup, stays so.
    """
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    for one, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(one, signal.default_int_handler)
    try:
        return body(sys.argv[1:] if argv is None else argv)
    except (UsageError, RunError) as error:
        print(f"{tool}: {outputs.escape_unprintable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print(f"{tool}: interrupted; what was started is stopped, nothing is written", file=sys.stderr)
        return 130
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def positive(option: str, value: float) -> None:
    """Raise UsageError unless ``value`` is above 0."""
    if not value > 0:
        raise UsageError(f"{option} {value}: must be above 0")


def writable(files: Mapping[str, Path | None]) -> None:
    """Raise UsageError for the first option whose path cannot be written. None is an option that was not given."""
    for option, path in files.items():
        if path == outputs.STDOUT:
            raise UsageError(f"{option} {path}: a file; /dev/stdout is the terminal")
        if (why := outputs.unwritable_reason(path)) is not None:
            raise UsageError(f"{option} {path}: {why}")


def folders(options: Mapping[str, Path | None]) -> None:
    """Raise UsageError for the first option whose path is there and no folder. None is an option that was not given."""
    for option, path in options.items():
        if path is not None and path.exists() and not path.is_dir():
            raise UsageError(f"{option} {path}: is no folder")


def run_pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:") and "for help" not in line]
        raise RunError((errors or [f"pip ended with status {done.returncode}"])[-1])


def escaped(value: Any) -> str:
    """Return ``value`` as one line of Markdown in which it starts or ends no cell, code, tag or link."""
    line = outputs.escape_unprintable(" ".join(str(value).split("\n")))
    line = re.sub(r"([\\|`\[\]])", r"\\\1", line.replace("&", "&amp;"))
    return line.replace("<", "&lt;").replace(">", "&gt;")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], align: str = "--:") -> list[str]:
    """Return a Markdown table. Every cell is escaped, short rows are filled up."""
    lines = [[escaped(value) for value in row] + [""] * (len(head) - len(row)) for row in rows]
    return ["| " + " | ".join(line) + " |" for line in ([*map(escaped, head)], [align] * len(head), *lines)]


def aligned(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return a table for a terminal: the first column flush left, the others flush right."""
    lines = [[str(value) for value in line] for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [" ".join([f"{line[0]:<{widths[0]}}", *map(str.rjust, line[1:], widths[1:])]) for line in lines]

# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla``: the commands."""

import errno
import importlib
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vllm_aiter_mla import __version__
from vllm_aiter_mla.commands import outputs, process

# Each module has a function with the name of the command, and no slow import at its top.
COMMANDS = ("check", "status", "report")

VERIFY_OPTIONS = {
    "-b": "--backend", "--only": "--case", "-k": "--case", "--seed": "--data-seed", "--replays": "--long-run"
}  # fmt: skip
NUMBER_OPTIONS = ("--tokens", "--heads")
ALIASES: dict[str, tuple[str, dict[str, str]]] = {
    "doctor": ("machine", {}),
    "plan": ("plan", {}),
    "verify": ("kernels", VERIFY_OPTIONS),
    "measure": ("timing", {"-t": "--tokens", "-n": "--heads"}),
}
"""By former command, the step of ``check`` that replaces it, and its options that have another name. Until 0.3."""


class AliasGroup(TyperGroup):
    """The commands, and the aliases of former commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. For a former command, print the new command line on stderr."""
        if args and args[0] in ALIASES:
            old_command, (step_name, new_names) = args[0], ALIASES[args[0]]
            args = ["check", "--only", step_name, *(_new_spelling(word, new_names) for word in args[1:])]
            typer.echo(
                outputs.one_line(f"vllm-aiter-mla {old_command} is now: vllm-aiter-mla {shlex.join(args)}"), err=True
            )
        return super().parse_args(ctx, args)


def _new_spelling(word: str, new_names: Mapping[str, str]) -> str:
    """Return an option with its new name, also in words like ``-n2``.

    ``-tp`` and ``-tp8`` are vLLM's: after ``-t`` only a number can follow.
    """
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return new_names.get(name, name) + equals + value
    new_name, value = new_names.get(word[:2]), word[2:]
    if new_name is None or (new_name in NUMBER_OPTIONS and value and not value.isdecimal()):
        return word
    return new_name + f"={value}" * bool(value)


app = typer.Typer(
    name="vllm-aiter-mla",
    cls=AliasGroup,
    help="Check the fused MLA decode path of the vLLM plugin, before and while it serves.",
    epilog=outputs.EXIT_STATUSES,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(has_version_option: bool) -> None:
    if has_version_option:
        typer.echo(f"vllm-aiter-mla {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Define the options that come before any command."""


for _name in COMMANDS:
    _module = importlib.import_module(f"vllm_aiter_mla.commands.{_name}")
    app.command(_name, **getattr(_module, "COMMAND", {}))(getattr(_module, _name))


def main() -> None:
    """Run the console script.

    The exit status is that of the command. It is 3 if torch or vLLM is not installed, or if standard output is full or
    closed. It is 128 + n if signal n ended the command.
    """
    try:
        with process.end_on_signals():
            _run_command()
    except process.SignalError as error:
        received_signal, *progress_messages = error.args
        typer.echo("; ".join((f"vllm-aiter-mla: ended by {received_signal.name}", *progress_messages)), err=True)
        sys.exit(outputs.SIGNAL_EXIT_OFFSET + received_signal)
    except ModuleNotFoundError as error:
        if error.name not in outputs.HOST_PACKAGES:
            raise
        typer.echo(f"vllm-aiter-mla: {error.name} is not installed here; run this where vLLM serves", err=True)
        sys.exit(outputs.EXIT_INCOMPLETE)


def _run_command() -> None:
    """Run the command. End it with one line if the disk of standard output is full or the reader of a pipe has gone."""
    try:
        if sys.stdout is None:  # it was closed before the start
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        try:
            app()
        finally:
            sys.stdout.flush()
            if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # click found a closed pipe
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF) or error.filename is not None:
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  otherwise Python would write the rest at exit, and report another error
        command = next((word for word in sys.argv[1:] if word in (*COMMANDS, *ALIASES)), "vllm-aiter-mla")
        typer.echo(f"{command}: standard output: {error.strerror}", err=True)
        sys.exit(outputs.EXIT_INCOMPLETE)


if __name__ == "__main__":
    main()

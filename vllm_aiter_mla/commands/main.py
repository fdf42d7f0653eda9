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

# Each module holds one function of the command's name and imports nothing heavy at its top.
COMMANDS = ("check", "status", "report")

VERIFY_OPTIONS = {
    "-b": "--backend", "--only": "--case", "-k": "--case", "--seed": "--data-seed", "--replays": "--long-run"
}  # fmt: skip
TAKE_NUMBERS = ("--tokens", "--heads")
ALIASES: dict[str, tuple[str, dict[str, str]]] = {
    "doctor": ("machine", {}),
    "plan": ("plan", {}),
    "verify": ("kernels", VERIFY_OPTIONS),
    "measure": ("timing", {"-t": "--tokens", "-n": "--heads"}),
}
"""Former commands: the step of ``check`` that each is now, and options that have another name there. Until 0.3."""


class WithAliases(TyperGroup):
    """The commands, and the former ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, and say the new spelling of an old one on stderr."""
        if args and args[0] in ALIASES:
            old, (step, renamed) = args[0], ALIASES[args[0]]
            args = ["check", "--only", step, *(_renamed(word, renamed) for word in args[1:])]
            typer.echo(outputs.one_line(f"vllm-aiter-mla {old} is now: vllm-aiter-mla {shlex.join(args)}"), err=True)
        return super().parse_args(ctx, args)


def _renamed(word: str, renamed: Mapping[str, str]) -> str:
    """Return an option by its new name: ``-n2`` too. ``-tp`` and ``-tp8`` are vLLM's, because ``-t`` takes a number."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return renamed.get(name, name) + equals + value
    option, value = renamed.get(word[:2]), word[2:]
    if option is None or (option in TAKE_NUMBERS and value and not value.isdecimal()):
        return word
    return option + f"={value}" * bool(value)


app = typer.Typer(
    name="vllm-aiter-mla",
    cls=WithAliases,
    help="Check the fused MLA decode path of the vLLM plugin, before and while it serves.",
    epilog=outputs.EXIT_STATUSES,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-aiter-mla {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before any command."""


for _name in COMMANDS:
    _module = importlib.import_module(f"vllm_aiter_mla.commands.{_name}")
    app.command(_name, **getattr(_module, "COMMAND", {}))(getattr(_module, _name))


def main() -> None:
    """Run the console script.

    Its exit status is 3 if torch or vLLM is not installed, or if standard output takes no more; and 128 + n if signal n
    ended it.
    """
    try:
        with process.ended_by_signals():
            _run_command()
    except process.SignalError as error:
        signal, *more = error.args
        typer.echo("; ".join((f"vllm-aiter-mla: ended by {signal.name}", *more)), err=True)
        sys.exit(outputs.SIGNALS + signal)
    except ModuleNotFoundError as error:
        if error.name not in outputs.HOST:
            raise
        typer.echo(f"vllm-aiter-mla: {error.name} is not installed here; run this where vLLM serves", err=True)
        sys.exit(outputs.EXIT_INCOMPLETE)


def _run_command() -> None:
    """Run the command; end it with one line if standard output is on a full disk or the reader of a pipe has gone."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
            if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # click has met a closed pipe
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO) or error.filename is not None:
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  or Python complains about the rest when it ends
        command = next((word for word in sys.argv[1:] if word in (*COMMANDS, *ALIASES)), "vllm-aiter-mla")
        typer.echo(f"{command}: standard output: {error.strerror}", err=True)
        sys.exit(outputs.EXIT_INCOMPLETE)


if __name__ == "__main__":
    main()

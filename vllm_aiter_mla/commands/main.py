# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla``: the commands."""

import importlib
import sys
from typing import Annotated

import typer

from vllm_aiter_mla import __version__
from vllm_aiter_mla.commands import outputs, process

# Each module holds one function of the command's name and imports nothing heavy at its top.
COMMANDS = ("check", "doctor", "plan", "verify", "measure", "report", "status")

# Packages of a ROCm image that the plugin needs and never asks pip for.
HOST = ("torch", "vllm", "triton", "numpy")

app = typer.Typer(
    name="vllm-aiter-mla",
    help="Check, plan, verify and measure the fused MLA decode path of the vLLM plugin.",
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
    """Run the console script. Exit status 3 if a command lacks torch or vLLM; ``doctor`` runs without them.

    128 + n if signal n ended it, as shells have it.
    """
    try:
        with process.ended_by_signals():
            app()
    except process.SignalError as error:
        signal, *more = error.args
        typer.echo("; ".join((f"vllm-aiter-mla: ended by {signal.name}", *more)), err=True)
        sys.exit(outputs.SIGNALS + signal)
    except ModuleNotFoundError as error:
        if error.name not in HOST:
            raise
        typer.echo(f"vllm-aiter-mla: {error.name} is not installed here; run this where vLLM serves", err=True)
        sys.exit(outputs.NOT_LOOKED)


if __name__ == "__main__":
    main()

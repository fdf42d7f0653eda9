# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla plan``: what would engage, from a model's config and the options of ``vllm serve``.

``model`` finds the config and starts a process of its own, in which ``build`` makes the plan: it asks vLLM
(``answer``), admission for every reason and the back ends (``kernels``), and counts bytes and launches
(``formulas``). ``printout`` prints the plan. Nothing here needs a GPU, weights or a network.
"""

import os
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from vllm_aiter_mla.commands import options, outputs


class PassesOn(TyperCommand):
    """A command that leaves every option it does not know to vLLM's own parser.

    Its own options have long names only: a one-letter option would be taken out of every ``-cc.…`` of vLLM's.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse our own options; from ``--`` on nothing is ours, and vLLM gets the ``--`` as well.

        ``-h`` is a word here and no letter: click would find it in vLLM's single-dash words.
        """
        end = args.index("--") if "--" in args else len(args)
        super().parse_args(ctx, ["--help" if word == "-h" else word for word in args[:end]])
        ctx.args += args[end:]
        return list(ctx.args)


COMMAND: dict[str, Any] = {
    "cls": PassesOn,
    "context_settings": {
        "allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"],
    },
}  # fmt: skip


class Arch(StrEnum):
    """Cards a plan can be made for, by architecture or by the name that is sold."""

    gfx942 = "gfx942"
    gfx950 = "gfx950"
    mi300x = "mi300x"
    mi325x = "mi325x"
    mi350p = "mi350p"
    mi350x = "mi350x"
    mi355x = "mi355x"

    @property
    def architecture(self) -> str:
        """gfx942 or gfx950."""
        return SOLD_AS.get(self.value, self.value)


SOLD_AS = {"mi300x": "gfx942", "mi325x": "gfx942", "mi350p": "gfx950", "mi350x": "gfx950", "mi355x": "gfx950"}


Variables = Annotated[
    list[str] | None, typer.Option(help="NAME=VALUE: one of vLLM's environment variables; may be repeated.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's own log on stderr.")]


def plan(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder or file of a config, a bundled example, or a cached hub name."),
    ],
    arch: Annotated[
        Arch | None, typer.Option(help="Card to plan for: this machine's, or gfx942 where there is none.")
    ] = None,
    env: Variables = None,
    json: outputs.Json = None,
    verbose: Verbose = False,
) -> None:
    """Say what would engage, without a GPU.

    MODEL comes first, then the options of `vllm serve`. Prints heads per rank, the decode limit, compile ranges,
    capture sizes, known issues, the kernel by batch size, every reason against and its remedy, and bytes and launches
    by formula. vLLM builds its own config for the card, and the plugin's own gate decides. Needs no weights and no
    network. Exit status: 0 if the layers would engage, 1 if not, 2 if an option or the model is wrong, 3 if it is not
    known.
    """
    from vllm_aiter_mla import files
    from vllm_aiter_mla.commands.plan import model as models
    from vllm_aiter_mla.commands.plan import printout

    try:
        check_words(model, context)
        source, variables = models.find(model), models.environment(env or [], os.environ)
        with Console(stderr=True).status("plan: vLLM builds its config"):
            found = models.ask(source, context.args, arch.architecture if arch else "", variables, verbose)
    except (LookupError, ValueError) as error:
        outputs.fail(f"plan: {error}")
    except models.NotKnownError as error:
        outputs.fail(f"plan: {error}", outputs.NOT_LOOKED)
    with outputs.text_apart(json):
        print(outputs.folded(printout.text(found)))
    if json is not None:
        outputs.write(json, files.text_of(found))
    raise typer.Exit({"engaged": outputs.FINE, "unknown": outputs.NOT_LOOKED}.get(found.outcome, outputs.FINDING))


def check_words(name: str, context: typer.Context) -> None:
    """Raise ValueError where MODEL is an option, as it is when options come first, where a second one is named, or
    where an option is misspelt.
    """
    arguments = context.args
    if name.startswith("-"):
        raise ValueError(f"{name} in the place of MODEL: MODEL comes first, then the options of `vllm serve`")
    for index, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option == "--model":
            other = value if equals else next(iter(arguments[index + 1 : index + 2]), "")
            raise ValueError(f"--model {other} and MODEL {name}: give the model once, as MODEL")
    options.check(arguments, [name for own in context.command.params for name in own.opts])

"""``vllm-aiter-mla plan``: a dry run on a model's config and the options of ``vllm serve``."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

# The options of `vllm serve` are vLLM's business: typer hands over what it does not know.
COMMAND: dict[str, Any] = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}


class Arch(str, Enum):
    """Cards a plan can be made for."""

    gfx942 = "gfx942"
    gfx950 = "gfx950"
    sm90 = "sm90"


def plan(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder or file of a config, a bundled example, or a cached hub name."),
    ],
    arch: Annotated[Arch, typer.Option(help="Card to plan for.")] = Arch.gfx942,
    env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE: one of vLLM's environment variables; may be repeated.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what would engage: MODEL first, then the options of `vllm serve`.

    Prints heads per rank, the decode bucket, compile ranges, capture sizes, the kernel by batch size, every reason
    against, and bytes and launches by formula. Needs no GPU, no weights and no network. Exits 0 when the layers would
    engage, 1 when not, 2 when an option or the model is wrong.
    """
    from vllm_aiter_mla.commands.plan import command

    raise typer.Exit(command.main(model, context.args, arch.value, env or [], as_json=json))

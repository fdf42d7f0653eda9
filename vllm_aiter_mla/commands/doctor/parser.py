"""``vllm-aiter-mla doctor``: can the fast path work here, and what stands in its way."""

from __future__ import annotations

from typing import Annotated, Any

import typer

# `-cc.pass_config.NAME=true` and its like are no names that can be declared: typer hands over what it does not know.
COMMAND: dict[str, Any] = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}


def doctor(
    context: typer.Context,
    compilation_config: Annotated[
        str | None,
        typer.Option("--compilation-config", "-cc", help="What you would give `vllm serve`: JSON, or -cc.NAME=VALUE."),
    ] = None,
    additional_config: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine: versions, vLLM's surface, AITER, switches, conflicts. Runs anywhere, without a GPU.

    One line per check: ok, warning, problem or unknown, the finding, and what to do. AITER is read, never imported.
    Exits 0; 1 with a problem; 2 without one but with something that cannot be told from here.
    """
    from vllm_aiter_mla.commands.doctor import command

    raise typer.Exit(command.main(compilation_config, additional_config, context.args, as_json=json))

"""``vllm-aiter-mla doctor``: can the fast path work here, and what stands in its way."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    compilation_config: Annotated[
        str | None, typer.Option("--compilation-config", "-cc", help="What you would give `vllm serve`, as JSON.")
    ] = None,
    additional_config: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine: versions, vLLM's surface, AITER, switches, conflicts. Runs anywhere, without a GPU.

    One line per check: ok, warning, problem or unknown, the finding, and what to do. AITER is read, never imported.
    Exits 0; 1 with a problem; 2 without one but with something that cannot be told from here.
    """
    from vllm_aiter_mla.report.doctor import command

    raise typer.Exit(command.main(compilation_config, additional_config, as_json=json))

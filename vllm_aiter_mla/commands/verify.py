"""``vllm-aiter-mla verify``: capture graphs here, replay them as serving does, compare with the reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console


def verify(
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", "-b", help="Back end to verify; may be repeated. Default: all here."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", "-k", help="Cases to run: a name or a part of it; may be repeated.")
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option("--variant", help="fp8, bf16, fp8-cache, ...; may be repeated. Default: all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the data.")] = 0,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds, each with the next seed.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Two variants, fewer cases, short long runs.")] = False,
    limit: Annotated[int | None, typer.Option(help="Last capture size, in tokens: 8 to 8192.")] = None,
    replays: Annotated[int | None, typer.Option(min=4, help="Replays of a long run.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Print the cases and the oracles, and run nothing.")] = False,
) -> None:
    """Replay captured graphs under everything that serving does to them, and compare bytes with the reference.

    Run it on your card before you trust the fast path, and after each upgrade of ROCm, vLLM or AITER. Without a GPU
    the same cases run as eager replay. Exit status: 0 all passed, 1 something failed, 2 nothing could be run.
    """
    from rich.console import Console

    from vllm_aiter_mla import evidence
    from vllm_aiter_mla.commands import outputs
    from vllm_aiter_mla.verify import terminal
    from vllm_aiter_mla.verify.session import NOTHING, NoSuchError, Request

    console = Console(highlight=False)
    if listing:
        _list(console)
        raise typer.Exit
    request = Request(
        tuple(backend or ()), tuple(only or ()), tuple(variant or ()), seed, repeat, quick, limit, replays
    )
    try:
        outputs.check({"--json": json})
        session = terminal.run(request, console)
    except (outputs.OutputError, NoSuchError) as error:
        typer.echo(f"verify: {error}", err=True)
        raise typer.Exit(NOTHING) from None
    if json is not None:
        evidence.write(json, session.as_dict() | evidence.stamp("verify", 1))
    if session.status == NOTHING:
        typer.echo("verify: nothing could be run", err=True)
    raise typer.Exit(session.status)


def _list(console: Console) -> None:
    from vllm_aiter_mla.verify.cases import cases
    from vllm_aiter_mla.verify.oracles import ORACLES
    from vllm_aiter_mla.verify.session import CPU_LIMIT

    console.print("cases:")
    for case in cases(CPU_LIMIT):
        console.print(f"  {case.name}: {case.serving}", soft_wrap=True)
    console.print("oracles:")
    for name, meaning in ORACLES.items():
        console.print(f"  {name}: {meaning}", soft_wrap=True)

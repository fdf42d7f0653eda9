"""``vllm-aiter-mla verify``: capture graphs here, replay them as serving does, compare with the reference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_aiter_mla.verify.session import Request


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
    self_test: Annotated[bool, typer.Option("--self-test", help="Plant faults and show that they are caught.")] = False,
) -> None:
    """Replay captured graphs under everything that serving does to them, and compare bytes with the reference.

    Run it on your card before you trust the fast path, and after each upgrade of ROCm, vLLM or AITER. Without a GPU
    the same cases run as eager replay. Exit status: 0 all passed, 1 something failed, 2 nothing could be run.
    """
    from vllm_aiter_mla.commands import outputs

    alone = {"--list": listing, "--self-test": self_test}
    with_a_run = {
        "--backend": backend, "--only": only, "--variant": variant, "--quick": quick, "--limit": limit,
        "--replays": replays, "--repeat": repeat != 1, "--json": json,
    }  # fmt: skip
    if listing:
        with_a_run |= {"--seed": seed}
    try:
        _refuse_beside(alone, with_a_run)
        outputs.check({"--json": json})
    except ValueError as error:
        raise typer.Exit(_wrong(str(error))) from None
    from rich.console import Console

    from vllm_aiter_mla.verify.session import Request

    console = Console(highlight=False)
    if listing:
        raise typer.Exit(_list(console))
    if self_test:
        raise typer.Exit(_self_test(console, seed))
    request = Request(
        tuple(backend or ()), tuple(only or ()), tuple(variant or ()), seed, repeat, quick, limit, replays
    )
    raise typer.Exit(_run(console, request, json))


def _refuse_beside(alone: Mapping[str, bool], others: Mapping[str, object]) -> None:
    """Raise ValueError where an option that runs no cases stands beside one that says how to run them."""
    chosen = [option for option, given in alone.items() if given]
    beside = [*chosen[1:], *(option for option, value in others.items() if value not in (None, False, 0, []))]
    if chosen and beside:
        raise ValueError(f"{chosen[0]}: {', '.join(beside)} would have no effect beside it; leave one of them out")


def _wrong(message: str) -> int:
    from vllm_aiter_mla.verify.session import NOTHING

    typer.echo(f"verify: {message}", err=True)
    return NOTHING


def _run(console: Console, request: Request, json: Path | None) -> int:
    from vllm_aiter_mla import files
    from vllm_aiter_mla.verify import terminal
    from vllm_aiter_mla.verify.session import NOTHING, NoSuchError

    try:
        session = terminal.run(request, console)
    except NoSuchError as error:
        return _wrong(str(error))
    if json is not None:
        files.write(json, session.as_dict() | files.stamp("verify", 1))
    if session.status == NOTHING:
        return _wrong("nothing could be run")
    return session.status


def _list(console: Console) -> int:
    from vllm_aiter_mla.verify.cases import cases
    from vllm_aiter_mla.verify.oracles import ORACLES
    from vllm_aiter_mla.verify.session import CPU_LIMIT

    console.print("cases:")
    for case in cases(CPU_LIMIT):
        console.print(f"  {case.name}: {case.serving}", soft_wrap=True)
    console.print("oracles:")
    for name, meaning in ORACLES.items():
        console.print(f"  {name}: {meaning}", soft_wrap=True)
    return 0


def _self_test(console: Console, seed: int) -> int:
    from functools import partial

    from vllm_aiter_mla.verify import backends, selftest, session, terminal
    from vllm_aiter_mla.verify.faults import FAULTS
    from vllm_aiter_mla.verify.runner import Options
    from vllm_aiter_mla.verify.setting import REAL, SMALL, variants

    engine = session.engine_here()
    fp8 = variants(engine.device, session.native_fp8(), quick=True)[0]
    options = Options(REAL if engine.graphs else SMALL, session.CPU_LIMIT, seed)
    caught = 0
    for outcome in selftest.self_test(FAULTS, partial(backends.load, "reference"), engine, fp8, options):
        console.print(terminal.status_line(outcome), soft_wrap=True)
        caught += outcome.ok
    console.print(f"self-test, {engine.name}: {caught}/{len(FAULTS)} planted faults caught by their named cases")
    if not engine.graphs:
        console.print(session.NO_GRAPHS)
    return 0 if caught == len(FAULTS) else 1

# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla verify``: capture graphs here, replay them as serving does, compare with the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_aiter_mla import files
from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.commands.measure import Weights
from vllm_aiter_mla.verify import NOTHING

if TYPE_CHECKING:
    from vllm_aiter_mla.verify.results import Result
    from vllm_aiter_mla.verify.session import Session

_MARKS = {"passed": "[green]ok[/]", "failed": "[red]FAILED[/]", "skipped": "[yellow]skipped[/]"}


class Device(StrEnum):
    """Where something runs."""

    gpu = "gpu"
    cpu = "cpu"


def verify(
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", help="Back end; may be repeated. Default: all here.")
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
    small: Annotated[
        bool, typer.Option("--small", help="The quick cases at sizes that an emulator finishes; digests in the JSON.")
    ] = False,
    emulated: Annotated[
        bool, typer.Option("--emulated", help="Note in the JSON that the card is an emulator's.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="Last capture size, in tokens: 8 to 8192.")] = None,
    replays: Annotated[int | None, typer.Option(min=4, help="Replays of a long run.")] = None,
    device: Annotated[Device, typer.Option(help="cpu: eager replay, without a graph.")] = Device.gpu,
    heads: Annotated[int | None, typer.Option(min=1, max=1024, help="Query heads of a rank.")] = None,
    nope: Annotated[int | None, typer.Option(min=1, max=4096, help="Un-rotated width of a query head.")] = None,
    v: Annotated[int | None, typer.Option("--v", min=1, max=4096, help="Width of a value head.")] = None,
    weights: Annotated[Weights | None, typer.Option(help="Format of the absorb weight. Default: several.")] = None,
    json: outputs.Json = None,
    listing: Annotated[bool, typer.Option("--list", help="Print the cases and the oracles, and run nothing.")] = False,
) -> None:
    """Replay captured graphs and compare bytes with the reference.

    Between replays it does to the graphs what serving does. Run it on your card before you trust the fast path, and
    after each upgrade of ROCm, vLLM or AITER. With --device cpu the same cases run as eager replay. Exit status: 0 all
    passed, 1 something failed, 2 an option is wrong, 3 there is no GPU, or not the back end that was asked for.
    """
    from vllm_aiter_mla.kernels.platform import detect_platform
    from vllm_aiter_mla.verify import session
    from vllm_aiter_mla.verify.cases import REAL, TINY

    if listing:
        _list()
        return
    sizes = {"heads": heads, "nope": nope, "v": v}
    again = _as_typed({
        "quick": quick and not replays, "small": small, "emulated": emulated, "limit": limit, "replays": replays,
        "device": device.value, **sizes, "weights": weights and weights.value,
    })  # fmt: skip
    try:
        given = {name: value for name, value in sizes.items() if value is not None}
        geometry = replace(TINY if small else REAL, **given) if given else None
        weight = weights.key(detect_platform().fp8) if weights else None
        run = session.Session(
            tuple(backend or ()), tuple(only or ()), tuple(variant or ()), seed, repeat, quick, limit, replays,
            device.value, geometry, weight, again, small=small, emulated=emulated,
        )  # fmt: skip
    except ValueError as error:
        outputs.fail(f"verify: {error}")
    except session.NotHereError as error:
        outputs.fail(f"verify: {error}", NOTHING)
    _run_and_write(run, json)


def _as_typed(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return options as they are typed, without the switches that are off and the options that are not given."""
    given = ((name, value) for name, value in options.items() if value is not None and value is not False)
    return tuple(f"--{name}" if value is True else f"--{name} {value}" for name, value in given)


def _run_and_write(session: Session, json: Path | None) -> NoReturn:
    """Run, print, write the JSON and end the command."""
    with outputs.text_apart(json):
        _run(session, Console(highlight=False))
    if json is not None:
        outputs.write(json, files.text_of(session.record()))
    if session.status == NOTHING:
        outputs.fail("verify: nothing could be run", NOTHING)
    raise typer.Exit(session.status)


def _list() -> None:
    from vllm_aiter_mla.verify import cases, oracles

    console = Console(highlight=False)
    console.print("cases:")
    for case in cases.cases(cases.LIMITS[0]):
        console.print(f"  {case.name}: {case.serving}", soft_wrap=True)
    console.print("oracles:")
    for name, meaning in oracles.ORACLES.items():
        console.print(f"  {name}: {meaning}", soft_wrap=True)


def _run(session: Session, console: Console) -> None:
    """Run and print: progress, a table per back end, and each failure with the command that repeats it."""
    console.print("machine: " + escape(", ".join(f"{name} {value}" for name, value in session.machine.items())))
    if not session.engine.graphs:
        console.print(
            "[bold]graph capture: not available on this machine[/]: torch sees no GPU. What follows is eager replay: "
            "recorded ATen calls, repeated on the same tensors with the same Python values. It says nothing about a "
            "driver, a kernel on a GPU or time."
        )
    for name, reason in session.missing.items():
        console.print(f"back end {name}: not available: {escape(reason)}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # On stderr, and on a terminal only: the case that runs now, and how many are done.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task, results = progress.add_task("", total=len(session.items)), session.run()
        for item in session.items:
            progress.update(task, description=f"{item.backend} {item.variant.name} {item.case.name}")
            next(results)
            progress.advance(task)
    for backend in dict.fromkeys(result.backend for result in session.results):
        console.print(_table(backend, [result for result in session.results if result.backend == backend]))
    for line in _outcome(session):
        console.print(line, soft_wrap=True)


def _table(backend: str, results: list[Result]) -> Table:
    """Return a row per case, with its variants, and what was done."""
    table = Table(title=f"{backend}: {results[0].engine}", title_justify="left", padding=(0, 1), pad_edge=False)
    for name in ("case", "variants", "graphs", "replays", "checks", "seconds"):
        table.add_column(name, justify="left" if name in ("case", "variants") else "right", no_wrap=True)
    for case in dict.fromkeys(result.case for result in results):
        of_case = [result for result in results if result.case == case]
        counts = Counter(result.status for result in of_case)
        marks = ", ".join(f"{counts[status]} {mark}" for status, mark in _MARKS.items() if counts[status])
        sums = (str(sum(getattr(result, name) for result in of_case)) for name in ("captures", "replays", "checks"))
        table.add_row(case, marks, *sums, f"{sum(result.seconds for result in of_case):.2f}")
    return table


def _outcome(session: Session) -> Iterator[str]:
    """Yield each failure, the reasons of skipped cases, the launches of a step, the oracles, and the sums."""
    from vllm_aiter_mla.verify.oracles import ORACLES

    for result in (result for result in session.results if result.status == "failed"):
        yield f"\n[red bold]FAILED[/] {result.backend} {result.case} ({result.variant}, seed {result.seed})"
        for finding in result.findings[:6]:
            yield f"  {finding.oracle}: {escape(finding.message)}"
            yield f"    must hold: {ORACLES[finding.oracle]}"
            yield f"    at {escape(finding.step)}"
        yield f"  reproduce: {session.command(result)}"
    yield from dict.fromkeys(f"{r.backend} {r.case}: {escape(r.reason)}" for r in session.results if r.reason)
    for result in session.results:
        if result.case == "kernel-status" and result.launches:
            size, text = next(iter(result.launches.items()))
            yield f"launches of {result.backend} {result.variant}, T={size}: {escape(text)}"
    yield f"oracles: {', '.join(ORACLES)}"
    counts = Counter(result.status for result in session.results)
    replays, seconds = (sum(getattr(result, name) for result in session.results) for name in ("replays", "seconds"))
    sums = ", ".join(f"{counts[status]} {status}" for status in _MARKS)
    yield f"{session.engine.name}: {sums}; {replays} replays; {seconds:.1f} s"

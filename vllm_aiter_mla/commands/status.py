# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla status``: what the servers of this machine run, from their status files. Imports no vLLM."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vllm_aiter_mla import files
from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.status.line import remedies, status_line
from vllm_aiter_mla.status.record import Decided, RankStatus, Reason, add_silent, group_by_engine, merge_ranks
from vllm_aiter_mla.status.status_files import engine_lives, front_end_lives, read_all


@dataclass(frozen=True)
class EngineLine:
    """One engine, as its status files say."""

    run: str
    model: str
    engine: str
    line: str
    remedies: dict[str, str]  # by code; of the layers that are skipped
    front_end_lives: bool | None  # None if that cannot be told
    whole: bool  # its front end lives, and every rank runs all of its layers on our kernels
    silent: int = 0  # ranks without a status file here


@dataclass(frozen=True)
class Engines:
    """The engines of this machine; ``schemas.json`` says what the fields mean."""

    engines: tuple[EngineLine, ...]
    unreadable: tuple[str, ...]
    exit: int
    evidence: files.Stamp = files.stamped("engines")


ENDED = {
    False: "the server has ended",
    True: "its front end has ended; the engine still runs and holds its cards: end VLLM::EngineCore and its workers",
}
"""What is said once a front end has ended, by whether its engine lives."""

Layer = Annotated[
    str | None, typer.Option("--layer", metavar="NAME", help="Print what was decided for the layers of this name.")
]


def status(layer: Layer = None, json: outputs.Json = None) -> None:
    """Print the status line of each engine on this machine.

    Reads the files under VLLM_CACHE_ROOT, and says if a server has ended, or only its front end. What to do about a
    skipped layer follows its line.

    Exit status: 0 if every MLA layer of the servers that live is engaged on every rank; 1 if not, or if none lives; 2
    if an option is wrong; 3 if there is no status file, if a rank has none here, or if a file or lock cannot be read.
    """
    folder, bad = files.cache_folder(), list[str]()
    with suppress(FileNotFoundError, NotADirectoryError):
        try:
            os.scandir(folder).close()  # ``glob`` takes a folder that cannot be read for an empty one
        except PermissionError:
            outputs.fail(
                f"status: {folder}: permission denied; run it as the server's user, or read the gauge",
                outputs.NOT_LOOKED,
            )
    by_engine = group_by_engine(read_all(folder, "*", bad.append))
    engines = tuple(_engine(folder, name, ranks) for name, ranks in by_engine.items())
    living = [one.whole for one in engines if one.front_end_lives]
    looked = outputs.FINE if living and all(living) else outputs.FINDING
    seen = engines and not bad and not any(one.front_end_lives is None or one.silent for one in engines)
    code = looked if seen else outputs.NOT_LOOKED
    told = {engine: list(_decisions(by_engine[engine], layer)) for engine in by_engine if layer is not None}
    # The record of an engine that was skipped as a whole does not know its layers' names.
    named = seen and all(rank.decided or not rank.skipped for ranks in by_engine.values() for rank in ranks)
    if layer is not None and named and not any(told.values()):
        outputs.fail(f"status: --layer {layer}: no server here has a layer of that name")
    with outputs.text_apart(json):
        for one in engines:
            typer.echo(outputs.line(f"run {one.run}, {one.model}, engine {one.engine}: {one.line}"))
            for of, remedy in one.remedies.items():
                if remedy not in one.line:
                    typer.echo(outputs.folded(f"  {of} -> {remedy}"))
            for text in told.get((one.run, one.model, one.engine), ()) if one.front_end_lives else ():
                typer.echo(outputs.folded(text))
    if json is not None:
        outputs.write(json, files.text_of(Engines(engines, tuple(bad), code)))
    for why in bad:
        typer.echo(outputs.line(f"status: {why}"), err=True)
    if not engines and not bad:
        outputs.fail(f"status: no server has written a status file to {folder}", code)
    raise typer.Exit(code)


def _engine(folder: Path, name: tuple[str, str, str], ranks: Sequence[RankStatus]) -> EngineLine:
    """Return what the files of one engine's ranks say; ``name`` is (run, model, engine)."""
    lives = front_end_lives(folder, name[0])
    if not lives:
        engine = engine_lives(folder, ranks) if lives is False else None
        unknown = f"whether the server lives cannot be told from its locks in {folder}"
        line = unknown if engine is None else ENDED[engine]
        return EngineLine(*name, line, {}, front_end_lives=None if engine is None else False, whole=False)
    all_ranks = add_silent(ranks)
    merged = merge_ranks(all_ranks)
    whole = merged.whole and bool(merged.record.engaged) and not merged.record.skipped
    line = status_line(*all_ranks)
    return EngineLine(*name, line, remedies(ranks), front_end_lives=True, whole=whole, silent=merged.silent)


def _decisions(ranks: Sequence[RankStatus], layer: str) -> Iterator[str]:
    """Yield for the layers whose name has the dotted part ``layer`` what runs them on which ranks, and why."""
    said: dict[str, list[str]] = {}
    for rank in ranks:
        for decided in rank.decided:
            for name in decided.layers:
                if f".{layer}." in f".{name}.":
                    skip = rank.skipped.get(name)  # a graph may skip it too, and a kernel that raised
                    said.setdefault("\n".join((f"  {name}", *_decision(decided, skip))), []).append(str(rank.rank))
    for text, on in said.items():
        first, _, rest = text.partition("\n")
        yield f"{first}, rank {', '.join(on)}\n{rest}"


def _decision(decided: Decided, skip: Reason | None) -> Iterator[str]:
    """Yield the lines that say what runs at how many tokens, and why each other kernel does not."""
    if skip is not None:
        yield f"    vLLM's own       {': '.join(skip)}"
    for first, last, kernel in () if skip is not None else decided.kernels:
        yield f"    {f'{first}..{last} tokens':<16} {kernel}"
    for name, reason in decided.passed_over:
        yield f"    not {name:<12} {reason}"

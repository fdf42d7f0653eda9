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
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.decided import Decision
from vllm_aiter_mla.status.line import remedies, status_line
from vllm_aiter_mla.status.record import RankStatus, group_by_engine, merge_ranks, records_of_all_ranks
from vllm_aiter_mla.status.status_files import is_engine_alive, is_serving, read_records


@dataclass(frozen=True)
class EngineLine:
    """One engine, as its status files say."""

    run: str
    model: str
    engine: str
    line: str
    remedies: dict[str, str]  # by code; of the layers that are skipped
    serves: bool | None  # whether it and its front end live; None if that cannot be told
    whole: bool  # it serves, and every rank runs all of its layers on our kernels
    silent: int = 0  # ranks without a status file here


@dataclass(frozen=True)
class Engines:
    """The engines of this machine; ``schemas.json`` says what the fields mean."""

    engines: tuple[EngineLine, ...]
    unreadable: tuple[str, ...]
    exit: int
    evidence: files.Stamp = files.stamp_field("engines")


ENDED = {
    False: "the engine has ended",
    True: "its front end has ended; the engine still runs and holds its cards: end VLLM::EngineCore and its workers",
}
"""The line of an engine that no longer serves, by whether its processes still run."""

Layer = Annotated[
    str | None, typer.Option("--layer", metavar="NAME", help="Print what was decided for the layers of this name.")
]


def status(layer: Layer = None, json: outputs.Json = None) -> None:
    """Print the status line of each engine on this machine.

    Reads the files under VLLM_CACHE_ROOT, and says if an engine has ended, or only its front end. What to do about a
    skipped layer follows its line.

    Exit status: 0 if every MLA layer of the engines that live is engaged on every rank; 1 if not, or if none lives; 2
    if an option is wrong; 3 if there is no status file, if a rank has none here, or if a file or lock cannot be read.
    """
    folder, bad = files.cache_folder(), list[str]()
    with suppress(FileNotFoundError, NotADirectoryError):
        try:
            os.scandir(folder).close()  # ``glob`` takes a folder that cannot be read for an empty one
        except PermissionError:
            outputs.fail(
                f"status: {folder}: permission denied; run it as the server's user, or read the metrics",
                outputs.EXIT_INCOMPLETE,
            )
    by_engine = group_by_engine(read_records(folder, "*", bad.append))
    engines = tuple(_engine_line(folder, name, ranks) for name, ranks in by_engine.items())
    complete = engines and not bad and not any(engine.serves is None or engine.silent for engine in engines)
    code = _exit_status(engines) if complete else outputs.EXIT_INCOMPLETE
    decisions = {name: list(_decisions(ranks, layer)) if layer else [] for name, ranks in by_engine.items()}
    # The record of an engine that was skipped as a whole does not know its layers' names.
    names_known = all(rank.decided or not rank.skipped for ranks in by_engine.values() for rank in ranks)
    if layer is not None and complete and names_known and not any(decisions.values()):
        outputs.fail(f"status: --layer {layer}: no server here has a layer of that name")
    with outputs.text_on_stderr(json):
        for engine in engines:
            _print(engine, decisions[engine.run, engine.model, engine.engine])
    if json is not None:
        outputs.write("status", json, files.to_json(Engines(engines, tuple(bad), code)))
    for why in bad:
        typer.echo(outputs.one_line(f"status: {why}"), err=True)
    if not engines and not bad:
        outputs.fail(f"status: no server has written a status file to {folder}", code)
    raise typer.Exit(code)


def _exit_status(engines: Sequence[EngineLine]) -> int:
    """Return the exit status where everything could be read."""
    living = [engine.whole for engine in engines if engine.serves]
    return outputs.EXIT_OK if living and all(living) else outputs.EXIT_FAILED


def _print(engine: EngineLine, decisions: Sequence[str]) -> None:
    """Print an engine's line, the remedies that the line lacks, and the decisions about the layer of --layer."""
    typer.echo(outputs.one_line(f"run {engine.run}, {engine.model}, engine {engine.engine}: {engine.line}"))
    for code, remedy in engine.remedies.items():
        if remedy not in engine.line:
            typer.echo(outputs.folded(f"  {code} -> {remedy}"))
    for text in decisions if engine.serves else ():
        typer.echo(outputs.folded(text))


def _engine_line(folder: Path, name: tuple[str, str, str], ranks: Sequence[RankStatus]) -> EngineLine:
    """Return what the files of one engine's ranks say; ``name`` is (run, model, engine)."""
    living = is_serving(folder, ranks)
    if not living:
        outlives = is_engine_alive(folder, ranks) if living is False else None
        unknown = f"whether the server lives cannot be told from its locks in {folder}"
        line = unknown if outlives is None else ENDED[outlives]
        return EngineLine(*name, line, {}, serves=None if outlives is None else False, whole=False)
    all_ranks = records_of_all_ranks(ranks)
    merged = merge_ranks(all_ranks)
    whole = merged.ranks_agree and bool(merged.engaged) and not merged.skipped
    line = status_line(*all_ranks)
    return EngineLine(*name, line, remedies(ranks), serves=True, whole=whole, silent=merged.silent)


def _decisions(ranks: Sequence[RankStatus], layer: str) -> Iterator[str]:
    """Yield for the layers whose name has the dotted part ``layer`` what runs them on which ranks, and why."""
    ranks_by_text: dict[str, list[str]] = {}
    for rank in ranks:
        for group in rank.decided:
            for name in group.layers:
                if f".{layer}." in f".{name}.":
                    text = "\n".join((f"  {name}", *_decision(group.decision, rank.skipped.get(name))))
                    ranks_by_text.setdefault(text, []).append(str(rank.rank))
    for text, numbers in ranks_by_text.items():
        first, _, rest = text.partition("\n")
        yield f"{first}, rank {', '.join(numbers)}\n{rest}"


def _decision(decision: Decision, skip: Skip | None) -> Iterator[str]:
    """Yield the lines that say what runs a layer at how many tokens, and why each other kernel does not.

    ``skip`` says why the layer is skipped: by its decision, its graph, or a kernel that raised.
    """
    if skip is not None:
        yield f"    vLLM's own       {skip.reason}"
    for span in () if skip is not None else decision.kernels:
        yield f"    {f'{span.tokens} tokens':<16} {span.kernel}"
    for other in decision.passed_over:
        yield f"    not {other.kernel:<12} {other.reason}"

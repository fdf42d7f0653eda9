# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla status``: show the status files of the servers on this machine. Imports no vLLM."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.decided import Decision
from vllm_aiter_mla.status.line import remedies, status_line
from vllm_aiter_mla.status.liveness import ServerLocks
from vllm_aiter_mla.status.record import (
    EngineKey,
    RankRecord,
    engine_key,
    group_by_engine,
    merge_ranks,
    records_of_all_ranks,
)
from vllm_aiter_mla.status.status_files import read_records


@dataclass(frozen=True)
class EngineLine:
    """One engine, according to its status files."""

    run: str
    engine_id: str
    dp_index: str  # data-parallel index
    model_name: str
    line: str
    remedies: dict[str, str]  # by code of a skipped layer
    is_serving: bool | None  # whether the engine and its front end live; None if that is unknown
    is_fully_engaged: bool  # whether the engine serves and every rank runs all its layers on our kernels
    num_ranks_without_file: int | None = 0  # ranks without a status file here; None if the number of ranks is unknown


@dataclass(frozen=True)
class Engines:
    """The engines on this machine. ``schemas.json`` explains the fields."""

    engines: tuple[EngineLine, ...]
    unreadable: tuple[str, ...]
    exit: int
    evidence: files.Stamp = files.stamp_field("engines")


ENDED_LINES = {
    False: "the engine has ended",
    True: "its front end has ended; the engine still runs and holds its cards: end VLLM::EngineCore and its workers",
}
"""The line of an engine that no longer serves, by whether its own processes still run."""

Layer = Annotated[
    str | None, typer.Option("--layer", metavar="NAME", help="Print the decisions for the layers of this name.")
]


def status(layer: Layer = None, json: outputs.Json = None) -> None:
    """Print the status line of each engine on this machine.

    The command reads the files under VLLM_CACHE_ROOT. It says if an engine has ended, or only its front end. The
    remedies for skipped layers follow the line of an engine.

    Exit status 0: every MLA layer of the running engines is engaged on every rank. 1: a layer is not engaged, or no
    engine is running. 2: an option is wrong. 3: there is no status file, a rank has no status file here, the number of
    ranks is unknown, or a file or lock cannot be read.
    """
    folder, unreadable_reasons = files.cache_folder(), list[str]()
    try:
        os.scandir(folder).close()  # to ``glob`` an unreadable folder looks empty
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        outputs.fail(
            f"status: {folder}: {reason}; run it as the server's user, or read the metrics", outputs.EXIT_INCOMPLETE
        )
    records = read_records(folder, "*", unreadable_reasons.append)
    server_locks = ServerLocks(folder, records)
    records_by_engine = group_by_engine(records)
    engines = tuple(
        _engine_line(folder, server_locks, engine, engine_records)
        for engine, engine_records in records_by_engine.items()
    )
    has_unknown_engine = any(engine.is_serving is None or engine.num_ranks_without_file != 0 for engine in engines)
    is_complete = engines and not unreadable_reasons and not has_unknown_engine
    exit_code = _exit_status(engines) if is_complete else outputs.EXIT_INCOMPLETE
    served_records = [
        engine_records
        for engine, engine_records in zip(engines, records_by_engine.values(), strict=True)
        if engine.is_serving
    ]
    decision_texts = {
        engine_key(records[0]): list(_decision_texts(records, layer)) if layer else [] for records in served_records
    }
    # A fully skipped engine has no layer names in its record. If no engine serves, the lines above say so.
    has_layer_names = bool(served_records) and all(
        record.decision_groups or not record.skipped for records in served_records for record in records
    )
    if layer is not None and is_complete and has_layer_names and not any(decision_texts.values()):
        outputs.fail(f"status: --layer {layer}: no server here has a layer of that name")
    with outputs.text_on_stderr(json):
        for engine, line in zip(records_by_engine, engines, strict=True):
            _print_engine(line, decision_texts.get(engine, ()))
    if json is not None:
        outputs.write_output("status", json, files.to_json(Engines(engines, tuple(unreadable_reasons), exit_code)))
    for reason in unreadable_reasons:
        typer.echo(outputs.one_line(f"status: {reason}"), err=True)
    if not engines and not unreadable_reasons:
        outputs.fail(f"status: no server has written a status file to {folder}", exit_code)
    raise typer.Exit(exit_code)


def _exit_status(engines: Sequence[EngineLine]) -> int:
    """Return the exit status, provided that everything could be read."""
    fully_engaged = [engine.is_fully_engaged for engine in engines if engine.is_serving]
    return outputs.EXIT_OK if fully_engaged and all(fully_engaged) else outputs.EXIT_FAILED


def _print_engine(engine: EngineLine, decision_texts: Sequence[str]) -> None:
    """Print an engine's line, the remedies that the line does not have, and the decisions for --layer."""
    typer.echo(outputs.one_line(f"run {engine.run}, {engine.model_name}, engine {engine.dp_index}: {engine.line}"))
    for code, remedy in engine.remedies.items():
        if remedy not in engine.line:
            typer.echo(outputs.fold_text(f"  {code} -> {remedy}"))
    for text in decision_texts:
        typer.echo(outputs.fold_text(text))


def _engine_line(
    folder: Path, server_locks: ServerLocks, engine: EngineKey, records: Sequence[RankRecord]
) -> EngineLine:
    """Return the line of one engine from the records of its ranks."""
    is_serving = server_locks.is_serving(records)
    if is_serving:
        return _serving_line(engine, records)
    is_engine_alive = server_locks.is_engine_alive(records) if is_serving is False else None
    unknown_line = f"cannot tell whether the server is running from its locks in {folder}"
    return EngineLine(
        *engine,
        model_name=records[0].model_name or "",
        line=unknown_line if is_engine_alive is None else ENDED_LINES[is_engine_alive],
        remedies={},
        is_serving=None if is_engine_alive is None else False,
        is_fully_engaged=False,
    )


def _serving_line(engine: EngineKey, records: Sequence[RankRecord]) -> EngineLine:
    """Return the line of an engine that serves."""
    records_and_gaps = records_of_all_ranks(records)
    merged = merge_ranks(records_and_gaps)
    return EngineLine(
        *engine,
        model_name=records[0].model_name or "",
        line=status_line(*records_and_gaps),
        remedies=remedies(records),
        is_serving=True,
        is_fully_engaged=merged.ranks_agree and bool(merged.engaged) and not merged.skipped,
        num_ranks_without_file=merged.num_silent if merged.is_num_ranks_known else None,
    )


def _decision_texts(records: Sequence[RankRecord], layer: str) -> Iterator[str]:
    """Yield the decision for each layer whose name contains the dotted part ``layer``, with the ranks that made it."""
    ranks_by_text: dict[str, list[str]] = {}
    for record in records:
        for group in record.decision_groups:
            for name in group.layers:
                if f".{layer}." in f".{name}.":
                    text = "\n".join((f"  {name}", *_decision_lines(group.decision, record.skipped.get(name))))
                    ranks_by_text.setdefault(text, []).append(str(record.rank))
    for text, rank_numbers in ranks_by_text.items():
        first_line, _, other_lines = text.partition("\n")
        yield f"{first_line}, rank {', '.join(rank_numbers)}\n{other_lines}"


def _decision_lines(decision: Decision, skip: Skip | None) -> Iterator[str]:
    """Yield lines: which kernel runs a layer at which numbers of tokens, and why each other kernel does not run.

    ``skip`` is the reason why the layer is skipped: its decision, its graph, or a kernel that raised.
    """
    if skip is not None:
        yield f"    vLLM's own       {skip.reason}"
    for span in () if skip is not None else decision.kernel_spans:
        yield f"    {f'{span.tokens_text} tokens':<16} {span.kernel}"
    for kernel in decision.rejected_kernels:
        yield f"    not {kernel.kernel:<12} {kernel.reason}"

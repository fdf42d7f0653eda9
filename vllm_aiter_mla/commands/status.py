# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla status``: what the servers of this machine run, from their status files. Imports no vLLM."""

import typer

from vllm_aiter_mla import files
from vllm_aiter_mla import status as status_of
from vllm_aiter_mla.commands import outputs


def status() -> None:
    """Print the status line of each engine whose files are under VLLM_CACHE_ROOT, or that its server has ended.

    Exits 0 if every MLA layer of the servers that live is engaged on every rank, 1 if not or if none lives, and 2 if
    there is no status file, or one that cannot be read.
    """
    folder, bad = files.cache_folder(), list[str]()
    engines = status_of.by_engine(status_of.read_all(folder, "*", bad.append))
    whole = list[bool]()  # of each engine that lives
    for (run, model, engine), ranks in engines.items():
        said = "the server has ended"
        if not status_of.has_ended(folder, run):
            said, found = status_of.line(*ranks), status_of.of_engine(ranks)
            whole.append(found.whole and not found.record.skipped)
        typer.echo(outputs.line(f"run {run}, {model}, engine {engine}: {said}"))
    for why in bad:
        typer.echo(outputs.line(f"status: {why}"), err=True)
    if not engines and not bad:
        outputs.fail(f"status: no server has written a status file to {folder}")
    raise typer.Exit(2 if bad else 0 if whole and all(whole) else 1)

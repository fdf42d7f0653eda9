# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla status``: what the servers of this machine run, from their status files."""

import typer

from vllm_aiter_mla import status as status_of
from vllm_aiter_mla.commands import outputs


def status() -> None:
    """Print the status line of each engine whose files are under VLLM_CACHE_ROOT.

    Exits 0 if every MLA layer is engaged on every rank, 1 if not, and 2 if there is no status file.
    """
    from vllm_aiter_mla.compat.config import cache_folder

    folder = cache_folder()
    try:
        engines = status_of.by_engine(folder, "*")
    except (OSError, ValueError, KeyError) as error:
        outputs.fail(f"status: a file in {folder} cannot be read: {type(error).__name__}: {error}")
    if not engines:
        outputs.fail(f"status: no server has written a status file to {folder}")
    whole = True
    for (run, model, engine), ranks in engines.items():
        found = status_of.of_engine(ranks)
        whole = whole and len(found["engaged"]) == found["total"] and found["whole_ranks"] == found["ranks"]
        typer.echo(outputs.line(f"run {run}, {model}, engine {engine}: {status_of.line(found)}"))
    raise typer.Exit(0 if whole else 1)

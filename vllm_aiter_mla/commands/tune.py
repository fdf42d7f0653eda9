# SPDX-License-Identifier: Apache-2.0
"""``measure --tune``: time the tiles of the Triton kernel on this GPU and keep the fastest for its starts."""

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import typer

from vllm_aiter_mla import files
from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.commands.compat.offline import load_plugins
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import LayerShape, meta_inputs, synthetic_inputs
from vllm_aiter_mla.kernels.triton import tiles, tuning
from vllm_aiter_mla.kernels.triton.backend import TritonBackend
from vllm_aiter_mla.serving import decision
from vllm_aiter_mla.startup import checks

LIMIT = 1024
"""Up to how many tokens tiles are timed, unless the user names the counts."""


def run(tokens: Sequence[int] | None, shapes: Iterable[LayerShape]) -> tuple[tuning.TunedTiles, int]:
    """Tune each shape, print a line for each range and keep the file; return this run's record and the exit status.

    A shape that raises ends the run. What was tuned before is kept, next to what earlier runs have tuned.
    """
    load_plugins()  # as in a server: they may bring the platform
    machine, counts = stopwatch.machine(), sorted(set(tokens or stopwatch.token_counts(LIMIT)))
    chosen, us, wrong, stopped = dict[str, stopwatch.Ranges](), {}, list[str](), ""
    with compat_config.as_current():
        for shape in shapes:
            key, base = tuning.key_of(meta_inputs(shape)), partial(default, heads=shape.heads)
            try:
                rounds = timed(shape, key, counts, wrong)
            except Exception as error:  # out of memory for a large size, or Triton is absent
                stopped = f"{key}: {type(error).__name__}: {error}"
                break
            us[key] = stopwatch.medians(rounds)
            chosen[key] = decision.ranges(rounds, [*tiles.allowed(card().arch)], base)
            typer.echo(f"{key}:")
            for first, last, label in chosen[key]:
                table = base(last)
                beaten = f"; the table's {table} {us[key][last][table]:.2f}" if label != table else ", the table's"
                typer.echo(f"  {first}..{last} tokens  {label}: {us[key][last][label]:.2f} us{beaten}")
            card().give_back()
    for why in wrong:
        typer.echo(outputs.line(f"WRONG, not timed: {why}"))
    if stopped:
        typer.echo(outputs.line(f"STOPPED at {stopped}"))
    record = tuning.TunedTiles(machine["card"], machine["triton"], chosen, us)
    if chosen:
        keep(record)
    return record, outputs.FINDING if wrong or stopped else outputs.FINE


def default(tokens: int, heads: int) -> str:
    """Return the label of the table's tile."""
    return tiles.tile_for(card().arch, tokens, heads).label


def timed(shape: LayerShape, key: str, counts: Sequence[int], wrong: list[str]) -> stopwatch.Rounds:
    """Check each tile as start-up does and time those that are right.

    Raises:
        ValueError: the kernel does not take the shape, or one of the table's tiles is wrong.
    """
    call, able = meta_inputs(shape), {}
    for label in tiles.allowed(card().arch):
        backend = TritonBackend({key: ((1, sys.maxsize, label),)})
        if (why := backend.refuse(call)) is not None:
            raise ValueError(why)
        checked = checks.self_check(label, backend, shape, (), max(counts))
        if checked.ok:
            able[label] = backend
        else:
            wrong.append(f"{label} at {key}: {checked.message}")
    missing = {default(tokens, shape.heads) for tokens in counts} - able.keys()
    if missing:
        raise ValueError(f"the tile {min(missing)} of the table failed its check")
    return stopwatch.time_shape(able, shape, synthetic_inputs(shape).weight, counts, stopwatch.Budget(float("inf")))


def spliced(new: stopwatch.Ranges, old: stopwatch.Ranges) -> stopwatch.Ranges:
    """Return the new ranges, and beyond their end the old ones."""
    end = new[-1][1]
    return (*new, *((max(first, end + 1), last, label) for first, last, label in old if last > end))


def keep(record: tuning.TunedTiles) -> None:
    """Write the file, with what earlier runs have tuned besides; end with a line if that fails."""
    folder = compat_config.cache_folder()
    path = tuning.path_of(folder, record.card, record.triton)
    with suppress(OSError, ValueError):  # none, or one that start-up leaves out as well
        old = files.read(tuning.TunedTiles, path)
        chosen = {key: spliced(ranges, old.chosen.get(key, ())) for key, ranges in record.chosen.items()}
        us = {key: old.us.get(key, {}) | by_tokens for key, by_tokens in record.us.items()}
        record = replace(record, chosen=old.chosen | chosen, us=old.us | us)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(path, record)
    except OSError as error:
        outputs.fail(f"measure: {path}: {error.strerror or error}")
    typer.echo(f"kept in {path}; the next start checks these tiles and names them in its status line")

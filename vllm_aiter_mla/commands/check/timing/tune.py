# SPDX-License-Identifier: Apache-2.0
"""The step ``timing`` with ``--tune``: time the tiles of the Triton kernel, and keep the fastest for its starts."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from vllm_aiter_mla import files
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.timing.child import TimingRequest
from vllm_aiter_mla.commands.compat.vllm_options import load_plugins
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.decided import Span, Spans, kernel_at
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import LayerShape, meta_inputs, synthetic_inputs
from vllm_aiter_mla.kernels.triton import tiles, tuning
from vllm_aiter_mla.kernels.triton.backend import TritonBackend
from vllm_aiter_mla.serving import decision
from vllm_aiter_mla.startup import checks

LIMIT = 1024
"""Up to how many tokens tiles are timed, unless the user names the counts."""


def tune(request: TimingRequest) -> tuple[tuning.TunedTiles, str | None]:
    """Tune the tiles for each layer, keep them at once and tell a line for each range of tokens.

    A shape that raises ends the run. What was tuned before is kept, next to what earlier runs have tuned. Without
    ``request.tokens`` powers of two are timed.

    Returns:
        The record, and what is wrong; None if every tile is right.

    Raises:
        OSError: the file cannot be kept.
    """
    load_plugins()  # as in a server: they may bring the platform
    machine, counts = stopwatch.machine(), sorted(set(request.tokens or stopwatch.token_counts(LIMIT)))
    record = tuning.TunedTiles(machine["card"], machine["triton"], {}, {})
    wrong, stopped = list[str](), None
    with compat_config.as_current():
        for layer in request.layers():
            shape = request.shape(*layer)
            key, tile_of_table = tuning.key_of(meta_inputs(shape)), partial(table_tile, heads=shape.heads)
            try:
                rounds = timed(shape, key, counts, wrong)
            except Exception as error:  # out of memory for a large size, or Triton is absent
                stopped = f"stopped: {key}: {type(error).__name__}: {error}"
                break
            # Below the smallest count the table may have tiles that were not compared: these stay.
            borders = [count for count in range(1, counts[0]) if tile_of_table(count) != tile_of_table(count + 1)]
            points: stopwatch.Rounds = {**{count: {} for count in borders}, **rounds}
            us = stopwatch.medians(rounds)
            spans = decision.fastest_spans(points, [*tiles.allowed(card().arch)], tile_of_table)
            path = keep(replace(record, chosen={key: spans}, us={key: us}))
            if not record.chosen:
                process.send(f"kept in {path}; the next start checks these tiles and names them in its status line")
            record = replace(record, chosen=record.chosen | {key: spans}, us=record.us | {key: us})
            for line in _lines(key, spans, us, tile_of_table):
                process.send(line)
            card().give_back()
    for why in wrong:
        process.send(f"WRONG, not timed: {why}")
    return record, stopped or ("a tile is wrong" if wrong else None)


def _lines(
    key: str, spans: Spans, us: Mapping[int, Mapping[str, float]], tile_of_table: Callable[[int], str]
) -> Iterator[str]:
    """Yield a line for each span of tokens: the tile that was chosen, its time, and that of the table's tile."""
    yield f"{key}:"
    for span in spans:
        label, table = span.kernel, tile_of_table(span.last)
        if span.last not in us:
            yield f"  {span.tokens} tokens  {label}: not timed, the table's"
            continue
        beaten = f"; the table's {table} {us[span.last][table]:.2f}" if label != table else ", the table's"
        yield f"  {span.tokens} tokens  {label}: {us[span.last][label]:.2f} us{beaten}"


def table_tile(tokens: int, heads: int) -> str:
    """Return the label of the table's tile."""
    return tiles.tile_for(card().arch, tokens, heads).label


def timed(shape: LayerShape, key: str, counts: Sequence[int], wrong: list[str]) -> stopwatch.Rounds:
    """Check each tile as start-up does and time those that are right.

    Raises:
        ValueError: the kernel does not take the shape, or one of the table's tiles is wrong.
    """
    call, able = meta_inputs(shape), {}
    for label in tiles.allowed(card().arch):
        backend = TritonBackend({key: (Span(1, sys.maxsize, label),)})
        if (why := backend.refuse(call)) is not None:
            raise ValueError(why)
        checked = checks.check_kernel(label, backend, shape, (), max(counts))
        if checked.has_passed:
            able[label] = backend
        else:
            wrong.append(f"{label} at {key}: {checked.message}")
    missing = {table_tile(tokens, shape.heads) for tokens in counts} - able.keys()
    if missing:
        raise ValueError(f"the tile {min(missing)} of the table failed its check")
    return stopwatch.time_shape(able, shape, synthetic_inputs(shape).weight, counts, stopwatch.Budget(float("inf")))


def splice_spans(new: Spans, counts: Collection[int], old: Spans, before: Collection[int]) -> Spans:
    """Return the old spans with the new tile at each of the ``counts``, and beyond their end the new ones.

    ``counts`` were timed now. A count decides down to the next one that was timed now or ``before``.
    """
    end = old[-1].last if old else 0

    def tile_at(tokens: int) -> str:
        return kernel_at(old if tokens not in counts and tokens <= end else new, tokens)

    points = {*counts, *before, *(span.last for span in (*old, *new))}
    return decision.fastest_spans({tokens: {} for tokens in points}, (), tile_at)


def keep(record: tuning.TunedTiles) -> Path:
    """Add the record to the file of this card and this Triton; return the file.

    Raises:
        OSError: it cannot be written.
    """
    folder = compat_config.cache_folder()
    path = tuning.path_of(folder, record.card, record.triton)
    with suppress(OSError, ValueError):  # none, or one that start-up leaves out as well
        old = files.read(tuning.TunedTiles, path)
        chosen = {
            key: splice_spans(spans, record.us[key], old.chosen.get(key, ()), old.us.get(key, ()))
            for key, spans in record.chosen.items()
        }
        us = {key: old.us.get(key, {}) | by_tokens for key, by_tokens in record.us.items()}
        record = replace(record, chosen=old.chosen | chosen, us=old.us | us)
    folder.mkdir(parents=True, exist_ok=True)
    files.write(path, record)
    return path

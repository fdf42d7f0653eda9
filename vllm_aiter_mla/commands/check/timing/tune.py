# SPDX-License-Identifier: Apache-2.0
"""The step ``timing`` with ``--tune``: time the tiles of the Triton kernel, and save the fastest for later starts."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from filelock import FileLock

from vllm_aiter_mla import files
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.timing.child import TimingRequest
from vllm_aiter_mla.commands.compat.vllm_options import load_plugins
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.decided import Span, Spans, kernel_at
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import LayerShape, meta_inputs, synthetic_inputs
from vllm_aiter_mla.kernels.triton import tiles, tuning
from vllm_aiter_mla.kernels.triton.backend import TritonBackend
from vllm_aiter_mla.serving import decision
from vllm_aiter_mla.startup import checks

MAX_TUNED_TOKENS = 1024
"""Most tokens that tiles are timed for, unless the user names the counts."""


def tune_tiles(request: TimingRequest) -> tuple[tuning.TunedTiles, str | None]:
    """Tune the tiles for each layer, save them at once, and send the caller a line for each range of tokens.

    A shape that raises ends the run. The tiles that were tuned before it stay in the file, next to those of earlier
    runs. A file that cannot be written ends the run too, behind the shape's lines. Without ``request.token_counts``
    powers of two are timed.

    Returns:
        The record, and the reason why the run failed; None if every tile is right.
    """
    load_plugins()  # as in a server: a plugin may provide the platform
    machine = stopwatch.machine()
    token_counts = sorted(set(request.token_counts or stopwatch.token_counts(MAX_TUNED_TOKENS)))
    record = tuning.TunedTiles(machine["card"], machine["triton"], card().units(), {}, {})
    has_wrong_tile, stop_reason = False, None
    with compat_config.as_current():
        for layer in request.layers():
            shape = request.shape(*layer)
            shape_key, table_tile_at = tuning.key_of(meta_inputs(shape)), partial(table_tile, heads=shape.heads)
            right_tiles = dict[str, KernelBackend]()
            try:
                for tile in check_tiles(shape, shape_key, max(token_counts)):
                    if tile.failure is None:
                        right_tiles[tile.label] = tile.backend
                    else:  # said at once, because a later check may end the process
                        has_wrong_tile = True
                        process.send_value(f"WRONG, not timed: {tile.label} at {shape_key}: {tile.failure}")
                rounds = time_tiles(right_tiles, shape, token_counts)
            except Exception as error:  # out of memory for a large size, or Triton is absent
                stop_reason = f"stopped: {shape_key}: {type(error).__name__}: {error}"
                break
            us = stopwatch.medians(rounds)
            spans = _fastest_tiles(rounds, token_counts[0], table_tile_at)
            try:  # kept before they are told, because the process may end
                path = save_tiles(replace(record, chosen={shape_key: spans}, us={shape_key: us}))
            except OSError as error:
                stop_reason = f"stopped: the tiles could not be kept for the next start: {error}"
            else:
                if not record.chosen:
                    process.send_value(
                        f"kept in {path}; the next start checks these tiles and names them in its status line"
                    )
            record = replace(record, chosen=record.chosen | {shape_key: spans}, us=record.us | {shape_key: us})
            for line in _span_lines(shape_key, spans, us, table_tile_at):
                process.send_value(line)
            card().give_back()
            if stop_reason is not None:
                break
    return record, stop_reason or ("a tile is wrong" if has_wrong_tile else None)


def _fastest_tiles(rounds: stopwatch.Rounds, min_tokens: int, table_tile_at: Callable[[int], str]) -> Spans:
    """Return the fastest tile at each number of tokens.

    Below ``min_tokens``, the smallest count, the table may have tiles that are not timed. Those ranges keep the table's
    tiles.
    """
    table_borders = [
        num_tokens for num_tokens in range(1, min_tokens) if table_tile_at(num_tokens) != table_tile_at(num_tokens + 1)
    ]
    points: stopwatch.Rounds = {**{num_tokens: {} for num_tokens in table_borders}, **rounds}
    return decision.fastest_spans(points, [*tiles.allowed(card().arch)], table_tile_at)


def _span_lines(
    shape_key: str, spans: Spans, us: Mapping[int, Mapping[str, float]], table_tile_at: Callable[[int], str]
) -> Iterator[str]:
    """Yield a line for each span of tokens: the fastest tile, its time, and the time of the table's tile.

    ``us`` has the median microseconds by number of tokens and tile.
    """
    yield f"{shape_key}:"
    for span in spans:
        label, table_label = span.kernel, table_tile_at(span.last)
        if span.last not in us:
            yield f"  {span.tokens_text} tokens  {label}: not timed, the table's"
            continue
        table_text = (
            f"; the table's {table_label} {us[span.last][table_label]:.2f}" if label != table_label else ", the table's"
        )
        yield f"  {span.tokens_text} tokens  {label}: {us[span.last][label]:.2f} us{table_text}"


def table_tile(tokens: int, heads: int) -> str:
    """Return the label of the tile that the table has for this number of tokens."""
    return tiles.tile_for(card().arch, tokens, heads).label


@dataclass(frozen=True)
class CheckedTile:
    """A tile after its check on one layer shape."""

    label: str
    backend: KernelBackend
    failure: str | None  # why the tile is wrong; None if it is right


def check_tiles(shape: LayerShape, shape_key: str, max_tokens: int) -> Iterator[CheckedTile]:
    """Check each tile with up to ``max_tokens`` tokens, as start-up does; yield each after its check.

    Raises:
        ValueError: the kernel does not take the shape.
    """
    inputs = meta_inputs(shape)
    for label in tiles.allowed(card().arch):
        backend = TritonBackend({shape_key: (Span(1, sys.maxsize, label),)})
        if (reason := backend.refuse(inputs)) is not None:
            raise ValueError(reason)
        checked = checks.check_kernel(label, backend, shape, (), max_tokens)
        yield CheckedTile(label, backend, None if checked.has_passed else checked.message)


def time_tiles(
    right_tiles: Mapping[str, KernelBackend], shape: LayerShape, token_counts: Sequence[int]
) -> stopwatch.Rounds:
    """Time the tiles that are right.

    Raises:
        ValueError: one of the table's tiles is wrong.
    """
    wrong_table_tiles = {table_tile(tokens, shape.heads) for tokens in token_counts} - right_tiles.keys()
    if wrong_table_tiles:
        raise ValueError(f"the tile {min(wrong_table_tiles)} of the table failed its check")
    return stopwatch.time_shape(
        right_tiles, shape, synthetic_inputs(shape).weight, token_counts, stopwatch.Budget(float("inf"))
    )


def splice_spans(new_spans: Spans, new_counts: Collection[int], old_spans: Spans, old_counts: Collection[int]) -> Spans:
    """Return the old spans with the new tile at each of ``new_counts``, followed by the new spans beyond their end.

    ``new_counts`` were timed now, and ``old_counts`` before. The tile of a count also serves the counts below it, down
    to the next count that was timed.
    """
    old_end = old_spans[-1].last if old_spans else 0

    def tile_at(tokens: int) -> str:
        return kernel_at(old_spans if tokens not in new_counts and tokens <= old_end else new_spans, tokens)

    points = {*new_counts, *old_counts, *(span.last for span in (*old_spans, *new_spans))}
    return decision.fastest_spans({tokens: {} for tokens in points}, (), tile_at)


def save_tiles(record: tuning.TunedTiles) -> Path:
    """Add the record to the file of this card and this Triton release; return its path.

    Raises:
        OSError: the file cannot be written.
    """
    folder = compat_config.cache_folder()
    path = tuning.path_of(folder, record.card, record.triton, record.units)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):  # held by another run that tunes, on another card of this machine
        files.write_record(path, _added_to(path, record))
    return path


def _added_to(path: Path, record: tuning.TunedTiles) -> tuning.TunedTiles:
    """Return the record in the file at ``path`` with this one added, or this one if start-up would read no other."""
    try:
        old_record = files.read_record(tuning.TunedTiles, path)
    except (OSError, ValueError):
        return record
    chosen = {
        shape_key: splice_spans(
            spans, record.us[shape_key], old_record.chosen.get(shape_key, ()), old_record.us.get(shape_key, ())
        )
        for shape_key, spans in record.chosen.items()
    }
    us = {shape_key: old_record.us.get(shape_key, {}) | by_tokens for shape_key, by_tokens in record.us.items()}
    return replace(record, chosen=old_record.chosen | chosen, us=old_record.us | us)

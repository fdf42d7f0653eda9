# SPDX-License-Identifier: Apache-2.0
"""The step ``timing`` with ``--tune``: time the tiles of the Triton kernel, and keep the fastest for its starts."""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from vllm_aiter_mla import files
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.compat.offline import load_plugins
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


def tune(asked: Mapping[str, Any]) -> tuple[tuning.TunedTiles, str]:
    """Tune what ``timing`` asks for, as it names it; see ``tune_shapes``."""
    from vllm_aiter_mla.commands.check.timing import shape_of

    given = dict(asked)
    tokens, heads, kinds, weights = (given.pop(name) for name in ("tokens", "heads", "kinds", "weights"))
    return tune_shapes(tokens, (shape_of(count, kind, weights, **given) for kind, count in product(kinds, heads)))


def tune_shapes(tokens: Sequence[int], shapes: Iterable[LayerShape]) -> tuple[tuning.TunedTiles, str]:
    """Tune each shape, keep its tiles at once and tell a line for each range; return the record and what is wrong.

    A shape that raises ends the run. What was tuned before is kept, next to what earlier runs have tuned. Without
    ``tokens`` powers of two are timed.

    Raises:
        OSError: the file cannot be kept.
    """
    load_plugins()  # as in a server: they may bring the platform
    machine, counts = stopwatch.machine(), sorted(set(tokens or stopwatch.token_counts(LIMIT)))
    record = tuning.TunedTiles(machine["card"], machine["triton"], {}, {})
    wrong, stopped = list[str](), ""
    with compat_config.as_current():
        for shape in shapes:
            key, base = tuning.key_of(meta_inputs(shape)), partial(default, heads=shape.heads)
            try:
                rounds = timed(shape, key, counts, wrong)
            except Exception as error:  # out of memory for a large size, or Triton is absent
                stopped = f"{key}: {type(error).__name__}: {error}"
                break
            # Below the smallest count the table may have tiles that were not compared: these stay.
            borders = [tokens for tokens in range(1, counts[0]) if base(tokens) != base(tokens + 1)]
            points: stopwatch.Rounds = {**{tokens: {} for tokens in borders}, **rounds}
            us, spans = stopwatch.medians(rounds), decision.fastest_spans(points, [*tiles.allowed(card().arch)], base)
            path = keep(replace(record, chosen={key: spans}, us={key: us}))
            if not record.chosen:
                process.tell(f"kept in {path}; the next start checks these tiles and names them in its status line")
            record = replace(record, chosen=record.chosen | {key: spans}, us=record.us | {key: us})
            process.tell(f"{key}:")
            for span in spans:
                label, table = span.kernel, base(span.last)
                if span.last not in us:
                    process.tell(f"  {span.tokens} tokens  {label}: not timed, the table's")
                    continue
                beaten = f"; the table's {table} {us[span.last][table]:.2f}" if label != table else ", the table's"
                process.tell(f"  {span.tokens} tokens  {label}: {us[span.last][label]:.2f} us{beaten}")
            card().give_back()
    for why in wrong:
        process.tell(f"WRONG, not timed: {why}")
    return record, f"stopped: {stopped}" if stopped else "a tile is wrong" if wrong else ""


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
        backend = TritonBackend({key: (Span(1, sys.maxsize, label),)})
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


def spliced(new: Spans, timed: Collection[int], old: Spans, before: Collection[int]) -> Spans:
    """Return the old spans with the new tile at each count that was ``timed``, and beyond their end the new ones.

    A count decides down to the next one that was timed now or ``before``.
    """
    end = old[-1].last if old else 0

    def tile_at(tokens: int) -> str:
        return kernel_at(old if tokens not in timed and tokens <= end else new, tokens)

    points = {*timed, *before, *(span.last for span in (*old, *new))}
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
            key: spliced(spans, record.us[key], old.chosen.get(key, ()), old.us.get(key, ()))
            for key, spans in record.chosen.items()
        }
        us = {key: old.us.get(key, {}) | by_tokens for key, by_tokens in record.us.items()}
        record = replace(record, chosen=old.chosen | chosen, us=old.us | us)
    folder.mkdir(parents=True, exist_ok=True)
    files.write(path, record)
    return path

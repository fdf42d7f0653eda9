# SPDX-License-Identifier: Apache-2.0
"""Time the kernels at start-up on the user's card: each rank chooses by its own figures, kept for its next start.

A kernel of ours runs where all ranks of the engine have chosen it. ``decision`` chooses; the ranks exchange choices.

Where no kernel could be timed vLLM's own run, code ``not_timed``, and one line says so: that ours are never slower is a
promise that only figures can keep. Only the settings and the device's type decide whether the ranks exchange anything:
a rank that waits for another one that never comes would hang.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import log, ranks
from vllm_aiter_mla.decided import VLLM, Span, Spans
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.kernels.absorb import UnknownWeightError
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.stopwatch import Rounds
from vllm_aiter_mla.serving.decision import Figures, decide
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.startup import kept_figures
from vllm_aiter_mla.status.record import Timed

VLLMS_RUN = "vLLM's own kernels run"
NO_RIVAL = "vLLM's own kernels cannot be timed here"


@dataclass(frozen=True, slots=True)
class ShapeTiming:
    """What a rank knows of the speed of one layer shape."""

    rounds: Rounds = field(default_factory=dict)  # empty if nothing could be timed, or is to be chosen
    why: str = ""  # it could not be timed
    key: Mapping[str, Any] = field(default_factory=dict)  # what its figures are kept by; empty if nothing is to choose
    kept: Rounds = field(default_factory=dict)  # those of ``rounds`` that earlier starts have taken
    since: str = ""  # when the last of them were taken; empty if this start timed something


@dataclass(frozen=True, slots=True)
class RankChoices:
    """What one rank hands over to the others. Layer shapes are in words."""

    chosen: dict[str, Spans] = field(default_factory=dict)  # by layer shape; () if it was not timed
    troubles: dict[str, str] = field(default_factory=dict)  # why a shape could not be timed
    why: str = ""  # the rank could not time at all


class Trouble(NamedTuple):
    """Why a rank could not time."""

    rank: int
    shape: str  # in words; empty for all shapes
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.why}"


def time_kernels(config: Any, settings: Settings, layers: Sequence[Layer], limit: int | None, rank: int) -> None:
    """Time the kernels of this rank's layers, and let each layer run what all ranks of the engine have chosen.

    Never raises, and takes part in the exchange whatever happens here.

    Args:
        config: the worker's ``VllmConfig``.
        settings: the engine's options.
        layers: the MLA layers of this rank.
        limit: the decode limit; None if this rank's kernels could not be checked.
        rank: of this worker.
    """
    try:
        if not _is_asked_for(config, settings):
            return
    except Exception as error:  # alike on every rank: nobody waits
        troubles = [Trouble(rank, "", _in_one_line(error))]
        _leave_untimed(layers, {}, troubles)
        _say(troubles, 0, 0.0, 0)
        return
    budget, timings = stopwatch.Budget(), dict[str, ShapeTiming]()
    mine, shapes = RankChoices(why="its kernels could not be checked"), dict[str, list[Layer]]()
    try:
        if limit is not None:
            # No batch is larger, whatever limit the user has set.
            counts = stopwatch.token_counts(min(limit, config.scheduler_config.max_num_batched_tokens))
            shapes = _by_shape(layers)
            for shape, (first, *_) in shapes.items():
                timings[shape] = _time_shape(config, first, counts, budget, rank)
            mine = _choose(shapes, timings, counts[-1])
    except Exception as error:
        mine = RankChoices(why=_in_one_line(error))
    agreed: dict[str, tuple[Spans, ...]] = {}
    try:
        place, choices = ranks.exchange(mine)
        agreed, troubles = agree(choices)
        for shape in (shape for shape in shapes if shape in agreed and timings[shape].rounds):
            _run_as_agreed(shape, shapes[shape], timings[shape], agreed[shape])
    except Exception as error:
        place, troubles = 0, [Trouble(rank, "", _in_one_line(error))]  # it says so, whichever rank it is
    _leave_untimed(layers, shapes, troubles)
    num_timed = sum(bool(timing.key) and not timing.since for timing in timings.values())
    # Only here: an exception's traceback holds what was allocated until it has been handled.
    if num_timed:
        with log.warned("the memory of the timing could not be given back"):
            card().give_back()
    if place == 0:
        _say(troubles, num_timed, stopwatch.BUDGET_S - budget.left, len(agreed))


def _by_shape(layers: Sequence[Layer]) -> dict[str, list[Layer]]:
    """Return the layers that a kernel may run on some rank, by shape in words; those stopped on this rank come last."""
    shapes = dict[str, list[Layer]]()
    for layer in sorted(layers, key=lambda layer: not layer.usable()):
        with suppress(UnknownWeightError):  # of the checkpoint: no rank knows the format
            if layer.not_admitted() is None:
                shapes.setdefault(layer.shape().in_words(), []).append(layer)
    return shapes


def hand_over_nothing(config: Any, settings: Settings) -> None:
    """Take part in the exchange of ``time_kernels`` for a rank whose model could not be loaded."""
    if _is_asked_for(config, settings):
        ranks.exchange(RankChoices(why="its model could not be loaded"))


def _is_asked_for(config: Any, settings: Settings) -> bool:
    """Whether to time at all, from facts that every rank of the engine reads alike."""
    return settings.measures and config.device_config.device_type == card().torch_device


def _time_shape(config: Any, layer: Layer, counts: Sequence[int], budget: stopwatch.Budget, rank: int) -> ShapeTiming:
    """Return the figures of a layer's shape, of earlier starts or timed now; none if there is nothing to choose."""
    backends, shape = layer.usable(), layer.shape()
    if len(backends) < 2 or VLLM not in backends:
        return ShapeTiming()
    key, kept, since, timed, why = dict[str, Any](), Rounds(), "", Rounds(), ""
    try:
        key = kept_figures.key_of(config, shape, backends, counts, rank)
        if layer.backends.settings.measure != "again":
            with log.warned("the kept figures could not be read"):
                kept, since = kept_figures.read(compat_config.cache_folder(), key)
        if left := [count for count in counts if count not in kept]:
            pad = partial(compat_layer.pad_query, layer.module) if layer.out_heads else None
            with card().fork_rng(), compat_config.as_current(config):
                stopwatch.time_shape(backends, shape, layer.weight(), left, budget, key["graphs"], pad, timed)
    except (stopwatch.OverBudgetError, torch.OutOfMemoryError) as error:  # says nothing against what was timed
        why = _in_one_line(error)
    except Exception as error:
        return ShapeTiming({}, _in_one_line(error), key, kept)
    rounds = dict(sorted((kept | timed).items()))
    return ShapeTiming(rounds, "" if rounds else why, key, kept, "" if timed else since)


def _choose(shapes: Mapping[str, Sequence[Layer]], timings: Mapping[str, ShapeTiming], most: int) -> RankChoices:
    """Return what this rank chooses, up to ``most`` tokens: vLLM's own where it has nothing else, else by its figures.

    One layer that is stopped decides for its shape: the ranks agree by shape.
    """
    chosen = dict[str, Spans]()
    for shape, group in shapes.items():
        first, last, rounds = group[0], group[-1], timings[shape].rounds
        chosen[shape] = ()
        if set(last.usable()) <= {VLLM}:
            chosen[shape] = _vllms(most)
        elif rounds:
            decision = decide(first.facts(), first.checks, Figures(rounds), first.backends.settings)
            chosen[shape] = decision.kernels or _vllms(max(rounds))
    return RankChoices(chosen, {shape: timing.why for shape, timing in timings.items() if timing.why})


def _vllms(most: int) -> Spans:
    return (Span(1, most, VLLM),)


def agree(choices: Sequence[RankChoices]) -> tuple[dict[str, tuple[Spans, ...]], list[Trouble]]:
    """Return what each rank has chosen by layer shape, and why shapes are missing. Pure, so every rank gets the same.

    A shape is missing if one of its ranks could not time it. All are if a rank does not know its shapes. A rank without
    layers of a shape, as in a pipeline, does not count for it.
    """
    told = ((rank, {"": mine.why} | mine.troubles) for rank, mine in enumerate(choices))
    troubles = [Trouble(rank, shape, why) for rank, whys in told for shape, why in whys.items() if why]
    if any(mine.why for mine in choices):
        return {}, troubles
    shapes = dict.fromkeys(shape for mine in choices for shape in mine.chosen)
    chosen = {shape: tuple(mine.chosen[shape] for mine in choices if shape in mine.chosen) for shape in shapes}
    return {shape: by_rank for shape, by_rank in chosen.items() if all(by_rank)}, troubles


def _run_as_agreed(shape: str, group: Sequence[Layer], own: ShapeTiming, chosen: tuple[Spans, ...]) -> None:
    """Let the layers of a shape run what this rank's figures and the choices of all ranks say; keep the figures."""
    for layer in group:
        layer.timed(Figures(own.rounds, ranks=chosen))
    names = tuple(layer.name for layer in group)
    runs = group[0].decision.kernels or _vllms(max(own.rounds))
    group[0].engine_status.add_timed(Timed(shape, names, runs, stopwatch.medians(own.rounds), own.since))
    if own.rounds != own.kept:
        with log.warned("the measured figures could not be kept"):
            kept_figures.write(compat_config.cache_folder(), own.key, own.rounds)


def _leave_untimed(layers: Sequence[Layer], shapes: Mapping[str, Sequence[Layer]], troubles: Sequence[Trouble]) -> None:
    """Tell the layers whose kernels were to be timed, and were not, that there are no figures, and why."""
    shape_of = {layer.name: shape for shape, group in shapes.items() for layer in group}
    for layer in layers:
        if layer.backends.settings.measures and VLLM in layer.backends.names and not layer.is_timed:
            own = ("", shape_of.get(layer.name))
            why = next((str(trouble) for trouble in troubles if trouble.shape in own), NO_RIVAL)
            layer.timed(Figures(why=why))


def _say(troubles: Sequence[Trouble], num_timed: int, seconds: float, num_usable: int) -> None:
    if troubles:
        more = f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""
        rest = f" but for {num_usable} layer shape(s)" if num_usable else ""
        log.say_once(logging.WARNING, f"the kernels could not be timed: {troubles[0]}{more}; {VLLMS_RUN}{rest}")
    elif num_timed:
        spent = f"{seconds:.1f} s of at most {stopwatch.BUDGET_S:g} s"
        log.say(logging.INFO, f"kernels timed on this card in {spent}: {num_timed} layer shape(s)")


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]

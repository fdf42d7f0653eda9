# SPDX-License-Identifier: Apache-2.0
"""Time the kernels at start-up on the user's card: each rank chooses by its own figures, kept for its next start.

A kernel of ours runs where all ranks of the engine have chosen it. ``decision`` chooses; the ranks exchange choices.

If no kernel could be timed, vLLM's own kernels run, with the code ``not_timed``, and one line says so: only figures can
show that ours are not slower. Whether the ranks exchange anything depends only on the settings and the device's type,
which are the same on every rank. Otherwise a rank could wait for ever for another one that never comes.

The figures of a layer shape pass through these types:

- ``stopwatch.Rounds``: what the stopwatch returns.
- ``kept_figures.KeptFigures``: the file that keeps rounds for the next start.
- ``ShapeFigures``: the rounds that this start has, new and kept ones.
- ``decision.Figures``: what the layers of the shape are given once the ranks have agreed.
- ``status.record.ShapeTiming``: what the status says of them, in medians.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import log, ranks
from vllm_aiter_mla.decided import VLLM, Span, Spans
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.kernels.absorb import UnknownWeightError
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.stopwatch import Rounds
from vllm_aiter_mla.serving.decision import Figures, decide
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.startup import kept_figures
from vllm_aiter_mla.status.record import ShapeTiming

VLLMS_RUN = "vLLM's own kernels run"
NO_BASELINE = "vLLM's own kernels cannot be timed here"
NOT_REQUESTED = "timing was not asked for"


@dataclass(frozen=True, slots=True)
class ShapeFigures:
    """The figures of one layer shape on this rank, for one token count or more."""

    rounds: Rounds  # of this start and of earlier ones
    kept_since: str | None  # when earlier starts took all of them; None if this start took some
    was_timed: bool  # whether this start has timed, or has tried to


@dataclass(frozen=True, slots=True)
class NotTimed:
    """Nothing could be timed: on a whole rank, or on one of its layer shapes."""

    why: str


@dataclass(frozen=True, slots=True)
class NoKernelOfOurs:
    """No kernel of ours may run the layers of a shape on this rank, however fast it is."""

    why: str


Choice = Spans | NoKernelOfOurs | NotTimed
"""What a rank answers for one layer shape."""
Answer = dict[str, Choice] | NotTimed
"""What a rank hands over to the others: its choice by layer shape in words, or why the whole rank has none."""


@dataclass(frozen=True, slots=True)
class RankTiming:
    """What this rank has timed and chosen. Layer shapes are in words."""

    answer: Answer
    groups: Mapping[str, Sequence[Layer]]  # the layers of each shape; see ``_by_shape``
    timings: Mapping[str, ShapeFigures | NotTimed]  # of the shapes for which there is something to choose
    seconds: float  # spent of the budget

    @property
    def num_timed(self) -> int:
        """How many layer shapes this start has timed, or has tried to time."""
        return sum(isinstance(timing, NotTimed) or timing.was_timed for timing in self.timings.values())


class RankReason(NamedTuple):
    """Why a rank could not time a layer shape, or has no kernel of ours that may run it."""

    rank: int
    shape: str | None  # in words; None for all shapes
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.why}"


Agreement = tuple[Spans, ...] | RankReason
"""What each rank has chosen for a layer shape, or why vLLM's own kernels run it on all of them."""


class Outcome(NamedTuple):
    """What has come of the exchange on this rank."""

    reasons: list[RankReason]  # that kept kernels from being timed
    num_timed_shapes: int  # layer shapes that were timed on all their ranks, those of other pipeline stages included
    logs_here: bool  # whether this rank logs for all of them


def time_kernels(
    config: Any,
    settings: Settings,
    layers: Sequence[Layer],
    limit: int | None,
    rank: int,
    around_calls: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Time the kernels of this rank's layers, and let each layer run what all ranks of the engine have chosen.

    Never raises, and takes part in the exchange whatever happens here.

    Args:
        config: the worker's ``VllmConfig``.
        settings: the engine's options.
        layers: the MLA layers of this rank.
        limit: the decode limit; None if this rank's kernels could not be checked.
        rank: of this worker.
        around_calls: surrounds the calls of kernels, and not the wait for other ranks: whoever ends this process then
            ends no kernel. It raises nothing before the calls.
    """
    layers = [layer for layer in layers if VLLM in layer.backends.names]  # on a CPU the reference has no rival
    try:
        if not _is_timing_on(config, settings):
            return
    except Exception as error:  # every rank raises the same here, so none of them waits for this one
        reasons = [RankReason(rank, None, _in_one_line(error))]
        _give_reasons(layers, {}, reasons)
        _warn(reasons, num_timed_shapes=0)
        return
    with log.warned("what surrounds the timing failed"), around_calls():  # the other ranks wait for an answer
        this_rank = _time_this_rank(config, layers, limit, rank)
    outcome = _exchange_and_run(this_rank, rank)
    _give_reasons(layers, this_rank.groups, outcome.reasons)
    # Not earlier: the traceback of an exception holds what was allocated until the exception has been handled.
    if this_rank.num_timed:
        with log.warned("the memory of the timing could not be given back"):
            card().give_back()
    if outcome.reasons and outcome.logs_here:
        _warn(outcome.reasons, outcome.num_timed_shapes)
    elif this_rank.num_timed and outcome.logs_here:
        spent = f"{this_rank.seconds:.1f} s, with a budget of {stopwatch.BUDGET_S:g} s"
        log.say(logging.INFO, f"kernels timed on this card in {spent}: {this_rank.num_timed} layer shape(s)")


def announce_failed_load(config: Any, settings: Settings) -> None:
    """Take part in the exchange of ``time_kernels`` for a rank whose model could not be loaded."""
    if _is_timing_on(config, settings):
        ranks.exchange(NotTimed("its model could not be loaded"))


def _is_timing_on(config: Any, settings: Settings) -> bool:
    """Return whether to time at all, from facts that every rank of the engine reads alike."""
    return settings.has_timing and config.device_config.device_type == card().torch_device


# What this rank does alone.


def _time_this_rank(config: Any, layers: Sequence[Layer], limit: int | None, rank: int) -> RankTiming:
    """Time the kernels of each layer shape and choose among them. Never raises: an error becomes the rank's answer."""
    answer: Answer = NotTimed("its kernels could not be checked")
    groups, timings = dict[str, list[Layer]](), dict[str, ShapeFigures | NotTimed]()
    budget = stopwatch.Budget()
    try:
        if limit is not None:
            # No batch is larger, whatever limit the user has set.
            counts = stopwatch.token_counts(min(limit, config.scheduler_config.max_num_batched_tokens))
            groups = _by_shape(layers)
            for shape, (first, *_) in groups.items():
                backends = first.usable()
                if {VLLM} < set(backends):
                    timings[shape] = _time_shape(config, first, backends, counts, budget, rank)
            answer = _choose(groups, timings)
    except Exception as error:
        answer = NotTimed(_in_one_line(error))
    return RankTiming(answer, groups, timings, stopwatch.BUDGET_S - budget.left)


def _by_shape(layers: Sequence[Layer]) -> dict[str, list[Layer]]:
    """Return the layers that a kernel may run on some rank, by shape in words; those stopped on this rank come last."""
    groups = dict[str, list[Layer]]()
    for layer in sorted(layers, key=lambda layer: not layer.usable()):
        with suppress(UnknownWeightError):  # no rank knows the format: all load the same checkpoint
            if layer.not_admitted() is None:
                groups.setdefault(layer.shape().in_words(), []).append(layer)
    return groups


def _time_shape(
    config: Any,
    layer: Layer,
    backends: Mapping[str, KernelBackend],
    counts: Sequence[int],
    budget: stopwatch.Budget,
    rank: int,
) -> ShapeFigures | NotTimed:
    """Return the figures of a layer's shape: those that earlier starts have kept, and new ones for other token counts.

    Args:
        config: the worker's ``VllmConfig``.
        layer: any layer of the shape that may run ``backends``.
        backends: the candidates, by name; vLLM's own is one of them.
        counts: token counts.
        budget: of this rank; the time spent here is taken from it.
        rank: of this worker.
    """
    shape = layer.shape()
    kept: kept_figures.KeptFigures | None = None
    try:
        key = kept_figures.key_of(config, shape, backends, counts, rank)
        if layer.backends.settings.measure != "again":
            with log.warned("the kept figures could not be read"):
                kept = kept_figures.read(compat_config.cache_folder(), key)
        kept_rounds = kept.rounds if kept else Rounds()
        new_rounds = Rounds()
        if missing := [count for count in counts if count not in kept_rounds]:
            reason = f"the budget of {stopwatch.BUDGET_S:g} s ended"
            pad = partial(compat_layer.pad_query, layer.module) if layer.out_heads else None
            try:
                with card().fork_rng(), compat_config.as_current(config):
                    stopwatch.time_shape(
                        backends, shape, layer.weight(), missing, budget, key["graphs"], pad, new_rounds
                    )
            except (stopwatch.OverBudgetError, torch.OutOfMemoryError) as error:
                if not (kept_rounds or new_rounds):
                    raise
                if isinstance(error, torch.OutOfMemoryError):
                    reason = _in_one_line(error)
            if untimed := len(set(missing) - set(new_rounds)):  # the figures of other token counts still hold
                log.say(logging.INFO, f"{shape.in_words()}: {untimed} token count(s) were not timed: {reason}")
    except Exception as error:
        return NotTimed(_in_one_line(error))
    rounds = dict(sorted((kept_rounds | new_rounds).items()))
    if new_rounds:  # before the exchange: whatever another rank answers, the next start need not time them again
        with log.warned("the measured figures could not be kept"):
            kept_figures.write(compat_config.cache_folder(), key, rounds)
    return ShapeFigures(rounds, kept.evidence.time if kept and not new_rounds else None, bool(missing))


def _choose(groups: Mapping[str, Sequence[Layer]], timings: Mapping[str, ShapeFigures | NotTimed]) -> dict[str, Choice]:
    """Return what this rank chooses for each layer shape by its figures, or why it cannot choose.

    The ranks agree by shape, so one layer that is stopped decides for all layers of its shape.
    """
    chosen = dict[str, Choice]()
    for shape, group in groups.items():
        first, last, timing = group[0], group[-1], timings.get(shape)
        if isinstance(timing, NotTimed):  # said even if a layer is stopped
            chosen[shape] = timing
        elif (skip := last.decision.skip) is not None:
            chosen[shape] = NoKernelOfOurs(skip.message)
        elif timing is None:
            chosen[shape] = NotTimed(NO_BASELINE)
        else:
            decision = decide(first.facts(), first.checks, Figures(timing.rounds), first.backends.settings)
            chosen[shape] = decision.kernels or _vllm_spans(max(timing.rounds))
    return chosen


def _vllm_spans(most: int) -> Spans:
    """Return the choice of vLLM's own kernels up to ``most`` tokens."""
    return (Span(1, most, VLLM),)


# What all ranks do together.


def _exchange_and_run(this_rank: RankTiming, rank: int) -> Outcome:
    """Exchange the answers, and let the layers run what the ranks agree on. Never raises, and always takes part.

    After an error that concerns one layer shape, its layers run vLLM's own kernels on this rank. Those of other shapes
    run what the ranks have agreed on.
    """
    try:
        index, answers = ranks.exchange(this_rank.answer)
        agreed, reasons = agree(answers)
    except Exception as error:
        return Outcome([RankReason(rank, None, _in_one_line(error))], 0, logs_here=True)
    shapes, logs_here = {shape for shape, found in agreed.items() if not isinstance(found, RankReason)}, index == 0
    for shape, timing in this_rank.timings.items():
        if shape in agreed and isinstance(timing, ShapeFigures):
            try:
                _run_as_agreed(shape, this_rank.groups[shape], timing, agreed[shape])
            except Exception as error:
                reasons.insert(0, RankReason(rank, shape, _in_one_line(error)))
                shapes.discard(shape)
                logs_here = True  # no other rank knows of it
    return Outcome(reasons, len(shapes), logs_here)


def agree(answers: Sequence[Answer]) -> tuple[dict[str, Agreement], list[RankReason]]:
    """Return what the ranks agree on by layer shape, and why shapes are missing. Pure, so every rank gets the same.

    A shape is missing if one of its ranks could not time it. All are missing if a rank could time nothing, because its
    shapes are not known. A rank without layers of a shape, as in a pipeline, does not count for that shape.

    Args:
        answers: of all ranks, in their order.
    """
    agreed, reasons = dict[str, Agreement](), list[RankReason]()
    for rank, answer in enumerate(answers):
        if isinstance(answer, NotTimed):
            reasons.append(RankReason(rank, None, answer.why))
            continue
        for shape, choice in answer.items():
            before = agreed.get(shape, ())
            if isinstance(choice, NotTimed):
                reasons.append(RankReason(rank, shape, choice.why))
            elif isinstance(before, RankReason):
                continue  # the first such rank is named
            elif isinstance(choice, NoKernelOfOurs):
                agreed[shape] = RankReason(rank, shape, choice.why)
            else:
                agreed[shape] = (*before, choice)
    missing = {reason.shape for reason in reasons}
    return {shape: found for shape, found in agreed.items() if not missing & {shape, None}}, reasons


def _run_as_agreed(shape: str, group: Sequence[Layer], figures: ShapeFigures, agreed: Agreement) -> None:
    """Let the layers of a shape run what this rank's figures and the answers of all ranks say."""
    if isinstance(agreed, RankReason):
        found = Figures(figures.rounds, why=str(agreed))
    else:
        found = Figures(figures.rounds, ranks=agreed)
    for layer in group:
        layer.timed(found)
    names = tuple(layer.name for layer in group)
    runs = group[0].decision.kernels or _vllm_spans(max(figures.rounds))
    us, kept_since = stopwatch.medians(figures.rounds), figures.kept_since or ""
    group[0].engine_status.add_timing(ShapeTiming(shape, names, runs, us, kept_since))


def _give_reasons(
    layers: Sequence[Layer], groups: Mapping[str, Sequence[Layer]], reasons: Sequence[RankReason]
) -> None:
    """Tell the layers of shapes that were not timed, or that could not be given their figures, why they have none."""
    shape_of = {layer.name: shape for shape, group in groups.items() for layer in group}
    for layer in layers:
        shapes = (None, shape_of.get(layer.name))
        why = next((str(reason) for reason in reasons if reason.shape in shapes), "")
        if why or not layer.is_timed:
            layer.timed(Figures(why=why or NOT_REQUESTED))


def _warn(reasons: Sequence[RankReason], num_timed_shapes: int) -> None:
    """Log why kernels could not be timed, the first reason in full, and how many layer shapes were timed."""
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    timed = f"; {num_timed_shapes} other layer shape(s) were timed" if num_timed_shapes else ""
    log.say_once(logging.WARNING, f"the kernels could not be timed: {reasons[0]}{more}; {VLLMS_RUN}{timed}")


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]

# SPDX-License-Identifier: Apache-2.0
"""Time the kernels at start-up on the user's card.

Each rank chooses by its own figures, and keeps them for the next start. A kernel of ours runs where all ranks of the
engine have chosen it. ``decision`` chooses, and the ranks exchange their choices.

If no kernel could be timed, vLLM's own kernels run, with the code ``not_timed`` and a log line. Only figures can show
that our kernels are not slower, so vLLM's own also run above the largest token count that was timed. Whether the ranks
exchange choices depends only on the settings and the device's type, which are the same on every rank. If it depended on
more, a rank could wait for ever for one that never answers.

The figures of a layer shape pass through these types:

- ``stopwatch.Rounds``: the result of the stopwatch.
- ``kept_figures.KeptFigures``: the file that keeps rounds for the next start.
- ``ShapeFigures``: the new and the kept rounds of this start.
- ``decision.Figures``: the figures that the layers get after the ranks have agreed.
- ``decided.ShapeTiming``: the medians in the status.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import log, ranks
from vllm_aiter_mla.decided import VLLM, ShapeTiming, Span, Spans
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.kernels.absorb import UnknownWeightError
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.stopwatch import Rounds
from vllm_aiter_mla.serving.decision import Figures, decide
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.startup import kept_figures

VLLM_KERNELS_RUN = "vLLM's own kernels run"
NO_BASELINE = "vLLM's own kernels cannot be timed here"
NOTHING_TO_TIME = "no kernel of ours was left to time"


@dataclass(frozen=True, slots=True)
class ShapeFigures:
    """The figures of one layer shape on this rank, for at least one token count."""

    rounds: Rounds  # of this start and of earlier starts
    kept_since: str | None  # when earlier starts took all the figures; None if this start took some of them
    is_timed_now: bool  # whether this start has timed the shape, or has tried to


@dataclass(frozen=True, slots=True)
class NotTimed:
    """The kernels could not be timed, on a whole rank or for one of its layer shapes."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoKernelOfOurs:
    """No kernel of ours may run the layers of a shape on this rank, however fast the kernel is."""

    reason: str


ShapeChoice = Spans | NoKernelOfOurs | NotTimed
"""The choice of a rank for one layer shape: the kernels by token count, or why it chose none."""
RankChoices = dict[str, ShapeChoice] | NotTimed
"""The choices that a rank sends to the other ranks, by layer shape in words, or why the rank has no choices."""


@dataclass(frozen=True, slots=True)
class RankTiming:
    """The figures and the choices of this rank. Layer shapes are in words."""

    choices: RankChoices
    layers_by_shape: Mapping[str, Sequence[Layer]]  # as ``_layers_by_shape`` returns them
    figures_by_shape: Mapping[str, ShapeFigures | NotTimed]  # only of shapes with more than one candidate
    seconds_spent: float  # of the budget

    @property
    def num_timed_now(self) -> int:
        """Number of layer shapes that this start has timed, or has tried to time."""
        return sum(isinstance(figures, NotTimed) or figures.is_timed_now for figures in self.figures_by_shape.values())


class RankReason(NamedTuple):
    """Why a rank could not time a layer shape, or has no kernel of ours that may run it."""

    rank: int
    shape: str | None  # in words; None for all shapes
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


ShapeAgreement = tuple[Spans, ...] | RankReason
"""The choice of each rank for a layer shape, or why vLLM's own kernels run the shape on all ranks."""


class ExchangeResult(NamedTuple):
    """The result of the exchange on this rank."""

    reasons: list[RankReason]  # why kernels could not be timed
    num_timed_shapes: int  # layer shapes that all their ranks have timed, in all pipeline stages
    is_logging_rank: bool  # whether this rank logs for all ranks


def time_kernels(
    config: Any,
    settings: Settings,
    layers: Sequence[Layer],
    limit: int | None,
    rank: int,
    mark_calls: Callable[[Iterable[str]], AbstractContextManager[None]],
) -> None:
    """Time the kernels of this rank's layers, and let each layer run the kernels that all ranks have chosen.

    This function never raises. It takes part in the exchange whatever happens on this rank.

    Args:
        config: the worker's ``VllmConfig``.
        settings: the engine's options.
        layers: the MLA layers of this rank.
        limit: the decode limit in tokens; None if this rank's kernels could not be checked.
        rank: the rank of this worker.
        mark_calls: returns the context in which the named kernels are called. If it raises, they are not timed. The
            wait for other ranks is outside: a kernel is not the cause if the process is ended during that wait.
    """
    layers = [layer for layer in layers if VLLM in layer.backends.names]  # on a CPU only the reference runs
    try:
        if not _is_timing_on(config, settings):
            return
    except Exception as error:  # every rank raises the same error here, so no rank waits for this one
        reasons = [RankReason(rank, None, _error_line(error))]
        _give_reasons(layers, {}, reasons)
        _log_untimed(reasons, num_timed_shapes=0)
        return
    rank_timing = _time_this_rank(config, layers, limit, rank, mark_calls)
    result = _exchange_and_apply_choices(rank_timing, rank)
    _give_reasons(layers, rank_timing.layers_by_shape, result.reasons)
    # Not earlier: until an exception has been handled, its traceback holds the memory that was allocated.
    if rank_timing.num_timed_now:
        with log.warned("the memory of the timing could not be given back"):
            card().give_back()
    if result.reasons and result.is_logging_rank:
        _log_untimed(result.reasons, result.num_timed_shapes)
    elif rank_timing.num_timed_now and result.is_logging_rank:
        duration = f"{rank_timing.seconds_spent:.1f} s, with a budget of {stopwatch.BUDGET_S:g} s"
        log.say(logging.INFO, f"kernels timed on this card in {duration}: {rank_timing.num_timed_now} layer shape(s)")


def announce_failed_load(config: Any, settings: Settings) -> None:
    """Take part in the exchange of ``time_kernels`` for a rank whose model could not be loaded."""
    if _is_timing_on(config, settings):
        ranks.exchange(NotTimed("its model could not be loaded"))


def _is_timing_on(config: Any, settings: Settings) -> bool:
    """Return whether kernels are timed. The result is the same on every rank of the engine."""
    return settings.has_timing and config.device_config.device_type == card().torch_device


# The steps of this rank, without the other ranks.


def _time_this_rank(
    config: Any,
    layers: Sequence[Layer],
    limit: int | None,
    rank: int,
    mark_calls: Callable[[Iterable[str]], AbstractContextManager[None]],
) -> RankTiming:
    """Time the kernels of each layer shape and choose among them. An error does not raise: it becomes ``choices``."""
    choices: RankChoices = NotTimed("its kernels could not be checked")
    layers_by_shape, figures_by_shape = dict[str, list[Layer]](), dict[str, ShapeFigures | NotTimed]()
    budget = stopwatch.Budget()
    try:
        if limit is not None:
            # No batch has more tokens than ``max_num_batched_tokens``, whatever limit the user has set.
            token_counts = stopwatch.token_counts(min(limit, config.scheduler_config.max_num_batched_tokens))
            layers_by_shape = _layers_by_shape(layers)
            for shape, (layer, *_) in layers_by_shape.items():
                backends = layer.usable()
                if {VLLM} < set(backends):
                    figures_by_shape[shape] = _time_shape(
                        config, layer, backends, token_counts, budget, rank, mark_calls
                    )
            choices = _choose_kernels(layers_by_shape, figures_by_shape)
    except Exception as error:
        choices = NotTimed(_error_line(error))
    return RankTiming(choices, layers_by_shape, figures_by_shape, stopwatch.BUDGET_S - budget.left)


def _layers_by_shape(layers: Sequence[Layer]) -> dict[str, list[Layer]]:
    """Return the layers that a kernel may run on some rank, by shape in words.

    The layers of a shape that are stopped on this rank come last.
    """
    layers_by_shape = dict[str, list[Layer]]()
    for layer in sorted(layers, key=lambda layer: not layer.usable()):
        with suppress(UnknownWeightError):  # no rank knows the format, because all ranks load the same checkpoint
            if layer.not_admitted() is None:
                layers_by_shape.setdefault(layer.shape().in_words(), []).append(layer)
    return layers_by_shape


def _time_shape(
    config: Any,
    layer: Layer,
    backends: Mapping[str, KernelBackend],
    token_counts: Sequence[int],
    budget: stopwatch.Budget,
    rank: int,
    mark_calls: Callable[[Iterable[str]], AbstractContextManager[None]],
) -> ShapeFigures | NotTimed:
    """Return the figures of a layer's shape: kept figures, and new figures for the other token counts.

    With ``measure=again`` every count is timed; a count for which neither the budget nor the memory suffices keeps its
    earlier figures.

    Args:
        config: the worker's ``VllmConfig``.
        layer: any layer of the shape that may run ``backends``.
        backends: the candidates by name, vLLM's own among them.
        token_counts: token counts.
        budget: the budget of this rank, from which the time spent here is taken.
        rank: the rank of this worker.
        mark_calls: see ``time_kernels``.
    """
    shape = layer.shape()
    kept_record: kept_figures.KeptFigures | None = None
    try:
        key = kept_figures.key_of(config, shape, backends, token_counts, rank)
        with log.warned("the kept figures could not be read"):
            kept_record = kept_figures.read(compat_config.cache_folder(), key)
        kept_rounds = kept_record.rounds if kept_record else Rounds()
        new_rounds, times_again = Rounds(), layer.backends.settings.measure == "again"
        if missing_counts := [count for count in token_counts if times_again or count not in kept_rounds]:
            reason = f"the budget of {stopwatch.BUDGET_S:g} s ended"
            pad = partial(compat_layer.pad_query, layer.module) if layer.out_heads else None
            try:
                with mark_calls(backends), card().fork_rng(), compat_config.as_current(config):
                    stopwatch.time_shape(
                        backends, shape, layer.weight(), missing_counts, budget, key["graphs"], pad, new_rounds
                    )
            except (stopwatch.OverBudgetError, torch.OutOfMemoryError) as error:
                if not (kept_rounds or new_rounds):
                    raise
                if isinstance(error, torch.OutOfMemoryError):
                    reason = _error_line(error)
            # The figures of the other token counts are still valid. Above the largest of them vLLM's own kernels run.
            if num_untimed := len(set(missing_counts) - set(new_rounds)):
                log.say(logging.INFO, f"{shape.in_words()}: {num_untimed} token count(s) were not timed: {reason}")
    except Exception as error:
        return NotTimed(_error_line(error))
    rounds = dict(sorted((kept_rounds | new_rounds).items()))
    if new_rounds:  # kept before the exchange, so that the next start can use them whatever the other ranks answer
        with log.warned("the measured figures could not be kept"):
            kept_figures.write(compat_config.cache_folder(), key, rounds)
    kept_since = kept_record.evidence.time if kept_record and not new_rounds else None
    return ShapeFigures(rounds, kept_since, bool(missing_counts))


def _choose_kernels(
    layers_by_shape: Mapping[str, Sequence[Layer]], figures_by_shape: Mapping[str, ShapeFigures | NotTimed]
) -> dict[str, ShapeChoice]:
    """Choose kernels for each layer shape by the figures of this rank; return the choices, or why there is none.

    The ranks agree by shape, so one layer that is stopped decides for all layers of its shape.
    """
    choices = dict[str, ShapeChoice]()
    for shape, shape_layers in layers_by_shape.items():
        layer, figures = shape_layers[0], figures_by_shape.get(shape)
        if isinstance(figures, NotTimed):  # reported even if a layer is stopped
            choices[shape] = figures
        elif (skip := shape_layers[-1].decision.skip) is not None:
            choices[shape] = NoKernelOfOurs(skip.message)
        elif figures is None:
            choices[shape] = NotTimed(NO_BASELINE)
        else:
            decision = decide(layer.facts(), layer.checks, Figures(figures.rounds), layer.backends.settings)
            choices[shape] = decision.kernel_spans or _vllm_spans(max(figures.rounds))
    return choices


def _vllm_spans(max_tokens: int) -> Spans:
    """Return the spans with which vLLM's own kernels run up to ``max_tokens`` tokens."""
    return (Span(1, max_tokens, VLLM),)


# The steps that all ranks take together.


def _exchange_and_apply_choices(rank_timing: RankTiming, rank: int) -> ExchangeResult:
    """Exchange the choices, and let the layers run the kernels that the ranks agree on.

    This function never raises, and always takes part in the exchange. After an error that concerns one layer shape, the
    layers of that shape run vLLM's own kernels on this rank. The layers of other shapes run the agreed kernels.
    """
    try:
        rank_index, choices_by_rank = ranks.exchange(rank_timing.choices)
        agreements, reasons = merge_choices(choices_by_rank)
    except Exception as error:
        return ExchangeResult([RankReason(rank, None, _error_line(error))], 0, is_logging_rank=True)
    timed_shapes = {shape for shape, agreement in agreements.items() if not isinstance(agreement, RankReason)}
    is_logging_rank = rank_index == 0
    for shape, figures in rank_timing.figures_by_shape.items():
        if shape in agreements and isinstance(figures, ShapeFigures):
            try:
                _apply_agreement(shape, rank_timing.layers_by_shape[shape], figures, agreements[shape])
            except Exception as error:
                message = f"the agreed kernels could not be applied: {_error_line(error)}"
                reasons.insert(0, RankReason(rank, shape, message))
                timed_shapes.discard(shape)
                is_logging_rank = True  # no other rank knows of the error
    return ExchangeResult(reasons, len(timed_shapes), is_logging_rank)


def merge_choices(choices_by_rank: Sequence[RankChoices]) -> tuple[dict[str, ShapeAgreement], list[RankReason]]:
    """Return the agreement of the ranks by layer shape, and why shapes are missing.

    The function is pure, so every rank gets the same result. A shape is missing if one of its ranks could not time it.
    All shapes are missing if a rank could time nothing, because the shapes of that rank are unknown. A rank without
    layers of a shape, as in a pipeline, does not count for that shape.

    Args:
        choices_by_rank: the choices of all ranks, in the order of ranks.
    """
    agreements, reasons = dict[str, ShapeAgreement](), list[RankReason]()
    for rank, choices in enumerate(choices_by_rank):
        if isinstance(choices, NotTimed):
            reasons.append(RankReason(rank, None, choices.reason))
            continue
        for shape, choice in choices.items():
            agreement = agreements.get(shape, ())
            if isinstance(choice, NotTimed):
                reasons.append(RankReason(rank, shape, choice.reason))
            elif isinstance(agreement, RankReason):
                continue  # only the first such rank is named
            elif isinstance(choice, NoKernelOfOurs):
                agreements[shape] = RankReason(rank, shape, choice.reason)
            else:
                agreements[shape] = (*agreement, choice)
    untimed_shapes = {reason.shape for reason in reasons}
    if None in untimed_shapes:
        return {}, reasons
    return {shape: agreement for shape, agreement in agreements.items() if shape not in untimed_shapes}, reasons


def _apply_agreement(
    shape: str, layers: Sequence[Layer], shape_figures: ShapeFigures, agreement: ShapeAgreement
) -> None:
    """Give the layers of a shape this rank's figures and the choices of all ranks, and note them in the status."""
    rounds = shape_figures.rounds
    if isinstance(agreement, RankReason):
        figures = Figures(rounds, why=str(agreement))
    else:
        figures = Figures(rounds, ranks=agreement)
    for layer in layers:
        layer.timed(figures)
    names = tuple(layer.name for layer in layers)
    spans = layers[0].decision.kernel_spans or _vllm_spans(max(rounds))
    medians_us, kept_since = stopwatch.medians(rounds), shape_figures.kept_since or ""
    layers[0].engine_status.add_timing(ShapeTiming(shape, names, spans, medians_us, kept_since))


def _give_reasons(
    layers: Sequence[Layer], layers_by_shape: Mapping[str, Sequence[Layer]], reasons: Sequence[RankReason]
) -> None:
    """Tell each layer without figures why its shape was not timed, or why the layer could not get its figures."""
    shape_by_name = {layer.name: shape for shape, group in layers_by_shape.items() for layer in group}
    for layer in layers:
        own_shape = shape_by_name.get(layer.name)
        own_reasons = [str(reason) for reason in reasons if reason.shape is None or reason.shape == own_shape]
        if own_reasons:
            layer.timed(Figures(why=own_reasons[0]))
        elif not layer.is_timed:
            layer.timed(Figures(why=NOTHING_TO_TIME))


def _log_untimed(reasons: Sequence[RankReason], num_timed_shapes: int) -> None:
    """Log the first reason why kernels could not be timed, and the number of layer shapes that were timed."""
    others_text = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    timed_text = f"; {num_timed_shapes} other layer shape(s) were timed" if num_timed_shapes else ""
    message = f"the kernels could not be timed: {reasons[0]}{others_text}; {VLLM_KERNELS_RUN}{timed_text}"
    log.say_once(logging.WARNING, message)


def _error_line(error: Exception) -> str:
    """Return the type and the message of an error as one line of at most 300 characters."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]

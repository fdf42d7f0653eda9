# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs a layer at how many tokens, or why none of ours does: decided once, as a value.

``decide`` is pure. Its inputs are what vLLM's layer and the back ends say (``LayerFacts``), what the self-check found
(``Checked``), what timing found (``Figures``), and the user's options. ``Layer.decision`` holds the result for the
passes, the module, the ops, the cache key and the status; ``plan`` calls ``decide`` with planned facts. A graph may add
reasons of its own to skip a layer.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from vllm_aiter_mla.admission import OVERFLOW, VLLM_FASTER, Skip
from vllm_aiter_mla.decided import VLLM, Decision, RejectedKernel, Span, Spans, kernel_at, merge_spans
from vllm_aiter_mla.kernels.stopwatch import Rounds
from vllm_aiter_mla.settings import Settings

MARGIN = 0.03
CLEAR = 0.75
"""A candidate is clearly faster if it is faster by ``MARGIN`` in this share of the rounds. With medians only, a clock
with 10 % of noise could choose something slower. Outliers in a quarter of the rounds do no harm."""


# The inputs.


@dataclass(frozen=True)
class Offer:
    """What one back end says of a layer, before any check."""

    absent: str = ""  # why it cannot be built in this process
    declines: Mapping[int, str] = field(default_factory=dict)  # why it does not take the layer, at which of ``points``
    needs_check: bool = True
    aborted: bool = False  # it is absent because an earlier start ended in its first call


@dataclass(frozen=True)
class LayerFacts:
    """What is known of a layer before its kernels are checked and timed."""

    skip: Skip | None  # why no kernel of ours may run it
    offers: Mapping[str, Offer] = field(default_factory=dict)  # by back end, in static order
    # Token counts, ascending, the last one the decode limit: each offer holds from the count before, plus one, to it
    points: tuple[int, ...] = (1,)
    no_product: str = ""  # why AITER's GEMM has no right product over the absorb weight, which ours are compared with

    def declines(self, name: str, tokens: int) -> str:
        """Return why a candidate does not take ``tokens``, or ""."""
        point = next((point for point in self.points if tokens <= point), self.points[-1])
        return self.offers[name].declines.get(point, "")


@dataclass(frozen=True)
class Checked:
    """What the self-check found of one kernel."""

    failed: str = ""  # why it must not run
    writes_nan: bool = False  # an fp8 overflow becomes NaN, where vLLM saturates


PASSED = Checked()


@dataclass(frozen=True)
class Figures:
    """What timing found on one rank, and what each rank of the engine chose by its own figures."""

    rounds: Rounds = field(default_factory=dict)  # of this rank; empty if nothing was timed
    why: str = ""  # why vLLM's own kernels run: nothing was timed, or a rank has no kernel of ours that may run
    ranks: tuple[Spans, ...] = ()  # what each rank, this one too, has chosen; empty until they have agreed


# The result.


def decide(facts: LayerFacts, checks: Mapping[str, Checked], figures: Figures | None, settings: Settings) -> Decision:
    """Return which kernel runs at how many tokens, or why none of ours does.

    A kernel that was named is never replaced by another one of ours. A kernel that failed its check, or was not
    checked, never runs. With ``kernel=auto`` none runs that turns an fp8 overflow into NaN. Where timing was asked for
    and found nothing, none of ours runs: only figures can promise that ours are not slower.

    Args:
        facts: of the layer.
        checks: of the self-check, by kernel.
        figures: of timing; None if nothing was to be timed, and the order of ``facts.offers`` decides.
        settings: the engine's options.
    """
    reasons = _reasons_against(facts, checks, settings)
    can_run = _without_a_reason(reasons)
    skip = facts.skip or _without_a_kernel(facts, reasons, can_run, settings)
    spans, skip = ((), skip) if skip else _chosen(facts, can_run, figures)
    return Decision(spans, skip, tuple(_passed_over(facts, reasons, {span.kernel for span in spans}, skip, figures)))


def would_serve(name: str, facts: LayerFacts, checks: Mapping[str, Checked], settings: Settings) -> bool:
    """Return whether a kernel would run at some token count by the static order if it had passed its check.

    Timing may choose another one. Arguments as ``decide``.
    """
    return name in decide(facts, {**checks, name: PASSED}, None, settings).our_kernels


def _chosen(facts: LayerFacts, can_run: Sequence[str], figures: Figures | None) -> tuple[Spans, Skip | None]:
    """Choose among the kernels that can run: by figures, or by the static order if nothing was to be timed.

    Ranks wait for one another, so a kernel of ours runs where every rank has chosen it, and else vLLM's own. Figures of
    two cards are never compared: they were not taken in turns.
    """
    if figures is None:
        return _spans_to(facts.points, lambda tokens: _first(can_run, facts, tokens)), None
    if not figures.rounds:
        return (), Skip("not_timed", f"no kernel was timed, so none of ours is known to be faster: {figures.why}")
    if figures.why:
        return (), Skip("kernel_shape", f"a kernel of ours runs on all ranks or on none: {figures.why}")
    rounds, counts = figures.rounds, sorted(figures.rounds)

    def fastest_at(tokens: int) -> str:
        timed_count = next((count for count in counts if tokens <= count), None)
        if timed_count is None:
            return VLLM  # nothing shows that a kernel of ours is not slower there
        return fastest(rounds[timed_count], [name for name in can_run if not facts.declines(name, tokens)])

    ranks = (_spans_to(sorted({*counts, *facts.points}), fastest_at), *figures.ranks)
    spans = _spans_to(sorted({span.last for spans in ranks for span in spans}), partial(_chosen_by_all, ranks))
    if {span.kernel for span in spans} == {VLLM}:
        where = " on every rank" if len(figures.ranks) > 1 else ""
        message = f"no kernel was clearly faster than vLLM's own at any token count{where}"
        ours = {span.kernel for spans in figures.ranks for span in spans if span.kernel not in ("", VLLM)}
        if len(ours) > 1:
            message = f"at no token count have all ranks chosen the same of {', '.join(sorted(ours))}"
        return (), Skip(VLLM_FASTER, message)
    return spans, None


def _chosen_by_all(ranks: Sequence[Spans], tokens: int) -> str:
    """Return the kernel that every rank has chosen for ``tokens``, else vLLM's own."""
    names = {kernel_at(spans, tokens) or VLLM for spans in ranks}
    return names.pop() if len(names) == 1 else VLLM


def _passed_over(
    facts: LayerFacts, reasons: Mapping[str, str], run: Collection[str], skip: Skip | None, figures: Figures | None
) -> Iterator[RejectedKernel]:
    """Yield each back end that is not among those that ``run``, and why it does not."""
    behind = "it comes later in the static order"
    if figures is not None:
        where = " on every rank" if len(figures.ranks) > 1 else ""
        behind = f"it was at no token count clearly the fastest{where}"
    for name, reason in reasons.items():
        if name not in run:
            yield RejectedKernel(name, reason or (skip.message if skip else behind), facts.offers[name].aborted)


def usable(facts: LayerFacts, checks: Mapping[str, Checked], settings: Settings) -> tuple[str, ...]:
    """Return the back ends that may run the layer at some token count, in static order; arguments as ``decide``."""
    return _without_a_reason(_reasons_against(facts, checks, settings))


def takers(facts: LayerFacts) -> tuple[str, ...]:
    """Return the back ends that can be built and take the layer at some token count, in static order."""
    return tuple(name for name, offer in facts.offers.items() if not _takes_none(offer, facts))


def _takes_none(offer: Offer, facts: LayerFacts) -> str:
    """Return why a back end runs the layer at no token count, or ""."""
    if offer.absent:
        return offer.absent
    return next(iter(offer.declines.values())) if all(point in offer.declines for point in facts.points) else ""


def _reasons_against(facts: LayerFacts, checks: Mapping[str, Checked], settings: Settings) -> dict[str, str]:
    """Return for each back end why it runs the layer at no token count, or "", in static order."""
    return {name: _why_not(name, facts, checks, settings) for name in facts.offers}


def _without_a_reason(reasons: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name, reason in reasons.items() if not reason)


def _why_not(name: str, facts: LayerFacts, checks: Mapping[str, Checked], settings: Settings) -> str:
    """Return why a back end runs the layer at no token count, or ""."""
    offer, checked = facts.offers[name], checks.get(name)
    why = _takes_none(offer, facts)
    if why or not offer.needs_check:
        return why
    if checked is None:
        return f"{name} was not checked for this layer"
    if not checked.failed and checked.writes_nan and settings.kernel == "auto":
        return f"{name} {OVERFLOW}"
    return checked.failed


def _without_a_kernel(
    facts: LayerFacts, reasons: Mapping[str, str], can_run: Sequence[str], settings: Settings
) -> Skip | None:
    """Return why no kernel of ours is to run, or can run; None if one can."""
    if settings.kernel == VLLM and VLLM in facts.offers:
        return Skip("kernel_vllm", "kernel=vllm was given, so vLLM's own kernels run")
    if can_run and set(can_run) != {VLLM}:
        return None
    ours = {name: why for name, why in reasons.items() if name != VLLM}
    absent = all(facts.offers[name].absent for name in ours)
    if facts.no_product and not absent:
        return Skip("mxfp4_width", f"kernel={settings.kernel}: {facts.no_product}")
    code = "kernel_unavailable" if absent else "kernel_shape"
    why = "; ".join(ours.values() if len(ours) == 1 else (f"{name}: {reason}" for name, reason in ours.items()))
    return Skip(code, f"kernel={settings.kernel}: {why}")


def _first(can_run: Sequence[str], facts: LayerFacts, tokens: int) -> str:
    """Return the first candidate in static order that takes ``tokens``; vLLM's own if none does."""
    return next((name for name in can_run if not facts.declines(name, tokens)), VLLM)


# What is chosen from figures.


def beats(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Return whether ``ours`` is clearly faster than ``theirs``, round by round, as a drifting clock meets both."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return ratios[int(CLEAR * len(ratios))] <= 1 - MARGIN


def fastest(samples: Mapping[str, Sequence[float]], order: Sequence[str], base: str = VLLM) -> str:
    """Return the candidate to run, of those in ``samples``; ``order`` is the static one.

    ``base`` runs unless another one clearly beats it. Among those that do, the earlier one runs unless a later one
    clearly beats it too. Equal figures give an equal choice at every start.
    """
    best = base
    for name in order:
        if name != base and name in samples and beats(samples[name], samples[base]):
            best = name if best == base or beats(samples[name], samples[best]) else best
    return best


def fastest_spans(rounds: Rounds, order: Sequence[str], base: Callable[[int], str] = lambda tokens: VLLM) -> Spans:
    """Return what runs from 1 token to the largest count timed; the larger of two counts decides between them.

    Steps are padded up to captured sizes, so the larger count is the nearer one. ``base`` is that of ``fastest``.
    """
    return _spans_to(sorted(rounds), lambda tokens: fastest(rounds[tokens], order, base(tokens)))


def _spans_to(points: Sequence[int], choose: Callable[[int], str]) -> Spans:
    """Return the spans that end at ``points``, each with the kernel that ``choose`` returns for its last token count.

    Neighbours with the same kernel become one span.
    """
    return merge_spans(Span(before + 1, tokens, choose(tokens)) for before, tokens in pairwise((0, *points)))

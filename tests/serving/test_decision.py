"""The decision as a specification: facts, checks, figures and options against what runs, and what holds for all."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_aiter_mla.admission import REASON_CODES, Skip
from vllm_aiter_mla.decided import VLLM, Decision, Span, kernel_at
from vllm_aiter_mla.serving import decision
from vllm_aiter_mla.serving.decision import PASSED, Checked, Figures, LayerFacts, Offer, decide
from vllm_aiter_mla.settings import Settings

LIMIT = 1024
AUTO = ("aiter", "aiter-opt", "triton", VLLM)
"""What "auto" offers on gfx942 and gfx950, in static order."""
TAKES, OWN = Offer(), Offer(needs_check=False)
ABSENT, DECLINES = Offer(absent="not installed"), Offer(declines=dict.fromkeys((255, LIMIT), "3 heads"))
UP_TO_255, FROM_256 = Offer(declines={LIMIT: "too many"}), Offer(declines={255: "too few"})
WRONG, NAN = Checked("3 steps off"), Checked(writes_nan=True)
NOT_ADMITTED, RAISED = Skip("sliding_window", "a window"), Skip("kernel_failed", "it raised")


def facts(*names, skip=None, **offers):
    """Offers of ``names``, all that take the layer but those given; an underscore stands for a hyphen."""
    found = {name: OWN if name in (VLLM, "reference") else TAKES for name in names}
    return LayerFacts(skip, found | {name.replace("_", "-"): one for name, one in offers.items()}, (255, LIMIT))


def checks(**found):
    """All kernels have passed their check but those given; None: it was not checked."""
    named = {name.replace("_", "-"): one for name, one in found.items()}
    return {name: one for name, one in ({name: PASSED for name in AUTO[:3]} | named).items() if one is not None}


def timed(*rows):
    """Figures of (tokens, microseconds by name), equal in every round."""
    return Figures({tokens: {name: [us] * 4 for name, us in by.items()} for tokens, by in rows})


def at(tokens, **us):
    return tokens, {name.replace("_", "-"): value for name, value in us.items()}


def at_limit(**us):
    return timed(at(LIMIT, **us))


def ranks(first, second, to=LIMIT, then=VLLM):
    """Figures by which this rank chooses Triton, and what two ranks chose: the second one up to ``to`` tokens only."""
    spans = (Span(1, LIMIT, first),), (Span(1, to, second), Span(to + 1, LIMIT, then))[: 1 + (to < LIMIT)]
    return replace(FAST_TRITON, ranks=spans)


ALL = facts(*AUTO)
FAST_TRITON = at_limit(aiter=8.0, aiter_opt=9.0, triton=5.0, vllm=10.0)
FAST_VLLM = at_limit(aiter=12.0, aiter_opt=12.0, triton=11.0, vllm=10.0)
STATIC = Settings(measure=False)
CHOICES = st.sampled_from([*AUTO])


def named(kernel):
    return Settings(kernel=kernel)


# Facts, checks, figures, options -> what runs up to 255 tokens and at the limit, or the code of why none of ours does.
ROWS = {
    # The static order: nothing is to be timed.
    "the first": (ALL, checks(), None, STATIC, "aiter aiter"),
    "the first is not built": (facts(*AUTO, aiter=ABSENT), checks(), None, STATIC, "aiter-opt aiter-opt"),
    "AITER is not built": (facts(*AUTO, aiter=ABSENT, aiter_opt=ABSENT), checks(), None, STATIC, "triton triton"),
    "the first does not take the layer": (facts(*AUTO, aiter=DECLINES), checks(), None, STATIC, "aiter-opt aiter-opt"),
    "the first is wrong": (ALL, checks(aiter=WRONG), None, STATIC, "aiter-opt aiter-opt"),
    "the first was not checked": (ALL, checks(aiter=None), None, STATIC, "aiter-opt aiter-opt"),
    "the first overflows": (ALL, checks(aiter=NAN), None, STATIC, "aiter-opt aiter-opt"),
    "both of AITER's overflow": (ALL, checks(aiter=NAN, aiter_opt=NAN), None, STATIC, "triton triton"),
    "the first two are wrong": (ALL, checks(aiter=WRONG, aiter_opt=WRONG), None, STATIC, "triton triton"),
    "a later one is wrong": (ALL, checks(triton=WRONG), None, STATIC, "aiter aiter"),
    "vLLM's kernels are not built": (facts(*AUTO, vllm=ABSENT), checks(), None, STATIC, "aiter aiter"),
    "the first takes few tokens": (facts(*AUTO, aiter=UP_TO_255), checks(), None, STATIC, "aiter aiter-opt"),
    "the first takes many tokens": (facts(*AUTO, aiter=FROM_256), checks(), None, STATIC, "aiter-opt aiter"),
    "two take few tokens": (
        facts(*AUTO, aiter=UP_TO_255, aiter_opt=UP_TO_255), checks(), None, STATIC, "aiter triton",
    ),
    "all of ours take few tokens": (
        facts(*AUTO, aiter=UP_TO_255, aiter_opt=UP_TO_255, triton=UP_TO_255), checks(), None, STATIC, "aiter vllm",
    ),
    "few tokens, and that one is wrong": (
        facts(*AUTO, aiter=UP_TO_255), checks(aiter=WRONG), None, STATIC, "aiter-opt aiter-opt",
    ),
    "few tokens, and the rest is wrong": (
        facts(*AUTO, aiter=UP_TO_255), checks(aiter_opt=WRONG, triton=WRONG), None, STATIC, "aiter vllm",
    ),
    "all are wrong": (ALL, checks(aiter=WRONG, aiter_opt=WRONG, triton=WRONG), None, STATIC, "kernel_shape"),
    "nothing was checked": (ALL, {}, None, STATIC, "kernel_shape"),
    "all overflow": (ALL, checks(aiter=NAN, aiter_opt=NAN, triton=NAN), None, STATIC, "kernel_shape"),
    "none is built": (
        facts(*AUTO, aiter=ABSENT, aiter_opt=ABSENT, triton=ABSENT), {}, None, STATIC, "kernel_unavailable",
    ),
    "none takes the layer": (
        facts(*AUTO, aiter=DECLINES, aiter_opt=DECLINES, triton=DECLINES), {}, None, STATIC, "kernel_shape",
    ),
    "AITER's GEMM has no right product": (
        replace(
            facts(*AUTO, aiter=DECLINES, aiter_opt=DECLINES, triton=DECLINES), no_product="it drops values"
        ), {}, None, STATIC, "mxfp4_width",
    ),
    "no right product, which a reference does not need": (
        replace(facts("reference"), no_product="it drops values"), {}, None, Settings(), "reference reference",
    ),
    "no right product, and none is built": (
        replace(facts(*AUTO, aiter=ABSENT, aiter_opt=ABSENT, triton=ABSENT), no_product="it drops values"),
        {}, None, STATIC, "kernel_unavailable",
    ),
    "one is absent, the others decline": (
        facts(*AUTO, aiter=ABSENT, aiter_opt=DECLINES, triton=DECLINES), {}, None, STATIC, "kernel_shape",
    ),
    "a CPU": (facts("reference"), {}, None, Settings(), "reference reference"),
    # The layer may not run any kernel of ours.
    "not admitted": (facts(skip=NOT_ADMITTED), {}, None, STATIC, "sliding_window"),
    "not admitted, all passed": (facts(*AUTO, skip=NOT_ADMITTED), checks(), FAST_TRITON, Settings(), "sliding_window"),
    "a kernel raised": (facts(*AUTO, skip=RAISED), checks(), FAST_TRITON, Settings(), "kernel_failed"),
    "not admitted, named": (facts("triton", skip=NOT_ADMITTED), checks(), None, named("triton"), "sliding_window"),
    # Figures.
    "Triton is the fastest": (ALL, checks(), FAST_TRITON, Settings(), "triton triton"),
    "AITER is the fastest": (ALL, checks(), at_limit(aiter=5.0, triton=8.0, vllm=10.0), Settings(), "aiter aiter"),
    "vLLM is the fastest": (ALL, checks(), FAST_VLLM, Settings(), "vllm_faster"),
    "equal figures": (ALL, checks(), at_limit(aiter=10.0, triton=10.0, vllm=10.0), Settings(), "vllm_faster"),
    "faster by 2 %": (ALL, checks(), at_limit(triton=9.8, vllm=10.0), Settings(), "vllm_faster"),
    "faster by just the margin": (ALL, checks(), at_limit(triton=97.0, vllm=100.0), Settings(), "triton triton"),
    "faster by 4 %": (ALL, checks(), at_limit(triton=9.6, vllm=10.0), Settings(), "triton triton"),
    "two beat vLLM alike": (ALL, checks(), at_limit(aiter=5.0, triton=4.9, vllm=9.0), Settings(), "aiter aiter"),
    "the fastest is wrong": (ALL, checks(triton=WRONG), FAST_TRITON, Settings(), "aiter aiter"),
    "the fastest was not checked": (ALL, checks(triton=None), FAST_TRITON, Settings(), "aiter aiter"),
    "the fastest overflows": (
        ALL, checks(aiter=NAN), at_limit(aiter=1.0, triton=5.0, vllm=10.0), Settings(), "triton triton",
    ),
    "the fastest is not built": (facts(*AUTO, triton=ABSENT), checks(), FAST_TRITON, Settings(), "aiter aiter"),
    "all are wrong, with figures": (
        ALL, checks(aiter=WRONG, aiter_opt=WRONG, triton=WRONG), FAST_TRITON, Settings(), "kernel_shape",
    ),
    "few tokens one, many the other": (
        ALL, checks(), timed(at(255, aiter=5.0, triton=8.0, vllm=9.0), at(LIMIT, aiter=8.0, triton=5.0, vllm=9.0)),
        Settings(), "aiter triton",
    ),
    "few tokens ours, many vLLM's": (
        ALL, checks(), timed(at(255, aiter=5.0, vllm=9.0), at(LIMIT, aiter=9.5, vllm=9.0)), Settings(), "aiter vllm",
    ),
    "few tokens vLLM's, many ours": (
        ALL, checks(), timed(at(255, aiter=9.5, vllm=9.0), at(LIMIT, aiter=5.0, vllm=9.0)), Settings(), "vllm aiter",
    ),
    "not timed at many tokens": (
        ALL, checks(), timed(at(255, aiter=5.0, triton=8.0, vllm=9.0), at(LIMIT, triton=5.0, vllm=9.0)),
        Settings(), "aiter triton",
    ),
    "the fastest declines few tokens": (
        facts(*AUTO, aiter=FROM_256), checks(), at_limit(aiter=5.0, vllm=9.0), Settings(), "vllm aiter",
    ),
    "the fastest declines few tokens, another takes them": (
        facts(*AUTO, aiter=FROM_256), checks(), at_limit(aiter=5.0, triton=7.0, vllm=9.0), Settings(),
        "triton aiter",
    ),
    "the fastest declines many tokens, another takes them": (
        facts(*AUTO, aiter=UP_TO_255), checks(), at_limit(aiter=5.0, triton=7.0, vllm=9.0), Settings(),
        "aiter triton",
    ),
    # Nothing shows that ours is not slower above the largest count.
    "the budget ended early": (ALL, checks(), timed(at(255, aiter=5.0, vllm=9.0)), Settings(), "aiter vllm"),
    "the budget ended earlier": (ALL, checks(), timed(at(1, aiter=5.0, vllm=9.0)), Settings(), "vllm vllm"),
    "figures again": (ALL, checks(), FAST_TRITON, Settings(measure="again"), "triton triton"),
    # What all ranks of the engine have chosen by their own figures.
    "ranks_choose alike": (ALL, checks(), ranks("triton", "triton"), Settings(), "triton triton"),
    "ranks_choose another kernel of ours": (ALL, checks(), ranks("triton", "aiter"), Settings(), "vllm_faster"),
    "ranks_choose vLLM's on one": (ALL, checks(), ranks("triton", "vllm"), Settings(), "vllm_faster"),
    "ranks_choose vLLM's for many tokens on one": (
        ALL, checks(), ranks("triton", "triton", 255, "vllm"), Settings(), "triton vllm",
    ),
    "ranks_choose what is wrong here": (
        ALL, checks(triton=WRONG), ranks("triton", "triton"), Settings(), "vllm_faster",
    ),
    "ranks_may run none of ours on one": (
        ALL, checks(), replace(FAST_TRITON, why="rank 1: planted"), Settings(), "kernel_shape",
    ),
    # Timing was asked for and found nothing.
    "not timed": (ALL, checks(), Figures(why="no memory"), Settings(), "not_timed"),
    "not timed again": (ALL, checks(), Figures(why="no memory"), Settings(measure="again"), "not_timed"),
    "not timed, one left": (
        facts(*AUTO, aiter=ABSENT, aiter_opt=ABSENT), checks(), Figures(why="no memory"), Settings(), "not_timed",
    ),
    "not timed, all wrong": (
        ALL, checks(aiter=WRONG, aiter_opt=WRONG, triton=WRONG), Figures(why="no memory"), Settings(), "kernel_shape",
    ),
    # A kernel that was named.
    "named": (facts("triton"), checks(), None, named("triton"), "triton triton"),
    "named AITER": (facts("aiter"), checks(), None, named("aiter"), "aiter aiter"),
    "named AITER that overflows": (facts("aiter"), checks(aiter=NAN), None, named("aiter"), "aiter aiter"),
    "named opt that overflows": (
        facts("aiter-opt"), checks(aiter_opt=NAN), None, named("aiter-opt"), "aiter-opt aiter-opt",
    ),
    "named and wrong": (facts("aiter"), checks(aiter=WRONG), None, named("aiter"), "kernel_shape"),
    "named and not checked": (facts("aiter"), {}, None, named("aiter"), "kernel_shape"),
    "named and not built": (facts("aiter", aiter=ABSENT), {}, None, named("aiter"), "kernel_unavailable"),
    "named and declines": (facts("aiter", aiter=DECLINES), {}, None, named("aiter"), "kernel_shape"),
    "named, takes few tokens": (facts("aiter", aiter=UP_TO_255), checks(), None, named("aiter"), "aiter vllm"),
    "named, takes many tokens": (facts("aiter", aiter=FROM_256), checks(), None, named("aiter"), "vllm aiter"),
    "named reference": (facts("reference"), {}, None, named("reference"), "reference reference"),
    "named vLLM's": (facts(VLLM), {}, None, named(VLLM), "kernel_vllm"),
    "named vLLM's, not built": (facts(VLLM, vllm=ABSENT), {}, None, named(VLLM), "kernel_vllm"),
}  # fmt: skip


def outcome(decided: Decision) -> str:
    return decided.skip.code if decided.skip else f"{decided.kernel_at(255)} {decided.kernel_at(LIMIT)}"


@pytest.mark.parametrize(("facts", "checks", "figures", "settings", "wanted"), ROWS.values(), ids=ROWS)
def test_decision_table(facts, checks, figures, settings, wanted):
    assert outcome(decide(facts, checks, figures, settings)) == wanted


def test_ranks_that_have_chosen_different_kernels_are_not_said_to_have_found_none():
    for chosen, said in (("aiter", "the same of aiter, triton"), ("vllm", "no kernel was clearly faster")):
        decided = decide(ALL, checks(), ranks("triton", chosen), Settings())
        assert said in decided.skip.message


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("name", "plant", "row", "ran"),
    [
        ("beats", lambda a, b: a[0] < b[0], "faster by 2 %", "triton triton"),
        ("MARGIN", 0.0, "two beat vLLM alike", "triton triton"),
    ],
)
def test_decision_mutation_a_choice_without_the_margin_is_caught(monkeypatch, name, plant, row, ran):
    monkeypatch.setattr(decision, name, plant)
    with pytest.raises(AssertionError, match=f"^assert '{ran}' == "):
        test_decision_table(*ROWS[row])


@pytest.mark.parametrize(
    ("name", "facts", "checks", "would"),
    [
        ("aiter", ALL, checks(aiter=WRONG), True),
        ("triton", ALL, checks(triton=WRONG), False),
        ("triton", ALL, checks(aiter=NAN, aiter_opt=NAN, triton=WRONG), True),
        ("triton", facts(*AUTO, aiter=UP_TO_255, aiter_opt=UP_TO_255), checks(triton=WRONG), True),
        ("aiter", facts(*AUTO, aiter=DECLINES), checks(aiter=WRONG), False),
    ],
    ids=["the first", "a later one", "behind two that overflow", "for many tokens", "one that takes no batch"],
)
def test_strict_wrong_kernel_is_one_that_would_serve_at_some_token_count(name, facts, checks, would):
    assert decision.would_serve(name, facts, checks, Settings()) == would


# What holds for every decision.

OFFERS = st.sampled_from([TAKES, ABSENT, DECLINES, UP_TO_255, FROM_256])
CHECKS = st.sampled_from([PASSED, WRONG, NAN, None])


@st.composite
def inputs(draw):
    """Facts, checks, figures and settings as start-up hands them over."""
    kernel = draw(st.sampled_from(["auto", "auto", "aiter", "triton", "vllm"]))
    names = AUTO if kernel == "auto" else (kernel,)
    offers = {name: OWN if name == VLLM else draw(OFFERS) for name in names}
    found = {name: check for name in names if (check := draw(CHECKS)) is not None and name != VLLM}
    skip = draw(st.sampled_from([None, None, None, NOT_ADMITTED]))
    settings, figures = Settings(kernel=kernel, measure=draw(st.sampled_from([True, "again", False]))), None
    if settings.has_timing:
        names_timed = [VLLM, *(name for name in AUTO[:3] if draw(st.booleans()))]
        us = st.floats(1.0, 20.0)
        counts = draw(st.lists(st.sampled_from([1, 64, 255, LIMIT]), unique=True))
        rounds = {tokens: {name: [draw(us)] * 4 for name in names_timed} for tokens in sorted(counts)}
        ranks = draw(st.lists(st.tuples(CHOICES, CHOICES), max_size=2)) if rounds else ()
        figures = Figures(
            rounds,
            "" if rounds else "planted",
            tuple((Span(1, 255, few), Span(256, LIMIT, many)) for few, many in ranks),
        )
    return LayerFacts(skip, offers, (255, LIMIT)), found, figures, settings


def reasons_of(decided):
    """Why each kernel that does not run is passed over."""
    return {other.kernel: other.reason for other in decided.rejected_kernels}


def run_by(decided):
    return {span.kernel for span in decided.kernel_spans}


def checked_kernels_only(decided, facts, checks, figures, settings):
    ours = run_by(decided) - {VLLM}
    assert all(checks.get(name) in (PASSED, NAN) for name in ours), "a kernel runs that did not pass its check"


def auto_saturates(decided, facts, checks, figures, settings):
    overflow = [name for name in run_by(decided) if checks.get(name) == NAN]
    assert settings.kernel != "auto" or not overflow, "auto runs a kernel that overflows"


def named_is_not_replaced(decided, facts, checks, figures, settings):
    assert settings.kernel == "auto" or run_by(decided) <= {settings.kernel, VLLM}, "another kernel runs"


def nothing_untimed(decided, facts, checks, figures, settings):
    due = figures is not None and not figures.rounds
    assert not (due and run_by(decided)), "a kernel runs that nobody timed"


def every_rank_has_chosen_it(decided, facts, checks, figures, settings):
    for tokens in (1, 64, 255, LIMIT) if figures is not None and decided.kernel_spans else ():
        theirs = {kernel_at(spans, tokens) for spans in figures.ranks}
        assert decided.kernel_at(tokens) == VLLM or theirs <= {decided.kernel_at(tokens)}, (
            "a rank has not chosen this kernel"
        )


def a_skip_has_a_reason(decided, facts, checks, figures, settings):
    assert bool(decided.kernel_spans) != bool(decided.skip), "neither a kernel nor a reason"
    assert decided.skip is None or decided.skip.message, "a skip without a message"
    assert decided.skip is None or decided.skip.code in REASON_CODES, "a skip with a code that is in no table"


def the_rest_is_passed_over(decided, facts, checks, figures, settings):
    reasons = reasons_of(decided)
    assert reasons.keys() == facts.offers.keys() - run_by(decided), "a kernel is missing among those passed over"
    assert all(reasons.values()), "passed over without a reason"


def takes_what_it_runs(decided, facts, checks, figures, settings):
    for point in facts.points:
        name = decided.kernel_at(point)
        assert name == VLLM or not facts.declines(name, point), "a kernel runs a batch that it does not take"


def without_a_gap(decided, facts, checks, figures, settings):
    firsts, lasts = [span.first for span in decided.kernel_spans], [span.last for span in decided.kernel_spans]
    assert firsts == [1, *(last + 1 for last in lasts)][: len(firsts)], "a gap between two spans"


PROPERTIES = [
    checked_kernels_only, auto_saturates, named_is_not_replaced, nothing_untimed, every_rank_has_chosen_it,
    a_skip_has_a_reason, the_rest_is_passed_over, takes_what_it_runs, without_a_gap,
]  # fmt: skip


def holds(rule):
    @given(inputs())
    def for_all(drawn):
        rule(decision.decide(*drawn), *drawn)

    for_all()


@pytest.mark.parametrize("rule", PROPERTIES, ids=lambda rule: rule.__name__)
def test_decision_property(rule):
    holds(rule)


def first_of_all(can_run, facts, tokens):
    return "triton"


PLANTS = {
    checked_kernels_only: ("_why_not", lambda name, facts, checks, settings: ""),
    auto_saturates: ("_why_not", lambda name, facts, checks, settings: getattr(checks.get(name), "failed", "-")),
    named_is_not_replaced: ("_first", first_of_all),
    nothing_untimed: ("_chosen", lambda facts, can_run, figures: ((Span(1, LIMIT, can_run[0]),), None)),
    every_rank_has_chosen_it: ("_chosen_by_all", lambda ranks, tokens: kernel_at(ranks[0], tokens)),
    a_skip_has_a_reason: ("_without_a_kernel", lambda *_: Skip("kernel_shape", "")),
    the_rest_is_passed_over: ("_passed_over", lambda *_: iter(())),
    takes_what_it_runs: ("fastest", lambda samples, order: "aiter"),
    without_a_gap: ("_spans_to", lambda points, at: tuple(Span(point, point, at(point)) for point in points)),
}
SEEN = {
    checked_kernels_only: "did not pass", auto_saturates: "overflows", named_is_not_replaced: "another kernel",
    nothing_untimed: "nobody timed", every_rank_has_chosen_it: "has not chosen",
    a_skip_has_a_reason: "without a message", the_rest_is_passed_over: "missing among",
    takes_what_it_runs: "does not take", without_a_gap: "a gap",
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("rule", PROPERTIES, ids=lambda rule: rule.__name__)
def test_decision_mutation_each_property_sees_its_bug(monkeypatch, rule):
    monkeypatch.setattr(decision, *PLANTS[rule])
    with pytest.raises(AssertionError, match=SEEN[rule]):
        holds(rule)


def test_decision_is_the_same_for_equal_inputs_and_says_why_each_kernel_does_not_run():
    first = decide(ALL, checks(aiter=WRONG), FAST_TRITON, Settings())
    assert first == decide(replace(ALL), checks(aiter=WRONG), FAST_TRITON, Settings())
    reasons = reasons_of(first)
    assert reasons["aiter"] == "3 steps off"
    assert "fastest" in reasons["aiter-opt"]

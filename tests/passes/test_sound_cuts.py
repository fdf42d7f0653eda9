"""Whatever an op does to some of the tokens, a layer that is rewritten computes the same for every number of them."""

import contextlib
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st

from tests.passes import execute as run
from tests.passes.cuts import CUTS, Case, T, cut_layer
from tests.passes.graphs import END
from tests.passes.stubs import Batch
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.passes import match, rope_probe
from vllm_aiter_mla.passes.match import match_layers

TOKENS = range(1, 41)
ALL_OF_THREE = (("min", 5, T), ("-", T, ("//", T, 6)), ("-", T, ("%", ("//", T, 4), 2)))
"""Bounds that are the number of tokens if it is three."""
TELLING = (("-", T, 2), ("//", T, 3), ("%", T, 2), ("%", T, 3), ("//", T, 6), ("+", ("//", T, 2), 12), *ALL_OF_THREE)
"""These, and what else is 0, 1, or behind the end if there are three tokens."""


class InvalidCutError(Exception):
    """Torch does not accept the cut, or accepts it for one number of tokens only."""


def outcome_of(case):
    """Cut a layer, rewrite it, compare at every number of tokens: the code of its skip, or "right"."""
    try:
        builder, edit = cut_layer(case)
    except Exception as error:  # no pass has run yet
        raise InvalidCutError from error
    if not case.static and not str(builder.t.meta["val"]).startswith("s"):
        raise InvalidCutError
    gm = run.clean(builder.finish(*edit.outputs))
    ((_, found),) = match_layers(gm.graph)
    if isinstance(found, Skip):
        return found.code
    stubs = run.stubs_for([edit.layer], builder.spelling)
    counts = [case.rows] if case.static else TOKENS
    batches = [Batch(f"{n} tokens", rows=n, decodes=n // 2, prefills=n - n // 2) for n in counts]
    valid = tuple(batch for batch in batches if runs(gm, stubs, batch))
    if not valid:
        raise InvalidCutError  # nothing would be compared
    assert run.assert_rewritten_right(gm, stubs, batches=valid, stops=(None,), exact=False)["matched"]
    return "right"


def runs(gm, stubs, batch):
    """Whether the graph computes something for this number of tokens before it is rewritten."""
    with contextlib.suppress(Exception):
        return run.execute(gm, stubs, batch).outputs[0].isfinite().all()
    return False


numbers = st.integers(-4, 8) | st.sampled_from([24, 1024, END])
expressions = st.recursive(
    st.just(T) | numbers,
    lambda inner: (
        st.tuples(st.sampled_from(["min", "max", "+", "-"]), inner, inner)
        | st.tuples(st.sampled_from(["//", "%"]), inner, st.integers(1, 8))
    ),
    max_leaves=5,
)
cases = st.builds(
    Case,
    cut=st.sampled_from(sorted(CUTS)),
    first=st.sampled_from(TELLING) | expressions,
    second=expressions,
    of=st.sampled_from("qk"),
    rows=st.sampled_from([2, 3, 7, 40]),
    static=st.sampled_from([False, False, True]),
    prefused=st.booleans(),
)


@settings(suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate], max_examples=60)
@given(cases)
def test_sound_cuts_are_skipped_or_right(case):
    try:
        outcome = outcome_of(case)
    except InvalidCutError:
        outcome = "no program"
    event(f"{case.cut}: {outcome}")
    assume(outcome != "no program")


@pytest.mark.parametrize("of", ["q", "k"])
@pytest.mark.parametrize("first", ALL_OF_THREE, ids=str)
@pytest.mark.parametrize("cut", ["rotated, then raw", "from the start", "written up to a bound"])
def test_sound_cuts_skip_a_bound_that_only_few_tokens_do_not_reach(cut, first, of):
    assert outcome_of(Case(cut, first, of=of)) == "not_evaluated"


@pytest.mark.parametrize("of", ["q", "k"])
@pytest.mark.parametrize(
    "case",
    [
        Case("from the start", T),
        Case("from the start", END),
        Case("between", 0),
        Case("written up to a bound", T),
        Case("written between", 0, END),
        Case("rotated, then raw", 3, rows=3, static=True),
        Case("the middle", 3, 3, rows=12, static=True),
        Case("one angle twice", 0, 1, rows=12, static=True),
    ],
    ids=str,
)
def test_sound_cuts_of_nothing_are_rewritten(case, of):
    assert outcome_of(replace(case, of=of)) == "right"


evaluate = rope_probe.Probe._evaluate
random_like = rope_probe.random_like


def trusts_positions(self, node):
    """Every view of the positions is taken for all of them."""
    value = match.val(node)
    if isinstance(value, torch.Tensor) and value.dtype == torch.int64:
        return torch.arange(rope_probe.concrete(value.shape[0])) * 2
    return evaluate(self, node)


def repeats_rows(node, generator, rows=None):
    """The table has five rows that differ at even numbers."""
    made = random_like(node, generator, rows)
    return made if rows is None else made[torch.arange(rows) % 10]


NO_CHECKS = {
    (rope_probe, "check_rows"): lambda *args: None,
    (rope_probe.Probe, "_check_arguments"): lambda *args: None,
}
NO_SHAPES, NO_ARGUMENTS = ({key: plant} for key, plant in NO_CHECKS.items())
PLANTED = [
    *[(NO_CHECKS, Case("rotated, then raw", first, of=of)) for first in ALL_OF_THREE for of in "qk"],
    (NO_CHECKS, Case("the last row repeated", 2)),
    (NO_CHECKS, Case("a reader of some rows", ALL_OF_THREE[1])),
    (NO_SHAPES, Case("a reader of mixed rows", 0)),
    (NO_ARGUMENTS, Case("a factor", ("-", T, 2))),
    (NO_ARGUMENTS, Case("a weight", ("//", T, 3), of="k")),
    (NO_ARGUMENTS, Case("heads by number", ("%", T, 2))),
    # Traced with seven tokens, a bound behind them is taken for the last one: the shapes are those of a whole slice.
    (NO_ARGUMENTS, Case("written up to a bound", 24)),
    (NO_ARGUMENTS, Case("written up to a bound", ("+", ("//", T, 2), 12), of="k")),
    ({(rope_probe.Probe, "_evaluate"): trusts_positions}, Case("one position for all", 0)),
    ({(rope_probe, "random_like"): repeats_rows}, Case("one angle twice", 5, 6, rows=12, static=True)),
]


@pytest.mark.mutation
@pytest.mark.parametrize(("plants", "case"), PLANTED, ids=[str(case) for _, case in PLANTED])
def test_mutation_sound_cuts_are_not_checked(plants, case, monkeypatch):
    assert outcome_of(case) in ("not_evaluated", "query_not_rope")
    for (owner, name), plant in plants.items():
        monkeypatch.setattr(owner, name, plant)
    with pytest.raises(AssertionError, match="differs"):
        outcome_of(case)

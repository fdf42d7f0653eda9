"""Random near-misses: whatever is done to a layer, it is either declined and left alone, or rewritten and right."""

import random
from collections import Counter
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st

from tests.passes import execute as run
from tests.passes.graphs import Spelling, build, shuffled
from tests.passes.perturb import Base, InvalidEditError, perturb
from tests.passes.stubs import DECODE, MIXED, PADDED, Batch, Sizes

SPELLINGS = [
    {},
    {"is_neox": False},
    {"rope": "deepseek", "views": "shared"},
    {"rope": "deepseek", "is_neox": False, "write": "cat"},
    {"rope": "op", "write": "scatter"},
    {"rope": "op, flat", "is_neox": False},
    {"prefused": True},
    {"rope": "plain", "is_neox": False, "cache": "fp8", "q_lora": False},
]
# The message of a failure names the edit, so there is nothing to shrink.
FEW = settings(suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])


base_of = cache(lambda index: Base(Spelling(**SPELLINGS[index])))
"""The unedited layers of one spelling."""


def outcome_of(index, draw, edits):
    """Edit two layers, run.rewrite, compare: what became of them, or why the edit is void."""
    with base_of(index).editing() as builder:
        done = []
        try:
            for _ in range(edits):
                done.append(perturb(builder, draw))
            gm = builder.finish(*builder.extra)
            return check(gm, builder, (DECODE, PADDED, MIXED)[draw(3)], run.STOPS[draw(3)])
        except InvalidEditError:
            return "no program"
        except Exception as error:
            raise AssertionError(f"{SPELLINGS[index]} after {done}: {error}") from error


def check(gm, builder, batch, stop):
    """The claim, for one edited graph."""
    stubs = run.stubs_for(builder.layers, builder.spelling)
    changed = run.clean(run.clone(gm))
    before = str(changed.graph)
    if run.rewrite(changed, stubs)["matched"] == 0:
        assert str(changed.graph) == before
        return "declined"
    try:
        reference = run.clean(run.clone(gm))
        want = run.execute(reference, stubs, batch)
        finite = all(bool(out.float().isfinite().all()) for out in want.outputs)
        # vLLM takes rotary ops apart in place without asking who else reads their operands.
        run.assert_same(run.execute(run.defunctionalise(reference), stubs, batch), want, "in unmodified vLLM")
    except Exception:
        return "no program"
    if not finite:
        return "no program"
    counts = run.assert_rewritten_right(gm, stubs, batches=(batch,), stops=(stop,), exact=False)
    return "right" if counts["matched"] == 2 else "one declined, one right"


@settings(FEW, max_examples=70)
@given(st.integers(0, len(SPELLINGS) - 1), st.integers(1, 2), st.integers(0, 10**6))
def test_perturbed_layer_is_declined_or_right(index, edits, seed):
    outcome = outcome_of(index, random.Random(seed).randrange, edits)
    event(outcome)
    assume(outcome != "no program")


@cache
def reached(index):
    rng = random.Random(1)
    return Counter(outcome_of(index, rng.randrange, 1) for _ in range(9))


@pytest.mark.parametrize("index", range(len(SPELLINGS)), ids=[str(changes) for changes in SPELLINGS])
def test_perturbations_of_every_spelling_are_rewritten_and_declined(index):
    """Seeded, so that the property above is known to be no empty one."""
    found = reached(index)
    assert found["one declined, one right"] >= 1, found
    assert found["right"] >= 1, found


def test_perturbations_decline_both_layers_too():
    assert sum(reached(index)["declined"] for index in range(len(SPELLINGS))) >= 5


@settings(FEW, max_examples=16)
@given(
    st.builds(
        Sizes,
        n=st.integers(1, 5),
        p=st.integers(1, 12),
        # vLLM's CPU kernel, which rotates prefill rows, works in vectors of 8 and writes past narrower halves.
        r=st.integers(1, 4).map(lambda vectors: 16 * vectors),
        latent=st.integers(1, 40),
        v=st.integers(1, 6),
    ),
    st.sampled_from(["plain", "deepseek", "op", "op, flat"]),
    st.booleans(),
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_any_head_count_width_batch_and_order_of_nodes_is_bit_exact(
    sizes, rope, is_neox, decodes, prefills, padding, seed
):
    batch = Batch("drawn", rows=decodes + prefills + padding, decodes=decodes, prefills=prefills)
    spelling = Spelling(rope=rope, is_neox=is_neox, dtype=torch.bfloat16, sizes=sizes)
    gm, layers = build(1 + seed % 3, spelling)
    counts = run.assert_rewritten_right(
        gm, run.stubs_for(layers, spelling), batches=(batch,), disturb=lambda copy: shuffled(copy, seed)
    )
    assert counts["aiter_fusion"] == len(layers)

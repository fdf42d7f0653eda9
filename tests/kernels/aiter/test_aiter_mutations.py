"""Planted mistakes in how AITER is called, each caught by the self-check; test_aiter_contract.py plants more."""

from dataclasses import replace
from functools import partial
from sys import maxsize

import pytest

from tests.support.simulated_aiter import FP8, backend, fate, inputs
from vllm_aiter_mla.kernels import absorb
from vllm_aiter_mla.kernels.inputs import LayerShape
from vllm_aiter_mla.startup.comparison import compare_with_reference

pytestmark = [pytest.mark.mutation("I12"), pytest.mark.usefixtures("fake_gfx942")]


def around(change):
    """``change`` receives what the back end runs, and the operands."""

    def plant(backend):
        bind = backend.bind

        def bind_changed(operands):
            bound = bind(operands)
            return bound if isinstance(bound, str) else replace(bound, run=partial(change, bound.run))

        backend.bind = bind_changed

    return plant


def changed(change):
    return around(lambda run, operands: run(change(operands)))


@around
def unabsorbed(run, operands):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(absorb, "absorb_plain", lambda q_nope, w_uk_t: q_nope.contiguous())
        return run(operands)


def stale_rows(bound):
    """Without the flag for all rows, a padded row's query is never written: the poisoned row differs."""
    run = bound._op
    bound._op = lambda *arguments: run(*arguments[:-1], False)


QUERY, ROPE, ALL = {"q nope", "q rope"}, {"q rope", "kv rope"}, {"q nope", "q rope", "kv nope", "kv rope"}
# What is planted, and the parts of query and cache that are then wrong.
PLANTED = {
    "nothing": (lambda bound: None, set()),
    "strided table halves": (lambda bound: setattr(bound, "halves", lambda table: table.chunk(2, -1)), ROPE),
    "scales applied twice": (changed(lambda x: replace(x, q_scale=x.q_scale**2, k_scale=x.k_scale**2)), ALL),
    "reciprocal scales": (changed(lambda x: replace(x, q_scale=1 / x.q_scale, k_scale=1 / x.k_scale)), ALL),
    "the other rotary style": (changed(lambda x: replace(x, is_neox=not x.is_neox)), ROPE),
    "an unabsorbed query of the latent width": (unabsorbed, {"q nope"}),
    "stale rows read": (stale_rows, QUERY),
}


@pytest.mark.parametrize("name", PLANTED)
def test_mutation_is_caught_by_the_self_check(name):
    plant, wrong = PLANTED[name]
    bound = backend()
    plant(bound)
    result = compare_with_reference(bound, LayerShape(4, 512, FP8["gfx942"], FP8["gfx942"], 16, False), maxsize)
    assert {part for part, found in result.differences.items() if found.steps} == wrong
    assert result.has_passed == (not wrong)


def test_mutation_an_unabsorbed_query_of_another_width_kills():
    bound = backend()
    unabsorbed(bound)
    outcome = fate(lambda: bound.prepare(inputs(nope=128)))
    assert outcome.startswith("SIGABRT: [AITER] check failed: q_out.size(2)")

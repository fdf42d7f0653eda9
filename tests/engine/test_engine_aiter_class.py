"""The real engine over vLLM's own AITER attention class, its metadata builder and AITER's prefill.

All head counts, caches and cards: ``pytest tests/engine/aiter_class_matrix.py``, an engine pair each.
"""

from __future__ import annotations

import pytest

from tests.engine.test_engine_parity import assert_all_engaged, assert_parity, beside
from tests.sandbox.compare import compare


@pytest.mark.engine("class-gfx942-off", "class-gfx942-on")
def test_fp8_scales_drafts_and_padded_heads_are_those_of_vllm_over_aiters_class(engines):
    """Target and draft are graphs under one limit; a request has three decode rows while two drafts are verified."""
    off, on = engines("class-gfx942-off"), engines("class-gfx942-on")
    assert_all_engaged(on)
    (record,) = on.status
    assert record["total"] == 2, "one layer of the target, one of the draft"
    assert record["decode_limit"] == [1, 48]
    assert record["compiled"]["1-48"]["aiter_fusion"] == 2
    assert_parity(off, on)
    for result in (off, on):
        assert {(3, 12), (9, 12), (15, 48)} <= result.replays.keys(), "padded full graphs, three rows a request"


@pytest.mark.engine("eager-drafts-off", "mutation-draft-rows")
@pytest.mark.mutation
def test_mutation_one_decode_row_per_request_is_caught(engines):
    found = engines("mutation-draft-rows")
    figures = compare(beside(engines("eager-drafts-off"), found), found)["mixed"]
    assert figures.tokens_equal < figures.tokens


@pytest.mark.engine("class-gfx950-off", "class-gfx950-on")
def test_aiters_op_on_two_spawned_ranks_gives_vllms_tokens_over_aiters_class(engines):
    on = engines("class-gfx950-on")
    assert_all_engaged(on, ranks=2)
    assert [set(record["engaged"].values()) for record in on.status] == [{"aiter"}] * 2
    assert_parity(engines("class-gfx950-off"), on)


@pytest.mark.engine("eager-drafts-off", "mutation-mixed-as-decode")
@pytest.mark.mutation
def test_mutation_a_mixed_batch_taken_for_decode_is_caught_over_aiters_class(engines):
    found = engines("mutation-mixed-as-decode")
    figures = compare(beside(engines("eager-drafts-off"), found), found)["mixed"]
    assert figures.tokens_equal < figures.tokens

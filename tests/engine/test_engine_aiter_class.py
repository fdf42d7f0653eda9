"""The real engine over vLLM's own AITER attention class, its metadata builder and AITER's prefill.

All head counts, caches and cards: ``pytest tests/engine/aiter_class_matrix.py``, an engine pair each.
"""

from __future__ import annotations

import pytest
from test_engine_parity import assert_all_engaged, assert_parity


@pytest.mark.engine("class-gfx942-off", "class-gfx942-on")
def test_fp8_scales_drafts_and_padded_heads_are_those_of_stock_over_aiters_class(engines):
    stock, ours = engines("class-gfx942-off"), engines("class-gfx942-on")
    assert_all_engaged(ours)
    assert_parity(stock, ours)
    for result in (stock, ours):
        assert {(3, 12), (9, 12), (15, 48)} <= result.replays.keys(), "padded full graphs, three rows a request"


@pytest.mark.engine("class-gfx950-off", "class-gfx950-on")
def test_aiters_op_on_two_ranks_gives_stocks_tokens_over_aiters_class(engines):
    assert_all_engaged(engines("class-gfx950-on"), ranks=2)
    assert_parity(engines("class-gfx950-off"), engines("class-gfx950-on"))


@pytest.mark.engine("class-gfx942-off", "class-gfx942-mixed-as-decode")
@pytest.mark.mutation
def test_mutation_a_mixed_batch_taken_for_decode_is_caught_over_aiters_class(engines):
    stock, ours = engines("class-gfx942-off"), engines("class-gfx942-mixed-as-decode")
    with pytest.raises(AssertionError):
        assert stock.scenarios["mixed"] == ours.scenarios["mixed"]

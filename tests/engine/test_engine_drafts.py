"""Speculative decoding with the model's own draft layer: target and draft are two graphs of one bucket."""

from __future__ import annotations

import pytest
from test_engine_parity import assert_all_engaged, assert_parity

from vllm_aiter_mla.sandbox.compare import compare


@pytest.mark.engine("mtp-off", "mtp-on")
def test_target_and_draft_engage_and_give_what_stock_gives(engines):
    """Every request has three decode rows while its two drafts are verified."""
    on = engines("mtp-on")
    assert_all_engaged(on)
    (record,) = on.census
    assert record["total"] == 2, "one layer of the target, one of the draft"
    assert record["decode_bucket"] == [1, 48]
    assert record["compiled"]["1-48"]["aiter_fusion"] == 2
    assert_parity(engines("mtp-off"), on)


@pytest.mark.engine("mtp-off", "mutation-mtp-rows")
@pytest.mark.mutation
def test_mutation_one_decode_row_per_request_is_caught(engines):
    found = compare(engines("mtp-off"), engines("mutation-mtp-rows"))
    assert found["mixed"].tokens_equal < found["mixed"].tokens

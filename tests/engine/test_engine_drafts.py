"""Speculative decoding with the model's own draft layer: target and draft are two graphs of one bucket."""

from __future__ import annotations

import pytest
from test_engine_parity import assert_all_engaged, assert_parity

from vllm_aiter_mla.sandbox.compare import compare


@pytest.mark.engine("mtp-off", "mtp-on", "mtp-fp8-off", "mtp-fp8-on")
@pytest.mark.parametrize(("name", "drafts"), [("mtp", 1), ("mtp-fp8", 2)])
def test_target_and_draft_engage_and_give_what_stock_gives(engines, name, drafts):
    """Every request has 1 + drafts decode rows while its drafts are verified."""
    on = engines(f"{name}-on")
    assert_all_engaged(on)
    (record,) = on.census
    assert record["total"] == 3, "two layers of the target, one of the draft"
    assert record["decode_bucket"] == [1, 16 * (1 + drafts)]
    assert record["compiled"][f"1-{16 * (1 + drafts)}"]["aiter_fusion"] == 3
    assert_parity(engines(f"{name}-off"), on)


@pytest.mark.engine("mtp-off", "mutation-mtp-rows")
@pytest.mark.mutation
def test_mutation_one_decode_row_per_request_is_caught(engines):
    found = compare(engines("mtp-off"), engines("mutation-mtp-rows"))
    assert found["mixed"].tokens_equal < found["mixed"].tokens

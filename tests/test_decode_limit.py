"""Claims about the decode limit's arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_aiter_mla.admission import SMALLEST_LIMIT, decode_limit, endpoints_with, within_limit

counts = st.integers(1, 4096)
drafts = st.integers(0, 16)


@pytest.mark.parametrize(
    ("seqs", "drafted", "limit"), [(256, 0, 256), (256, 3, 1024), (1, 1, 2), (64, 1, 128), (1024, 0, 1024)]
)
def test_limit_is_sequences_times_one_plus_drafts(seqs: int, drafted: int, limit: int) -> None:
    assert decode_limit(seqs, drafted) == limit


@given(counts, drafts)
def test_every_decode_step_lies_inside_its_decode_limit(seqs: int, drafted: int) -> None:
    limit = decode_limit(seqs, drafted)
    assert all(within_limit(running * (1 + drafted), limit) for running in (1, seqs))


@given(counts, drafts, st.integers(1, 10**6))
def test_an_override_replaces_the_derived_limit(seqs: int, drafted: int, override: int) -> None:
    assert decode_limit(seqs, drafted, override) == max(override, SMALLEST_LIMIT)


def test_a_limit_of_one_is_raised_to_the_smallest_endpoint_vllm_keeps() -> None:
    assert decode_limit(1, 0) == decode_limit(256, 0, override=1) == SMALLEST_LIMIT == 2


def test_a_range_is_inside_when_it_ends_at_or_below_the_limit() -> None:
    assert [within_limit(end, 512) for end in (1, 511, 512, 513, 8192)] == [True, True, True, False, False]


@given(st.lists(st.integers(2, 9999)), st.integers(2, 9999))
def test_adding_an_endpoint_keeps_the_others_and_is_idempotent(endpoints: list[int], limit: int) -> None:
    kept = list(endpoints)
    once = endpoints_with(endpoints, limit)
    assert endpoints == kept
    assert set(once) == {*endpoints, limit}
    assert once == sorted(once) == endpoints_with(once, limit)


def test_no_endpoints_yet_is_a_list_of_one() -> None:
    assert endpoints_with(None, 64) == [64]


@pytest.mark.parametrize(("seqs", "drafted", "override"), [(0, 0, None), (-1, 0, None), (4, -1, None), (4, 0, 0)])
def test_counts_out_of_range_are_refused(seqs: int, drafted: int, override: int | None) -> None:
    with pytest.raises(ValueError, match="must"):
        decode_limit(seqs, drafted, override)

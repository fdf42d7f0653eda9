"""The kernel's values on a CPU: Triton's interpreter, its casts replaced, against the reference byte by byte."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.triton.triton_mutations import CODES, MUTATIONS, MXFP4
from tests.support.triton_cases import Case

pytestmark = pytest.mark.slow
# The interpreter sums the 128 products in another order than torch: a bfloat16 rounding may fall the other way, which
# is one fp8 step. 0.5 % is far above what any case shows and far below what a mutant does.
NOPE_FRACTION = 0.005
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")

CASES = [
    Case(),
    Case(is_neox=True, cache="float8_e4m3fnuz", block_size=1),
    Case(cache="bfloat16", block_size=64),
    Case(cache="bfloat16", is_neox=True, block_size=1, w_major="P"),
    Case(cache="float8_e4m3fnuz", out="bfloat16", block_size=64),
    Case(act="float16", cache="float16"),
    Case(act="float16", cache="float8_e4m3fn", is_neox=True),
    Case(w_major="P", heads=3, tokens=17),
    Case(tokens=1, heads=1),
    Case(tokens=0),
    Case(slots=0),
    Case(tokens=6, slots=4),
    Case(no_slot="all"),
    Case(tokens=70, heads=1, block_size=64),
    Case(nope=64, rope=32, latent=256, heads=1, is_neox=True),
    Case(nope=256, rope=128, latent=1024, heads=1),
    Case(nope=16, rope=16, latent=16, heads=5, tokens=33, cache="bfloat16"),
    Case(block_size=48, tokens=7),
    Case(nope=192, heads=3),
    # Both halves overflow, and saturate.
    *[Case(cache=fp8, is_neox=neox, magnitude=300.0) for fp8 in FP8 for neox in (False, True)],
    Case(**CODES),
    Case(weight="float8_e4m3fnuz", w_major="P", cache="float8_e4m3fnuz", block_size=1, is_neox=True),
    Case(**CODES, cache="bfloat16", nope=192, heads=3, tokens=17),
    Case(**CODES, act="float16", cache="float16", nope=256),
    Case(weight="float8_e4m3fn", out="bfloat16", nope=64),
    Case(**CODES, no_slot="all", nope=32),
    Case(**MXFP4),
    Case(**MXFP4, cache="bfloat16", nope=256, heads=3, tokens=17),
    Case(**MXFP4, out="bfloat16", nope=512, latent=64, heads=1, is_neox=True),
]


def assert_as_the_reference(found: dict[str, Any], different: float = NOPE_FRACTION) -> None:
    """To the byte, but for few values of the absorbed part, one step off."""
    assert (found.get("skipped"), found["wrong_rope"]) == (None, 0)
    assert found["wrong_cache"] == 0, "cache, its untouched rows and the guards around it"
    assert found["nope_steps"] <= 1
    assert found["nope_different"] <= different


@pytest.mark.parametrize("case", CASES, ids=Case.label)
def test_triton_kernel_writes_the_bytes_of_the_reference(interpreted, case):
    assert_as_the_reference(interpreted("compare", case=asdict(case)))


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(1, 33),
    heads=st.integers(1, 16),
    slots=st.integers(0, 33),
    form=st.sampled_from([{}, {"nope": 192}, CODES, CODES | {"nope": 192}, MXFP4, MXFP4 | {"nope": 256}]),
    cache=st.sampled_from(["bfloat16", "float8_e4m3fn"]),
    no_slot=st.sampled_from(["some", "all", "none"]),
    seed=st.integers(0, 99),
)
def test_triton_any_number_of_heads_tokens_and_slots_gives_the_bytes_of_the_reference(
    interpreted, tokens, heads, slots, form, cache, no_slot, seed
):
    sizes = {"tokens": tokens, "heads": heads, "slots": min(slots, tokens), "latent": 64}
    case = Case(**sizes, cache=cache, no_slot=no_slot, seed=seed, **form)
    # One value may fall the other way in a batch of any size.
    different = max(NOPE_FRACTION, 1 / (tokens * heads * case.latent))
    assert_as_the_reference(interpreted("compare", case=asdict(case)), different)


@pytest.mark.parametrize(
    ("cache", "weight"),
    [("bfloat16", "float8_e4m3fn"), ("float8_e4m3fnuz", "float8_e4m3fnuz"), ("float8_e4m3fnuz", "plain")],
)
def test_triton_rows_of_zeros_of_tiny_numbers_and_with_a_nan_are_quantised_as_aiter_does(interpreted, cache, weight):
    assert_as_the_reference(interpreted("odd_rows", cache=cache, weight=weight))


def test_triton_query_is_quantised_to_mxfp4_as_aiter_does_ties_and_ends_of_the_range_included(interpreted):
    """Every sum is exact there: not one value may differ."""
    assert interpreted("odd_groups") == {"wrong_rope": 0, "nope_steps": 0, "nope_different": 0.0, "distinct": True}


def test_triton_interpreter_multiplies_mxfp4_codes_and_scales_as_the_numbers_they_are(interpreted):
    """Every code and scale that float32 can hold, on either side: dot_scaled against the decoded numbers, exact."""
    assert interpreted("mxfp4_dots") == {"wrong": 0, "scales": 253}


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("w_major", ["L", "P"])
def test_triton_absorb_keeps_the_stated_bound_against_float64(interpreted, act, w_major):
    """|error| <= u |x| + (1 + u) P 2**-24 sum |q w|, u = 2**-8 (bfloat16) or 2**-11 (float16)."""
    found = interpreted("compare", case=asdict(Case(act=act, cache=act, w_major=w_major, tokens=9)))
    assert 0.1 < found["bmm_bound"] <= 1.0, "a bound that nothing comes near would prove nothing"


@pytest.mark.parametrize(("arch", "cache"), [("gfx942", "float8_e4m3fnuz"), ("gfx950", "float8_e4m3fn")])
def test_triton_overflow_rows_of_the_self_check_saturate(interpreted, arch, cache):
    found = interpreted("self_checked", arch=arch, limit=16, weight="plain", cache=cache)
    assert (found["ok"], found["writes_nan"]) == (True, False), found["message"]


@pytest.mark.mutation("I14")
def test_triton_mutation_overflow_that_is_not_saturated_fails_the_self_check(interpreted):
    case = {"cache": "float8_e4m3fnuz", "mutation": "overflow_not_saturated"}
    found = interpreted("self_checked", arch="gfx942", limit=16, weight="plain", **case)
    assert (found["ok"], found["writes_nan"]) == (False, True), found["message"]


@pytest.mark.parametrize(("arch", "index"), [("gfx942", 0), ("gfx942", 1), ("gfx942", 2), ("gfx942", 3), ("sm90", 4)])
@pytest.mark.parametrize("weight", ["plain", "float8_e4m3fn", "mxfp4"])
def test_triton_tiles_of_the_table_agree_with_the_reference(interpreted, arch, index, weight):
    assert_as_the_reference(interpreted("compare_tile", arch=arch, index=index, weight=weight))


def test_triton_kernel_keeps_nan_payloads_in_bf16_and_gives_the_lowest_fp8(interpreted):
    assert interpreted("nan_and_payload") == {"float8_e4m3fn": 0, "bfloat16": 0}


@pytest.mark.parametrize("cache", ["float8_e4m3fn", "bfloat16"])
def test_triton_cache_rows_beyond_four_gib_land_where_they_belong(interpreted, cache):
    found = interpreted("far_cache", cache=cache)
    assert found["bytes"] > 4 << 30
    assert (found["wrong"], found["aliased"]) == (0, 0)


def test_triton_query_rows_beyond_two_to_the_31_elements_are_read_right(interpreted):
    assert_as_the_reference(interpreted("far_query"))


# What a start-up compares on each card with one head: 7 rows, then what each further tile needs, up to L.
CHECKED = [
    *[("gfx942", 1024, weight, [7, 33, 129]) for weight in ("plain", "float8_e4m3fnuz")],
    *[("gfx942", 40, weight, [7, 33]) for weight in ("plain", "float8_e4m3fnuz")],
    *[("gfx942", 16, weight, [7]) for weight in ("plain", "float8_e4m3fnuz")],
    *[("sm90", 1024, weight, [7, 32, 65, 129]) for weight in ("plain", "float8_e4m3fn")],
    ("gfx950", 1024, "mxfp4", [7, 33, 129]),
]


@pytest.mark.parametrize(("arch", "limit", "weight", "counts"), CHECKED)
def test_triton_self_check_runs_each_tile_that_the_decode_limit_reaches(interpreted, arch, limit, weight, counts):
    found = interpreted("self_checked", arch=arch, limit=limit, weight=weight)
    assert found["ok"], found["message"]
    assert weight != "mxfp4" or "q nope 0 step(s)" in found["message"]
    small, large = found["launched"][: len(counts)], found["launched"][len(counts) :]
    assert small == large, "each tile over a small cache, then over one that claims 2 GiB"
    assert [tokens for tokens, _ in small] == counts
    assert len({tile for _, tile in small}) == len(small)


@pytest.mark.mutation
@pytest.mark.parametrize("name", ["fp4_scales_of_the_first_head", "fp4_halves_of_a_byte_swapped", "fp4_sign_lost"])
def test_triton_mutation_over_mxfp4_weights_fails_the_self_check(interpreted, name):
    found = interpreted("self_checked", arch="gfx950", limit=16, weight="mxfp4", mutation=name)
    assert "FAILED" in found["message"]


@pytest.mark.mutation
def test_triton_mutation_one_bad_tile_fails_the_self_check(interpreted):
    for tile in ("32x64/8w", "64x128/4w"):
        found = interpreted("self_checked", arch="gfx942", limit=1024, weight="plain", bad_tile=tile)
        assert "FAILED" in found["message"]


def test_triton_interpreter_casts_are_wrong_as_shipped_and_exact_once_replaced(interpreted):
    wrong = interpreted("wrong_casts")
    assert {name: count for name, count in wrong.items() if "replaced" in name and count} == {}
    assert all(count > 0 for name, count in wrong.items() if "shipped" in name), f"the patch can go: {wrong}"


@pytest.mark.mutation
@pytest.mark.parametrize("name", [name for name, (*_, case, _) in MUTATIONS.items() if case])
def test_triton_mutation_is_caught_by_the_comparison(interpreted, name):
    *_, case, figure = MUTATIONS[name]
    found = interpreted("compare", case=asdict(case), mutation=name)
    assert found[figure] > (NOPE_FRACTION if figure == "nope_different" else 0)


@pytest.mark.mutation
def test_triton_mutation_of_a_32_bit_slot_is_caught_by_the_far_cache(interpreted):
    found = interpreted("far_cache", cache="float8_e4m3fn", mutation="slot_in_32_bits")
    assert found["wrong"] > 0


@pytest.mark.mutation
def test_triton_mutation_of_the_floor_is_caught_by_a_row_of_zeros(interpreted):
    assert interpreted("odd_rows", mutation="row_maximum_without_floor")["nope_steps"] > 1


@pytest.mark.mutation
def test_triton_mutation_of_the_columns_is_caught_on_the_tile_that_does_several_blocks(interpreted):
    found = interpreted("compare_tile", arch="gfx942", index=3, weight="plain", mutation="second_columns_of_the_first")
    assert found["nope_different"] > NOPE_FRACTION

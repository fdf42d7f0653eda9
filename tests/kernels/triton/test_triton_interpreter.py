"""The kernel's values on a CPU: Triton's interpreter, its casts replaced, against the reference byte by byte."""

import re
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.triton.triton_mutations import CASES, CODES, MUTATIONS, MXFP4
from tests.support.triton_cases import Case

pytestmark = pytest.mark.slow
# The interpreter sums the 128 products in another order than torch: a bfloat16 rounding may fall the other way, which
# is one fp8 step. 0.5 % is far above what any case shows and far below what a mutant does.
NOPE_FRACTION = 0.005
GFX942 = {"arch": "gfx942", "weight": "plain"}


def assert_as_the_reference(found, different=NOPE_FRACTION):
    """To the byte, but for few values of the absorbed part, one step off."""
    assert found["wrong_rope"] == 0
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
    form=st.sampled_from([{}, {"nope": 192}, CODES, CODES | {"nope": 192}, MXFP4, MXFP4 | {"nope": 256}]),
    cache=st.sampled_from(["bfloat16", "float8_e4m3fn"]),
    no_slot=st.sampled_from(["some", "all", "none"]),
    seed=st.integers(0, 99),
)
def test_triton_any_batch_gives_the_bytes_of_the_reference(interpreted, tokens, heads, form, cache, no_slot, seed):
    case = Case(tokens=tokens, heads=heads, latent=64, cache=cache, no_slot=no_slot, seed=seed, **form)
    # One value may fall the other way in a batch of any size.
    different = max(NOPE_FRACTION, 1 / (tokens * heads * case.latent))
    assert_as_the_reference(interpreted("compare", case=asdict(case)), different)


@pytest.mark.parametrize(
    ("cache", "weight"),
    [
        ("bfloat16", "float8_e4m3fn"),
        ("float8_e4m3fnuz", "float8_e4m3fnuz"),
        ("float8_e4m3fnuz", "plain"),
        ("float8_e4m3fn", "plain"),
    ],
)
def test_triton_rows_of_zeros_of_tiny_numbers_and_with_a_nan_are_quantised_as_aiter_does(interpreted, cache, weight):
    assert_as_the_reference(interpreted("odd_rows", cache=cache, weight=weight))


def test_triton_query_is_quantised_to_mxfp4_as_aiter_does_ties_and_ends_of_the_range_included(interpreted):
    """Every sum is exact there: not one value may differ."""
    assert interpreted("odd_groups") == {"wrong_rope": 0, "nope_steps": 0, "nope_different": 0.0, "distinct": True}


@pytest.mark.parametrize("scale", [2.0**-110, 0.0061, 1.0, 2.0**103])
def test_triton_sums_are_stored_on_gfx942_as_bfloat16_rounds_them(interpreted, scale):
    """Ties, overflow, infinities and NaNs included; docs/kernels.md gives these ends of the scales."""
    assert interpreted("stored_sums", scale=scale) == {"different": 0, "nans": 0}


@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 2.0**-130, 2.0**-112, 2.0**104, 2.0**127, float("inf")])
def test_triton_no_scale_stores_a_sum_on_gfx942_as_nan(interpreted, scale):
    """No calibration gives such a scale; a checkpoint may hold one."""
    assert interpreted("stored_sums", scale=scale)["nans"] == 0


@pytest.mark.mutation
@pytest.mark.parametrize("wrong", [{"scale": 2.0**110}, {"scale": 1.0, "clamped": False}], ids=["scale", "clamp"])
def test_triton_mutation_of_how_sums_are_stored_on_gfx942_is_caught(interpreted, wrong):
    """A scale beyond its range; no clamp."""
    assert interpreted("stored_sums", **wrong)["different"] > 0


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("w_major", ["L", "P"])
def test_triton_absorb_keeps_the_stated_bound_against_float64(interpreted, act, w_major):
    """|error| <= u |x| + (1 + u) P 2**-24 sum |q w|, u = 2**-8 (bfloat16) or 2**-11 (float16)."""
    found = interpreted("compare", case=asdict(Case(act=act, cache=act, w_major=w_major, tokens=9)))
    assert 0.1 < found["bmm_bound"] <= 1.0, "a bound that nothing comes near would prove nothing"


@pytest.mark.parametrize(
    ("arch", "cache", "mutation"),
    [
        ("gfx942", "float8_e4m3fnuz", None),
        ("gfx950", "float8_e4m3fn", None),
        pytest.param("gfx942", "float8_e4m3fnuz", "overflow_not_saturated", marks=pytest.mark.mutation("I14")),
    ],
)
def test_triton_overflow_rows_of_the_self_check_saturate(interpreted, arch, cache, mutation):
    found = interpreted("self_checked", arch=arch, limit=16, weight="plain", cache=cache, mutation=mutation)
    assert (found["ok"], found["writes_nan"]) == (mutation is None, mutation is not None), found["message"]


@pytest.mark.parametrize(("arch", "index"), [*(("gfx942", index) for index in range(5)), ("sm90", 4)])
@pytest.mark.parametrize("weight", ["plain", "float8_e4m3fn", "mxfp4"])
def test_triton_tiles_of_the_table_agree_with_the_reference(interpreted, arch, index, weight):
    assert_as_the_reference(interpreted("compare_tile", arch=arch, index=index, weight=weight))


@pytest.mark.parametrize("cache", ["float8_e4m3fn", "bfloat16"])
def test_triton_cache_rows_beyond_four_gib_land_where_they_belong(interpreted, cache):
    found = interpreted("far_cache", cache=cache)
    assert found["bytes"] > 4 << 30
    assert (found["wrong"], found["aliased"]) == (0, 0)


def test_triton_query_rows_beyond_two_to_the_31_elements_are_read_right(interpreted):
    assert_as_the_reference(interpreted("far_query"))


# What a start-up compares on each card with 32 heads: the rows that each tile needs, up to L, the most first.
CHECKED = [
    ("gfx942", 512, "plain", [129, 65, 33, 17, 16]),
    *[("gfx942", 16, weight, [16]) for weight in ("plain", "float8_e4m3fnuz")],
    ("gfx950", 512, "mxfp4", [129, 65, 33, 17, 16]),
]
CHECKED_WIDE = [
    ("gfx942", 512, "float8_e4m3fnuz", [129, 65, 33, 17, 16]),
    *[("gfx942", 40, weight, [40, 17, 16]) for weight in ("plain", "float8_e4m3fnuz")],
    *[("sm90", 1024, weight, [513, 129, 65, 32, 16]) for weight in ("plain", "float8_e4m3fn")],
]


@pytest.mark.parametrize(
    ("arch", "limit", "weight", "counts"),
    [*CHECKED, *(pytest.param(*row, marks=pytest.mark.wide) for row in CHECKED_WIDE)],
)
def test_triton_self_check_runs_each_tile_that_the_decode_limit_reaches(interpreted, arch, limit, weight, counts):
    found = interpreted("self_checked", arch=arch, limit=limit, weight=weight)
    assert found["ok"], found["message"]
    assert weight != "mxfp4" or "q nope 0 step(s)" in found["message"]
    launched = found["launched"][::2]
    assert launched == found["launched"][1::2], "each batch twice, and the second one is compared"
    small, large = launched[: len(counts)], launched[len(counts) :]
    assert small == large, "each tile over a small cache, then over one that claims 2 GiB"
    assert [tokens for tokens, _ in small] == counts
    assert len({tile for _, tile in small}) == len(small)


@pytest.mark.mutation
@pytest.mark.parametrize("name", ["fp4_scales_of_the_first_head", "fp4_halves_of_a_byte_swapped", "fp4_sign_lost"])
def test_triton_mutation_over_mxfp4_weights_fails_the_self_check(interpreted, name):
    found = interpreted("self_checked", arch="gfx950", limit=16, weight="mxfp4", mutation=name)
    assert re.search("FAILED: q nope [1-9]", found["message"])


@pytest.mark.mutation
def test_triton_mutation_one_bad_tile_fails_the_self_check(interpreted):
    for tile in ("32x128/8w", "64x128/4w"):
        found = interpreted("self_checked", **GFX942, limit=1024, bad=tile)
        assert re.search("FAILED: q nope [1-9]", found["message"])


@pytest.mark.mutation
@pytest.mark.parametrize("name", [name for name, (*_, case, _) in MUTATIONS.items() if case])
def test_triton_mutation_is_caught_by_the_comparison(interpreted, name):
    *_, case, figure = MUTATIONS[name]
    found = interpreted("compare", case=asdict(case), mutation=name)
    assert found[figure] > (NOPE_FRACTION if figure == "nope_different" else 0)


OWN_CALLS = [
    ("far_cache", {"cache": "float8_e4m3fn", "mutation": "slot_in_32_bits"}, "wrong", 0),
    ("odd_rows", {"mutation": "row_maximum_without_floor"}, "nope_steps", 1),  # a row of zeros
    ("odd_rows", {"cache": "float8_e4m3fn", "mutation": "nan_of_the_rotated_half_hidden"}, "wrong_rope", 0),
    ("odd_rows", {"cache": "float8_e4m3fn", "mutation": "nan_of_the_rotated_half_hidden"}, "wrong_cache", 0),
    # The tile that does several blocks.
    *[
        (
            "compare_tile",
            GFX942 | {"index": 4, "mutation": f"second_{which}_of_the_first"},
            "nope_different",
            NOPE_FRACTION,
        )
        for which in ("columns", "weight")
    ],
]


@pytest.mark.mutation
@pytest.mark.parametrize(("op", "arguments", "figure", "most"), OWN_CALLS)
def test_triton_mutation_is_caught_by_a_call_of_its_own(interpreted, op, arguments, figure, most):
    assert interpreted(op, **arguments)[figure] > most


@pytest.mark.parametrize("cache", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("heads", [4, 5])
def test_triton_stand_in_for_vllms_kernels_gives_what_the_reference_gives(interpreted, heads, cache):
    answer = interpreted("checked_stand_in", heads=heads, cache=cache)
    assert answer["ok"] == [True, True], answer["said"]


@pytest.mark.mutation
def test_triton_mutation_stand_in_with_another_scale_is_wrong(interpreted):
    answer = interpreted("checked_stand_in", heads=4, cache="float8_e4m3fn", planted=True)
    assert answer["ok"] == [False, False]
    assert answer["wrong"] == ["q nope", "q rope"]

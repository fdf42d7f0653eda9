"""How far two results are apart: in steps, by bits worked out by hand, and as a share of the norm."""

import pytest
import torch

from vllm_aiter_mla.kernels.distance import ROW_BOUNDS, Difference, deviation, difference, why_off


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_difference_is_the_largest_step_and_the_share_of_elements_that_differ(dtype):
    """By their bits: a CPU may flush the smallest values to zero where it converts them."""
    integer = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.int8}[dtype]
    values, negative, nan = torch.tensor([1.0, -1.0, 0.0, 0.0]).to(dtype), torch.iinfo(integer).min, -1
    bits = values.view(integer)
    bits[2] = 1  # the smallest

    def changed(index, to):
        other = bits.clone()
        other[index] = to
        return difference(other.view(dtype), values)

    assert difference(values, values) == difference(values[:0], values[:0]) == Difference(0, 0.0)
    assert changed(0, bits[0] + 1) == changed(1, bits[1] + 1) == changed(0, bits[0] - 1) == Difference(1, 0.25)
    assert changed(2, negative + 1) == Difference(2, 0.25), "zero lies between"
    assert changed(3, negative) == Difference(0, 0.0), "zero has two signs"
    assert changed(0, nan).steps > 1 << 32
    bits[0] = torch.iinfo(integer).max
    assert changed(0, nan) == Difference(0, 0.0), "all NaNs are equal"


def test_differences_within_the_slack_do_not_count():
    wanted = torch.tensor([-2.0, 1.0], dtype=torch.bfloat16)
    given = torch.tensor([-2.0, 1.0 + 2**-6], dtype=torch.bfloat16)
    assert difference(given, wanted) == Difference(2, 0.5)
    assert difference(given, wanted, slack=2**-7) == Difference(0, 0.0)
    assert difference(given, wanted, slack=2**-8) == Difference(2, 0.5)


def test_a_products_deviation_is_relative_and_infinite_where_nothing_can_be_compared():
    product = torch.tensor([[3.0, 4.0]])
    assert deviation(product, product) == 0
    assert deviation(product * 1.25, product) == deviation(product * 0.75, product) == 0.25
    for other in (product[:, :1], product.double(), product * float("nan")):
        assert deviation(other, product) == float("inf")


def test_a_product_is_off_by_its_norm_or_by_that_of_one_row():
    expected = torch.ones(1000, 16)
    assert why_off(expected, expected, 0.01) == ""
    assert "1.50% off" in why_off(expected * 1.015, expected, 0.01)
    assert why_off(expected * float("nan"), expected, 0.01) == "of another shape or dtype, or NaN"
    row = expected.clone()
    row[7, 0] = 0
    assert deviation(row, expected) < 0.01
    assert "one row is 25% off" in why_off(row, expected, 0.01)
    assert why_off(row, expected, 0.26 / ROW_BOUNDS) == ""
    assert "one row" in why_off(expected, expected * (torch.arange(1000) != 7)[:, None], 0.05), "nothing was expected"

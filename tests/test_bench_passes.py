"""The bound on the passes' time is a share of stock's pass in the same run: no machine is too slow for it."""

from __future__ import annotations

import pytest

from tools import bench_passes
from tools.bench_passes import Compile, Point

COMPILED = Compile("1-16", 8, 100.0, 0.1)


@pytest.mark.parametrize(("ours", "stock"), [(1.4, 70.0), (5.1, 149.0), (15.0, 600.0)])
def test_a_slower_machine_slows_both_sides_and_misses_no_bound(ours: float, stock: float) -> None:
    points = [Point(8, ours, 8, stock, 8), Point(64, ours, 64, stock, 64)]
    assert bench_passes.misses(points, COMPILED) == []


def test_passes_that_take_over_a_tenth_of_stocks_pass_are_named() -> None:
    points = [Point(8, 20.0, 8, 149.0, 8), Point(64, 20.0, 64, 149.0, 64)]
    (first, second) = bench_passes.misses(points, COMPILED)
    assert "of stock's pass" in first
    assert "64 layers" in second

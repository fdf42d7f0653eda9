"""Claims about the statistics, against figures worked out by hand."""

from __future__ import annotations

import pytest

from tools.serving import figures
from tools.serving.bench import seed
from tools.serving.figures import Estimate
from tools.serving.sweep import PER_RUN, PER_SIDE, RUNNING, visits


def test_standard_error_is_the_sample_deviation_over_the_root_of_the_runs() -> None:
    assert figures.estimate([1.0, 2.0, 3.0]) == Estimate(2.0, pytest.approx(1 / 3**0.5))


def test_one_run_has_no_standard_error() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        figures.estimate([1.0])


def test_ratio_is_above_one_where_on_takes_less_time() -> None:
    quotient = figures.ratio(Estimate(10.0, 0.3), Estimate(8.0, 0.32))
    assert quotient.mean == 1.25
    assert quotient.stderr == pytest.approx(1.25 * 0.05)  # 3 % and 4 % make 5 %


def test_two_combined_standard_errors_decide() -> None:
    # 0.3 and 0.4 combine to 0.5.
    assert figures.outcome(Estimate(10.0, 0.3), Estimate(9.01, 0.4)) == figures.NOT_DISTINGUISHABLE
    assert figures.outcome(Estimate(10.0, 0.3), Estimate(9.0, 0.4)) == "on faster"
    assert figures.outcome(Estimate(9.0, 0.3), Estimate(10.0, 0.4)) == "off faster"


def test_equal_means_without_spread_are_not_distinguishable() -> None:
    assert figures.outcome(Estimate(5.0, 0.0), Estimate(5.0, 0.0)) == figures.NOT_DISTINGUISHABLE
    assert figures.accuracy_outcome(Estimate(0.0, 0.0)) == figures.NOT_DISTINGUISHABLE


@pytest.mark.parametrize(("first", "second", "p"), [(0, 0, 1.0), (3, 3, 1.0), (0, 6, 0.03125), (1, 5, 0.21875)])
def test_mcnemar_is_the_coin_s_two_tails(first: int, second: int, p: float) -> None:
    assert figures.mcnemar(first, second) == p == figures.mcnemar(second, first)


def test_runs_of_the_same_questions_are_no_independent_sample() -> None:
    off, on = {"0": False, "1": True, "2": True, "3": True}, dict.fromkeys("0123", True)
    once = figures.mean_difference([off], [on])
    assert once == Estimate(0.25, 0.25)
    assert figures.mean_difference([off] * 9, [on] * 9) == once


def test_order_alternates_so_that_drift_favours_neither_side() -> None:
    for servers in (PER_RUN, RUNNING):
        assert visits(3, servers) == [("on", 0), ("off", 0), ("off", 1), ("on", 1), ("on", 2), ("off", 2)]


def test_one_start_per_side_measures_all_its_runs() -> None:
    assert visits(3, PER_SIDE) == [("on", None), ("off", None)]


def test_no_two_measurements_of_a_side_share_their_prompts() -> None:
    seeds = [seed(7, run, point) for run in range(5) for point in range(18)]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.mutation
def test_a_outcome_that_always_sees_a_difference_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "SIGMAS", 0.0)
    with pytest.raises(AssertionError):
        test_two_combined_standard_errors_decide()


@pytest.mark.mutation
def test_a_ratio_turned_round_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = figures.ratio
    monkeypatch.setattr(figures, "ratio", lambda off, on: inner(on, off))
    with pytest.raises(AssertionError):
        test_ratio_is_above_one_where_on_takes_less_time()

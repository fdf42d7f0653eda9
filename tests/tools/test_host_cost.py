"""The tool's arithmetic, and that both sides run. No bound on time: the machine of a test has other work."""

import re
import time
from itertools import product

import pytest

from tests.support.pages import PAGES
from tools import host_cost
from tools.common import guarded
from tools.host_cost import Row
from vllm_aiter_mla.serving import ops


def test_the_least_round_of_each_side_counts():
    ticks = iter(range(10**6))
    now = [0]

    def slow_at_first():
        now[0] += 1000 if next(ticks) > 3 * host_cost.CALLS else 9000

    def steady():
        now[0] += 2000

    assert host_cost.least([[slow_at_first], [steady], []], 6, lambda: now[0]) == [1.0, 2.0, 0.0]


def row(ratio, mode="pieces", batch="all decode", spread=0.0):
    return Row("aiter", "fp8", batch, mode, 50.0, 50.0 * ratio, spread)


def test_a_row_above_its_goal_is_named_and_one_without_calls_is_not():
    full = Row("aiter", "fp8", "all decode", "full", 0.0, 0.0)
    assert host_cost.misses([row(0.5), full, row(0.2)]) == [
        "aiter, fp8 cache, all decode, graphs pieces: 0.50 of vLLM's own time (<= 0.25)"
    ]


def test_no_goal_lets_a_batch_pay():
    goals = {host_cost.goal(*of) for of in product(host_cost.CACHES, host_cost.BATCHES, host_cost.MODES)}
    assert max(goals) == 1.0


HOST = PAGES["evidence.md"].partition("## What the host pays")[2].partition("\n## ")[0]


def goals_of_the_page():
    """Each goal of the page's table by cache, batch and mode."""
    for row in re.findall(r"^\| (.+) \| ([\d.]+) \| ([\d.]+) \|$", HOST, re.M):
        caches = [cache for cache in host_cost.CACHES if row[0].endswith(f", {cache}")] or host_cost.CACHES
        for cache, batch, mode in product(caches, host_cost.BATCHES, host_cost.MODES):
            if batch in row[0] and mode != "full":
                yield (cache, batch, mode), float(row[1 + mode.endswith("piecewise")])


def assert_the_page_has_the_goals():
    of_the_page = dict(goals_of_the_page())
    every = product(host_cost.CACHES, host_cost.BATCHES, [mode for mode in host_cost.MODES if mode != "full"])
    assert {of: host_cost.goal(*of) for of in every} == of_the_page
    row = r"^    (?:aiter|triton), (\w+), ([\w ]+), (.+?) +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+) "
    shown = [((cache, batch, mode), float(most)) for cache, batch, mode, most in re.findall(row, HOST, re.M)]
    assert len(shown) > 5
    assert set(shown) <= set(of_the_page.items())


def test_the_goals_are_those_of_the_page():
    assert_the_page_has_the_goals()


@pytest.mark.mutation
@pytest.mark.parametrize(("batch", "cache"), [("all decode", "fp8"), ("all decode", "auto"), ("dummy", "auto")])
def test_mutation_a_goal_that_is_raised_to_pass_is_seen(monkeypatch, batch, cache):
    monkeypatch.setitem(host_cost.GOALS[batch], cache, (1.0, 1.0))
    with pytest.raises(AssertionError, match=batch):
        assert_the_page_has_the_goals()


@pytest.mark.parametrize(("spread", "ratio", "unclear"), [(0.02, 0.25, False), (0.05, 0.22, True), (0.05, 0.1, False)])
def test_halves_that_differ_are_named_where_they_could_decide(spread, ratio, unclear):
    assert bool(host_cost.too_wide(row(ratio, spread=spread))) is unclear


@pytest.mark.parametrize(
    ("ratio", "spread", "us", "status"),
    [(0.2, 0.0, 5.0, 0), (0.3, 0.0, 5.0, 1), (0.2, 0.0, 6.5, 1), (0.25, 0.1, 5.0, 2)],
)
def test_the_command_fails_where_a_row_or_the_launch_takes_too_long(monkeypatch, capsys, ratio, spread, us, status):
    monkeypatch.setattr(host_cost, "measure", lambda rounds: [row(ratio, spread=spread)])
    monkeypatch.setattr(host_cost, "launch", lambda rounds: (us, 30.0))
    assert host_cost.run(["--rounds", "1"]) == status
    assert f"{ratio:.2f}" in capsys.readouterr().out
    assert guarded("host_cost", host_cost.run, ["--rounds", "0"]) == 2


@pytest.mark.slow
@pytest.mark.mutation
def test_mutation_an_op_that_waits_in_decode_batches_misses_its_goal(monkeypatch):
    """Half a millisecond a layer: no load on the machine hides it, and none is taken for it."""
    inner = ops.prepared_query
    monkeypatch.setattr(ops, "prepared_query", lambda *given: (time.sleep(5e-4), inner(*given))[1])
    for name, only in {"KERNELS": "aiter", "CACHES": "auto", "BATCHES": "all decode"}.items():
        monkeypatch.setattr(host_cost, name, (only,))
    assert len(host_cost.misses(host_cost.measure(rounds=2))) == len(host_cost.MODES) - 1


def test_a_row_that_cannot_be_told_hides_no_other_and_is_not_said_to_keep_its_goal(monkeypatch, capsys):
    unclear, missed = row(0.25, spread=0.1), row(0.3)
    monkeypatch.setattr(host_cost, "launch", lambda rounds: (5.0, 30.0))
    for rows, status, named in ([unclear], 2, ["UNCLEAR"]), ([unclear, missed], 1, ["UNCLEAR", "MISSED"]):
        monkeypatch.setattr(host_cost, "measure", lambda rounds, rows=rows: rows)
        assert host_cost.run(["--rounds", "1"]) == status
        shown = capsys.readouterr().out
        assert re.findall(r"^(\w+): aiter", shown, re.M) == named
        assert "every row" not in shown


def test_the_call_of_the_triton_kernel_is_timed_both_ways_and_the_card_taken_away():
    pytest.importorskip("triton")
    from triton.runtime.driver import driver

    assert all(us > 0 for us in host_cost.launch(rounds=1))
    assert driver._active is None


@pytest.mark.slow
@pytest.mark.wide
def test_every_row_is_timed():
    found = host_cost.measure(rounds=1)
    kinds = product(host_cost.KERNELS, host_cost.CACHES, host_cost.BATCHES, host_cost.MODES)
    assert {(row.kernel, row.cache, row.batch, row.graphs) for row in found} == set(kinds)
    assert all((row.vllm_us > 0) == (row.ours_us > 0) == (row.graphs != "full") for row in found)

"""The tool's arithmetic, and that both sides run. No bound on time: the machine of a test has other work."""

from itertools import product

import pytest

from tools import host_cost
from tools.common import guarded
from tools.host_cost import Row


def test_the_least_round_of_each_side_counts():
    ticks = iter(range(10**6))
    now = [0]

    def slow_at_first():
        now[0] += 1000 if next(ticks) > 3 * host_cost.CALLS else 9000

    def steady():
        now[0] += 2000

    assert host_cost.least([[slow_at_first], [steady], []], 6, lambda: now[0]) == [1.0, 2.0, 0.0]


def test_a_row_above_vllm_is_named_and_one_without_calls_is_not():
    kind = ("aiter", "fp8", "all decode")
    rows = [Row(*kind, "none", 40.0, 44.0), Row(*kind, "full", 0.0, 0.0)]
    assert host_cost.misses(rows) == ["aiter, fp8 cache, all decode, graphs none: 1.10 of vLLM's own time (<= 1.00)"]
    assert host_cost.misses([Row(*kind, "none", 44.0, 40.0)]) == []


@pytest.mark.parametrize(("ours", "us", "status"), [(40.0, 5.0, 0), (60.0, 5.0, 1), (40.0, 99.0, 1)])
def test_the_command_fails_where_a_row_or_the_launch_takes_too_long(monkeypatch, capsys, ours, us, status):
    monkeypatch.setattr(host_cost, "measure", lambda rounds: [Row("aiter", "fp8", "all decode", "none", 50.0, ours)])
    monkeypatch.setattr(host_cost, "launch", lambda rounds: (us, 30.0))
    assert host_cost.run(["--rounds", "1"]) == status
    assert f"{ours / 50:.2f}" in capsys.readouterr().out
    assert guarded("host_cost", host_cost.run, ["--rounds", "0"]) == 2


def test_the_call_of_the_triton_kernel_is_timed_both_ways_and_the_card_taken_away():
    pytest.importorskip("triton")
    from triton.runtime.driver import driver

    assert all(us > 0 for us in host_cost.launch(rounds=1))
    assert driver._active is None


@pytest.mark.slow
@pytest.mark.wide
def test_every_row_is_timed():
    found = host_cost.measure(rounds=1)
    kinds = product(("aiter", "triton"), ("fp8", "auto"), host_cost.BATCHES, host_cost.MODES)
    assert {(row.kernel, row.cache, row.batch, row.graphs) for row in found} == set(kinds)
    assert all((row.vllm_us > 0) == (row.ours_us > 0) == (row.graphs != "full") for row in found)

"""The tool's arithmetic, and that both sides run. No bound on time: the machine of a test has other work."""

import pytest

from tools import host_cost
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
    rows = [Row("fp8", "all decode", "none", 40.0, 44.0), Row("fp8", "all decode", "full", 0.0, 0.0)]
    assert host_cost.misses(rows) == ["fp8 cache, all decode, graphs none: 1.10 of vLLM's own time (<= 1.00)"]
    assert host_cost.misses([Row("fp8", "all decode", "none", 44.0, 40.0)]) == []


def test_the_call_of_the_triton_kernel_is_timed_and_the_kernel_put_back():
    launcher = pytest.importorskip("vllm_aiter_mla.kernels.triton.launcher")
    kernel = launcher.decode_prep_kernel
    assert host_cost.launch(rounds=1) > 0
    assert launcher.decode_prep_kernel is kernel


@pytest.mark.slow
def test_every_row_is_timed():
    found = host_cost.measure(rounds=1)
    assert {(row.cache, row.batch, row.graphs) for row in found} == {
        (cache, batch, mode) for cache in ("fp8", "auto") for batch in host_cost.BATCHES for mode in host_cost.MODES
    }
    assert all((row.vllm_us > 0) == (row.ours_us > 0) == (row.graphs != "full") for row in found)

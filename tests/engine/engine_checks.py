"""What engine tests compare: two results, or the layers of one."""

from dataclasses import replace

from tests.sandbox.compare import compare

MAX_DLOGPROB = 1e-3


def same_scenarios(base, other):
    """Return the part of ``base`` that ``other`` has too: one run of unmodified vLLM serves runs of fewer scenarios."""
    assert other.scenarios
    return replace(base, scenarios={name: base.scenarios[name] for name in other.scenarios})


def figures(base, other):
    return compare(same_scenarios(base, other), other)


def assert_parity(base, other, max_dlogprob=MAX_DLOGPROB):
    """Check that all tokens are equal and log-probabilities close."""
    for name, found in figures(base, other).items():
        assert found.tokens_equal == found.tokens > 0, f"{name}: {found}"
        assert found.max_abs_dlogprob <= max_dlogprob, f"{name}: {found}"


def assert_all_engaged(result, ranks=1):
    """Check that every layer of every rank ran on the fast path."""
    assert len(result.status) == ranks
    for record in result.status:
        assert len(record["engaged"]) == record["total"] > 0
        assert record["skipped"] == {}


def kernels(result):
    return [set(record["engaged"].values()) for record in result.status]


def padded(result):
    """Return the replays of full graphs that had padding, as (real rows, rows)."""
    return {rows for rows in result.replays if rows[0] < rows[1]}

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
        assert len(record["engaged"]) == record["num_layers"] > 0
        assert record["skipped"] == {}


def assert_integration(spec, result):
    """Check that the engine ran by the integration that its spec names. A skipped engine has none."""
    asked = spec.plugin.integration
    assert asked == "auto" or {record["integration"] for record in result.status} <= {asked, ""}


def kernels(result):
    return [set(record["engaged"].values()) for record in result.status]


def assert_pieces_replayed(result, graphs=1):
    """Check that each size was captured in so many graphs' pieces, one before, between and after the layers' ops.

    And that batches were replayed in pieces.
    """
    sizes = result.status[0]["capture_sizes"]
    assert result.captured == dict.fromkeys(sizes, result.status[0]["num_layers"] + graphs)
    assert sum(result.replayed.values()) > 0


def padded(result):
    """Return the replays of full graphs that had padding, as (real rows, rows)."""
    return {rows for rows in result.replays if rows[0] < rows[1]}

"""The demo's two tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from tests.sandbox.demo import Outcome


def layer_table(outcomes: list[Outcome]) -> Table:
    """What engaged, in which decode limit, and what is left of a layer's graph."""
    devices = sorted({outcome.result.versions["device"] for outcome in outcomes})
    table = Table(title=f"Layers (real vLLM engine; device: {', '.join(devices)})")
    for heading in ("run", "numerics", "decode_limit", "compile ranges", "engaged", "skipped", "graph ops per layer"):
        table.add_column(heading)
    for outcome in outcomes:
        record = outcome.as_dict()
        ops = record["ops_per_layer"]
        skipped = sorted({f"{code}: {reason}" for code, reason in record["layers"]["skipped"].values()})
        layers = record["layers"]
        table.add_row(
            record["name"],
            record["numerics"],
            "-" if record["decode_limit"] is None else "{}..{}".format(*record["decode_limit"]),
            " ".join(f"{start}-{end}" for start, end in record["ranges"]),
            f"{layers['engaged']}/{layers['total']}" if record["flag"] else "flag off",
            "; ".join(skipped) or "none",
            "-" if ops is None else f"{ops[0]:.1f} -> {ops[1]:.1f}",
        )
    return table


def scenario_table(outcomes: list[Outcome]) -> Table:
    """Tokens and log-probabilities against unmodified vLLM, per run and scenario."""
    table = Table(title="Flag on against flag off, greedy", caption=_bounds(outcomes))
    for heading in ("run", "scenario", "tokens", "equal", "top-1", "max |dlogprob|", "mean", "outcome"):
        table.add_column(heading, justify="left" if heading in ("run", "scenario", "outcome") else "right")
    for outcome in outcomes:
        for name, found in outcome.figures.items():
            said = "reported" if outcome.run.bound is None else "ok" if outcome.scenario_ok(name) else "MISSED"
            table.add_row(
                outcome.run.name,
                name,
                str(found.tokens),
                str(found.tokens_equal),
                f"{found.top1_agreement:.1%}",
                f"{found.max_abs_dlogprob:.2g}",
                f"{found.mean_abs_dlogprob:.2g}",
                said,
            )
    return table


def _bounds(outcomes: list[Outcome]) -> str:
    return "; ".join(f"{o.run.name}: {o.run.bound}" for o in outcomes if o.run.bound is not None)

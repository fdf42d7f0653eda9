"""I13: no kind of batch costs a layer more launches, allocations or bytes than with the flag off, same options."""

import pytest
import torch

from tools import ledger
from tools.counting.counter import Counter, Event
from tools.ledger import Cost, Row
from vllm_aiter_mla.serving import ops as bodies


@pytest.fixture(scope="module")
def counted():
    return ledger.count_all()


def violations_of_ours(counted):
    """Count the sides with the flag on again, in place of those of ``counted``."""
    off = {cache: dict(zip(ledger.SIDES, sides, strict=True)) for cache, sides in counted.items()}
    again = {
        cache: [ledger.count(side, cache) if side in ledger.BRANCHES else sides[side] for side in ledger.SIDES]
        for cache, sides in off.items()
    }
    return ledger.violations(ledger.rows_of(again))


def test_no_batch_costs_more_than_with_the_flag_off_and_the_same_options(counted):
    assert ledger.violations(ledger.rows_of(counted)) == []
    assert ledger.strays(counted) == [], "through AITER's op, or as the flag off rotates and writes"
    for _, on, _, on_fused in counted.values():
        for side, ours in (("on", on), ("on, fused", on_fused)):
            assert set(ledger.BRANCHES[side]) < set(ours)


def test_todays_rounding_takes_as_many_launches_as_todays_pieces(counted):
    """A batch with prefill rows: RoPE, KV write, and what vLLM's attention launches."""
    for off, on, *_ in counted.values():
        for kind in ledger.PREFILL:
            assert launches(on, kind) == launches(off, kind)
            assert launches(on, kind)[:2] == [ledger.ROTARY, ledger.OWN_WRITE]


def launches(side, kind):
    return [event.name for event in side[kind] if event.launches]


def test_no_query_is_copied_for_heads_that_the_decode_kernel_pads(counted, monkeypatch):
    for cache, (_, ours, vllm_own, _) in counted.items():
        assert launches(ours, "all decode, 20 heads") == launches(ours, "all decode")
        assert {"aten::repeat", "aten::contiguous"} <= set(launches(vllm_own, "all decode, 20 heads"))
        with monkeypatch.context() as patch:
            patch.setattr("vllm_aiter_mla.compat.layer.padded_heads", lambda layer: None)
            unpadded = ledger.count("on", cache)
        assert launches(unpadded, "all decode, 20 heads") != launches(unpadded, "all decode"), "planted"


@pytest.mark.parametrize(("above", "status"), [([], 0), (["a row"], 1)])
def test_the_tool_exits_with_1_where_a_row_is_above(counted, monkeypatch, above, status):
    monkeypatch.setattr(ledger, "count_all", lambda: counted)
    monkeypatch.setattr(ledger, "violations", lambda rows: above)
    assert ledger.main([]) == status


@pytest.mark.mutation("I13")
def test_mutation_a_second_rotation_is_caught(counted, monkeypatch):
    inner = bodies.rotate_and_write

    def again(step, q, k_pe, kv_c, rope):
        return step.layer.rotate(q[..., -k_pe.shape[-1] :], inner(step, q, k_pe, kv_c, rope), rope)

    monkeypatch.setattr(bodies, "rotate_and_write", again)
    found = violations_of_ours(counted)
    assert any("one prefill among decodes" in line and "launches" in line for line in found)
    assert not any("all decode" in line for line in found)


@pytest.mark.mutation("I13")
def test_mutation_a_copy_of_q_is_caught(counted, monkeypatch):
    inner = bodies.attention_with_rope
    monkeypatch.setattr(bodies, "attention_with_rope", lambda step, q, *rest: inner(step, q.clone(), *rest))
    found = violations_of_ours(counted)
    for what in ("launches", "allocations", "moved"):
        assert any("one prefill among decodes" in line and what in line for line in found), what


@pytest.mark.mutation("I13")
def test_mutation_a_decode_batch_that_is_not_prepared_is_caught(monkeypatch):
    monkeypatch.setattr(bodies, "prepared_query", lambda *args: None)
    found = ledger.strays({"fp8": [ledger.count(side, "fp8") if side == "on" else {} for side in ledger.SIDES]})
    assert found == [
        f"fp8 cache, {kind}, on: launches of our op {(ledger.ROTARY, ledger.OWN_WRITE)}, expected {(ledger.AITER_OP,)}"
        for kind in ledger.DECODE
    ]


A, B, OUT, ROW = torch.zeros(2, 3, 4), torch.zeros(2, 4, 5), torch.zeros(2, 3, 5), torch.zeros(1, 8)
# What runs, and launches, allocations and bytes of each event.
COUNTED = [
    # A view costs nothing, a copy is one launch into one buffer.
    (lambda: A[:, 1:].transpose(0, 1).unsqueeze(0), []),
    (A.clone, [(1, 1, 2 * 24 * 4)]),
    # An out argument is written once and not read.
    (lambda: torch.bmm(A, B, out=OUT), [(1, 0, 4 * (24 + 40 + 30))]),
    # A broadcast dimension counts once, and an empty buffer not at all.
    (lambda: torch.empty(4, 8).copy_(ROW.expand(4, 8)), [(0, 1, 0), (1, 0, 4 * (32 + 8))]),
    (lambda: torch.empty(0), [(0, 0, 0)]),
]


@pytest.mark.parametrize(("run", "events"), COUNTED)
def test_what_runs_is_counted(run, events):
    with Counter() as counter:
        run()
    assert [(event.launches, event.allocations, event.moved) for event in counter.events] == events


def test_what_a_graph_replays_allocates_nothing():
    events = [Event("a", 1, 1, 8, captured=True), Event("b", 1, 1, 4)]
    found = [ledger.cost(events, mode) for mode in ("none", "piecewise", "full")]
    assert found == [Cost(2, 2, 12), Cost(2, 1, 12), Cost(2, 0, 12)]
    assert ledger.modes("all decode")["full, derived"] == "full"
    for kind in ("one prefill among decodes", "dummy"):
        assert ledger.modes(kind)["full, runs piecewise"] == "piecewise"


def test_flag_on_is_held_against_flag_off_with_the_same_options_in_each_figure():
    row = Row("fp8", "all decode", "none", (Cost(5, 1, 90), Cost(4, 2, 80), Cost(4, 2, 80), Cost(4, 2, 80)))
    assert ledger.violations([row]) == ["fp8 cache, all decode, graphs none, on: allocations 2, flag off 1"]
    more = row._replace(costs=(Cost(5, 2, 90), *row.costs[1:3], Cost(5, 2, 80)))
    assert ledger.violations([more]) == ["fp8 cache, all decode, graphs none, on, fused: launches 5, flag off 4"]

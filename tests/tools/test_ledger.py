"""I13: no kind of batch costs a layer more launches, allocations or bytes than with the flag off, same options.

What is counted is also what the formulas of the plan say.
"""

from itertools import takewhile

import pytest
import torch

from tools.counting import ledger
from tools.counting.ledger import Cost, Counted
from vllm_aiter_mla.kernels import formulas
from vllm_aiter_mla.serving import ops as bodies

AITER_OP = "aiter.fused_qk_rope_concat_and_cache_mla"
FUSED = "_C_cache_ops.concat_and_cache_mla_rope_fused"
ROTARY, OWN_WRITE = "_C.rotary_embedding", "concat_and_cache_mla"
DECODE = ("all decode", "all decode, 20 heads", "padded decode")
PREFILL = ("one prefill among decodes", "all short prompts")
BRANCHES = {
    "on": dict.fromkeys(DECODE, (AITER_OP,)) | dict.fromkeys(PREFILL, (ROTARY, OWN_WRITE)),
    "on, fused": dict.fromkeys(DECODE, (AITER_OP,)) | dict.fromkeys(PREFILL, (FUSED,)),
}
"""What our op launches in each kind of batch; in a dummy run it has no rows."""
PATHS = {"off": "vLLM, unfused", "on": "aiter", "off, fused": "vLLM, fused", "on, fused": "aiter"}


@pytest.fixture(scope="module")
def counted():
    return ledger.count_all()


def count_again(counted):
    """Count the sides with the flag on again, in place of those of ``counted``."""
    return {cache: sides | {side: ledger.count(side, cache) for side in BRANCHES} for cache, sides in counted.items()}


def above(counted):
    """Each figure of flag on that is above that of flag off with the same options: batch, side and figure."""
    return {
        (kind, on, figure)
        for sides in counted.values()
        for on in BRANCHES
        for kind, ours in sides[on].items()
        for figure in Cost._fields
        if getattr(ours.cost, figure) > getattr(sides[on.replace("on", "off")][kind].cost, figure)
    }


def strays(sides):
    """Each kind of batch in which our op did not launch what it is there to launch, with what it launched."""
    for side, by_kind in BRANCHES.items():
        for kind in sides.get(side, ()):
            ran = tuple(name for name in launches(sides[side], kind) if name in (AITER_OP, FUSED, ROTARY, OWN_WRITE))
            if ran != by_kind.get(kind, ()):
                yield side, kind, ran


def launches(side, kind):
    return [call.name for call in side[kind].calls]


def apart(counted):
    """Each cache and side whose decode step does not move, launch by launch, the bytes of the formulas."""
    from tools.counting import stub_layer

    for cache, sides in counted.items():
        stored = 1 if cache == "fp8" else 2
        size = formulas.StepSize(
            stub_layer.ROWS, stub_layer.HEADS, stub_layer.NOPE, stub_layer.ROPE, stub_layer.LATENT, stored
        )
        for side, path in PATHS.items():
            prepare = takewhile(lambda call: call.name != "decode attention", sides[side]["all decode"].calls)
            if [*map(ledger.moved, prepare)] != [one.read + one.written for one in formulas.paths(size)[path]]:
                yield cache, side


def test_no_batch_costs_more_than_with_the_flag_off_and_the_same_options(counted):
    assert above(counted) == set()
    for sides in counted.values():
        assert list(strays(sides)) == [], "through AITER's op, or as the flag off rotates and writes"
        for side in BRANCHES:
            assert set(BRANCHES[side]) < set(sides[side])


def test_what_a_piecewise_graph_replays_allocates_nothing_so_that_no_graph_changes_the_comparison(counted):
    found = [batch.replayed for sides in counted.values() for side in sides.values() for batch in side.values()]
    assert {Counted(replayed, ledger.record([])).cost.allocations for replayed in found} == {0}
    assert any(replayed.calls for replayed in found)


def test_a_decode_step_moves_the_bytes_of_the_formulas(counted):
    assert list(apart(counted)) == []


@pytest.mark.mutation
def test_mutation_a_formula_with_other_bytes_is_caught(counted, monkeypatch):
    inner = formulas.paths
    monkeypatch.setattr(formulas, "paths", lambda size: inner(size._replace(weight=1)))
    assert len(list(apart(counted))) == len(ledger.CACHES) * len(PATHS)


def test_todays_rounding_takes_as_many_launches_as_todays_pieces(counted):
    """A batch with prefill rows: RoPE, KV write, and what vLLM's attention launches."""
    for sides in counted.values():
        for kind in PREFILL:
            assert launches(sides["on"], kind) == launches(sides["off"], kind)
            assert launches(sides["on"], kind)[:2] == [ROTARY, OWN_WRITE]


def test_no_query_is_copied_for_heads_that_the_decode_kernel_pads(counted, monkeypatch):
    for cache, sides in counted.items():
        ours, vllm_own = sides["on"], sides["off, fused"]
        assert launches(ours, "all decode, 20 heads") == launches(ours, "all decode")
        assert {"aten.repeat", "aten.contiguous"} <= set(launches(vllm_own, "all decode, 20 heads"))
        with monkeypatch.context() as patch:
            patch.setattr("vllm_aiter_mla.compat.layer.padded_heads", lambda layer: None)
            unpadded = ledger.count("on", cache)
        assert launches(unpadded, "all decode, 20 heads") != launches(unpadded, "all decode"), "planted"


@pytest.mark.mutation("I13")
def test_mutation_a_second_rotation_is_caught(counted, monkeypatch):
    inner = bodies.rotate_and_write

    def again(step, q, k_pe, kv_c, rope):
        return step.layer.rotate(q[..., -k_pe.shape[-1] :], inner(step, q, k_pe, kv_c, rope), rope)

    monkeypatch.setattr(bodies, "rotate_and_write", again)
    found = above(count_again(counted))
    assert ("one prefill among decodes", "on", "launches") in found
    assert not any(kind == "all decode" for kind, *_ in found)


@pytest.mark.mutation("I13")
def test_mutation_a_copy_of_q_is_caught(counted, monkeypatch):
    inner = bodies.attention_with_rope
    monkeypatch.setattr(bodies, "attention_with_rope", lambda step, q, *rest: inner(step, q.clone(), *rest))
    again = count_again(counted)
    copies = {("one prefill among decodes", side, figure) for side in BRANCHES for figure in Cost._fields}
    assert copies <= above(again)
    assert {side for _, side in apart(again)} == set(BRANCHES)


@pytest.mark.mutation("I13")
def test_mutation_a_decode_batch_that_is_not_prepared_is_caught(monkeypatch):
    monkeypatch.setattr(bodies, "prepared_query", lambda *args: None)
    found = list(strays({"on": ledger.count("on", "fp8")}))
    assert found == [("on", kind, (ROTARY, OWN_WRITE)) for kind in DECODE]


A, B, OUT, ROW = torch.zeros(2, 3, 4), torch.zeros(2, 4, 5), torch.zeros(2, 3, 5), torch.zeros(1, 8)
# What runs, and its launches, allocations and bytes.
COUNTED = [
    # A view costs nothing, a copy is one launch into one buffer.
    (lambda: A[:, 1:].transpose(0, 1).unsqueeze(0), (0, 0, 0)),
    (A.clone, (1, 1, 2 * 24 * 4)),
    # An out argument is written once and not read; an in-place op reads what it writes.
    (lambda: torch.bmm(A, B, out=OUT), (1, 0, 4 * (24 + 40 + 30))),
    (lambda: OUT.add_(1), (1, 0, 4 * 2 * 30)),
    # A broadcast dimension counts once, and an empty buffer not at all.
    (lambda: torch.empty(4, 8).copy_(ROW.expand(4, 8)), (1, 1, 4 * (32 + 8))),
    (lambda: torch.empty(0), (0, 0, 0)),
]


@pytest.mark.parametrize(("run", "cost"), COUNTED)
def test_what_runs_is_counted(run, cost):
    assert Counted(ledger.record([]), ledger.record([run])).cost == cost

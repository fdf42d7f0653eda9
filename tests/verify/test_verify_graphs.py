"""The engine for a GPU on a card that records: its Python must be right before it meets a real one."""

import itertools

import pytest

from tests.sandbox.rehearsal_card import RehearsalCard
from tests.verify.faults import Changed
from vllm_aiter_mla.verify.engine import GraphEngine


@pytest.fixture
def card(monkeypatch):
    return RehearsalCard().install(monkeypatch)


@pytest.fixture
def engine(card):
    return GraphEngine()


def test_the_launches_come_from_the_dump(run, backend, engine):
    result = run("kernel-status", backend, engine=engine)
    assert result.status == "passed", result.findings
    assert "aten.bmm" in result.launches["12"] or "other kinds" in result.launches["12"]


@pytest.mark.parametrize("name", ["both-ends-1-drafts", "piecewise-decode", "mixed-batch-piecewise", "long-run"])
def test_a_right_back_end_passes(run, backend, engine, name):
    assert run(name, backend, engine=engine).findings == []


def test_graphs_of_a_shared_pool_get_one_handle_and_others_their_own(run, backend, engine, card):
    run("shared-pool", backend, engine=engine)
    assert len({pool for pool, _ in card.captures}) == 1
    assert len(card.captures) == 5
    card.captures.clear()
    run("every-capture-size", backend, engine=engine)
    assert len({pool for pool, _ in card.captures}) == len(card.captures) == 12


def test_a_capture_on_a_side_stream_is_asked_for_one_and_so_is_a_replay(run, backend, engine, card):
    run("side-stream", backend, engine=engine)
    assert all(side_stream for _, side_stream in card.captures)
    assert card.side_streams > 0


def test_the_synchronisation_check_is_on_for_the_probe_and_off_again(run, backend, engine, card):
    run("fresh-data", backend, engine=engine)
    assert (card.sync_checks, card.checks_syncs) == (1, False)


def test_a_call_that_synchronises_is_found_before_it_can_break_a_capture(run, engine, card):
    def prepare(right, inputs):
        if card.checks_syncs:
            raise RuntimeError("called a synchronizing CUDA operation")
        return right(inputs)

    result = run("fresh-data", Changed(prepare), engine=engine)
    assert {finding.oracle for finding in result.findings} == {"no-sync"}
    assert not card.checks_syncs
    assert result.captures == 0


def test_a_capture_that_fails_is_a_finding(run, engine, card):
    def prepare(right, inputs):
        if card.is_capturing():
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return right(inputs)

    (finding,) = run("fresh-data", Changed(prepare), engine=engine).findings
    assert (finding.oracle, finding.step) == ("runs", "capture of T=12")
    assert "operation not permitted" in finding.message
    assert "more" not in finding.message


def test_replays_that_ask_for_memory_fail(broken, backend, engine, card, monkeypatch):
    monkeypatch.setattr(card, "allocations", itertools.count().__next__)
    assert broken("long-run", backend, engine=engine) == {"memory"}


def test_a_dump_that_cannot_be_had_skips_the_count_with_the_reason(run, backend, engine, card, monkeypatch):
    monkeypatch.setattr(card, "dot", lambda graph: "")
    result = run("kernel-status", backend, engine=engine)
    assert result.status == "skipped"
    assert "torch wrote no DOT dump" in result.reason


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("name", "oracle"),
    [("launches-more", "launches"), ("captured-in-a-piece", "attention-output"), ("stale-scale", "query-nope"),
     ("mixes-padded-rows", "finite")],
)  # fmt: skip
def test_mutation_planted_faults_are_caught_by_the_gpu_engine_too(caught, engine, name, oracle):
    assert oracle in caught(name, engine=engine)

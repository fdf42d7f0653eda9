"""Ranks that have not decided the same: a node has its own gate, and a rank that is left to vLLM answers nobody."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, local

import pytest
import torch

from tests.support.planted import raising
from tests.support.strict import both_modes, stops
from tests.support.worker import Worker, layer_in, ours
from vllm_aiter_mla import engine
from vllm_aiter_mla.compat import patches, ranks
from vllm_aiter_mla.engine import Engine


@pytest.fixture
def exchanges(monkeypatch):
    """What this rank handed to the others, of whom none would answer."""
    handed = []
    monkeypatch.setattr(engine.ranks, "exchange", lambda mine: (handed.append(mine), (0, [mine]))[1])
    return handed


def start(monkeypatch, apart, **options):
    """A worker on one of two nodes that has started; ``apart``: the ranks that decided otherwise."""
    monkeypatch.setattr(engine.ranks, "apart", lambda decided, world_size: apart)
    one = Worker(ours(**options), num_ranks=4, **options)
    one.init_device()
    one.load_model()
    one.compile_or_warm_up_model()
    return one


@both_modes
def test_no_rank_waits_for_a_node_that_has_left_the_engine_to_vllm(monkeypatch, said, exchanges, strict):
    found = []
    with stops(strict, "decided otherwise"):
        found.append(start(monkeypatch, [2, 3], strict=strict))
    assert exchanges == [], "this rank waits for ever"
    for one in found:
        assert "rank(s) 2, 3 have decided otherwise" in layer_in(one).why_skipped().message
        assert one.steps == 0, "a decode step has collectives"
        assert sum("decided otherwise" in text for level, text in said if level == logging.ERROR) == 1
        assert not one.engine.status.record.engaged


def test_nodes_that_agree_serve_and_give_their_status(monkeypatch, said, exchanges):
    one = start(monkeypatch, [])
    assert one.engine.status.record.engaged
    assert len(exchanges) == 2, "the choice of kernels and the status"


@pytest.mark.mutation
def test_mutation_an_engine_that_waits_all_the_same_is_caught(monkeypatch, said, exchanges):
    monkeypatch.setattr(Engine, "_answer", lambda self, answer: engine._answer_other_ranks(answer))
    with pytest.raises(AssertionError, match="waits for ever"):
        test_no_rank_waits_for_a_node_that_has_left_the_engine_to_vllm(monkeypatch, said, exchanges, strict=False)


def test_a_rank_that_could_not_be_hooked_asks_nobody_and_waits_for_nobody(monkeypatch, said, exchanges):
    """The others miss its word. What was hooked before stays hooked."""
    monkeypatch.setattr(engine.ranks, "apart", raising(KeyError("asked")))
    hook = patches.after

    def fails_at_the_last(worker, method, then, failed):
        if method == "init_device":
            raise RuntimeError("planted")
        hook(worker, method, then, failed)

    monkeypatch.setattr(engine.patches, "after", fails_at_the_last)
    one = Worker(ours(), num_ranks=4)
    one.init_device()
    one.load_model()
    one.compile_or_warm_up_model()
    assert exchanges == [], "this rank waits for ever"
    assert "were not asked" in layer_in(one).why_skipped().message


def test_ranks_have_to_say_the_options_and_the_sources_of_the_plugin_alike(monkeypatch):
    """A node may have an image of its own, and another version may exchange other records."""
    words = []
    monkeypatch.setattr(engine.ranks, "apart", lambda decided, world_size: (words.append(decided), [])[1])
    module = ours()
    module.integration = "module"
    for fingerprint, pass_, options in (
        ("1-a", ours(), {}), ("1-a", ours(), {}), ("2-b", ours(), {}), ("1-a", ours(8), {}), ("1-a", module, {}),
        ("1-a", ours(), {"measure": False}), ("1-a", ours(), {"kernel": "triton"}),
    ):  # fmt: skip
        monkeypatch.setattr(engine.packages, "fingerprint", lambda fingerprint=fingerprint: fingerprint)
        Worker(pass_, num_ranks=4, **options).init_device()
    assert words[0] == words[1]
    assert len(set(words)) == len(words) - 1


def test_an_engine_of_one_rank_asks_nobody(monkeypatch, said):
    monkeypatch.setattr(engine.ranks, "apart", raising(KeyError("asked")))
    one = Worker(ours())
    one.init_device()
    one.load_model()
    assert layer_in(one).why_skipped() is None
    assert [text for level, text in said if level >= logging.WARNING] == []


def test_a_rank_that_cannot_ask_waits_for_nobody_and_runs_vllms_own_kernels(monkeypatch, said, exchanges):
    """torch has no group here, and so no store."""
    one = Worker(ours(), num_ranks=4)
    one.init_device()
    one.load_model()
    one.compile_or_warm_up_model()
    assert exchanges == []
    assert "were not asked" in layer_in(one).why_skipped().message
    assert [level for level, text in said if "could not be asked" in text] == [logging.WARNING]


def test_every_rank_of_an_engine_knows_who_decided_otherwise(monkeypatch):
    """Three engines of two ranks each, in threads. tests/startup/test_timing.py asks over torch's own store."""
    words, store, thread = ["one", "another", "one", "", "a third", "a third"], torch.distributed.HashStore(), local()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: thread.rank)

    def ask(rank):
        thread.rank = rank
        return ranks.apart(words[rank], 2, wait_s=1) if words[rank] else None

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == [[1], [0], [3], None, [], []]


@pytest.fixture
def ranks_of_one_store(monkeypatch):
    """Call a function as so many ranks, each in a thread of its own, over one store."""
    store, thread = torch.distributed.HashStore(), local()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: thread.rank)

    def call(function, number):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: number)

        def as_rank(rank):
            thread.rank = rank
            return function(rank)

        with ThreadPoolExecutor(number) as pool:
            return list(pool.map(as_rank, range(number)))

    return call


def test_a_rank_that_comes_when_another_has_stopped_waiting_does_not_wait_for_it(ranks_of_one_store):
    """It finds the same word of both. The other one has gone on, and answers nothing."""

    over = Event()

    def ask(rank):
        if rank == 1:
            over.wait()
        try:
            return ranks.apart("one", 2, wait_s=0.2)
        finally:
            over.set()

    assert ranks_of_one_store(ask, 2) == [[1], [1]]


def test_an_engine_whose_ranks_are_apart_is_not_taken_for_agreed_by_another_one(ranks_of_one_store):
    """Ranks 0 and 1 are one engine, of which one came late with the same word; 2 and 3 are another one, in time."""
    apart, profiled = Barrier(2), Barrier(4)

    def ask(rank):
        if rank == 1:
            apart.wait()
        found = ranks.apart("limit=16", 2, wait_s=0.1 if rank == 0 else 10.0)
        if rank == 0:
            apart.wait()
        profiled.wait()  # vLLM's profiling, which waits for all
        return bool(found), ranks.all_say("limit=16")

    assert ranks_of_one_store(ask, 4) == [(True, False), (True, False), (False, False), (False, False)]


def test_the_words_of_an_engine_before_count_no_more(ranks_of_one_store):
    """Frameworks for training build one engine after the other over one process group."""

    def twice(rank):
        return [(time.sleep(0.2 * rank), ranks.apart(decided, 2))[1] for decided in ("limit=16", "limit=64")]

    assert ranks_of_one_store(twice, 2) == [[[], []], [[], []]]


def test_every_data_parallel_engine_has_to_have_said_the_same(ranks_of_one_store):
    for words, agreed in ("aa", True), ("ab", False), ("a ", False):
        said = Barrier(2)  # vLLM's profiling, which waits for all

        def ask(rank, words=words, said=said):
            if words[rank] != " ":
                ranks.say(words[rank])
            said.wait()
            return ranks.all_say("a")

        found = ranks_of_one_store(ask, 2)
        assert found[0] is agreed, words


@pytest.mark.parametrize("agreed", [True, False])
def test_no_decode_step_waits_for_a_data_parallel_engine_that_has_decided_otherwise(monkeypatch, said, agreed):
    monkeypatch.setattr(engine.ranks, "say", lambda decided: None)
    monkeypatch.setattr(engine.ranks, "all_say", lambda decided: agreed)
    one = Worker(ours(), num_engines=2)
    one.init_device()
    one.load_model()
    one.compile_or_warm_up_model()
    assert one.steps == agreed, "a decode step waits for every engine"
    assert sum("a data-parallel engine has decided otherwise" in text for level, text in said) == (not agreed)


@pytest.mark.mutation
def test_mutation_a_decode_step_that_nobody_was_asked_for_is_caught(monkeypatch, said):
    monkeypatch.setattr(Engine, "_are_engines_agreed", lambda self: True)
    with pytest.raises(AssertionError, match="waits for every engine"):
        test_no_decode_step_waits_for_a_data_parallel_engine_that_has_decided_otherwise(monkeypatch, said, False)

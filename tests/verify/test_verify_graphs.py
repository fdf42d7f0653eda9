"""The engine for a GPU on stand-ins for torch.cuda: its own Python must be right before a card is at hand."""

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch

from tests.verify.verify_support import broken
from vllm_aiter_mla.verify import graphs
from vllm_aiter_mla.verify.faults import FAULTS
from vllm_aiter_mla.verify.recording import Recording


class Graph:
    """Behaves as ``CUDAGraph(keep_graph=True)``: no replay before it is instantiated, and a dump that warns."""

    def __init__(self, keep_graph=False):
        assert keep_graph
        self.ready = False

    def instantiate(self):
        self.ready = True

    def replay(self):
        assert self.ready
        self.made.replay()

    def debug_dump(self, path):
        warnings.warn("DEBUG: calling debug_dump()", stacklevel=1)
        nodes = "".join(
            f'"graph_0_node_{i}"[style="bold" shape="octagon" label="{i}\n{name}\n"];\n'
            for i, name in enumerate(self.made.names)
        )
        with open(path, "w") as file:
            file.write(f"digraph dot {{\n{nodes}}}\n")


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda with graphs made of recordings; returns what was asked of it."""
    asked = SimpleNamespace(pools=[], streams=[], sync_modes=[], restored=0, allocations=0)

    class Capture:
        def __init__(self, graph, pool=None, stream=None):
            self.graph, self.made = graph, Recording()
            asked.pools.append(pool)
            asked.streams.append(stream)

        def __enter__(self):
            self.made.__enter__()

        def __exit__(self, *error):
            self.made.__exit__(*error)
            self.graph.made = self.made

    class Stream:
        def wait_stream(self, other):
            pass

    def set_stream(stream):
        asked.restored += 1

    replacements = {
        "CUDAGraph": Graph,
        "graph": Capture,
        "Stream": Stream,
        "graph_pool_handle": object,
        "synchronize": lambda: None,
        "current_stream": Stream,
        "set_stream": set_stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "set_sync_debug_mode": asked.sync_modes.append,
        "memory_stats": lambda: {"allocation.all.allocated": asked.allocations},
        "memory_allocated": lambda: 5,
        "memory_reserved": lambda: 0,
        "mem_get_info": lambda: (1, 2),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch.version, "hip", None)
    return asked


@pytest.fixture
def engine(cuda):
    engine = graphs.GraphEngine()
    engine.device = "cpu"
    return engine


def test_the_launches_come_from_the_dump(run, subject, engine):
    result = run("kernel-status", subject, engine=engine)
    assert result.status == "passed", result.findings
    assert "aten.bmm" in result.launches["12"] or "other kinds" in result.launches["12"]


@pytest.mark.parametrize("name", ["full-graph-decode", "piecewise-decode", "mixed-batch-piecewise", "long-run"])
def test_right_subjects_pass(run, subject, engine, name):
    assert run(name, subject, engine=engine).findings == []


def test_graphs_of_a_shared_pool_get_one_handle_and_others_their_own(run, subject, engine, cuda):
    run("shared-pool", subject, engine=engine)
    assert len(set(map(id, cuda.pools))) == 1
    assert len(cuda.pools) == 3
    cuda.pools.clear()
    run("every-capture-size", subject, engine=engine)
    assert len(set(map(id, cuda.pools))) == len(cuda.pools) == 5


def test_a_capture_on_a_side_stream_is_given_the_stream(run, subject, engine, cuda):
    run("side-stream", subject, engine=engine)
    assert all(stream is not None for stream in cuda.streams)


def test_the_synchronisation_check_is_on_for_the_probe_and_off_again(run, subject, engine, cuda):
    run("fresh-data", subject, engine=engine)
    assert cuda.sync_modes == ["error", "default"]


def test_a_call_that_synchronises_is_found_before_it_can_break_a_capture(run, subject, engine, cuda):
    from dataclasses import replace

    def prepare(inputs):
        if cuda.sync_modes[-1:] == ["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")
        return subject.prepare(inputs)

    result = run("fresh-data", replace(subject, prepare=prepare), engine=engine)
    assert broken(result) == {"no-sync"}
    assert cuda.sync_modes[-1] == "default"
    assert result.captures == 0


def test_a_capture_that_fails_is_a_finding_and_puts_the_stream_back(run, subject, engine, cuda):
    from dataclasses import replace

    def prepare(inputs):
        if cuda.pools:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return subject.prepare(inputs)

    result = run("fresh-data", replace(subject, prepare=prepare), engine=engine)
    assert broken(result) == {"runs"}
    assert "the capture failed: operation not permitted" in result.findings[0].message
    assert cuda.restored == 1


def test_replays_that_ask_for_memory_fail(run, subject, engine, monkeypatch):
    def counting():
        counting.calls += 1
        return {"allocation.all.allocated": counting.calls}

    counting.calls = 0
    monkeypatch.setattr(torch.cuda, "memory_stats", counting)
    assert broken(run("long-run", subject, engine=engine)) == {"memory"}


def test_a_dump_that_cannot_be_had_skips_the_count_with_the_reason(run, subject, engine, monkeypatch):
    monkeypatch.setattr(Graph, "debug_dump", lambda self, path: None)
    result = run("kernel-status", subject, engine=engine)
    assert result.status == "skipped"
    assert "torch wrote no DOT dump" in result.reason


@pytest.mark.mutation
@pytest.mark.parametrize("name", ["launches-more", "captured-in-a-piece", "scale-baked-in", "mixes-padded-rows"])
def test_mutation_planted_faults_are_caught_by_the_gpu_engine_too(run, subject, engine, name):
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    assert fault.oracle in broken(run(fault.case, fault.plant(fault.base(subject)), engine=engine))

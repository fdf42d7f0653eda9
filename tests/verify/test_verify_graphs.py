"""The engine for a GPU over a simulated torch.cuda: its Python must be right before it meets a card."""

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch

from tests.verify.faults import Changed
from vllm_aiter_mla.verify.engine import GraphEngine, Recording


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
    engine = GraphEngine()
    engine.device = "cpu"
    return engine


def test_the_launches_come_from_the_dump(run, backend, engine):
    result = run("kernel-status", backend, engine=engine)
    assert result.status == "passed", result.findings
    assert "aten.bmm" in result.launches["12"] or "other kinds" in result.launches["12"]


@pytest.mark.parametrize("name", ["full-graph-decode", "piecewise-decode", "mixed-batch-piecewise", "long-run"])
def test_a_right_back_end_passes(run, backend, engine, name):
    assert run(name, backend, engine=engine).findings == []


def test_graphs_of_a_shared_pool_get_one_handle_and_others_their_own(run, backend, engine, cuda):
    run("shared-pool", backend, engine=engine)
    assert len(set(map(id, cuda.pools))) == 1
    assert len(cuda.pools) == 3
    cuda.pools.clear()
    run("every-capture-size", backend, engine=engine)
    assert len(set(map(id, cuda.pools))) == len(cuda.pools) == 5


def test_a_capture_on_a_side_stream_is_given_the_stream(run, backend, engine, cuda):
    run("side-stream", backend, engine=engine)
    assert all(stream is not None for stream in cuda.streams)


def test_the_synchronisation_check_is_on_for_the_probe_and_off_again(run, backend, engine, cuda):
    run("fresh-data", backend, engine=engine)
    assert cuda.sync_modes == ["error", "default"]


def test_a_call_that_synchronises_is_found_before_it_can_break_a_capture(run, engine, cuda):
    def prepare(right, inputs):
        if cuda.sync_modes[-1:] == ["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")
        return right(inputs)

    result = run("fresh-data", Changed(prepare), engine=engine)
    assert {finding.oracle for finding in result.findings} == {"no-sync"}
    assert cuda.sync_modes[-1] == "default"
    assert result.captures == 0


def test_a_capture_that_fails_is_a_finding_and_puts_the_stream_back(run, engine, cuda):
    def prepare(right, inputs):
        if cuda.pools:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return right(inputs)

    (finding,) = run("fresh-data", Changed(prepare), engine=engine).findings
    assert (finding.oracle, finding.step) == ("runs", "capture of T=12")
    assert "operation not permitted" in finding.message
    assert "more" not in finding.message
    assert cuda.restored == 1


def test_replays_that_ask_for_memory_fail(broken, backend, engine, monkeypatch):
    def counting():
        counting.calls += 1
        return {"allocation.all.allocated": counting.calls}

    counting.calls = 0
    monkeypatch.setattr(torch.cuda, "memory_stats", counting)
    assert broken("long-run", backend, engine=engine) == {"memory"}


def test_a_dump_that_cannot_be_had_skips_the_count_with_the_reason(run, backend, engine, monkeypatch):
    monkeypatch.setattr(Graph, "debug_dump", lambda self, path: None)
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

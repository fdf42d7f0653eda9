"""The seam to the device: the real one over a simulated torch.cuda, and a CPU on which everything runs through it."""

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch

from tests.sandbox import rehearsal_card
from tests.sandbox.rehearsal_card import RehearsalCard, Scenario
from tests.support.decisions import spans
from tests.support.made_up_clock import Named
from tests.support.planted import raising
from vllm_aiter_mla.commands.check.context import CheckOptions
from vllm_aiter_mla.commands.compat.llm_engine import KernelCounter
from vllm_aiter_mla.commands.machine import checks as machine
from vllm_aiter_mla.kernels import device, stopwatch
from vllm_aiter_mla.kernels.backend import Binding
from vllm_aiter_mla.kernels.device import Device, card
from vllm_aiter_mla.kernels.inputs import LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform, detect_platform
from vllm_aiter_mla.serving import decision
from vllm_aiter_mla.verify import launches, session
from vllm_aiter_mla.verify.engine import EagerEngine, GraphEngine

SHAPE = LayerShape(2, 16, torch.bfloat16, torch.bfloat16, 4, False, latent=32, rope=16)


# The real one.


class Graph:
    """Behaves as ``CUDAGraph``: a dump announces itself as a warning."""

    def __init__(self, log, keep_graph=False):
        self.keep_graph = keep_graph
        self.capture_begin = lambda capture_error_mode: log.append(f"begin {capture_error_mode}")
        self.capture_end = lambda: log.append("end")
        self.replay = lambda: log.append("replay")

    def debug_dump(self, path):
        warnings.warn("DEBUG: calling debug_dump()", stacklevel=1)
        with open(path, "w") as file:
            file.write("digraph")


@pytest.fixture
def log(monkeypatch):
    """A simulated torch.cuda; returns what was asked of it, in order."""
    log = []

    @contextlib.contextmanager
    def graph(graph, pool=None, stream=None):
        log.append(("graph", graph.keep_graph, pool, stream))
        yield

    @contextlib.contextmanager
    def stream(stream):
        log.append(f"on {stream}")
        yield
        log.append(f"off {stream}")

    class Stream(str):
        def __new__(cls, name="new stream"):
            return super().__new__(cls, name)

        def wait_stream(self, other):
            log.append(f"{self} waits for {other}")

    class Event:
        def __init__(self, enable_timing):
            self.record = lambda: log.append("event")
            self.synchronize, self.elapsed_time = lambda: log.append("waited"), lambda other: 0.5

    replacements = {
        "is_available": lambda: True,
        "CUDAGraph": lambda keep_graph=False: Graph(log, keep_graph),
        "graph": graph,
        "stream": stream,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda: Stream("main"),
        "set_stream": lambda stream: log.append(f"back on {stream}"),
        "set_sync_debug_mode": log.append,
        "synchronize": lambda: log.append("synchronized"),
        "is_current_stream_capturing": lambda: True,
        "current_device": lambda: 1,
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch.version, "hip", None)
    return log


broken = raising(RuntimeError("operation not permitted when stream is capturing"))


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize(("hip", "size"), [(None, 50 << 20), ("7.0.2", 256 << 20)])
def test_the_caches_of_an_amd_card_hold_more_than_its_l2(monkeypatch, hip, size):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(L2_cache_size=50 << 20))
    assert Device().cache_bytes() == size


ASKED, HELD = "requested_bytes.all.current", "allocated_bytes.all.current"


@pytest.mark.parametrize(
    ("stats", "tensors"), [({ASKED: 1_179_648, HELD: 1_779_712}, 1_179_648), ({HELD: 2_097_152}, 2_097_152), ({}, 0)]
)
def test_a_tensor_counts_with_what_was_asked_for_where_the_allocator_says_it(monkeypatch, stats, tensors):
    """A block that is handed out again may be larger: seen as 600,064 bytes that a replay seemed to keep."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 << 20, 100 << 20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 30 << 20)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    assert Device().memory() == (tensors, 10 << 20)


@pytest.mark.gpu
def test_the_same_tensor_counts_the_same_in_a_block_that_is_larger():
    larger = torch.empty(1_779_712, dtype=torch.uint8, device="cuda")
    before, size = card().memory()[0] - larger.nbytes, 1_179_648
    del larger
    kept = torch.empty(size, dtype=torch.uint8, device="cuda")
    assert card().memory()[0] - before == kept.nbytes


@pytest.mark.parametrize(("rocm", "expected"), [("10.0.0", "10.0.0"), (None, "7.15.26333")])
def test_the_release_of_rocm_is_taken_from_torch_and_hips_version_where_torch_does_not_say_it(
    monkeypatch, rocm, expected
):
    monkeypatch.setattr(torch.version, "hip", "7.15.26333")
    monkeypatch.setattr(torch.version, "rocm", rocm, raising=False)
    assert Device().rocm == expected
    assert Device().built_for == f"ROCm {expected}"


@pytest.mark.parametrize(("hip", "rocm"), [("7.0.51831-a3e329ad8", (7, 0)), (None, None), ("unknown", None)])
def test_the_platform_is_read_only_from_torch(monkeypatch, hip, rocm):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "installed", Device())
    assert detect_platform() == Platform("cpu", rocm)
    found = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(device, "installed", Device())
    assert detect_platform() == (Platform("sm90") if hip is None else Platform("gfx942", rocm))


@pytest.mark.parametrize(
    ("hip", "cuda", "says"), [("7.0.2", None, "ROCm 7.0.2"), (None, "13.0", "CUDA 13.0"), (None, None, "")]
)
def test_a_build_of_torch_is_for_rocm_for_cuda_or_for_neither(monkeypatch, hip, cuda, says):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert Device().built_for == says


def test_without_a_card_a_machine_answers_what_it_can(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = Device()
    assert (here.is_there(), here.arch, here.is_capturing()) == (False, "cpu", False)
    here.synchronize()
    before = torch.get_rng_state()
    with here.fork_rng():
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())
    stop = here.count_kernels()
    torch.ones(3).sum()
    assert stop() == 0


def test_a_card_is_looked_for_once_by_what_every_step_asks(log, monkeypatch):
    here = Device()
    assert here.is_capturing()
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert here.is_capturing()


def test_two_events_lie_around_what_is_timed(log):
    assert Device().time_us(lambda: log.append("run")) == 500
    assert log == ["event", "run", "event", "waited"]


def test_a_recording_for_timing_has_a_stream_of_its_own_and_lets_other_threads_use_the_device(log):
    replay = Device().record(lambda: log.append("run"))
    assert log == ["synchronized", "on new stream", "begin thread_local", "run", "end", "off new stream"]
    replay()
    assert log[-1] == "replay"


def test_a_recording_that_breaks_is_ended_and_raises_what_broke_it(log):
    with pytest.raises(RuntimeError, match="operation not permitted"):
        Device().record(broken)
    assert log[-2:] == ["begin thread_local", "end"]


@pytest.mark.parametrize(("side", "stream"), [(True, "new stream"), (False, None)])
def test_a_capture_keeps_its_graph_for_the_dump_and_is_given_pool_and_stream(log, side, stream):
    graph = Device().capture(lambda: log.append("run"), "pool", side)
    assert log == [("graph", True, "pool", stream), "run"]
    assert Device().dot(graph) == "digraph"


def test_a_capture_that_fails_puts_the_stream_back(log):
    with pytest.raises(RuntimeError, match="operation not permitted"):
        Device().capture(broken, None, False)
    assert log[-1] == "back on main"


def test_a_graph_that_torch_does_not_dump_has_no_text_and_on_rocm_hip_python_is_asked(log, monkeypatch):
    graph = Graph(log)
    graph.debug_dump = lambda path: None
    assert Device().dot(graph) == ""
    monkeypatch.setattr(torch.version, "hip", "7.0.2")
    assert Device().dot(graph) is None
    graph.raw_cuda_graph = lambda: 7
    monkeypatch.setattr(launches, "hip_dot", lambda address: f"digraph {address}")
    assert launches.graph_dot(graph) == "digraph 7"


def test_the_check_for_synchronisations_is_off_again_after_one(log):
    with pytest.raises(RuntimeError, match="operation not permitted"), Device().syncs_raise():
        broken()
    assert log == ["error", "default"]


def test_a_side_stream_waits_and_is_waited_for(log):
    Device().on_side_stream(lambda: log.append("run"))
    assert log == ["new stream waits for main", "on new stream", "run", "off new stream", "main waits for new stream"]


# Another one, put in its place by one assignment.


@pytest.fixture
def recorded(monkeypatch):
    """A card of another make, on which each ``aten.neg`` takes ten microseconds."""
    monkeypatch.setitem(rehearsal_card.KERNELS, "neg", ("neg", 0))
    scenario = Scenario(arch="sm90", name="a recorded card", rocm=None, us={"neg": [(1, 10.0)]}, noise=0.0)
    return RehearsalCard(scenario).install(monkeypatch)


def answers(kind):
    """What a class has of its own, but private names."""
    return {name for name in vars(kind) if not name.startswith("_")}


def test_a_replacement_leaves_no_question_to_torch():
    assert answers(Device) <= answers(RehearsalCard)


def test_what_asks_for_a_card_finds_the_installed_one(recorded):
    assert machine.gpu_arch() == detect_platform().arch == "sm90"
    assert machine.check_torch({}).status == "problem"
    assert CheckOptions().can_use_gpu
    assert stopwatch.machine()["card"] == session.Session(quick=True, case=("fresh-data",)).machine["card"]
    engine = session.engine_here()
    assert (type(engine), engine.device) == (GraphEngine, "cpu")
    recorded.rocm, recorded.arch = "7.0.2", "gfx942"
    assert (machine.rocm_version(), detect_platform()) == ("7.0.2", Platform("gfx942", (7, 0)))


def test_without_the_replacement_there_is_no_card():
    assert (type(card()), CheckOptions().can_use_gpu, type(session.engine_here("cpu"))) == (
        Device,
        card().is_there(),
        EagerEngine,
    )


class Launching(Named):
    """Launches ``few`` below 4 tokens and ``many`` from there on."""

    def __init__(self, name, few, many):
        super().__init__(name)
        self.few, self.many = few, many

    def bind(self, inputs):
        def run(given):
            for _ in range(self.few if given.num_tokens < 4 else self.many):
                given.q.neg()
            return given.new_query()

        return Binding(run)


def timed(graphs):
    found = {"triton": Launching("triton", 1, 4), "vllm": Launching("vllm", 4, 1)}
    weight = synthetic_inputs(SHAPE).weight
    return stopwatch.time_shape(found, SHAPE, weight, (2, 8), stopwatch.Budget(float("inf")), graphs)


@pytest.mark.parametrize("graphs", [True, False])
def test_kernels_are_timed_and_chosen_by_what_a_launch_costs_on_the_installed_card(recorded, graphs):
    rounds = timed(graphs)
    assert stopwatch.medians(rounds) == {2: {"triton": 10.0, "vllm": 40.0}, 8: {"triton": 40.0, "vllm": 10.0}}
    assert decision.fastest_spans(rounds, ("triton", "vllm")) == spans((1, 2, "triton"), (3, 8, "vllm"))
    assert recorded.recorded == 4 * graphs


def test_what_is_recorded_for_timing_runs_once_and_its_replays_run_no_python(recorded):
    ran, calls = [], stopwatch.calls_of(SHAPE, [synthetic_inputs(SHAPE).weight], 2, resident=4096)
    replay = stopwatch.record(lambda given: ran.append(given) or given.q.neg(), calls)
    assert (replay(), replay()) == (10.0, 10.0)
    assert len(ran) == len(calls)


def test_the_kernels_of_a_step_are_counted_by_the_installed_card(recorded):
    worker = KernelCounter()
    worker.start_counting()
    torch.ones(3).neg().neg()
    assert worker.stop_counting() == 3


@pytest.mark.mutation
def test_mutation_a_clock_that_times_no_launch_is_caught(recorded, monkeypatch):
    monkeypatch.setattr(recorded, "time_us", lambda run: 1.0)
    with pytest.raises(AssertionError, match=f"'triton': {1 / 32}"):
        test_kernels_are_timed_and_chosen_by_what_a_launch_costs_on_the_installed_card(recorded, True)


@pytest.mark.mutation
def test_mutation_a_question_that_a_replacement_forgets_is_caught(monkeypatch):
    monkeypatch.setattr(Device, "temperature", lambda self: 40, raising=False)
    with pytest.raises(AssertionError, match="'temperature'"):
        test_a_replacement_leaves_no_question_to_torch()

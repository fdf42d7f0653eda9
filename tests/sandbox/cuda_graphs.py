"""Emulate CUDA graphs without a GPU: those of a graph's pieces, and full ones that hold a whole decode step.

vLLM cuts the model's graph at the splitting ops: Dynamo's graph by default, Inductor's with graph partition. It wraps
each piece, captures it once per size in a dummy run, and replays it in batches that its dispatcher gives to piecewise
graphs. A replay runs the recorded kernels over the buffers of the capture, but no Python: whatever a captured op
decided from the metadata is frozen. The cuts, the wrapping, the dispatcher, its padding and the dummy runs are vLLM's
here too. A replay calls the piece again with what Python saw at its capture: the inputs, and the metadata and slots,
which are None with model runner V1 and those of a decode batch with V2. It fills the outputs of its capture.

For batches of decode rows the model was captured as a whole. V2 hands its graph manager a closure over all that is
frozen, and a replay calls the closure again. V1 wraps the model: a replay calls it with the inputs, metadata and slot
mapping of the capture, each number the captured size. Only the contents of their tensors belong to this step.

Before V2 allocates the KV cache, it captures once to measure the memory, over a cache that it throws away.

What Python reads out of a tensor is not frozen: a GPU forbids it while it captures, which ``verify`` checks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map

VARIABLE = "AITER_MLA_SANDBOX_GRAPHS"
"""Environment variable: "1" lets each process of an engine emulate graphs."""
CAPTURED: Counter[int] = Counter()
"""How many pieces were captured, by rows."""
REPLAYED: Counter[int] = Counter()
"""How often a piece was replayed, by rows."""
REPLAYS: Counter[tuple[int, int]] = Counter()
"""How often a full graph of the model was replayed, by real rows and rows of the graph."""
DRAFT_REPLAYS: Counter[int] = Counter()
"""How often a full graph of V2's draft was replayed, by rows."""


@cache
def emulate() -> None:
    """Let vLLM plan, cut, capture and replay graphs on a CPU; before any engine is built. Idempotent."""
    from vllm.platforms import current_platform

    from tests.sandbox import platform

    _cut_as_on_a_gpu()
    platform.has_graphs = True
    platform_cls = type(current_platform)
    platform_cls.support_static_graph_mode = classmethod(lambda cls: True)
    platform_cls.get_static_graph_wrapper_cls = classmethod(lambda cls: f"{__name__}.{PieceGraphs.__name__}")
    _for_v1()
    _for_v2()


def _cut_as_on_a_gpu() -> None:
    """Let Inductor's partition cut at the splitting ops although the graph's nodes are on a CPU."""
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

    vllm_rule = Scheduler.should_partition

    def should_partition(scheduler: Any, node: Any) -> str | None:
        # Only the model's graph names splitting ops; the sampler's small graphs do not.
        if not torch._inductor.config.custom_should_partition_ops:
            return vllm_rule(scheduler, node)
        with mock.patch.object(BaseSchedulerNode, "is_gpu", return_value=True):
            return vllm_rule(scheduler, node)

    Scheduler.should_partition = should_partition


class CapturedPiece(NamedTuple):
    """One graph of a piece: what Python saw at its capture, and the outputs that each replay fills."""

    inputs: Any
    addresses: list[int]
    metadata: Any
    slots: Any
    output: Any


class PieceGraphs:
    """A piece with a graph for each batch descriptor that vLLM's dispatcher gives to piecewise graphs.

    vLLM makes one for each piece, of either partition, where a GPU has its ``CUDAGraphWrapper``; the arguments are that
    class's.
    """

    made: ClassVar[weakref.WeakSet[PieceGraphs]] = weakref.WeakSet()

    def __init__(
        self, runnable: Callable[..., Any], vllm_config: Any, runtime_mode: Any, cudagraph_options: Any
    ) -> None:
        self.runnable, self._mode = runnable, runtime_mode
        self._graphs: dict[Any, CapturedPiece] = {}
        self.made.add(self)

    @classmethod
    def forget_all(cls) -> None:
        """Drop all graphs, as vLLM does with those that only measured the memory."""
        for pieces in cls.made:
            pieces._graphs.clear()
        CAPTURED.clear()

    def __getattr__(self, name: str) -> Any:
        """The piece's own attribute."""
        return getattr(self.__dict__["runnable"], name)

    def __call__(self, *args: Any) -> Any:
        """Capture, replay, or, in a step without piecewise graphs, run.

        Raises:
            RuntimeError: an input, or V2's slots, lie elsewhere than at the capture, where a replay would read.
        """
        from vllm.compilation.monitor import validate_cudagraph_capturing_enabled
        from vllm.forward_context import get_forward_context

        context: Any = get_forward_context()
        if context.cudagraph_runtime_mode != self._mode:
            return self.runnable(*args)
        descriptor, addresses = context.batch_descriptor, _addresses(args)
        graph = self._graphs.get(descriptor)
        if graph is None:
            validate_cudagraph_capturing_enabled()
            inputs = tree_map(lambda value: value, args)  # Inductor empties the list that it is given
            seen = context.attn_metadata, context.slot_mapping
            self._graphs[descriptor] = CapturedPiece(inputs, addresses, *seen, self._run(context, args, *seen))
            CAPTURED[descriptor.num_tokens] += 1
            return self._graphs[descriptor].output
        moved = addresses != graph.addresses
        if moved or (graph.slots and _addresses(graph.slots) != _addresses(context.slot_mapping)):
            raise RuntimeError("what a captured piece reads has moved: a replay reads where the capture read")
        found = self._run(context, tree_map(lambda value: value, graph.inputs), graph.metadata, graph.slots)
        # An output may be another one's input: all are read before the first is written.
        for kept, value in zip(_tensors(graph.output), [one.clone() for one in _tensors(found)], strict=True):
            kept.copy_(value)
        REPLAYED[descriptor.num_tokens] += 1
        return graph.output

    def _run(self, context: Any, args: Any, metadata: Any, slots: Any) -> Any:
        with capturing(), shown(context, metadata, slots):
            return self.runnable(*args)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _addresses(values: Any) -> list[int]:
    return [value.data_ptr() for value in _tensors(values)]


class Captured(NamedTuple):
    """One full graph: what Python saw at its capture, and the tensor that each replay fills."""

    inputs: dict[str, Any]
    metadata: Any
    slots: Any
    output: torch.Tensor


class FullGraphs:
    """V1: a model's ``forward`` with a graph for each batch descriptor that vLLM's dispatcher gives a full graph.

    Args:
        forward: the model's own; it takes its inputs by name and gives a tensor.
    """

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        self._forward = forward
        self._graphs: dict[Any, Captured] = {}

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Capture, replay, or, in a step without a full graph, run.

        Raises:
            RuntimeError: a replay has changed a KV row outside its slots.
        """
        from vllm.compilation.monitor import validate_cudagraph_capturing_enabled
        from vllm.forward_context import get_forward_context

        context: Any = get_forward_context()
        if context.cudagraph_runtime_mode.name != "FULL":
            return self._forward(**inputs)
        graph = self._graphs.get(context.batch_descriptor)
        if graph is None:
            validate_cudagraph_capturing_enabled()
            with capturing(), unchanged_elsewhere(context):
                output = self._forward(**inputs)
            self._graphs[context.batch_descriptor] = Captured(
                inputs, context.attn_metadata, context.slot_mapping, output
            )
            return output
        with shown(context, graph.metadata, graph.slots), capturing(), unchanged_elsewhere(context):
            graph.output.copy_(self._forward(**graph.inputs))
        REPLAYS[_rows(graph.slots)] += 1
        return graph.output


class FullGraph:
    """V2: in place of ``torch.cuda.CUDAGraph``. A replay calls again what V2's graph manager called at the capture."""

    captured: ClassVar[tuple[Any, Callable[[Any], None]]]
    """The manager that captures, and the closure that its factory made last."""
    slots: ClassVar[Any] = None
    """The slot mapping that the last forward pass of a full graph has seen."""

    def __init__(self) -> None:
        self._manager, self._forward = self.captured

    def replay(self) -> None:
        """Run the captured step over what is in V2's buffers now.

        Raises:
            RuntimeError: it has changed a KV row outside its slots.
        """
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

        with capturing():
            self._forward(CUDAGraphMode.NONE)
        real, rows = _rows(self.slots)
        if isinstance(self._manager, ModelCudaGraphManager):
            REPLAYS[real, rows] += 1
        else:
            DRAFT_REPLAYS[rows] += 1


def _rows(slots: Any) -> tuple[int, int]:
    """The rows of a step that have a slot, and all of them."""
    first = next(iter(slots.values()))
    return int((first >= 0).sum()), first.shape[0]


def watched(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's ``forward`` that in a full graph of V2 writes KV rows nowhere outside the step's slots."""

    def run(*args: Any, **inputs: Any) -> Any:
        from vllm.forward_context import get_forward_context

        from vllm_aiter_mla.kernels.device import card

        if not card().is_capturing():
            return forward(*args, **inputs)
        context: Any = get_forward_context()
        FullGraph.slots = context.slot_mapping
        with unchanged_elsewhere(context):
            return forward(*args, **inputs)

    return run


@contextlib.contextmanager
def shown(context: Any, metadata: Any, slots: Any) -> Iterator[None]:
    """Let a forward context show this metadata and these slots for a block."""
    current = context.attn_metadata, context.slot_mapping
    context.attn_metadata, context.slot_mapping = metadata, slots
    try:
        yield
    finally:
        context.attn_metadata, context.slot_mapping = current


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Tell the plugin that a graph is being recorded."""
    from vllm_aiter_mla.kernels.device import card

    with mock.patch.object(card(), "is_capturing", return_value=True):
        yield


@contextlib.contextmanager
def unchanged_elsewhere(context: Any) -> Iterator[None]:
    """Check that in the blocks of a step, the null block and the last one, only the rows of its slots are written.

    A clamped index of -1 ends in the null block, a wrapped one in the last.

    Raises:
        RuntimeError: another row has changed.
    """
    kept = {name: _other_rows(context, name) for name in context.attn_metadata}
    yield
    for name, (rows, others, before) in kept.items():
        if not torch.equal(rows[others].view(torch.uint8), before):
            raise RuntimeError(f"a full graph of {name} has written KV rows outside its slots")


def _other_rows(context: Any, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The layer's cache as rows, the rows that must stay, and what is in them."""
    cache = context.no_compile_layers[name].kv_cache
    blocks, size = cache.shape[:2]
    table = context.attn_metadata[name].decode.block_table
    watched = torch.cat([table.flatten(), table.new_tensor([0, blocks - 1])]).unique().long()
    rows = (watched.unsqueeze(1) * size + torch.arange(size)).flatten()
    others = rows[~torch.isin(rows, context.slot_mapping[name])]
    cache = cache.view(blocks * size, -1)
    return cache, others, cache[others].view(torch.uint8)


def _for_v1() -> None:
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    load, warm_up = CPUModelRunner.load_model, CPUWorker.compile_or_warm_up_model

    def load_model(runner: Any, *args: Any, **kwargs: Any) -> None:
        load(runner, *args, **kwargs)
        runner.model.forward = FullGraphs(runner.model.forward)

    def compile_or_warm_up_model(worker: Any) -> Any:
        if worker.use_v2_model_runner:
            return warm_up(worker)
        # As vLLM's capture_model, without its streams and memory figures.
        set_cudagraph_capturing_enabled(True)
        for mode, descriptors in worker.model_runner.cudagraph_dispatcher.get_capture_descs():
            worker.model_runner._capture_cudagraphs(descriptors, mode)
        set_cudagraph_capturing_enabled(False)
        return warm_up(worker)

    CPUModelRunner.load_model = load_model
    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model


def _for_v2() -> None:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu import cudagraph_utils
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    type(current_platform).graph_pool_handle = classmethod(lambda cls: (0, 0))
    vars(torch.cuda).update(CUDAGraph=FullGraph, graph=lambda *_, **__: capturing())
    # It enters the capture of each group's GPU communicator.
    cudagraph_utils.graph_capture = lambda device: contextlib.nullcontext()
    capture, clear = cudagraph_utils.CudaGraphManager.capture, CUDAGraphWrapper.clear_all_graphs
    available = CPUWorker.determine_available_memory

    def capture_by(manager: Any, create_forward_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        def create(*given: Any, **named: Any) -> Any:
            FullGraph.captured = manager, create_forward_fn(*given, **named)
            return FullGraph.captured[1]

        capture(manager, create, *args, **kwargs)

    def clear_all_graphs(cls: Any) -> None:
        clear()
        PieceGraphs.forget_all()

    def determine_available_memory(worker: Any) -> Any:
        found = available(worker)
        if worker.use_v2_model_runner and worker.compilation_config.cudagraph_mode.name != "NONE":
            worker.model_runner.profile_cudagraph_memory()  # as a GPU's worker here
        return found

    cudagraph_utils.CudaGraphManager.capture = capture_by
    CUDAGraphWrapper.clear_all_graphs = classmethod(clear_all_graphs)
    CPUWorker.determine_available_memory = determine_available_memory
    for owner in (GPUModelRunner, DraftModelSpeculator):
        _watch(owner)


def _watch(owner: Any) -> None:
    load = owner.load_model

    def load_model(holder: Any, *args: Any, **kwargs: Any) -> None:
        load(holder, *args, **kwargs)
        holder.model.forward = watched(holder.model.forward)

    owner.load_model = load_model

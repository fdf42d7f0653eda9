"""Emulate CUDA graphs without a GPU: those of a graph's pieces, and full ones that hold a whole decode step.

vLLM cuts the model's graph at the splitting ops: Dynamo's graph by default, Inductor's with graph partition. It wraps
each piece, captures it once per size in a dummy run without metadata, and replays it in batches that its dispatcher
gives to piecewise graphs. A replay runs the recorded kernels over the buffers of the capture, but no Python: whatever a
captured op decided from the metadata is frozen. The cuts, the wrapping, the dispatcher, its padding and the dummy runs
are vLLM's here too. A replay calls the piece again with the inputs of its capture and without metadata, and fills the
outputs of its capture.

For batches of decode rows the model was captured as a whole. A replay calls the model again and shows it what it saw at
the capture: the same inputs, metadata and slot mapping, each number the captured size. Only the contents of their
tensors belong to this step, and each replay returns the same output tensor.

Model runner V2 captures pieces with the metadata of a decode batch. That is emulated over Inductor's partition, without
the dispatcher: while a piece runs, in every batch, the forward context shows such metadata.

What Python reads out of a tensor is not frozen: a GPU forbids it while it captures, which ``verify`` checks.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map

KINDS = ("decode", "vllm")
PIECES: list[int] = []
"""For each piece of Inductor's partition that was made for "decode", how many its graph has."""
CAPTURED: Counter[int] = Counter()
"""How many pieces were captured, by rows."""
REPLAYED: Counter[int] = Counter()
"""How often a piece was replayed, by rows."""
REPLAYS: Counter[tuple[int, int]] = Counter()
"""How often a full graph was replayed, by real rows and rows of the graph."""


def emulate(kind: str) -> None:
    """Cut graphs as on a GPU and freeze what they see; before any engine is built.

    Args:
        kind: "vllm": the graphs that the engine's ``cudagraph_mode`` asks for; "decode": pieces of Inductor's partition
            see a decode batch, as model runner V2 captures.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"graphs: expected one of {', '.join(KINDS)}, got {kind!r}")
    _cut_as_on_a_gpu()
    if kind == "vllm":
        _emulate_vllms()
    else:
        _freeze_over_a_decode_batch()


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


def _freeze_over_a_decode_batch() -> None:
    from vllm.compilation import decorators

    def wrapped(piece: Callable[..., Any], about: Any) -> Callable[..., Any]:
        PIECES.append(about.num_partitions)
        return _frozen(piece)

    @contextlib.contextmanager
    def wrapped_partitions(vllm_config: Any) -> Iterator[None]:
        torch._inductor.utils.set_customized_partition_wrappers(wrapped)
        yield
        torch._inductor.utils.set_customized_partition_wrappers(None)

    decorators.maybe_use_cudagraph_partition_wrapper = wrapped_partitions


def _frozen(piece: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        from vllm.forward_context import get_forward_context

        context: Any = get_forward_context()
        with shown(context, _as_decode(context.attn_metadata)):
            return piece(*args, **kwargs)

    return run


@contextlib.contextmanager
def shown(context: Any, metadata: Any) -> Iterator[None]:
    """Let a forward context show this metadata for a block."""
    current, context.attn_metadata = context.attn_metadata, metadata
    try:
        yield
    finally:
        context.attn_metadata = current


def _as_decode(metadata: Any) -> Any:
    """The metadata of a batch of the same size in which every row is a decode row."""
    if not isinstance(metadata, dict):
        return metadata
    return {name: _one_as_decode(entry) for name, entry in metadata.items()}


def _one_as_decode(entry: Any) -> Any:
    frozen = copy.copy(entry)
    frozen.num_prefills = 0
    frozen.num_decodes = frozen.num_decode_tokens = frozen.num_actual_tokens
    frozen.prefill = None
    if frozen.decode is None:
        rows = frozen.num_actual_tokens
        frozen.decode = SimpleNamespace(
            block_table=torch.zeros(rows, 1, dtype=torch.int32), seq_lens=torch.ones(rows, dtype=torch.int32)
        )
    return frozen


class CapturedPiece(NamedTuple):
    """One graph of a piece: the inputs of its capture, and the outputs that each replay fills."""

    inputs: Any
    addresses: list[int]
    output: Any


class PieceGraphs:
    """A piece with a graph for each batch descriptor that vLLM's dispatcher gives to piecewise graphs.

    vLLM makes one for each piece, of either partition, where a GPU has its ``CUDAGraphWrapper``; the arguments are that
    class's.
    """

    def __init__(
        self, runnable: Callable[..., Any], vllm_config: Any, runtime_mode: Any, cudagraph_options: Any
    ) -> None:
        self._piece, self._mode = runnable, runtime_mode
        self._graphs: dict[Any, CapturedPiece] = {}

    def __getattr__(self, name: str) -> Any:
        """The piece's own attribute."""
        return getattr(self.__dict__["_piece"], name)

    def __call__(self, *args: Any) -> Any:
        """Capture, replay, or, in a step without piecewise graphs, run.

        Raises:
            RuntimeError: an input lies elsewhere than at the capture, where a replay would read.
        """
        from vllm.compilation.monitor import validate_cudagraph_capturing_enabled
        from vllm.forward_context import get_forward_context

        context: Any = get_forward_context()
        if context.cudagraph_runtime_mode != self._mode:
            return self._piece(*args)
        descriptor, addresses = context.batch_descriptor, _addresses(args)
        graph = self._graphs.get(descriptor)
        if graph is None:
            validate_cudagraph_capturing_enabled()
            inputs = tree_map(lambda value: value, args)  # Inductor empties the list that it is given
            self._graphs[descriptor] = CapturedPiece(inputs, addresses, self._run(context, args))
            CAPTURED[descriptor.num_tokens] += 1
            return self._graphs[descriptor].output
        if addresses != graph.addresses:
            raise RuntimeError("an input of a captured piece has moved: a replay reads where the capture read")
        found = self._run(context, tree_map(lambda value: value, graph.inputs))
        # An output may be another one's input: all are read before the first is written.
        for kept, value in zip(_tensors(graph.output), [one.clone() for one in _tensors(found)], strict=True):
            kept.copy_(value)
        REPLAYED[descriptor.num_tokens] += 1
        return graph.output

    def _run(self, context: Any, args: Any) -> Any:
        with capturing(), shown(context, None):
            return self._piece(*args)


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
    """A model's ``forward`` with a graph for each batch descriptor that vLLM's dispatcher gives a full graph.

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
        context.attn_metadata, context.slot_mapping = graph.metadata, graph.slots
        with capturing(), unchanged_elsewhere(context):
            graph.output.copy_(self._forward(**graph.inputs))
        slots = next(iter(graph.slots.values()))
        REPLAYS[int((slots >= 0).sum()), slots.shape[0]] += 1
        return graph.output


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
    for name, (cache, others, before) in kept.items():
        if not torch.equal(cache[others].view(torch.uint8), before):
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


def _emulate_vllms() -> None:
    """Let vLLM plan, capture and replay graphs on a CPU."""
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    from tests.sandbox import platform

    platform.has_graphs = True
    platform_cls = type(current_platform)
    platform_cls.support_static_graph_mode = classmethod(lambda cls: True)
    platform_cls.get_static_graph_wrapper_cls = classmethod(lambda cls: f"{__name__}.{PieceGraphs.__name__}")
    load, warm_up = CPUModelRunner.load_model, CPUWorker.compile_or_warm_up_model

    def load_model(runner: Any, *args: Any, **kwargs: Any) -> None:
        load(runner, *args, **kwargs)
        runner.model.forward = FullGraphs(runner.model.forward)

    def compile_or_warm_up_model(worker: Any) -> Any:
        # As vLLM's capture_model, without its streams and memory figures.
        set_cudagraph_capturing_enabled(True)
        for mode, descriptors in worker.model_runner.cudagraph_dispatcher.get_capture_descs():
            worker.model_runner._capture_cudagraphs(descriptors, mode)
        set_cudagraph_capturing_enabled(False)
        return warm_up(worker)

    CPUModelRunner.load_model = load_model
    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model

"""Emulate full CUDA graphs without a GPU: one graph of a whole decode step per captured size.

On a GPU, vLLM's dispatcher pads a batch of decode rows to a captured size. The model is captured once per size in a
dummy run of vLLM's own: Python sees no other batch. A replay runs the recorded kernels over vLLM's persistent buffers
and hands out the same output tensor each time. Here the dispatcher, its padding, the dummy runs and the buffers are
vLLM's own; a replay calls the model again, and shows it what it saw at the capture: the same inputs, metadata and slot
mapping, each number the captured size. Only what lies in their tensors is of this step. It is model runner V1's.

What Python reads out of a tensor is not frozen: a GPU forbids it while it captures, which ``verify`` checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

REPLAYS: Counter[tuple[int, int]] = Counter()
"""How often a graph was replayed, by real rows and rows of the graph."""


class Captured(NamedTuple):
    """One graph: what Python saw when it was captured, and the tensor that each replay fills."""

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
            RuntimeError: a replay has changed a KV row that is none of its slots.
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


@contextmanager
def capturing() -> Iterator[None]:
    """The plugin is told that a graph is being recorded."""
    from vllm_aiter_mla.kernels import backend as capture

    with (
        mock.patch.object(capture, "_has_gpu", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
    ):
        yield


@contextmanager
def unchanged_elsewhere(context: Any) -> Iterator[None]:
    """Hold that of the blocks of a step, the null block and the last one, only the rows of its slots are written.

    An index of -1 that is clamped ends in the null block, one that wraps around in the last.

    Raises:
        RuntimeError: another row has changed.
    """
    kept = {name: _other_rows(context, name) for name in context.attn_metadata}
    yield
    for name, (cache, others, before) in kept.items():
        if not torch.equal(cache[others].view(torch.uint8), before):
            raise RuntimeError(f"a full graph of {name} has written KV rows that are none of its slots")


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


def emulate() -> None:
    """Let vLLM plan, capture and replay full graphs on a CPU; before any config is built."""
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    from tests.sandbox import platform

    platform.has_graphs = True
    type(current_platform).support_static_graph_mode = classmethod(  # type: ignore[method-assign,assignment]
        lambda cls: True
    )
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

    CPUModelRunner.load_model = load_model  # type: ignore[method-assign]
    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model  # type: ignore[method-assign,assignment]

"""Emulate a piecewise graph capture without a GPU.

On a GPU, Inductor cuts the graph at the splitting ops and vLLM captures every piece once, with the metadata that
Python sees then: none at all (model runner v1) or that of a decode batch (v2). A replay runs the recorded kernels
over current buffers, but no Python: whatever a captured op decided from the metadata is frozen. Here the graph is cut
by Inductor's own rule, its nodes said to be a GPU's, and while a piece runs, the forward context shows the frozen
metadata; buffers stay current. ``full_graphs`` adds the graphs that hold a whole decode step.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

KINDS = ("none", "decode", "full")
PIECES: list[int] = []
"""For each piece that was made, how many its graph has."""


def emulate(kind: str) -> None:
    """Cut graphs as on a GPU and freeze the metadata that pieces see; before any engine is built.

    Args:
        kind: "none": no metadata, as model runner v1 captures; "decode": every row a decode row, as v2 does; "full":
            as "none", in steps that vLLM's dispatcher gives to piecewise graphs.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"graphs: expected one of {', '.join(KINDS)}, got {kind!r}")
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
    from vllm.compilation import decorators

    vllm_rule = Scheduler.should_partition

    def should_partition(scheduler: Any, node: Any) -> str | None:
        # Only vLLM's model graph names splitting ops; the sampler's small graphs are none of ours.
        if not torch._inductor.config.custom_should_partition_ops:
            return vllm_rule(scheduler, node)
        with mock.patch.object(BaseSchedulerNode, "is_gpu", return_value=True):
            return vllm_rule(scheduler, node)

    Scheduler.should_partition = should_partition  # type: ignore[method-assign,assignment]

    def wrapped(piece: Callable[..., Any], about: Any) -> Callable[..., Any]:
        PIECES.append(about.num_partitions)
        return _frozen(piece, kind)

    @contextlib.contextmanager
    def wrapped_partitions(vllm_config: Any) -> Iterator[None]:
        torch._inductor.utils.set_customized_partition_wrappers(wrapped)
        yield
        torch._inductor.utils.set_customized_partition_wrappers(None)  # type: ignore[arg-type]

    decorators.maybe_use_cudagraph_partition_wrapper = wrapped_partitions


def _frozen(piece: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        from vllm.forward_context import get_forward_context

        context: Any = get_forward_context()
        if kind == "full" and context.cudagraph_runtime_mode.name != "PIECEWISE":
            return piece(*args, **kwargs)  # part of a full graph, or of a step without graphs
        current = context.attn_metadata
        context.attn_metadata = _as_decode(current) if kind == "decode" else None
        try:
            return piece(*args, **kwargs)
        finally:
            context.attn_metadata = current

    return run


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

"""What is under test: a back end inside the plugin's own op bodies, and the steps made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.ops import bodies
from vllm_aiter_mla.verify.buffers import Buffers
from vllm_aiter_mla.verify.layer import Kernel, Layer, Operands

Outputs = dict[str, torch.Tensor]


def attend(ctx: bodies.LayerContext, q_prepared: torch.Tensor, is_rotated: bool = False) -> None:
    """The attention op of the plugin: q_prepared [T, N, latent+R]; ``is_rotated`` is what it is told of q and k_pe."""
    layer, size = ctx.layer, q_prepared.shape[0]
    assert isinstance(layer, Layer)
    buffers, step = layer.buffers, layer.buffers.batch
    batch = bodies.Batch(None if step.dummy else step, step.rows, not step.dummy and step.prefill_rows == 0)
    q, k_pe, kv_c, positions = layer.operands(size)
    bodies.attention(
        ctx, batch, q, kv_c, k_pe, q_prepared, layer.out[:size],
        positions, buffers.table, buffers.variant.is_neox, is_rotated,
    )  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A back end as the plugin would run it; a planted fault replaces what it changes.

    Attributes:
        backend: what it says about itself counts.
        prepare: its kernel.
        defined_rows: how many leading rows of q_prepared it defines.
        attend: the attention op.
    """

    backend: KernelBackend
    prepare: Kernel
    defined_rows: Callable[[DecodeInputs], int]
    attend: Callable[..., None] = attend


def subject_of(backend: KernelBackend) -> Subject:
    """A back end without a fault."""
    return Subject(backend, lambda inputs, batch: backend.prepare(inputs), backend.defined_rows)


def context_of(
    buffers: Buffers, subject: Subject, index: int, slots: int | None = None, piecewise: bool = False
) -> bodies.LayerContext:
    """A layer as the op bodies take it; ``slots`` is S, by default the whole buffer, however many rows a step has."""
    layer = replace(buffers.layers[index], kernel=subject.prepare)
    return bodies.LayerContext(f"layer {index}", layer, layer.kv_cache, buffers.slots[:slots], piecewise)


def fused(ctx: bodies.LayerContext, operands: Operands) -> torch.Tensor:
    """The fused op of the plugin, over ``Layer.operands``: q_prepared [T, N, latent+R]."""
    layer = ctx.layer
    assert isinstance(layer, Layer)
    table, variant = layer.buffers.table, layer.buffers.variant
    return bodies.fused_prepare(ctx, *operands, table, layer.k_scale, variant.is_neox, variant.out)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a step: recorded into a graph, or run anew at every replay as vLLM runs a splitting op."""

    captured: bool
    run: Callable[[], Outputs]


def query_name(index: int) -> str:
    """Key of a layer's prepared query among a step's outputs."""
    return f"q_prepared.{index}"


def build(kind: str, buffers: Buffers, subject: Subject, size: int, slots: int | None = None) -> list[Segment]:
    """The segments of one step at a padded size.

    Args:
        kind: "kernel" is the fused op alone; "full" has the attention op in the same graph; "piecewise" leaves it out.
        buffers: what the step reads and writes.
        subject: what is tested.
        size: T.
        slots: S, where it is below T; by default the slot mapping is longer than T.
    """
    contexts = [context_of(buffers, subject, i, slots, kind == "piecewise") for i in range(len(buffers.layers))]
    results: Outputs = {}

    def prepare(i: int) -> None:
        results[query_name(i)] = fused(contexts[i], buffers.layers[i].operands(size))

    def attention(i: int) -> None:
        subject.attend(contexts[i], results[query_name(i)])

    def tail() -> None:
        # Something behind the attention that a graph computes from its output buffer.
        results.update({f"final.{i}": layer.out[:size] * 2 for i, layer in enumerate(buffers.layers)})

    def segment(captured: bool, *calls: Callable[[], None]) -> Segment:
        def run() -> Outputs:
            for call in calls:
                call()
            return results

        return Segment(captured, run)

    calls: list[tuple[bool, Callable[[], None]]] = []
    for i in range(len(contexts)):
        calls.append((True, partial(prepare, i)))
        if kind != "kernel":
            calls.append((False, partial(attention, i)))
    if kind != "kernel":
        calls.append((True, tail))
    if kind == "piecewise":
        return [segment(captured, call) for captured, call in calls]
    return [segment(True, *(call for _, call in calls))]

"""What is under test: a back end inside the plugin's own op bodies, and the steps made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.compare import EXACT
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.ops import bodies
from vllm_aiter_mla.verify.layer import Kernel, PlainLayer
from vllm_aiter_mla.verify.world import Layer, World

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Attend:
    """One call of the attention op.

    Attributes:
        context: the layer as the op body takes it.
        world: the buffers that all layers share.
        layer: the layer's tensors.
        q_prepared: [T, N, latent+R].
        is_rotated: what the op is told of q and k_pe.
    """

    context: bodies.LayerContext
    world: World
    layer: Layer
    q_prepared: torch.Tensor
    is_rotated: bool = False


def attend(call: Attend) -> None:
    """The attention op of the plugin."""
    world, layer, size = call.world, call.layer, call.q_prepared.shape[0]
    step = world.batch
    batch = bodies.Batch(None if step.dummy else step, step.rows, not step.dummy and step.prefill_rows == 0)
    bodies.attention(
        call.context, batch, layer.q[:size], layer.kv_c[:size], layer.k_pe[:size], call.q_prepared, layer.out[:size],
        world.positions[:size], world.table, world.variant.is_neox, call.is_rotated,
    )  # fmt: skip


def fused(
    world: World,
    context: bodies.LayerContext,
    layer: Layer,
    q: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The fused op of the plugin."""
    is_neox, out = world.variant.is_neox, world.variant.out
    return bodies.fused_prepare(context, q, k_pe, kv_c, positions, world.table, layer.k_scale, is_neox, out)


def context_of(world: World, subject: Subject, index: int, slots: int | None, piecewise: bool) -> bodies.LayerContext:
    """A layer as the op bodies take it; ``slots`` is S, by default the whole buffer, however many rows a step has."""
    layer = world.layers[index]
    plain = PlainLayer(world, layer, subject.prepare)
    return bodies.LayerContext(f"layer {index}", plain, layer.kv_cache, world.slots[:slots], piecewise)


def all_rows(inputs: DecodeInputs) -> torch.Tensor:
    """Every row of q_prepared is defined: bool [T]."""
    return torch.ones(inputs.num_tokens, dtype=torch.bool, device=inputs.q.device)


@dataclass(frozen=True)
class Subject:
    """A back end as the plugin would run it; a planted fault replaces one field.

    Attributes:
        name: of the back end.
        refuse: why a call cannot be taken, or None.
        prepare: its kernel.
        attend: the attention op.
        defined: which rows of q_prepared the back end defines, bool [T].
        numerics: the roundings that count as right, the documented one first.
        reference_bmm: whether the absorb BMM is the reference's own, so that the nope half must agree to the bit.
        exact_rope: whether the rotated half must agree to the bit.
        plain: a call that launches as much as one of the back end may, where ``census.EXPECTED`` has no list for it.
    """

    name: str
    refuse: Callable[[DecodeInputs], str | None]
    prepare: Kernel
    attend: Callable[[Attend], None] = attend
    defined: Callable[[DecodeInputs], torch.Tensor] = all_rows
    numerics: Callable[[DecodeInputs], tuple[reference.Numerics, ...]] = field(
        default=lambda inputs: (reference.AITER,)
    )
    reference_bmm: bool = True
    exact_rope: bool = True
    plain: Callable[[DecodeInputs], torch.Tensor] | None = None


def subject_of(backend: KernelBackend) -> Subject:
    """A back end, with what it says about itself."""

    def defined(inputs: DecodeInputs) -> torch.Tensor:
        return torch.arange(inputs.num_tokens, device=inputs.q.device) < backend.defined_rows(inputs)

    def numerics(inputs: DecodeInputs) -> tuple[reference.Numerics, ...]:
        # AITER's truncating store is read from its source; should a release round instead, that is no failure.
        return tuple(dict.fromkeys((backend.numerics(inputs), reference.AITER)))

    is_reference = backend.name == "reference"
    return Subject(
        name=backend.name,
        refuse=backend.refuse,
        prepare=lambda inputs, batch: backend.prepare(inputs),
        defined=defined,
        numerics=numerics,
        reference_bmm=backend.bounds == EXACT,
        exact_rope=is_reference,
        plain=reference.prepare if is_reference else None,
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a step: recorded into a graph, or run anew at every replay as vLLM runs a splitting op."""

    captured: bool
    run: Callable[[], Outputs]


def query_name(index: int) -> str:
    """Key of a layer's prepared query among a step's outputs."""
    return f"q_prepared.{index}"


def build(kind: str, world: World, subject: Subject, size: int, slots: int | None = None) -> list[Segment]:
    """The segments of one step at a padded size.

    Args:
        kind: "kernel" is the fused op alone; "full" has the attention op in the same graph; "piecewise" leaves it out.
        world: the buffers.
        subject: what is tested.
        size: T.
        slots: S, where it is below T; by default the slot mapping is longer than T.
    """
    contexts = [context_of(world, subject, i, slots, kind == "piecewise") for i in range(len(world.layers))]
    step = _Step(world, subject, size, contexts, {})
    layers = [(partial(step.prepare, i), partial(step.attend, i)) for i in range(len(contexts))]
    if kind == "kernel":
        return [step.segment(*(prepare for prepare, _ in layers))]
    if kind == "full":
        return [step.segment(*(call for pair in layers for call in pair), step.tail)]
    pieces = ((step.segment(prepare), step.segment(attend, captured=False)) for prepare, attend in layers)
    return [*(segment for pair in pieces for segment in pair), step.segment(step.tail)]


@dataclass(frozen=True, slots=True)
class _Step:
    """The calls of a step; each adds what it computes to ``results``."""

    world: World
    subject: Subject
    size: int
    contexts: list[bodies.LayerContext]
    results: Outputs

    def prepare(self, i: int) -> None:
        own, size = self.world.layers[i], self.size
        q, k_pe, kv_c, positions = own.q[:size], own.k_pe[:size], own.kv_c[:size], self.world.positions[:size]
        self.results[query_name(i)] = fused(self.world, self.contexts[i], own, q, k_pe, kv_c, positions)

    def attend(self, i: int) -> None:
        call = Attend(self.contexts[i], self.world, self.world.layers[i], self.results[query_name(i)])
        self.subject.attend(call)

    def tail(self) -> None:
        # Something behind the attention that a graph computes from its output buffer.
        self.results.update({f"final.{i}": layer.out[: self.size] * 2 for i, layer in enumerate(self.world.layers)})

    def segment(self, *calls: Callable[[], None], captured: bool = True) -> Segment:
        return Segment(captured, partial(self._run, calls))

    def _run(self, calls: tuple[Callable[[], None], ...]) -> Outputs:
        for call in calls:
            call()
        return self.results

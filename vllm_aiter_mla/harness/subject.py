"""What is under test: a back end inside the op, the op's fake, and the attention op; and programs made of them.

The two ops repeat the semantics of ``runtime.fused`` and ``runtime.attention`` without vLLM. A fault of the self-test
is one field replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from vllm_aiter_mla.harness import attention
from vllm_aiter_mla.harness.world import Batch, Layer, World
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.compare import EXACT
from vllm_aiter_mla.kernels.inputs import DecodeInputs

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the op: the operands, and what it could read from Python but must not."""

    inputs: DecodeInputs
    batch: Batch
    layer: Layer


@dataclass(frozen=True, slots=True)
class Attend:
    """One call of the attention op for a padded size; ``q_prepared`` is [T, N, latent+R]."""

    world: World
    layer: Layer
    size: int
    q_prepared: torch.Tensor


def declare(inputs: DecodeInputs) -> torch.Tensor:
    """The op's fake: [T, N, latent+R] of ``out_dtype`` on the meta device, from shapes and dtypes alone."""
    shape = (inputs.q.shape[0], inputs.q.shape[1], inputs.kv_c.shape[-1] + inputs.k_pe.shape[-1])
    return torch.empty(shape, dtype=inputs.out_dtype, device="meta")


def attend(call: Attend) -> None:
    """The attention op: decode rows with the prepared query, mixed batches with rotated private copies."""
    batch = call.world.batch
    if batch.dummy:
        return
    n = batch.rows
    if batch.prefill_rows == 0:
        call.layer.out[:n] = attention.decode_attention(call.world, call.layer, call.q_prepared[:n])
        return
    q = attention.rotated_copies(call.world, call.layer, n)
    call.layer.out[:n] = attention.mixed_attention(call.world, call.layer, q)


def all_rows(inputs: DecodeInputs) -> torch.Tensor:
    """Every row of q_prepared is defined: bool [T]."""
    return torch.ones(inputs.num_tokens, dtype=torch.bool, device=inputs.q.device)


@dataclass(frozen=True)
class Subject:
    """A back end as the plugin would run it.

    Attributes:
        name: of the back end.
        refuse: why a call cannot be taken, or None.
        prepare: the op's real implementation.
        declare: its fake.
        attend: the attention op.
        defined: which rows of q_prepared the back end defines, bool [T].
        numerics: the roundings that count as right, the documented one first.
        reference_bmm: whether the absorb BMM is the reference's own, so that the nope half must agree to the bit.
        exact_rope: whether the rotated half must agree to the bit.
        plain: a call that launches as much as one of the back end may, where ``census.EXPECTED`` has no list for it.
    """

    name: str
    refuse: Callable[[DecodeInputs], str | None]
    prepare: Callable[[Call], torch.Tensor]
    declare: Callable[[DecodeInputs], torch.Tensor] = declare
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

    return Subject(
        name=backend.name,
        refuse=backend.refuse,
        prepare=lambda call: backend.prepare(call.inputs),
        defined=defined,
        numerics=numerics,
        reference_bmm=backend.bounds == EXACT,
        exact_rope=backend.name == "reference",
        plain=reference.prepare if backend.name == "reference" else None,
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a step: recorded into a graph, or run anew at every replay as vLLM runs a splitting op."""

    captured: bool
    run: Callable[[], Outputs]


def query_name(index: int) -> str:
    """Key of a layer's prepared query among a program's outputs."""
    return f"q_prepared.{index}"


def build(kind: str, world: World, subject: Subject, size: int, slots: int | None = None) -> list[Segment]:
    """The segments of one step at a padded size.

    Args:
        kind: "kernel" is the op alone; "full" holds the attention op in the same graph; "piecewise" leaves it out.
        world: the buffers.
        subject: what is tested.
        size: T.
        slots: S, where it is below T.
    """
    results: Outputs = {}

    def prepare(index: int) -> Outputs:
        layer = world.layers[index]
        prepared = subject.prepare(Call(world.inputs(layer, size, slots), world.batch, layer))
        return {query_name(index): prepared}

    def attention_op(index: int) -> Outputs:
        layer = world.layers[index]
        subject.attend(Attend(world, layer, size, results[query_name(index)]))
        return {}

    def tail() -> Outputs:
        # Something behind the attention that a graph computes from its output buffer.
        return {f"final.{i}": layer.out[:size] * 2 for i, layer in enumerate(world.layers)}

    def keep(*parts: Callable[[], Outputs]) -> Callable[[], Outputs]:
        def run() -> Outputs:
            for part in parts:
                results.update(part())
            return results

        return run

    indices = range(len(world.layers))
    if kind == "kernel":
        return [Segment(True, keep(*(_bind(prepare, i) for i in indices)))]
    if kind == "full":
        both = [_bind(part, i) for i in indices for part in (prepare, attention_op)]
        return [Segment(True, keep(*both, tail))]
    parts = []
    for i in indices:
        parts += [Segment(True, keep(_bind(prepare, i))), Segment(False, keep(_bind(attention_op, i)))]
    return [*parts, Segment(True, keep(tail))]


def _bind(part: Callable[[int], Outputs], index: int) -> Callable[[], Outputs]:
    return lambda: part(index)

"""The operands of a sweep. In a real step a layer's weight comes from memory and its query from the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import cycle, islice
from typing import Any, cast

import torch

from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.measure.clock import MIN_CALLS
from vllm_aiter_mla.kernels.shape import LayerShape, synthetic_inputs

# Operand sets of one measurement: as many as do not fit in the caches, and no more than a graph can hold comfortably.
MIN_SETS, MAX_SETS = 8, 512
MOST_RESULTS = 256 << 20  # bytes of results that calls beyond the sets needed may add


def sets_needed(bytes_once: int, resident: int) -> int:
    """Operand sets whose bytes are at least twice what the caches hold, so that no set is found there again.

    At most ``MAX_SETS``: sets of less than 1 MiB may stay in a cache of 256 MiB. To read one from there instead of from
    memory saves a fraction of a microsecond, in every kernel alike.
    """
    return max(MIN_SETS, min(MAX_SETS, -(-2 * resident // max(bytes_once, 1))))


def cold_weights(weight: AbsorbWeight, resident: int) -> list[AbsorbWeight]:
    """``weight`` and copies of it, strides kept, together too large for caches of ``resident`` bytes."""
    count = sets_needed(bytes_of(weight), resident)
    return [weight, *(_copied(weight) for _ in range(count - 1))]


def bytes_of(weight: AbsorbWeight) -> int:
    """Bytes of all that the product reads of the weight."""
    return sum(tensor.numel() * tensor.itemsize for _, tensor in weight.tensors)


def _copied(weight: AbsorbWeight) -> AbsorbWeight:
    record = cast(Any, weight)  # every form is a frozen record of tensors
    found = {field.name: getattr(record, field.name) for field in fields(record)}
    tensors = {name: value.clone() for name, value in found.items() if isinstance(value, torch.Tensor)}
    return cast(AbsorbWeight, replace(record, **tensors))


def calls(shape: LayerShape, weights: Sequence[AbsorbWeight], tokens: int, resident: int) -> list[DecodeInputs]:
    """One call after the other with cold weights; the activations are shared, as the step has just written them.

    Draws from a generator of its own, on the device.
    """
    generator = torch.Generator(device=shape.device).manual_seed(tokens)
    one = synthetic_inputs(shape, tokens, padded=None, generator=generator)
    result = tokens * shape.heads * (shape.latent + shape.rope) * shape.out_dtype.itemsize
    needed = sets_needed(bytes_of(weights[0]) + result, resident)
    count = max(needed, min(MIN_CALLS, MOST_RESULTS // result))
    return [replace(one, weight=weight) for weight in islice(cycle(weights), count)]

# SPDX-License-Identifier: Apache-2.0
"""Prepare for batches with prefill rows, which vLLM's own functions run: check its rotation, compile its quantisation.

The rotary kernel takes the place of code that Inductor generates, so it has to round once. This project has read in
vLLM's sources that it does; a start checks that on the user's card.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.kernels import formats
from vllm_aiter_mla.kernels.backend import EXACT
from vllm_aiter_mla.kernels.distance import difference
from vllm_aiter_mla.kernels.inputs import LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.reference import gather_cos_sin, rotate
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.startup.comparison import ROTARY_STYLES


class RotationError(RuntimeError):
    """vLLM's rotary kernel does not rotate as vLLM's compiled graph."""


def check_rotation(layer: Layer) -> None:
    """Check vLLM's rotary kernel for layers of this shape, if it may rotate their prefill rows.

    Raises:
        RotationError: the kernel rounds more than once, or rotates in another way.
    """
    if compat_layer.rounds_once(layer.module):
        compare_rotation(partial(compat_layer.rotary_embedding, compat_layer.ROTARY_KERNEL), layer.shape())


def compare_rotation(kernel: Callable[..., None], shape: LayerShape) -> None:
    """Rotate synthetic rows in place with ``kernel``, under both rotary styles, and compare with the reference.

    Args:
        kernel: takes positions [T], q_pe [T, N, R], k_pe [T, 1, R], the table [max_position, R] and ``is_neox``.
        shape: the layer; its rotary style does not count.

    Raises:
        RotationError: more than one value in a hundred differs from the rotation rounded once, or one value
            differs by two steps.
    """
    for is_neox in ROTARY_STYLES:
        inputs = synthetic_inputs(replace(shape, is_neox=is_neox))
        rows = {"q": inputs.q[..., inputs.nope_dim :], "k": inputs.k_pe.unsqueeze(1)}
        cos, sin = (half.unsqueeze(1) for half in gather_cos_sin(inputs.cos_sin_cache, inputs.positions))
        expected = {name: rotate(x, cos, sin, is_neox).to(x.dtype) for name, x in rows.items()}
        kernel(inputs.positions, *rows.values(), inputs.cos_sin_cache, is_neox)
        for name, x in rows.items():
            apart = difference(x, expected[name])
            if apart.steps > EXACT.rope_steps or apart.share > EXACT.rope_share:
                raise RotationError(
                    "vLLM's rotary kernel differs from a rotation that rounds once "
                    f"({'NeoX' if is_neox else 'GPT-J'} pairs): {name} {apart.steps} step(s) on {apart.share:.2%}"
                )


def compile_quantisation(layer: Layer) -> None:
    """Let vLLM compile the function with which its own attention quantises a query, if the layer's query is fp8.

    vLLM's warm-up, which would compile the function, has only decode batches, and those run our op. Without this call
    the first batch that mixes prefill and decode rows would compile it while it serves.
    """
    shape = layer.shape()
    if not formats.is_fp8(shape.out_dtype):
        return
    for rows in (2, 1):  # torch compiles separately for one row, and once for all other counts
        absorbed, query = (
            torch.zeros(rows, shape.heads, width, dtype=shape.act, device=shape.device)
            for width in (shape.latent, shape.nope_dim + shape.rope)
        )
        with torch.inference_mode():
            layer.quantise(absorbed, query[..., shape.nope_dim :])

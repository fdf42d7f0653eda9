# SPDX-License-Identifier: Apache-2.0
"""Prepare for batches with prefill rows, which vLLM's own functions run: check its rotation, compile its quantisation.

vLLM's rotary kernel replaces code that Inductor generates, so the kernel has to round once. According to vLLM's sources
the kernel rounds once. Each start checks that on the user's card.
"""

from collections.abc import Callable, Sequence
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
    """Check vLLM's rotary kernel for layers of this shape, if the kernel may rotate their prefill rows.

    Raises:
        RotationError: the kernel rounds more than once, or rotates in another way.
    """
    if compat_layer.rounds_once(layer.module):
        compare_rotation(partial(compat_layer.rotary_embedding, compat_layer.ROTARY_KERNEL), layer.shape())


def compare_rotation(kernel: Callable[..., None], shape: LayerShape) -> None:
    """Rotate synthetic rows in place with ``kernel``, under both rotary styles, and compare with the reference.

    Args:
        kernel: takes positions [T], q_pe [T, N, R], k_pe [T, 1, R], the table [max_position, R] and ``is_neox``.
        shape: the layer; its rotary style is ignored.

    Raises:
        RotationError: more than one value in a hundred differs from a rotation that rounds once, or one value
            differs by two steps.
    """
    for is_neox in ROTARY_STYLES:
        inputs = synthetic_inputs(replace(shape, is_neox=is_neox))
        rows = {"q": inputs.q[..., inputs.nope_dim :], "k": inputs.k_pe.unsqueeze(1)}
        cos, sin = (half.unsqueeze(1) for half in gather_cos_sin(inputs.cos_sin_cache, inputs.positions))
        expected = {name: rotate(values, cos, sin, is_neox).to(values.dtype) for name, values in rows.items()}
        kernel(inputs.positions, *rows.values(), inputs.cos_sin_cache, is_neox)
        for name, values in rows.items():
            rotation_difference = difference(values, expected[name])
            if rotation_difference.steps > EXACT.rope_steps or rotation_difference.share > EXACT.rope_share:
                figures = f"{rotation_difference.steps} step(s) on {rotation_difference.share:.2%}"
                raise RotationError(
                    "vLLM's rotary kernel differs from a rotation that rounds once "
                    f"({'NeoX' if is_neox else 'GPT-J'} pairs): {name} {figures}"
                )


def compile_quantisation(layer: Layer) -> None:
    """Compile the function with which vLLM's own attention quantises a query, if the layer's query is fp8.

    vLLM's warm-up has only decode batches. Those run our op, so the warm-up does not compile the function. Without this
    call, vLLM would compile the function while it serves the first batch with both prefill and decode rows.
    """
    shape = layer.shape()
    if not formats.is_fp8(shape.out_dtype):
        return
    for rows in (2, 1):  # torch compiles separately for one row, and once for all other counts
        with torch.inference_mode():  # also the operands: torch compiles again for tensors that were made outside it
            absorbed, query = (
                torch.zeros(rows, shape.heads, width, dtype=shape.act, device=shape.device)
                for width in (shape.latent, shape.nope_dim + shape.rope)
            )
            layer.quantise(absorbed, query[..., shape.nope_dim :])


def compile_product(layer: Layer, captured_sizes: Callable[[], Sequence[int]]) -> None:
    """Compile the product of vLLM's own attention at the captured sizes, if vLLM compiles it while it warms up.

    Over mxfp4 weights and an fp8 query vLLM hands AITER's GEMM the query's scale, which no kernel of ours does. Triton
    compiles the GEMM for that, and for ranges of token counts. With the flag off each captured size calls it.
    """
    shape = layer.shape()
    if shape.weight[0] != "mxfp4" or not formats.is_fp8(shape.out_dtype):
        return
    for rows in captured_sizes():
        with torch.inference_mode():
            q_nope = torch.zeros(rows, shape.heads, shape.nope_dim, dtype=shape.act, device=shape.device)
            layer.weight().product(q_nope, {"y_scale": layer.q_scale})

# SPDX-License-Identifier: Apache-2.0
"""Compile vLLM's quantisation of a query ahead of the batch that needs it."""

import torch

from vllm_aiter_mla.kernels import formats
from vllm_aiter_mla.serving.layer import Layer


def compile_ahead(layer: Layer) -> None:
    """Let vLLM compile the function with which its own attention quantises a query, if that is fp8.

    vLLM compiles it in its warm-up, with decode batches. Those go to our op; without this the first batch that mixes
    prefill and decode rows would compile it while it serves.
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

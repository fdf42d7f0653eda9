"""``mla_decode_q_prep``: absorb BMM, concat and optional fp8 quantisation of an already rotated query."""

from typing import Any

import torch

from vllm_aiter_mla.runtime.absorb import weight_of
from vllm_aiter_mla.runtime.context import layer_context


def mla_decode_q_prep(
    q: torch.Tensor, latent_dim: int, rope_dim: int, out_dtype: torch.dtype, layer_name: Any
) -> torch.Tensor:
    """q [T, N, P+R], rotated -> q_prepared [T, N, L+R] of ``out_dtype``, as stock's attention op prepares it.

    The weights and the scale are read from the layer per call: reloading replaces them.
    """
    layer = layer_context(layer_name).layer
    nope = q.shape[-1] - rope_dim
    q_nope, q_pe = q.split([nope, rope_dim], dim=-1)
    absorbed = weight_of(layer).product(q_nope)
    if out_dtype == q.dtype:
        return torch.cat([absorbed, q_pe], dim=-1)
    return layer._decode_concat_quant_fp8_op(absorbed, q_pe, layer._q_scale)


def mla_decode_q_prep_fake(
    q: torch.Tensor, latent_dim: int, rope_dim: int, out_dtype: torch.dtype, layer_name: Any
) -> torch.Tensor:
    """Shape and dtype from the tensor and scalar arguments alone."""
    return q.new_empty((q.shape[0], q.shape[1], latent_dim + rope_dim), dtype=out_dtype)

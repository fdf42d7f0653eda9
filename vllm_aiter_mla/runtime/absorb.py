"""The absorbed weight of a layer as vLLM keeps it, and vLLM's own product with it.

Read from the layer per call: reloading replaces the tensors in place or as a whole.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_aiter_mla.compat import kernels, layer_view
from vllm_aiter_mla.kernels import reference


def weight_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(W_UK_T [N, P, L], None), or (its fp8 codes [N, P, L], their scale) under VLLM_ROCM_USE_AITER_FP8BMM."""
    if layer_view.uses_fp8_bmm(layer):
        return layer.W_K.transpose(1, 2), layer.W_K_scale
    return layer.W_UK_T, None


def absorb(q_nope: torch.Tensor, w_uk_t: torch.Tensor, w_scale: torch.Tensor | None) -> torch.Tensor:
    """q_nope [T, N, P] -> [T, N, L] in its dtype, token-major, by the kernel that vLLM's ``forward_impl`` calls."""
    if w_scale is None:
        return reference.absorb(q_nope, w_uk_t)
    return kernels.fp8_bmm(q_nope, w_uk_t.transpose(1, 2), w_scale, reference.FP8_GROUP)

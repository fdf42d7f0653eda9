# SPDX-License-Identifier: Apache-2.0
"""Predict which of AITER's kernels a call lands on, and choose the view of the cache that steers it.

The conditions are those of ``fused_qk_rope_concat_and_cache_mla`` in csrc/kernels/cache_kernels.cu, for 2-D ``kv_c``
and ``k_pe``. Only the first two kernels clamp positions and honour ``compute_all_q_rope``, so only they are used.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from vllm_aiter_mla.kernels.backend import Numerics
from vllm_aiter_mla.kernels.platform import Platform

KernelName = Literal["per-head", "opt", "general"]

LATENT, ROPE = 512, 64  # the widths both fast kernels are written for
PER_HEAD_TOKENS = 256  # the per-head kernel serves fewer tokens than this
STRIDE_LIMIT = 1 << 31  # elements; AITER keeps strides in a C int
OPT_WORK = 2048  # latent * heads from which the opt kernel is taken


@dataclass(frozen=True, slots=True)
class Route:
    """How a call reaches one of AITER's kernels."""

    kernel: KernelName  # the AITER kernel that will run
    # How the cache is handed over: [slots, 1, 576] or [1, slots, 576], the same bytes and slots; None: as it is
    view: tuple[int, int, int] | None
    numerics: Numerics  # the roundings of that kernel, for the reference

    @property
    def honours_all_rows(self) -> bool:
        """Whether the kernel clamps positions and takes ``compute_all_q_rope=True``."""
        return self.kernel != "general"


def kernel_for(block_size: int, latent: int, rope: int, heads: int, tokens: int) -> KernelName:
    """Return the kernel AITER dispatches to; ``tokens`` is the length of the slot mapping."""
    if latent <= LATENT and block_size == 1 and rope == ROPE and tokens < PER_HEAD_TOKENS:
        return "per-head"
    if rope == ROPE and latent == LATENT and latent * heads >= OPT_WORK:
        return "opt"
    return "general"


def truncates_cache_rope(kernel: KernelName, arch: str, cache_dtype: torch.dtype) -> bool:
    """Return whether the rope part of the cache row is cut toward zero instead of rounded.

    The opt kernel stores it through ``opus::cast``, whose float-to-bf16 default truncates on anything older than
    gfx950 (OPUS_FP32_to_BF16_DEFAULT in opus.hpp); every other store is a plain, rounding conversion.
    """
    return kernel == "opt" and arch == "gfx942" and cache_dtype == torch.bfloat16


def route_of(
    kv_cache: torch.Tensor, tokens: int, heads: int, rope: int, platform: Platform, wanted: KernelName = "per-head"
) -> Route:
    """Choose the view of ``kv_cache`` [blocks, block_size, latent+rope] and name the kernel that follows from it.

    The first view that leads to the kernel ``wanted`` is taken; if none does, one that leads to the other fast kernel.
    The last choice is general, which neither clamps nor fills padded rows.
    """
    blocks, block_size, width = kv_cache.shape
    latent = width - rope

    def through(block: int, view: tuple[int, int, int] | None) -> Route:
        kernel = kernel_for(block, latent, rope, heads, tokens)
        return Route(kernel, view, Numerics("aiter", truncates_cache_rope(kernel, platform.arch, kv_cache.dtype)))

    routes = [through(block_size, None)]
    if kv_cache.is_contiguous():
        routes.append(through(1, (-1, 1, width)))
        if kv_cache.numel() < STRIDE_LIMIT:  # the whole cache is one block's stride
            routes.append(through(blocks * block_size, (1, -1, width)))
    serving = [route for route in routes if route.honours_all_rows]
    return next((route for route in serving if route.kernel == wanted), (serving or routes)[0])
